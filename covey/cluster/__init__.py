"""Runs trainer ranks, engines, scoring and the reference on several machines with Ray.

    ray_client.py     connects to Ray and turns its errors into one-line messages
    trainers.py       starts, connects, watches and ends the trainer ranks together
    rank_actor.py     the actor that starts one rank as a process
    rank_process.py   the process of one rank, which ends with its actor
    ray_engine.py     one engine that distributes requests over engines in actors
    engine_actor.py   the actor of one such engine
    scoring.py        scoring workers in actors
    ray_reference.py  a frozen reference in an actor

Ray starts and restarts processes on several machines, and moves data between the processes. The
trainer ranks decide what is computed and when. The same config file therefore works on a laptop and
on a cluster.
"""
