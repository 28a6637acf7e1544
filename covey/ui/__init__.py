"""The web page of runs, `covey ui`. The web page does not import torch, so it opens quickly on any
machine."""
