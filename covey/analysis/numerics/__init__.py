"""Where sampler and trainer differ, by how much, and whether it matters."""
