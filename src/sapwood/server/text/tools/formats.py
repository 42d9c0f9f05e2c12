"""The formats in which models write tool calls as JSON; those with arguments between tags are in tagged.py."""

from __future__ import annotations

import re

from ...limits import MAX_CALLS
from .base import NAME, BaseParser
from .json_text import SPACES, JsonText

_CALL_ID = re.compile(r"[a-zA-Z0-9]+")


class HermesParser(BaseParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text around them: Hermes,
    Qwen and many others. Also an array of such objects between the tags, as SmolLM2 writes it."""

    opening = "<tool_call>"
    closing = "</tool_call>"


class Llama3JsonParser(BaseParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` or whitespace between them, at the beginning of the text
    or behind `<|python_tag|>`. Braces elsewhere are content: answers may be JSON too."""

    opening = "<|python_tag|>"
    needs_arguments = True

    def __init__(self, names: frozenset[str] | None = None) -> None:
        super().__init__(names)
        self._state = self._beginning

    def _beginning(self, text: str, at: int) -> int:
        char = text[at]
        if char.isspace():
            self._held.append(char)
            return at + 1
        self._state = self._outside
        if char == "{":
            self._begin_object()
        return at

    def _opened(self, text: str, at: int) -> int:
        if text[at] != "[":
            return super()._opened(text, at)
        self._fail()
        return at

    def _calls_over(self) -> None:
        self._state = self._behind_call

    def _behind_call(self, text: str, at: int) -> int:
        char = text[at]
        if char == "{" and self._calls < MAX_CALLS:
            self._begin_object()
        elif char in SPACES or char == ";":
            self._held.append(char)
            return at + 1
        else:
            self._fail()
        return at

    def _between_calls(self) -> bool:
        return self._state == self._behind_call


class MistralParser(BaseParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or, from newer tokenizers on, `[TOOL_CALLS]name{...}`,
    several one after the other, where `[CALL_ID]...` and `[ARGS]` may come before the brace."""

    opening = "[TOOL_CALLS]"

    def _opened(self, text: str, at: int) -> int:
        if text[at] == "[" and self.opening.startswith(text[at : at + len(self.opening)]):
            if text.startswith(self.opening, at):
                self._fail()  # the mark is there twice: the second one may begin a call
                return at
            self._half = text[at:]
            return len(text)
        if not NAME.match(text, at):
            return super()._opened(text, at)
        self._function = ""
        self._array = False
        self._state = self._naming
        return at

    def _named(self, text: str, at: int) -> int:
        char = text[at]
        if char == "{":
            self._begin(self._function)
            self._json = JsonText()
            self._state = self._in_arguments
            return at
        if char in SPACES:
            self._held.append(char)
            return at + 1
        for mark in ("[ARGS]", "[CALL_ID]"):
            if text.startswith(mark, at):
                self._held.append(mark)
                self._state = self._identifying if mark == "[CALL_ID]" else self._named
                return at + len(mark)
            if mark.startswith(text[at : at + len(mark)]):
                self._half = text[at:]
                return len(text)
        self._fail()
        return at

    def _identifying(self, text: str, at: int) -> int:
        found = _CALL_ID.match(text, at)
        if found is None:
            self._state = self._named
            return at
        self._held.append(found[0])
        return found.end()
