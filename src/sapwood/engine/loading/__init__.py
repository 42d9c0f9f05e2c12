"""From files to a model: weights, GGUF, digests, caches of the user."""
