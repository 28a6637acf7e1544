"""Plans of runs: forecasts of the steps, the memory and the time of a run before it starts."""
