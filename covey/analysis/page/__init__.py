"""Style sheet and templates that all reports share."""
