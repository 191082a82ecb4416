"""What a run's drafter begins as: random, the target's last layers, or another drafter."""
