"""Checks of a configuration on this machine: `covey doctor` and `covey numerics`."""
