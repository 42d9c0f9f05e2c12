"""Between text and tokens: templates, tokenizers, reasoning, calls of tools."""
