"""A sample's text as its parts: reasoning, content and tool calls, as it comes. And what a request says of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..api.schemas import Sampling
from ..errors import bad
from ..process.grammars import GrammarSpec
from .reasoning import ReasoningSplitter
from .tools import (
    MOST_CALLS,
    CallArguments,
    CallBegins,
    Content,
    ToolChoice,
    ToolParser,
    check_tools,
    forced_calls,
    parser_of,
)

_TOOLS_TEXT = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Reasoning(NamedTuple):
    text: str


Part = Reasoning | Content | CallBegins | CallArguments


class Tools(NamedTuple):
    """What a request says of tools. `shown`: those that the model is told of. `most`: calls that it may make."""

    choice: ToolChoice
    shown: Sequence[Mapping[str, Any]] | None
    grammar: GrammarSpec | None  # of a call that is demanded
    parser: Callable[[], ToolParser] | None
    most: int = MOST_CALLS

    def show_marks(self, request: Sampling) -> None:
        """The marks of calls are special tokens in some vocabularies, and without them a call is only text."""
        if self.parser is not None and request.skip_special_tokens is None:
            request.skip_special_tokens = False


def read_tools(tools: Any, tool_choice: Any, default: str | None, most: int = MOST_CALLS) -> Tools:
    """`default`: the format of this model's calls."""
    try:
        choice = check_tools(tools, tool_choice)
    except ValueError as error:
        raise bad(str(error).split(" ", 1)[0], str(error)) from None
    if choice.mode == "none" or not tools:
        return Tools(choice, None, None, None)
    some = [tool for tool in tools if tool["function"]["name"] in choice.names]
    if choice.mode in ("required", "named"):
        forced = forced_calls(some, tool_choice if choice.mode == "named" else "required", default, most)
        return Tools(choice, some, GrammarSpec(forced.kind, forced.text), forced.parser, most)
    names = None if len(some) == len(tools) else choice.names
    return Tools(choice, some, None, None if default is None else parser_of(default, some, names), most)


def most_calls(parallel_tool_calls: bool | None) -> int:
    """How many calls an answer may have."""
    return 1 if parallel_tool_calls is False else MOST_CALLS


def with_tools_in_system_prompt(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """For a chat template that knows of no tools: messages that begin with what the model must know of them."""
    listed = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
    text = _TOOLS_TEXT.format(tools=listed)
    first = messages[0]
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


class AnswerParser:
    """One sample. `splitter`: what tells its reasoning apart, or None."""

    __slots__ = ("_most", "_parser", "_splitter", "calls", "full")

    def __init__(self, tools: Tools, splitter: ReasoningSplitter | None) -> None:
        self.calls = 0  # begun so far
        self.full = False  # a call more than there may be has begun: from there on nothing counts
        self._most = tools.most
        self._parser = None if tools.parser is None else tools.parser()
        self._splitter = splitter

    def push(self, text: str) -> list[Part]:
        if self._splitter is None:
            return self._content(text)
        thought, said = self._splitter.push(text)
        return ([Reasoning(thought)] if thought else []) + self._content(said)

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._splitter is not None:
            thought, said = self._splitter.finish()
            parts = ([Reasoning(thought)] if thought else []) + self._content(said)
        if self._parser is not None:
            parts += self._counted(self._parser.finish())
        return parts

    def _content(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._parser is None:
            return [Content(text)]
        return self._counted(self._parser.push(text))

    def _counted(self, parts: Sequence[Part]) -> list[Part]:
        if self.full:
            return []
        for at, part in enumerate(parts):
            if isinstance(part, CallBegins):
                if self.calls == self._most:
                    self.full = True
                    return list(parts[:at])
                self.calls += 1
        return list(parts)
