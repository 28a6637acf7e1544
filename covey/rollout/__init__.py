"""Generate rollouts: run episodes, collect and score groups, and filter them for training."""
