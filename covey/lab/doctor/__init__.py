"""Checks of a configuration on this machine, for `covey doctor`."""
