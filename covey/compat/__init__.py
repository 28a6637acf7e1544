"""Conversion of other libraries' options to settings of Covey."""
