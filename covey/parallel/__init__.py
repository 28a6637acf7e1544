"""Ranks: several processes that train one policy together, over torch.distributed.

The modules are:

    lifeline.py      detects quickly that a rank has failed or died
    world.py         the interface `World`, and several ranks behind it
    join.py          joining the ranks of a run, and leaving them
    passes.py        which rows of a batch this rank computes
    gradients.py     sum of gradients over ranks (strategy "ddp")
    shard.py         sharded parameters, gradients and optimizer state (strategy "fsdp")
"""
