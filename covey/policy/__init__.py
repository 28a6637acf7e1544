"""The trained model: weights, optimizer, schedule, critic and checkpoints."""
