"""What the parsers of all formats of tool calls have in common: the deltas that they make of a text, and how they move
through it: content, calls one after the other, and arrays of calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import ClassVar, Protocol, TypeAlias

import msgspec

from ...limits import MAX_CALL_NAME_CHARACTERS, MAX_CALLS
from .json_text import SPACES, CallObject, JsonText

NAME = re.compile(r"[\w.-]+", re.ASCII)  # of a function


# ---- what a parser makes of a text


class Content(msgspec.Struct, frozen=True):
    text: str


class CallBegins(msgspec.Struct, frozen=True):
    """Calls are counted from 0, and begin in that order."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A further piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta: TypeAlias = Content | CallBegins | CallArguments


class ToolParser(Protocol):
    """The parser of one text. `push` takes the next piece and returns the deltas that are certain with it; `finish`
    returns the rest.

    - The pieces of a call's arguments together are the JSON text of an object, as the model wrote it.
    - A call begins when its name is known and its arguments have begun. What looks like a call and breaks before that
      is content, unchanged, and so is a call that is cut off before that.
    - A call that breaks later cannot be taken back. Its arguments stay what they were up to there, which is no valid
      JSON, so that no client runs it by mistake; the text from there on is content. The arguments of a call that is
      cut off end where the text ends.
    - Text outside calls is content; whitespace before, between and after calls is dropped, and so are their tags and
      separators and other keys than name and arguments.
    - Work is linear in the text, however it is cut, and the deltas say the same.
    """

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


# ---- marks in a text that comes in pieces


def half_mark(text: str, mark: str, start: int = 0) -> int:
    """Where, from `start` on, a mark such as `<tool_call>` begins that the end of the text cuts off; the text's length
    if there is none."""
    at = max(start, len(text) - len(mark) + 1)
    while (at := text.find(mark[0], at)) >= 0:
        if mark.startswith(text[at:]):
            return at
        at += 1
    return len(text)


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """The first of several marks, in one walk through a text."""
    return re.compile("|".join(re.escape(mark) for mark in marks if mark))


# ---- a parser


