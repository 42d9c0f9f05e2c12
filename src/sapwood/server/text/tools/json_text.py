"""JSON text that comes in pieces: how far it is JSON, and where its value ends. Nothing is decoded here."""

from __future__ import annotations

import re

SPACES = " \t\n\r"
MOST_DEPTH = 200  # of objects and arrays: what is deeper, many decoders refuse

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
    """One JSON value (RFC 8259, no NaN) without spaces around it."""

    __slots__ = ("_behind_string", "_ends", "_state", "broken", "over")

    def __init__(self) -> None:
        self.over = False  # the value is complete
        self.broken = False  # this becomes no JSON any more
        self._state = "value"
        self._behind_string = "after"  # the state then: "colon" for a key
        self._ends: list[str] = []  # of the containers that are open, the innermost last

    def take(self, text: str, at: int) -> int:
        """How far the text from `at` on belongs to the value: to its end, to what breaks it, or to the text's end."""
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
                    at -= 1  # the character is not the number's
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
            elif char in _ENDS and len(self._ends) < MOST_DEPTH:
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
