"""The vLLM engine: generation by vLLM servers that hold their own copy of the weights."""
