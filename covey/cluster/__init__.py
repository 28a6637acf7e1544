"""Ray: runs engines, scoring workers and the reference as actors on one or more machines.

Ray places and restarts actors and moves data between them. The trainer, which runs in the process
that you start, decides what is computed and in which order. So the same config file trains on a
laptop and on a cluster.
"""
