"""A call written as `{"name": ..., "arguments": {...}}`, as it comes."""

from __future__ import annotations

import msgspec

from .json_text import SPACES, JsonText

MOST_NAME = 256  # characters
_ARGUMENTS = ("arguments", "parameters")  # models mix them up


class CallObject:
    """One such object. Its keys may come in any order, others are skipped; name and arguments may come once.

    `names`: a call to any other breaks it; None: every name is good. `needs_arguments`: without them it is no call,
    rather than one with empty arguments.

    {"name": "f", "id": 7, "arguments": {"a": 1}, "id": 7}
    |--------- held ------------------->|------>|-- held ->
                             begun here ^       ^ whole
    """

    __slots__ = (
        *("_early", "_json", "_key", "_names", "_needs_arguments", "_piece", "_seen", "_step", "_wants"),
        *("begun", "broken", "fragments", "held", "name", "over", "whole"),
    )

    def __init__(self, names: frozenset[str] | None, *, needs_arguments: bool) -> None:
        self.name = ""
        self.begun = False  # the name is known, and the arguments have begun
        self.whole = False  # the arguments are complete
        self.over = False  # the object is complete; if it has not begun, it is no call
        self.broken = False  # it becomes no call any more, or none that ends well
        self.fragments: list[str] = []  # of arguments, for the caller to take
        self.held: list[str] = []  # text that is neither in `fragments` nor of a call that has begun for certain
        self._names = names
        self._needs_arguments = needs_arguments
        self._early: list[str] = []  # arguments that came before the name
        self._seen: set[str] = set()
        self._key = ""
        self._piece: list[str] = []  # of a key, or of the name
        self._json = JsonText()
        self._wants = "{"  # the characters that may come next, between keys and values
        self._step = self._between

    def take(self, text: str, at: int) -> int:
        """How far the text from `at` on belongs to the object: to its end, to what breaks it, or to the text's end."""
        while at < len(text) and not (self.over or self.broken):
            at = self._step(text, at)
        return at

    def _between(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACES:
            self.held.append(char)
        elif char not in self._wants:
            self.broken = True
            return at
        elif char == '"':
            self._json, self._piece, self._step = JsonText(), [], self._take_key
            return at
        else:
            self.held.append(char)
            if char == ":":
                self._step = self._begin_value
            elif char == "}":
                self._end()
            else:
                self._wants = '"}' if char == "{" else '"'
        return at + 1

    def _take_key(self, text: str, at: int) -> int:
        end = self._read(text, at)
        self.held.append(text[at:end])
        self._piece.append(text[at:end])
        if self._json.over:
            key = _string(self._piece)
            self._key = "arguments" if key in _ARGUMENTS else key
            if self._key in ("name", "arguments"):
                self.broken = self._key in self._seen
                self._seen.add(self._key)
            self._step, self._wants = self._between, ":"
        return end

    def _begin_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACES:
            self.held.append(char)
            return at + 1
        if self._key == "arguments":
            self.broken = char != "{"
            if self.name and not self.broken:
                self._begin()
        elif self._key == "name":
            self.broken = char != '"'
        self._json, self._piece, self._step = JsonText(), [], self._take_value
        return at

    def _take_value(self, text: str, at: int) -> int:
        end = self._read(text, at)
        piece = text[at:end]
        if self._key == "arguments" and self.begun:
            self.fragments.append(piece)
        else:
            self.held.append(piece)
            if self._key == "arguments":
                self._early.append(piece)
            elif self._key == "name":
                self._piece.append(piece)
        if self._json.over:
            self._step, self._wants = self._between, ",}"
            if self._key == "arguments":
                self.whole = True
            elif self._key == "name":
                self._take_name(_string(self._piece))
        return end

    def _take_name(self, name: str) -> None:
        if not 0 < len(name) <= MOST_NAME or (self._names is not None and name not in self._names):
            self.broken = True
            return
        self.name = name
        if self.whole:
            self._begin()
            self.fragments += self._early

    def _begin(self) -> None:
        self.begun = True
        self.held.clear()

    def _end(self) -> None:
        self.over = True
        if self.name and not self.begun and not self._needs_arguments:
            self._begin()
            self.whole = True
            self.fragments.append("{}")

    def _read(self, text: str, at: int) -> int:
        end = self._json.take(text, at)
        self.broken = self._json.broken
        return end


def _string(pieces: list[str]) -> str:
    """What a JSON string says; "" if it is no text (half of a surrogate pair)."""
    try:
        return str(msgspec.json.decode("".join(pieces)))
    except ValueError:  # also what cannot be encoded
        return ""
