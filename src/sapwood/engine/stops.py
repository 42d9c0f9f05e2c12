"""The text of a sample, and the strings that end it. No torch here: the API process of a server looks for them.

tokens --> text that is whole --> held back while it may --> final text
           (detokenize.py)        become a stop string
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .detokenize import Detokenizer
from .params import MOST_BAD_WORD_TOKENS, SamplingParams


class TextStream:
    """`prompt_tail`: the last tokens of the prompt, in whose company the first token is decoded."""

    __slots__ = ("_decoding", "_held", "_includes", "_least", "_pieces", "_stops", "stopped", "tokens")

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams, prompt_tail: Sequence[int]) -> None:
        self.stopped: str | None = None  # the stop string that was found
        self.tokens = 0  # of this text: those after a stop string are not counted
        self._decoding = detokenizer.stream(prompt_tail, params.skip_special_tokens) if params.detokenize else None
        self._includes = params.include_stop_str_in_output
        self._least = params.min_tokens
        self._stops = _Stops(params.stops) if params.stops else None
        self._pieces: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """All that `push` and `finish` have returned."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """The text that is final with one more token. Nothing any more after a stop string."""
        if self.stopped is not None:
            return ""
        self.tokens += 1
        if self._decoding is None:
            return ""
        new = self._decoding.push(token)
        stops = self._stops
        if stops is None or (not stops.begun and stops.firsts.isdisjoint(new)):
            self._pieces.append(new)
            return new
        return self._take(new)

    def finish(self, stop_token: int | None = None) -> str:
        """The rest of the text. `stop_token`: the token that ended it (eos, or one of `stop_token_ids`) and was not
        pushed; it counts, but its text is left out as that of a stop string is."""
        new = ""
        if stop_token is not None and self.stopped is None:
            if self._includes:
                new = self.push(stop_token)
            else:
                self.tokens += 1
        if self.stopped is not None or self._decoding is None:
            return new
        new += self._take(self._decoding.finish())
        rest, self._held = self._held, ""
        self._pieces.append(rest)
        return new + rest

    def _take(self, new: str) -> str:
        """What of the text held back and this new text is final."""
        stops = self._stops
        if stops is None:
            self._pieces.append(new)
            return new
        text = self._held + new
        found = stops.find(new)
        if found is not None and self.tokens > self._least:
            self.stopped, behind = found
            end = len(text) - behind
            final, self._held = text[: end if self._includes else end - len(self.stopped)], ""
        else:
            kept = 0 if self._includes else len(stops.begun)
            final, self._held = text[: len(text) - kept], text[len(text) - kept :]
        self._pieces.append(final)
        return final


class _Stops:
    """Stop strings. `begun`: the longest end of the text so far that one of them begins with; `firsts`: a text without
    these characters begins none."""

    __slots__ = ("_begins", "_longest", "_strings", "begun", "firsts")

    def __init__(self, strings: Sequence[str]) -> None:
        self.begun = ""
        self.firsts = {string[0] for string in strings}
        self._strings = strings
        self._longest = max(map(len, strings)) - 1
        self._begins = {string[:end] for string in strings for end in range(1, len(string))}

    def find(self, new: str) -> tuple[str, int] | None:
        """The stop string that is complete first in a text that goes on with `new`, however that is cut; of those that
        end together, the longest. And how many characters are behind it."""
        window = self.begun + new
        first = len(self.begun) + 1  # a string ends in `new`
        found: tuple[int, int, str] | None = None
        for string in self._strings:
            at = window.find(string, max(0, first - len(string)))
            if at >= 0 and (found is None or (at + len(string), -len(string)) < found[:2]):
                found = at + len(string), -len(string), string
        ends = range(max(0, len(window) - self._longest), len(window))
        self.begun = next((window[at:] for at in ends if window[at] in self.firsts and window[at:] in self._begins), "")
        return None if found is None else (found[2], len(window) - found[0])


def bad_word_tokens(tokenizer: Any, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """The tokens of `bad_words`, each as it is at the beginning of a text and behind a space. ValueError if one has too
    many."""
    encode = getattr(tokenizer, "backend_tokenizer", tokenizer).encode
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        for text in (word.lstrip() or word, " " + word.lstrip()):
            tokens = tuple(encode(text, add_special_tokens=False).ids)
            if len(tokens) > MOST_BAD_WORD_TOKENS:
                raise ValueError(
                    f"bad_words must have at most {MOST_BAD_WORD_TOKENS} tokens, got {word!r:.60} of {len(tokens)}"
                )
            if tokens:
                found[tokens] = None
    return tuple(found)
