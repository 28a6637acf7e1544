"""The native engine: batched generation with the trainer's own weights."""
