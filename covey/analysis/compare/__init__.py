"""Compare algorithms or settings fairly: train runs, test differences, write reports."""
