"""Ray: engines, scoring workers and the reference as actors on one machine or many.

Ray places, restarts and moves data. What is computed, and in which order, is decided by the trainer
in the process that was started: the same file trains on a laptop and on a cluster.
"""
