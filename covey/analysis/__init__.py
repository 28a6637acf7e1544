"""Analysis of runs and configurations: compare, plan, explain, numerics, lab."""
