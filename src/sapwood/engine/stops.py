"""Text from tokens, as they come, and the strings that end it. No torch here: the API process makes the text.

tokens --> decoded in a window --> text that is whole ----> held back while it may ----> final text
           that begins where       (no half characters)     become a stop string
           text was last whole
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .params import MOST_BAD_WORD_TOKENS, SamplingParams

_HALF = "\ufffd"  # what tokenizers make of the bytes of a character that is not there yet
_LONGEST = 64  # tokens without a whole end after which their text is taken as it is, so that windows stay small
TAIL = 6  # tokens of a prompt that are enough for the spaces around the first token generated


class TextStream:
    """The text of one sample. `tokenizer`: a `tokenizers.Tokenizer`, or what transformers wraps around one.
    `prompt_tail`: the last tokens of the prompt, in whose company the first token is decoded."""

    __slots__ = (
        *("_decode", "_held", "_includes", "_least", "_pieces", "_read", "_sent", "_skips", "_stops", "_window"),
        *("stopped", "tokens"),
    )

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_tail: Sequence[int]) -> None:
        self.stopped: str | None = None  # the stop string that was found
        self.tokens = 0  # of this text: those after a stop string are not counted
        self._decode = getattr(tokenizer, "backend_tokenizer", tokenizer).decode if params.detokenize else None
        self._skips = params.skip_special_tokens
        self._includes = params.include_stop_str_in_output
        self._least = params.min_tokens
        self._stops = [_Stop(string) for string in params.stops]
        self._pieces: list[str] = []
        self._held = ""
        self._window = [int(token) for token in prompt_tail[-TAIL:]]
        self._read = self._sent = 0
        self._sent = len(self._begin_window(0).rstrip(_HALF))

    @property
    def text(self) -> str:
        """All that `push` and `finish` have returned."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """The text that is final with one more token. Nothing any more after a stop string."""
        if self.stopped is not None:
            return ""
        self.tokens += 1
        if self._decode is None:
            return ""
        self._window.append(token)
        full = self._decode(self._window, skip_special_tokens=self._skips)
        long = len(self._window) - self._read >= _LONGEST
        whole = full if long else full.rstrip(_HALF)
        new = whole[self._sent :]
        if long or (new and len(whole) == len(full)):
            self._begin_window(self._read)
        else:
            self._sent = max(self._sent, len(whole))
        return self._take(new) if new else ""

    def finish(self, stop_token: int | None = None) -> str:
        """The rest of the text. `stop_token`: the token that ended it (eos, or one of `stop_token_ids`) and was not
        pushed; it counts, but its text is left out as that of a stop string is."""
        new = ""
        if stop_token is not None and self.stopped is None:
            if self._includes:
                new = self.push(stop_token)
            else:
                self.tokens += 1
        if self.stopped is not None or self._decode is None:
            return new
        new += self._take(self._decode(self._window, skip_special_tokens=self._skips)[self._sent :])
        rest, self._held = self._held, ""
        self._pieces.append(rest)
        self._window, self._read, self._sent = [], 0, 0
        return new + rest

    def _begin_window(self, at: int) -> str:
        """The next window begins with the tokens from `at` on, whose text is out already: what a token becomes may
        depend on the one before it (spaces), not on earlier ones. Returns their text."""
        del self._window[:at]
        self._read = len(self._window)
        known: str = self._decode(self._window, skip_special_tokens=self._skips) if self._decode else ""
        self._sent = len(known)
        return known

    def _take(self, new: str) -> str:
        """What of the text held back and this new text is final."""
        if self._stops and self._find(new):
            final = self._held
            self._held = ""
        else:
            held = self._held + new
            kept = 0 if self._includes else max((stop.matched for stop in self._stops), default=0)
            final, self._held = held[: len(held) - kept], held[len(held) - kept :]
        self._pieces.append(final)
        return final

    def _find(self, new: str) -> bool:
        """Look for the stop string that is complete first, however the text is cut into tokens; of those that end
        together, the longest. If there is one, `_held` is what is left to tell."""
        counts = self.tokens > self._least
        for i, char in enumerate(new):
            found = [stop.string for stop in self._stops if stop.take(char)]
            if found and counts:
                self.stopped = max(found, key=len)
                text = self._held + new[: i + 1]
                self._held = text if self._includes else text[: len(text) - len(self.stopped)]
                return True
        return False


class _Stop:
    """A stop string, and how much of it the text ends with (as Knuth, Morris and Pratt have it)."""

    __slots__ = ("borders", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.borders = [0]  # after i + 1 characters: how many of the last ones are its first ones too
        self.matched = 0
        for char in string[1:]:
            self.take(char)
            self.borders.append(self.matched)
        self.matched = 0

    def take(self, char: str) -> bool:
        """One more character; True if it completes the string."""
        matched = self.matched
        while matched and self.string[matched] != char:
            matched = self.borders[matched - 1]
        matched += self.string[matched] == char
        complete = matched == len(self.string)
        self.matched = self.borders[matched - 1] if complete else matched
        return complete


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
