"""Tool calls: what a request says of them, and what a model writes.

- `check_tools`: the request's `tools` and `tool_choice`, checked -> `ToolChoice`.
- `parser_for`, `guess_parser`: the parser of a format ("hermes", "qwen", "llama3_json", "mistral"), by name and by the
  model's chat template.
- `forced_schema`, `ForcedParser`: for calls that the request demands.
- `ToolParser`: what all parsers do: text in, `Delta`s out (`Content`, `CallBegins`, `CallArguments`). `gather` makes
  content and `Call`s of them.
- `call_id`: a fresh id for a call.

    parser = parser_for("hermes")()
    for piece in pieces:
        for delta in parser.push(piece): ...
    for delta in parser.finish(): ...
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from .deltas import MOST_CALLS, Call, CallArguments, CallBegins, Content, Delta, ToolParser, gather
from .forced import ForcedParser, forced_schema
from .formats import HermesParser, Llama3JsonParser, MistralParser
from .request import MOST_TOOLS, ToolChoice, check_tools

__all__ = [
    "MOST_CALLS",
    "MOST_TOOLS",
    "PARSERS",
    "Call",
    "CallArguments",
    "CallBegins",
    "Content",
    "Delta",
    "ForcedParser",
    "HermesParser",
    "Llama3JsonParser",
    "MistralParser",
    "ToolChoice",
    "ToolParser",
    "call_id",
    "check_tools",
    "forced_schema",
    "gather",
    "guess_parser",
    "parser_for",
]

PARSERS: dict[str, Callable[..., ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
# Marks of a chat template -> the format it teaches; the first that is there decides. None: one that is not read here.
_MARKS = (
    ("<function=", None),  # Qwen3-Coder
    ("<arg_key>", None),  # GLM 4.5
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),  # Llama 3.2
)
_ALPHANUMERIC = string.ascii_letters + string.digits


def parser_for(name: str) -> Callable[..., ToolParser]:
    """What makes the parser of one text. It may be given `names`: calls to other functions are content then; without
    it, whatever name the model writes is passed on."""
    if name not in PARSERS:
        raise ValueError(f"the tool parser must be one of {', '.join(PARSERS)}, got {name!r:.60}")
    return PARSERS[name]


def guess_parser(chat_template: str | None) -> str | None:
    """The name of the parser for models with this chat template; None if it teaches no format known here."""
    return next((name for mark, name in _MARKS if mark in (chat_template or "")), None)


def call_id(parser: str | None = None) -> str:
    """A fresh id, as the templates of the parser's models take them back: Mistral's want nine letters and digits."""
    if parser == "mistral":
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
