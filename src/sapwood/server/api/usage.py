"""How many tokens a request took, as OpenAI tells it."""

from __future__ import annotations

from msgspec import Struct

from ..generation import Generation
from .schemas import StreamOptions


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


def streamed_usage(options: StreamOptions | None, always: bool) -> tuple[bool, bool]:
    """Whether a stream tells it at its end, and whether in every chunk. `always`: whatever the request says."""
    asked = always or bool(options and options.include_usage)
    return asked, asked and bool(options and options.continuous_usage_stats)
