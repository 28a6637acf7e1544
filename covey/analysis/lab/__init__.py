"""The reward lab: checks whether a reward can be hacked. It does not import torch."""
