"""JSON text that comes in pieces: how far it is JSON and where its value ends (`JsonText`), and a call that is written
as `{"name": ..., "arguments": {...}}` (`CallObject`)."""

from __future__ import annotations

import re

import msgspec

from ...limits import MAX_CALL_JSON_DEPTH, MAX_CALL_NAME_CHARACTERS

SPACES = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")  # models mix them up

_SPECIAL = re.compile(r'["\\\x00-\x1f]')  # in a string: its end, an escape, what must not be there
_DIGITS, _HEX, _EXPONENT = "0123456789", "0123456789abcdefABCDEF", dict.fromkeys("eE", "e")


def _words() -> dict[str, dict[str, str]]:
    """Of true, false and null: what has been read -> its next character -> what has been read then."""
    return {
        word[:i]: {word[i]: "after" if word[: i + 1] == word else word[: i + 1]}
        for word in ("true", "false", "null")
        for i in range(1, len(word))
    }


# Inside a value that is no container: state -> character -> next state. "after": the value is over.
_MOVES: dict[str, dict[str, str]] = {
    "escape": {**dict.fromkeys('"\\/bfnrt', "string"), "u": "hex4"},
    "hex4": dict.fromkeys(_HEX, "hex3"),
    "hex3": dict.fromkeys(_HEX, "hex2"),
    "hex2": dict.fromkeys(_HEX, "hex1"),
    "hex1": dict.fromkeys(_HEX, "string"),
    "-": {**dict.fromkeys(_DIGITS, "whole"), "0": "zero"},
    "zero": {".": ".", **_EXPONENT},
    "whole": {**dict.fromkeys(_DIGITS, "whole"), ".": ".", **_EXPONENT},
    ".": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {**dict.fromkeys(_DIGITS, "fraction"), **_EXPONENT},
    "e": {**dict.fromkeys("+-", "e+"), **dict.fromkeys(_DIGITS, "power")},
    "e+": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
    **_words(),
}
_NUMBERS = {"zero", "whole", "fraction", "power"}  # where a number may end: with a character that is not its own
_VALUES = {'"': "string", "-": "-", "0": "zero", **dict.fromkeys("123456789", "whole"), "t": "t", "f": "f", "n": "n"}
_ENDS = {"{": "}", "[": "]"}


class JsonText:
    """One JSON value (RFC 8259, no NaN) without spaces around it. Nothing is decoded."""

    __slots__ = ("_behind_string", "_ends", "_state", "broken", "over")

    def __init__(self) -> None:
        self.over = False  # the value is complete
        self.broken = False  # the text is no JSON, however it goes on
        self._state = "value"
        self._behind_string = "after"  # the state behind a string: "colon" for a key
        self._ends: list[str] = []  # the characters that end the open containers, the innermost last

    def take(self, text: str, at: int) -> int:
        """The index up to which the text from `at` on belongs to the value: its end, the character that breaks it, or
        the text's end."""
        while at < len(text):
            if self._state == "string":
                special = _SPECIAL.search(text, at)
                if special is None:
                    return len(text)
                at, char = special.start(), special[0]
                if char == '"':
                    self._state, self._behind_string = self._behind_string, "after"
                elif char == "\\":
                    self._state = "escape"
                else:
                    self.broken = True
            elif (moves := _MOVES.get(self._state)) is not None:
                char = text[at]
                if char in moves:
                    self._state = moves[char]
                elif self._state in _NUMBERS:
                    self._state = "after"
                    at -= 1  # the character is no part of the number
                else:
                    self.broken = True
            elif text[at] not in SPACES or not self._ends:
                self._structure(text[at])
            if self.broken:
                return at
            at += 1
            if self._state == "after" and not self._ends:
                self.over = True
                return at
        return at

    def _structure(self, char: str) -> None:
        """A character between the values of a container, or the first of a value.

        states: value, first value (or the end of an array), key, first key (or the end of an object), colon, after
        """
        state = self._state
        if self._ends and char == self._ends[-1] and state in ("after", "first key", "first value"):
            self._ends.pop()
            self._state = "after"
        elif state in ("value", "first value"):
            if char in _VALUES:
                self._state = _VALUES[char]
            elif char in _ENDS and len(self._ends) < MAX_CALL_JSON_DEPTH:
                self._ends.append(_ENDS[char])
                self._state = "first key" if char == "{" else "first value"
            else:
                self.broken = True
        elif state in ("key", "first key") and char == '"':
            self._state, self._behind_string = "string", "colon"
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state == "after" and char == ",":
            self._state = "key" if self._ends[-1] == "}" else "value"
        else:
            self.broken = True


class CallObject:
    """A call as a JSON object. Its keys may come in any order, others are skipped; name and arguments may come once.

    `names`: a call to any other function breaks it; None: every name is good. `needs_arguments`: an object without
    them is no call, rather than a call with empty arguments.

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
        self.over = False  # the object is complete; where the call has not begun, it is none
        self.broken = False  # the text is no call, or a call with broken arguments, however it goes on
        self.fragments: list[str] = []  # pieces of the arguments, for the caller to take
        self.held: list[str] = []  # text that is content if this is no call
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
        """The index up to which the text from `at` on belongs to the object: its end, the character that breaks it, or
        the text's end."""
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
        if not 0 < len(name) <= MAX_CALL_NAME_CHARACTERS or (self._names is not None and name not in self._names):
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
    """The text of a JSON string; "" if it is none (half of a surrogate pair)."""
    try:
        return str(msgspec.json.decode("".join(pieces)))
    except ValueError:  # also what cannot be encoded
        return ""
