"""The vLLM engine: generation by vLLM servers, which have their own copy of the weights."""
