"""Formats in which each argument of a call stands between tags of its own, as plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from ...limits import MAX_CALL_NAME_CHARACTERS
from .base import BaseParser, Delta, half_mark
from .json_text import SPACES
from .typed import Parameters, json_of, kinds_of, quoted

_NO_KEY = re.compile(r"[<\n]")
_SPACE = re.compile(r"[ \t\n\r]+")


class TaggedParser(BaseParser):
    """Between the marks of a call: the name of a function, then its arguments, in any order.

    _outside --opening--> _opened --> _naming --> _between --key_opening--> _keying --> _before_value --> _in_value
                                                  _between <------------------------------- _behind_value <--'
    The mark that ends a value counts only where what follows it may follow a value: text that quotes the format is an
    argument like any other. A text is passed on as it comes; a value of any other type, by the schema, is passed on
    when it is whole. `parameters`: the schema of each function.
    """

    key_opening: ClassVar[str]
    key_closing: ClassVar[str]
    value_opening: ClassVar[str]  # "": the value begins where the key has ended
    value_closing: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]  # marks that end a call; the last one ends the whole block
    own_lines: ClassVar[bool]  # a value stands on lines of its own: the breaks around it are no part of it

    def __init__(self, names: frozenset[str] | None = None, parameters: Mapping[str, Parameters] | None = None) -> None:
        super().__init__(names)
        self._parameters = parameters or {}
        self._begun = False  # the call cannot be taken back
        self._key = ""
        self._kinds: tuple[str, ...] = ()
        self._value: list[str] = []  # pieces of the value that are not passed on yet
        self._value_begins = False
        self._behind: list[str] = []  # what may be the mark behind a value, and spaces behind that

    def finish(self) -> list[Delta]:
        if self._begun:  # the call is cut off: its arguments end here, and are no JSON
            self._held.clear()
            self._half = ""
            self._begun = False
        return super().finish()

    # ---- the name

    def _opened(self, text: str, at: int) -> int:
        """Behind the opening mark."""
        if text[at] in SPACES:
            self._held.append(text[at])
            return at + 1
        return self._begin_name(text, at)

    def _begin_name(self, text: str, at: int) -> int:
        self._function, self._begun = "", False
        self._state = self._naming
        return at

    def _named(self, text: str, at: int) -> int:
        self._state = self._between
        return at

    # ---- arguments

    def _between(self, text: str, at: int) -> int:
        """Before an argument, or before the end of the call."""
        spaces = _SPACE.match(text, at)
        if spaces is not None:
            self._hold(spaces[0])
            return spaces.end()
        mark, end = self._mark(text, at, (self.key_opening, *self.ends))
        if mark is None:
            return end
        if mark == self.key_opening:
            self._hold(mark)
            self._key = ""
            self._state = self._keying
        elif mark:
            self._end(mark)
        else:
            self._fail()
        return end

    def _keying(self, text: str, at: int) -> int:
        place = text.find(self.key_closing[0], at)
        piece = text[at:] if place < 0 else text[at:place]
        broken = _NO_KEY.search(piece)
        good = min(MAX_CALL_NAME_CHARACTERS - len(self._key), len(piece) if broken is None else broken.start())
        self._key += piece[:good]
        self._hold(piece[:good])
        if good < len(piece):
            self._fail()
            return at + good
        if place < 0:
            return len(text)
        mark, end = self._mark(text, place, (self.key_closing,))
        if mark is None:
            return end
        if not mark or not self._key.strip():
            self._fail()
            return place
        self._hold(mark)
        self._key = self._key.strip()
        self._state = self._before_value
        return end

    def _before_value(self, text: str, at: int) -> int:
        if self.value_opening:
            spaces = _SPACE.match(text, at)
            if spaces is not None:
                self._hold(spaces[0])
                return spaces.end()
            mark, at = self._mark(text, at, (self.value_opening,))
            if mark is None:
                return at
            if not mark:
                self._fail()
                return at
        if self._begun:
            self._arguments(", ")
        else:
            self._begin(self._function)
            self._begun = True
            self._arguments("{")
        self._kinds = kinds_of(self._parameters.get(self._function, {}), self._key)
        self._arguments(quoted(self._key) + ": ")
        if self._kinds == ("string",):
            self._arguments('"')
        self._value.clear()
        self._value_begins = True
        self._state = self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        if self._value_begins:
            self._value_begins = False
            if self.own_lines and text[at] == "\n":
                return at + 1
        place = text.find(self.value_closing, at)
        if place < 0:
            place = half_mark(text, self.value_closing, at)
            self._push_value(text[at:place])
            self._half = text[place:]
            return len(text)
        self._push_value(text[at:place])
        self._behind = [self.value_closing]
        self._state = self._behind_value
        return place + len(self.value_closing)

    def _behind_value(self, text: str, at: int) -> int:
        """Behind a mark that looks like the end of the value."""
        spaces = _SPACE.match(text, at)
        if spaces is not None:
            self._behind.append(spaces[0])
            return spaces.end()
        mark, end = self._mark(text, at, (self.key_opening, *self.ends))
        if mark is None:
            return end
        if not mark:
            self._push_value("".join(self._behind))
            self._state = self._in_value
            return at
        self._end_value()
        self._state = self._between
        return at

    # ---- values as JSON

    def _push_value(self, text: str) -> None:
        """A piece of the value. A line break at its end waits: it may be no part of the value."""
        if not text:
            return
        self._value.append(text)
        if self._kinds != ("string",):
            return
        value = "".join(self._value)
        kept = "\n" if self.own_lines and value.endswith("\n") else ""
        value = value[: len(value) - len(kept)]
        self._value = [kept] if kept else []
        self._arguments(quoted(value)[1:-1])

    def _end_value(self) -> None:
        value = "".join(self._value)
        self._value.clear()
        if self.own_lines and value.endswith("\n"):
            value = value[:-1]
        if self._kinds == ("string",):
            self._arguments(quoted(value)[1:-1] + '"')
        else:
            self._arguments(json_of(value, self._kinds))

    def _end(self, mark: str) -> None:
        if self._begun:
            self._arguments("}")
        else:
            self._begin(self._function)
            self._arguments("{}")
        self._begun = False
        self._calls_over()
        self._unclosed = mark != self.ends[-1]

    def _fail(self) -> None:
        if self._begun:
            self._begun, self._unclosed, self._after_call = False, True, False
        super()._fail()

    # ---- marks

    def _hold(self, text: str) -> None:
        """Text that is content if the call breaks before it has begun."""
        if not self._begun:
            self._held.append(text)

    def _mark(self, text: str, at: int, marks: tuple[str, ...]) -> tuple[str | None, int]:
        """The mark that stands here, and its end; "" if there is none; None if the text ends too early to know."""
        for mark in marks:
            if text.startswith(mark, at):
                return mark, at + len(mark)
        if any(mark.startswith(text[at:]) for mark in marks):
            self._half = text[at:]
            return None, len(text)
        return "", at


class Qwen3CoderParser(TaggedParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, with line breaks between all
    of them: Qwen3-Coder and those that learned from it. Some leave out the outer tags."""

    opening = "<tool_call>"
    bare = "<function="
    closing = "</tool_call>"
    key_opening = "<parameter="
    key_closing = ">"
    value_opening = ""
    value_closing = "</parameter>"
    ends = ("</function>", "</tool_call>")
    own_lines = True

    def _begin_name(self, text: str, at: int) -> int:
        mark, end = self._mark(text, at, (self.bare,))
        if mark is None:
            return end
        if not mark:
            self._fail()
            return at
        self._held.append(mark)
        return super()._begin_name(text, end)

    def _named(self, text: str, at: int) -> int:
        if text[at] != ">":
            self._fail()
            return at
        self._held.append(">")
        self._state = self._between
        return at + 1


class Glm45Parser(TaggedParser):
    """`<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` for each argument, `</tool_call>`;
    with line breaks between them (GLM-4.5) or without (GLM-4.7)."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    key_opening = "<arg_key>"
    key_closing = "</arg_key>"
    value_opening = "<arg_value>"
    value_closing = "</arg_value>"
    ends = ("</tool_call>",)
    own_lines = False
