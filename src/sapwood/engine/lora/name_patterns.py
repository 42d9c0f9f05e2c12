"""Regular expressions over names of modules, as PEFT and those who train with it write them. Nothing but the standard
library here.

They come from strangers. Python's `re` tries one way to match after the other, and a pattern can have more ways than
anybody can wait for. Here all of them are gone at once, from the end of a name to its begin:

    name     model.layers.7.mlp         places 0 to 18, as bits of a whole number
    part     (...)(places where its matches end) --> the places where these begin

so that the work is the length of the pattern times that of the name. What could cost more, or is rarely written
(references back, looking behind, flags, repeats of what repeats), is refused. Which of several ways a match goes cannot
be told; whether there is one is what `re` says too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

MOST_CHARACTERS = 1 << 16  # of a pattern
_MOST_DEPTH = 32  # groups in each other
_MOST_TIMES = 64  # that a part may have to come, together with those around it

_Test = Callable[[str], bool]


class PatternError(ValueError):
    """A pattern that is wrong, or that is not served."""


class Name:
    """A name, with what has been found out about it for patterns before."""

    __slots__ = ("_tests", "_texts", "all", "begins", "end", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.end = 1 << len(text)
        self.all = 2 * self.end - 1  # every place
        self._tests: dict[_Test, int] = {}
        self._texts: dict[str, int] = {}
        self.begins = 1 | self.before(".") << 1  # of the name, and of what follows a dot

    def where(self, test: _Test) -> int:
        """The places that characters of a kind follow."""
        found = self._tests.get(test)
        if found is None:
            found = self._tests[test] = sum(1 << at for at, char in enumerate(self.text) if test(char))
        return found

    def before(self, text: str) -> int:
        """The places that a text follows."""
        found = self._texts.get(text)
        if found is None:
            found, at = 0, self.text.find(text)
            while at >= 0:
                found |= 1 << at
                at = self.text.find(text, at + 1)
            self._texts[text] = found
        return found


class Pattern:
    """A regular expression. PatternError if it is none, or one that is not served."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise PatternError(f"a pattern may have {MOST_CHARACTERS} characters, got {len(text)}: {text!r:.60}")
        self.text = text
        self._part = _Parser(text).whole()

    def __repr__(self) -> str:
        return f"<Pattern {self.text!r:.200}>"

    def matches(self, name: Name) -> bool:
        """The whole of a name, as `re.fullmatch` does."""
        return bool(self._part.begins(name, name.end) & 1)

    def matches_end(self, name: Name) -> bool:
        """The whole of a name, or what stands behind one of its dots."""
        return bool(self._part.begins(name, name.end) & name.begins)


# ---- parts


class _Part(Protocol):
    def begins(self, name: Name, ends: int) -> int:
        """The places where matches begin that end at one of these."""


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def begins(self, name: Name, ends: int) -> int:
        return ends >> len(self.text) & name.before(self.text)


class _One:
    """A character of a kind."""

    def __init__(self, test: _Test) -> None:
        self.test = test

    def begins(self, name: Name, ends: int) -> int:
        return ends >> 1 & name.where(self.test)


class _Chain:
    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = parts[::-1]

    def begins(self, name: Name, ends: int) -> int:
        for part in self.parts:
            ends = part.begins(name, ends)
            if not ends:
                break
        return ends


class _Either:
    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = parts

    def begins(self, name: Name, ends: int) -> int:
        found = 0
        for part in self.parts:
            found |= part.begins(name, ends)
        return found


class _Repeat:
    """`most` -1: as often as it may be. A place is gone on from once, so that there are no more turns than places."""

    def __init__(self, part: _Part, least: int, most: int) -> None:
        self.part, self.least, self.most = part, least, most

    def begins(self, name: Name, ends: int) -> int:
        for _ in range(self.least):
            ends = self.part.begins(name, ends)
        found = new = ends
        left = self.most - self.least
        while new and left:
            new = self.part.begins(name, new) & ~found
            found |= new
            left -= 1
        return found


class _Place:
    """No character, but a place of a kind."""

    def __init__(self, places: Callable[[Name], int]) -> None:
        self.places = places

    def begins(self, name: Name, ends: int) -> int:
        return ends & self.places(name)


def _word_edges(name: Name) -> int:
    words = name.where(_is_word)
    return (words ^ words << 1) & name.all


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_KINDS: dict[str, _Test] = {
    "d": str.isdecimal,
    "D": lambda char: not char.isdecimal(),
    "w": _is_word,
    "W": lambda char: not _is_word(char),
    "s": str.isspace,
    "S": lambda char: not char.isspace(),
}
_PLACES: dict[str, Callable[[Name], int]] = {
    "^": lambda name: 1,
    "A": lambda name: 1,
    "$": lambda name: name.end,
    "Z": lambda name: name.end,
    "b": _word_edges,
}


def _any(char: str) -> bool:
    return char != "\n"


