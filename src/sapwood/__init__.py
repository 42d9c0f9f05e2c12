"""Sapwood: an LLM serving engine grown around one prefix tree."""

__version__ = "0.1.0"
