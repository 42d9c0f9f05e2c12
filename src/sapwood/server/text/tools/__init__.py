"""Tool calls: the fields of a request, and the calls that a model writes.

- `check_tools`: the request's `tools` and `tool_choice`, checked -> `ToolChoice`.
- `parser_for`, `guess_parser`: the parser of a format (one of `PARSERS`), by name and by the model's chat template;
  `parser_of`: the same for the tools of a request, whose schemas give the types of arguments that are plain text.
- `forced_calls`: for calls that the request demands, a grammar and a parser: in the form that the model writes
  (`written_grammar`), or else as JSON (`forced_schema`, `ForcedParser`).
- `ToolParser`: the protocol of all parsers: text in, `Delta`s out (`Content`, `CallBegins`, `CallArguments`).
- `call_id`: a fresh id for a call.

    parser = parser_for("hermes")()
    for piece in pieces:
        for delta in parser.push(piece): ...
    for delta in parser.finish(): ...
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ...limits import MAX_CALLS
from .base import CallArguments, CallBegins, Content, Delta, ToolParser
from .forced import ForcedParser, forced_schema, functions_of, written_grammar
from .formats import HermesParser, Llama3JsonParser, MistralParser
from .request import ToolChoice, check_tools
from .tagged import Glm45Parser, Qwen3CoderParser, TaggedParser

__all__ = [
    "PARSERS",
    "CallArguments",
    "CallBegins",
    "Content",
    "Delta",
    "Forced",
    "ForcedParser",
    "Glm45Parser",
    "HermesParser",
    "Llama3JsonParser",
    "MistralParser",
    "Qwen3CoderParser",
    "ToolChoice",
    "ToolParser",
    "call_id",
    "check_tools",
    "forced_calls",
    "forced_schema",
    "guess_parser",
    "parser_for",
    "parser_of",
    "written_grammar",
]

PARSERS: dict[str, Callable[..., ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "granite4": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
    "mimo": Qwen3CoderParser,
    "glm45": Glm45Parser,
    "glm47": Glm45Parser,
}
_FORMS = {"qwen3_xml": "qwen3_coder", "mimo": "qwen3_coder", "glm47": "glm45"}  # other names of `written_grammar`'s
# Marks of a chat template -> the format it teaches; the first whose marks are all there decides.
_MARKS: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<function=",), None),  # with other tags around it
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<arg_key>",), None),
    (("<tool_call>", "<|start_of_role|>"), "granite4"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),  # Llama 3.2
)
_ALPHANUMERIC = string.ascii_letters + string.digits


def parser_for(name: str) -> Callable[..., ToolParser]:
    """A factory of parsers, one for each text. It may be given `names`: a call to any other function is content then;
    without it, any name is passed on."""
    if name not in PARSERS:
        raise ValueError(f"the tool parser must be one of {', '.join(PARSERS)}, got {name!r:.60}")
    return PARSERS[name]


def guess_parser(chat_template: str | None) -> str | None:
    """The name of the parser for models with this chat template; None if it teaches no format known here."""
    text = chat_template or ""
    return next((name for marks, name in _MARKS if all(mark in text for mark in marks)), None)


def parser_of(
    name: str, tools: Sequence[Mapping[str, Any]], names: frozenset[str] | None = None
) -> Callable[[], ToolParser]:
    """A factory of parsers, one for each text, for tools that `check_tools` has seen."""
    made = parser_for(name)
    tagged = isinstance(made, type) and issubclass(made, TaggedParser)
    return partial(made, names, functions_of(tools)) if tagged else partial(made, names)


class Forced(NamedTuple):
    """How an answer is held to the calls that a request demands: `kind` and `text` of a `GrammarSpec`, and the parser
    of the answer."""

    kind: str
    text: str
    parser: Callable[[], ToolParser]


def forced_calls(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], form: str | None, most: int = MAX_CALLS
) -> Forced:
    """For tools and a choice, "required" or a function, that `check_tools` has seen. `form`: the format of the model's
    calls."""
    name = None if isinstance(choice, str) else choice["function"]["name"]
    functions = {each: given for each, given in functions_of(tools).items() if name in (None, each)}
    written = None
    if form is not None:
        written = written_grammar(_FORMS.get(form, form), functions, most if name is None else 1)
    if form is None or written is None:
        schema = forced_schema(tools, choice, most)
        return Forced("json_schema", msgspec.json.encode(schema).decode(), partial(ForcedParser, name))
    return Forced("tool_calls", written, parser_of(form, tools))


def call_id(parser: str | None = None) -> str:
    """A fresh id, in a form that the chat templates of the parser's models accept: Mistral's want nine letters and
    digits."""
    if parser == "mistral":
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
