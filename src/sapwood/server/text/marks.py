"""Marks in generated text that comes in pieces: `<think>`, `<tool_call>` and their like."""

from __future__ import annotations


def half_mark(text: str, mark: str, start: int = 0) -> int:
    """Where, from `start` on, a mark begins that the end of the text cuts off; the text's length if nowhere."""
    at = max(start, len(text) - len(mark) + 1)
    while (at := text.find(mark[0], at)) >= 0:
        if mark.startswith(text[at:]):
            return at
        at += 1
    return len(text)
