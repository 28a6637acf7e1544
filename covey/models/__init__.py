"""Language models: loading, chat templates, tokenizers, adapters and export."""
