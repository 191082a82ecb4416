"""The loss of a drafter's rows: cross entropy, D-PACE's weights, distillation."""
