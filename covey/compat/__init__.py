"""Converts options of other libraries to settings of Covey."""