# ---- from text to parts


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def whole(self) -> _Part:
        part, _ = self._either()
        if self.at < len(self.text):
            raise self._error("there is no bracket that it closes")
        return part

    def _error(self, why: str) -> PatternError:
        at = min(self.at, max(0, len(self.text) - 1))
        return PatternError(f"{self.text!r:.80} is not served: at {self.text[at : at + 20]!r} ({at}): {why}")

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    # Each of these returns a part and how often what repeats in it may come, 0: without a bound.

    def _either(self) -> tuple[_Part, int]:
        part, times = self._chain()
        if self._next() != "|":
            return part, times
        parts, every = [part], [times]
        while self._take("|"):
            part, times = self._chain()
            parts.append(part)
            every.append(times)
        return _Either(parts), _most(every)

    def _chain(self) -> tuple[_Part, int]:
        parts: list[_Part] = []
        every = [1]
        plain = ""
        while self._next() not in ("", "|", ")"):
            begin = self.at
            part, times = self._atom()
            least, most = self._often()
            if (least, most) != (1, 1):
                if isinstance(part, _Place):
                    self.at = begin
                    raise self._error("there is nothing to repeat")
                times = self._times(begin, times, most)
                part = _Repeat(part, least, most)
            every.append(times)
            if isinstance(part, _Text):
                plain += part.text
                continue
            if plain:
                parts.append(_Text(plain))
                plain = ""
            parts.append(part)
        if plain:
            parts.append(_Text(plain))
        return parts[0] if len(parts) == 1 else _Chain(parts), _most(every)

    def _times(self, begin: int, inner: int, most: int) -> int:
        """How often what is in a repeat may come."""
        together = inner * max(1, most) if inner > 0 and most >= 0 else 0
        twice = (most < 0 and inner != 1) or (inner == 0 and most > 1)
        if twice or together > _MOST_TIMES:
            self.at = begin
            raise self._error(f"a repeat of what repeats, or more than {_MOST_TIMES} times")
        return together

    def _often(self) -> tuple[int, int]:
        begin = self.at
        if self._take("*"):
            found = 0, -1
        elif self._take("+"):
            found = 1, -1
        elif self._take("?"):
            found = 0, 1
        elif self._next() == "{":
            found = self._counted()
        else:
            return 1, 1
        self._take("?")  # it prefers to be short, which is another way to the same matches
        if self._next() in ("*", "+", "?", "{"):
            self.at = begin
            raise self._error("a repeat is repeated, or keeps what it has")
        return found

    def _counted(self) -> tuple[int, int]:
        begin, end = self.at, self.text.find("}", self.at)
        least, comma, most = self.text[begin + 1 : max(begin, end)].partition(",")
        numbers = [number for number in (least, most) if number]
        right = numbers and all(number.isascii() and number.isdecimal() and len(number) < 4 for number in numbers)
        if end < 0 or not right:
            raise self._error("{ must be followed by numbers below 1000, as {2} or {1,3}")
        low = int(least or 0)
        high = (int(most) if most else -1) if comma else low
        if 0 <= high < low or low > _MOST_TIMES:
            raise self._error(f"{{ must be followed by numbers in order, the first at most {_MOST_TIMES}")
        self.at = end + 1
        return low, high

    def _atom(self) -> tuple[_Part, int]:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return _One(self._class()), 1
        if char in "*+?{":
            raise self._error("there is nothing to repeat")
        self.at += 1
        if char == ".":
            return _One(_any), 1
        if char in "^$":
            return _Place(_PLACES[char]), 1
        if char != "\\":
            return _Text(char), 1
        escaped = self._escaped()
        if escaped in _PLACES and escaped not in "^$":
            return _Place(_PLACES[escaped]), 1
        return (_One(_KINDS[escaped]) if escaped in _KINDS else _Text(escaped)), 1

    def _escaped(self) -> str:
        """The character behind a backslash."""
        char = self._next()
        if not char or (char.isalnum() and char not in _KINDS and char not in "bAZ"):
            self.at -= 1
            raise self._error("a backslash may stand before d, D, w, W, s, S, b, A, Z or what is no letter")
        self.at += 1
        return char

    def _group(self) -> tuple[_Part, int]:
        begin = self.at
        self.depth += 1
        ahead = next((mark for mark in ("(?=", "(?!") if self._take(mark)), "")
        if not (ahead or self._take("(?:")):
            self._take("(")
            if self._take("?P<"):
                end = self.text.find(">", self.at)
                if not self.text[self.at : max(self.at, end)].isidentifier():
                    raise self._error("a group must have a name")
                self.at = end + 1
            elif self._next() == "?":
                self.at = begin
                raise self._error("only (...), (?:...), (?P<name>...), (?=...) and (?!...) are served")
        if self.depth > _MOST_DEPTH:
            raise self._error(f"more than {_MOST_DEPTH} groups in each other")
        part, times = self._either()
        if not self._take(")"):
            self.at = begin
            raise self._error("the bracket is not closed")
        self.depth -= 1
        if ahead == "(?=":
            return _Place(lambda name: part.begins(name, name.all)), times
        if ahead:
            return _Place(lambda name: name.all & ~part.begins(name, name.all)), times
        return part, times

    def _class(self) -> _Test:
        begin = self.at
        self.at += 1
        inverted = self._take("^")
        chars: set[str] = set()
        ranges: list[tuple[str, str]] = []
        tests: list[_Test] = []
        while not self._take("]"):
            low = self._member(begin, tests)
            if low and self._next() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._member(begin, [])
                if not high or high < low:
                    raise self._error("a range must go from a character to a later one")
                ranges.append((low, high))
            elif low:
                chars.add(low)
        if not (chars or ranges or tests):
            self.at = begin
            raise self._error("a class of characters must have some")

        def test(char: str) -> bool:
            found = char in chars or any(low <= char <= high for low, high in ranges)
            return (found or any(each(char) for each in tests)) != inverted

        return test

    def _member(self, begin: int, tests: list[_Test]) -> str:
        """A character of a class; "" for a kind, which goes to `tests`."""
        char = self._next()
        if not char or char == "[":
            self.at = begin
            raise self._error("the class of characters is not closed, or has a [ without a backslash")
        self.at += 1
        if char != "\\":
            return char
        char = self._escaped()
        if char in _KINDS:
            tests.append(_KINDS[char])
            return ""
        if char.isalnum():
            raise self._error("that is no character")
        return char


def _most(every: Sequence[int]) -> int:
    return 0 if 0 in every else max(every, default=1)
