"""Checks that the files in a run folder are what the run computed, for `covey runs verify`."""
