"""A sample's text as parts: reasoning, content and tool calls, as it comes; and the tools of a request, which decide
how calls are found in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..api.schemas import Sampling
from ..errors import bad
from ..limits import MAX_CALLS
from ..process.grammars import GrammarSpec
from .reasoning import ReasoningSplitter
from .tools import (
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
    """The tools of a request. `shown`: those in the prompt. `most`: how many calls the model may make."""

    choice: ToolChoice
    shown: Sequence[Mapping[str, Any]] | None
    grammar: GrammarSpec | None  # of calls that the request demands
    parser: Callable[[], ToolParser] | None
    most: int = MAX_CALLS

    def show_marks(self, request: Sampling) -> None:
        """Have special tokens in the text: in some vocabularies they are the marks of calls, without which a call is
        only text."""
        if self.parser is not None and request.skip_special_tokens is None:
            request.skip_special_tokens = False


def read_tools(tools: Any, tool_choice: Any, default: str | None, most: int = MAX_CALLS) -> Tools:
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
    return 1 if parallel_tool_calls is False else MAX_CALLS


def with_tools_in_system_prompt(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Messages for a chat template that knows of no tools: the system message describes them."""
    listed = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
    text = _TOOLS_TEXT.format(tools=listed)
    first = messages[0]
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


class AnswerParser:
    """The parts of one sample. `splitter`: None where its text has no reasoning."""

    __slots__ = ("_most", "_parser", "_splitter", "calls", "full")

    def __init__(self, tools: Tools, splitter: ReasoningSplitter | None) -> None:
        self.calls = 0  # that have begun
        self.full = False  # one call too many has begun: the text from there on is dropped
        self._most = tools.most
        self._parser = None if tools.parser is None else tools.parser()
        self._splitter = splitter

    def push(self, text: str) -> list[Part]:
        if self._splitter is None:
            return self._content(text)
        reasoning, content = self._splitter.push(text)
        return ([Reasoning(reasoning)] if reasoning else []) + self._content(content)

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._splitter is not None:
            reasoning, content = self._splitter.finish()
            parts = ([Reasoning(reasoning)] if reasoning else []) + self._content(content)
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
