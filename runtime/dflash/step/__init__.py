"""What a step of training or scoring computes of one bucket."""