class BaseParser:
    """Moves through a text. `_state` is the method for the present place in it: it takes the text from an index on and
    returns the index behind what it has read.

    _outside --opening mark--> _opened --{--> _in_call ----------> _outside
                                       --[--> _in_array <--> _in_call
    A character that breaks the form leads back `_outside`, which goes on with it: nothing is read twice.
    """

    opening: ClassVar[str] = ""
    bare: ClassVar[str] = ""  # begins a call too, where the model has left the opening mark out
    closing: ClassVar[str] = ""  # dropped once after a call; its first character is that of `opening`
    needs_arguments: ClassVar[bool] = False

    def __init__(self, names: frozenset[str] | None = None) -> None:
        """`names`: a call to any other function is content; None: any name is passed on."""
        self._names = names
        self._out: list[Delta] = []
        self._calls = 0  # that have begun
        self._held: list[str] = []  # whitespace that may be before a call, then what may be the call's beginning
        self._half = ""  # the end of the last piece, which is read again with the next one
        self._unclosed = False  # a closing mark may come
        self._after_call = False  # whitespace is dropped
        self._array = False  # the call is in an array
        self._item_next = True  # in an array: a call comes next, rather than a comma or the end
        self._function = ""  # the name of the function, where it stands outside of JSON
        self._call: CallObject | None = None
        self._json = JsonText()
        self._state: Callable[[str, int], int] = self._outside

    def push(self, text: str) -> list[Delta]:
        if self._half:
            text, self._half = self._half + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Delta]:
        rest = "".join(self._held)
        self._held = []
        if self._call is not None and not self._call.begun:
            rest += "".join(self._call.held)
        elif self._between_calls() and not rest.strip(SPACES + ",;"):
            rest = ""
        if not (self._after_call and self._unclosed and self.closing.startswith(self._half)):
            rest += self._half
        self._half = ""
        self._content(rest)
        if self._held:
            self._out.append(Content("".join(self._held)))
            self._held = []
        self._state, self._call = self._plain, None
        out, self._out = self._out, []
        return out

    # Outside

    def _outside(self, text: str, at: int) -> int:
        if text.find(self.opening[0], at) < 0:  # most text has nothing like a mark
            self._content(text[at:])
            return len(text)
        marks = (self.opening, self.bare, self.closing if self._unclosed else "")
        found = _any_of(marks).search(text, at)
        if found is None:
            cut = min(half_mark(text, mark, at) for mark in marks if mark)
            self._content(text[at:cut])
            self._half = text[cut:]
            return len(text)
        place, mark = found.start(), found[0]
        self._content(text[at:place])
        self._unclosed = False
        if mark == self.closing:
            self._held.clear()
            self._after_call = True
        elif self._calls >= MAX_CALLS:
            self._state = self._plain
            return place
        elif mark == self.bare:
            self._state = self._opened
            return place
        else:
            self._held.append(mark)
            self._state = self._opened
        return place + len(mark)

    def _plain(self, text: str, at: int) -> int:
        """Behind the last call that may be: all is content."""
        self._content(text[at:])
        return len(text)

    def _content(self, text: str) -> None:
        """A piece of content. Whitespace at its end waits for what comes next: before a call it is dropped."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        self._after_call = False
        words = text.rstrip()
        if words:
            self._out.append(Content("".join(self._held) + words))
            self._held.clear()
        if len(words) < len(text):
            self._held.append(text[len(words) :])

    # Calls

    def _opened(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACES:
            self._held.append(char)
            return at + 1
        if char == "[":
            self._held.append(char)
            self._array = self._item_next = True
            self._state = self._in_array
            return at + 1
        if char == "{":
            self._array = False
            self._begin_object()
        else:
            self._fail()
        return at

    def _in_array(self, text: str, at: int) -> int:
        char = text[at]
        if char == "{" and self._item_next and self._calls < MAX_CALLS:
            self._begin_object()
            return at
        if char in SPACES:
            self._held.append(char)
        elif char == "," and not self._item_next:
            self._held.append(char)
            self._item_next = True
        elif char == "]" and not self._item_next:
            self._held.clear()
            self._calls_over()
        else:
            self._fail()
            return at
        return at + 1

    def _naming(self, text: str, at: int) -> int:
        """A name that stands outside of JSON. `_named` goes on behind it."""
        found = NAME.match(text, at)
        if found is None:
            known = self._function and (self._names is None or self._function in self._names)
            self._state = self._named
            if not known:
                self._fail()
            return at
        self._held.append(found[0])
        self._function += found[0]
        if len(self._function) > MAX_CALL_NAME_CHARACTERS:
            self._fail()
        return found.end()

    def _named(self, text: str, at: int) -> int:
        raise NotImplementedError

    def _begin_object(self) -> None:
        self._call = CallObject(self._names, needs_arguments=self.needs_arguments)
        self._state = self._in_call

    def _in_call(self, text: str, at: int) -> int:
        call = self._call
        assert call is not None
        had_begun = call.begun
        at = call.take(text, at)
        if call.begun and not had_begun:
            self._begin(call.name)
        self._arguments("".join(call.fragments))
        call.fragments.clear()
        if call.broken or (call.over and not call.begun):
            self._held += call.held
            self._fail()
        elif call.over:
            self._call_over()
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        """The arguments of a call that has begun, where they stand alone."""
        end = self._json.take(text, at)
        self._arguments(text[at:end])
        if self._json.broken:
            self._fail()
        elif self._json.over:
            self._call_over()
        return end

    def _begin(self, name: str) -> None:
        self._held.clear()
        self._after_call = False
        self._out.append(CallBegins(self._calls, name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(self._calls - 1, text))

    def _call_over(self) -> None:
        self._call = None
        self._after_call = True
        if self._array:
            self._item_next = False
            self._state = self._in_array
        else:
            self._calls_over()

    def _calls_over(self) -> None:
        self._unclosed = self._after_call = True
        self._state = self._outside

    def _fail(self) -> None:
        """This is no call: the held text is content after all."""
        if self._call is not None:
            if self._call.begun:
                self._unclosed, self._after_call = True, self._call.whole
            self._call = None
        text = "".join(self._held)
        self._held = []
        self._content(text)
        self._state = self._outside

    def _between_calls(self) -> bool:
        return self._state == self._in_array
