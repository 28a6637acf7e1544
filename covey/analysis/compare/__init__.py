"""Fair comparisons of algorithms or settings: runs, paired statistics, reports."""
