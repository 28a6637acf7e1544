"""Ranks: several processes that train one policy together, over torch.distributed.

environment.py   which rank this process is, from what torchrun sets
lifeline.py      noticing at once that a rank has failed or is gone
world.py         what the rest of covey knows of ranks; one rank by default
ranks.py         the same over torch.distributed
join.py          joining the ranks of a run, and leaving them
passes.py        which rows of a batch this rank takes
gradients.py     sums of gradients over ranks (strategy "ddp")
shard.py         sharded parameters, gradients and optimizer state (strategy "fsdp")
"""
