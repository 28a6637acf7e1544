"""The web page of runs: `covey ui`. It does not import torch, so it opens at once anywhere."""
