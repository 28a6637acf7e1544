"""Which algorithm is better: fair runs, paired statistics, a report."""
