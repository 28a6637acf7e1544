"""Engines that generate completions: the native engine and vLLM."""
