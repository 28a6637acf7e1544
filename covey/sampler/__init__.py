"""Samplers: how answers are written."""
