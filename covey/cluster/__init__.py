"""Trainer ranks, engines, scoring and the reference on several machines, with Ray.

    ray_client.py     connects to Ray and turns its errors into one-line messages
    trainers.py       trainer ranks: placed together, connected, watched, and ended together
    rank_actor.py     the actor that starts one rank as a process
    rank_process.py   that process, which ends with its actor
    engine.py         engines in actors, as one engine that spreads requests over them
    engine_actor.py   one of these actors
    scoring.py        scoring workers in actors
    reference.py      a frozen reference in an actor

Ray starts processes on machines, restarts them and moves data, while the trainer ranks decide what
is computed and in which order. So the same config file works on a laptop and on a cluster.
"""
