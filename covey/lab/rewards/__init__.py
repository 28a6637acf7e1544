"""The reward lab, which checks whether a policy can hack a reward.

This package does not import torch.
"""
