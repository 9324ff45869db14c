"""What `train`, `check` and `learn` share: target weights, hidden states, blocks, acceptance."""
