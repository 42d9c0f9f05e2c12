"""How many tokens a request took, as OpenAI tells it."""

from __future__ import annotations

from msgspec import Struct

from .generation import Generation


class Details(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Details


def usage_of(generation: Generation) -> Usage:
    prompt, completion, cached = generation.usage
    return Usage(prompt, completion, prompt + completion, Details(cached))
