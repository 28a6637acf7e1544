"""Plans of runs: what a run will do and how much memory and time it needs, before it starts."""
