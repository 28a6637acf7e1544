"""Models on disk and in memory: loading, chat templates, tokenizers, adapters, export."""
