"""What a parser of tool calls makes of a text, in the order in which it is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

MOST_CALLS = 128  # in one text; what comes after them is content


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
    """One text. `push` gives what is certain with one more piece of it, `finish` the rest.

    - The pieces of a call's arguments together are the JSON text of an object, as the model wrote it.
    - A call begins when its name is known and its arguments have begun. What looks like a call and breaks before that
      is content, unchanged, and so is what is cut off before that.
    - A call that breaks later cannot be taken back. Its arguments stay what they were up to there, which is no valid
      JSON, so that nobody runs it by mistake; the text from there on is content. One that is cut off likewise: its
      arguments end where the text ends.
    - Text outside calls is content; whitespace before, between and after calls is dropped, and so are their tags and
      separators and other keys than name and arguments.
    - Work is linear in the text, however it is cut, and the deltas say the same.
    """

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON text, unless the call broke or was cut off


def gather(deltas: Iterable[Delta]) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a whole text."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, Content):
            content.append(delta.text)
        elif isinstance(delta, CallBegins):
            names.append(delta.name)
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    return "".join(content), [ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)]
