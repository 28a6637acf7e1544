"""What a recorded step learned, token by token, and what other algorithms would have learned."""
