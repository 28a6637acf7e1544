"""The native engine in a separate process, with its own copy of the weights."""
