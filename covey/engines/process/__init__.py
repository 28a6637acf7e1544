"""The native engine in a process of its own, with a copy of the weights."""
