"""Bridges from other libraries."""
