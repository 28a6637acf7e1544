"""Checks that the records in a run folder are genuine and complete, for `covey runs verify`."""
