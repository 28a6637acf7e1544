"""What a run will do and need, said before it starts."""
