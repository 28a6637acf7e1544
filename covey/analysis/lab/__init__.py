"""The reward lab: checks whether a reward can be hacked. This package does not import torch."""
