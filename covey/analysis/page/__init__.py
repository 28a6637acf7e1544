"""Templates, style sheet and scripts of all reports."""
