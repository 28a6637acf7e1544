"""The policy: weights, log-probabilities, optimizer, checkpoints."""
