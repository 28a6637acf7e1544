"""The run folder. No torch here."""
