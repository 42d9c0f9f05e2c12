"""Between text and tokens: chat templates, tokenizers, reasoning, tool calls."""
