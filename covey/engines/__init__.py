"""Engines, which generate completions: native or vLLM."""
