"""Checks that a run folder is what its run computed, for `covey runs verify` and `--verify`."""
