"""Forecasts the steps, memory and time of a training run before the run starts."""
