"""A sample's text as its parts: reasoning, content and tool calls, as it comes. And what a request says of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .errors import bad
from .grammars import GrammarSpec
from .reasoning import ReasoningSplitter, opens_reasoning
from .tools import (
    CallArguments,
    CallBegins,
    Content,
    ForcedParser,
    ToolChoice,
    ToolParser,
    check_tools,
    forced_schema,
    parser_for,
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
    """What a request says of tools. `shown`: those that the model is told of."""

    choice: ToolChoice
    shown: Sequence[Mapping[str, Any]] | None
    grammar: GrammarSpec | None  # of a call that is demanded
    parser: Callable[[], ToolParser] | None


def read_tools(tools: Any, tool_choice: Any, default: str | None) -> Tools:
    """`default`: the format of this model's calls."""
    try:
        choice = check_tools(tools, tool_choice)
    except ValueError as error:
        raise bad(str(error).split(" ", 1)[0], str(error)) from None
    if choice.mode in ("required", "named"):
        schema = forced_schema(tools, tool_choice)
        spec = GrammarSpec("json_schema", msgspec.json.encode(schema).decode())
        return Tools(choice, tools, spec, lambda: ForcedParser(choice.name))
    if choice.mode == "none" or not tools:
        return Tools(choice, None, None, None)
    return Tools(choice, tools, None, None if default is None else parser_for(default))


def told_of_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """For a chat template that knows of no tools: messages that begin with what the model must know of them."""
    listed = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
    text = _TOOLS_TEXT.format(tools=listed)
    first = messages[0]
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


class Spoken:
    """One sample. `reasoning`: whether it is told apart; `prompt`: the text before, which may have begun it."""

    __slots__ = ("_parser", "_splitter", "calls")

    def __init__(self, tools: Tools, reasoning: bool, prompt: str | None) -> None:
        self.calls = 0  # begun so far
        self._parser = None if tools.parser is None else tools.parser()
        self._splitter = (
            ReasoningSplitter(begins_inside=opens_reasoning(prompt or "")) if reasoning and not tools.grammar else None
        )

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
        for part in parts:
            if isinstance(part, CallBegins):
                self.calls += 1
        return list(parts)
