"""The version of Covey, in its own module so that packaging reads it without importing torch."""

__version__ = "0.1.0"
