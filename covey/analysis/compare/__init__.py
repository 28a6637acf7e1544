"""Compares algorithms or settings fairly: trains runs, tests differences, writes reports."""
