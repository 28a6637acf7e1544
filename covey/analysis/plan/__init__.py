"""Forecasts the steps, memory and time of a training run before it starts."""
