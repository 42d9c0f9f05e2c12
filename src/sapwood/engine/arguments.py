"""The flags of an engine as arguments of a command line, made from EngineConfig: there is one list of flags. No torch
here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from sapwood.store.uri import nbytes

from .flags import ALIASES, EngineConfig, from_flags, like
from .foreign import FOREIGN, Foreign

_WORDS = re.compile(r"^    (\w+(?:, \w+)*)  +(.*(?:\n {8,}.*)*)$", re.M)
_SHORT = {short for flag in FOREIGN.values() for short in flag.short}
_OPTION = re.compile(r"(--?[A-Za-z][\w-]*)((?:\.[\w.+-]*)?)(=.*)?", re.S)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Every field of EngineConfig by its name with dashes, and what vLLM has besides."""
    group = parser.add_argument_group("engine")
    add_fields(group, EngineConfig)
    add_foreign(group, FOREIGN)


def add_fields(group: Any, kind: type) -> None:
    """Options for the fields of a dataclass, with what its docstring says of each as help."""
    words, kinds = _words(kind), get_type_hints(kind)
    for field in fields(kind):
        names = [field.name, *(alias for alias, name in ALIASES.items() if name == field.name)]
        default = "" if field.default in (None, ()) else f" (default {field.default})"
        _add(group, names, kinds[field.name], words.get(field.name, "") + default)


def add_foreign(group: Any, flags: Mapping[str, Foreign]) -> None:
    """Options that help does not show, for `take_foreign` to judge what they say."""
    for name, flag in flags.items():
        kind = tuple[str, ...] if isinstance(flag.value, tuple) else str if flag.value is None else type(flag.value)
        _add(group, [name], kind, argparse.SUPPRESS, flag.short)


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags of an engine that were given, by their names with underscores."""
    known = {*(field.name for field in fields(EngineConfig)), *FOREIGN}
    return {name: value for name, value in vars(arguments).items() if name in known}


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """What was given, checked: a ValueError names the flag."""
    flags = given_flags(arguments)
    return from_flags(flags.pop("model", None), flags)


# ---- how people write them


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """`parser.parse_args`, for people: underscores are as good as dashes, and for a mistyped option the user is asked
    whether he meant the nearest one."""
    known = set(_options(parser))
    asked, unknown = parser.parse_known_args(list(_dashed(parser, arguments, known)))
    if unknown:
        words = next((word for word in unknown if word.startswith("-")), "").partition("=")[0]
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{like(words, known) if words else ''}")
    return asked


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """All of them, also those of commands within a command."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _options(each)


def _dashed(parser: argparse.ArgumentParser, arguments: Sequence[str], known: set[str]) -> Iterator[str]:
    for at, word in enumerate(arguments):
        if word == "--":
            yield from arguments[at:]
            return
        found = _OPTION.fullmatch(word)
        if found is None:
            yield word
            continue
        name, keys, value = found.groups()
        dashed = name.replace("_", "-") if name.startswith("--") else name
        if keys and dashed in known:  # as vLLM takes JSON: --compilation-config.level 3
            if dashed.lstrip("-").replace("-", "_") not in FOREIGN and dashed not in _SHORT:
                parser.error(f"{dashed} takes its value in one piece, got {word!r:.60}")
            keys = ""
        yield f"{dashed}{keys}{value or ''}" if dashed in known else word


def _add(group: Any, names: list[str], kind: Any, help: str, short: Sequence[str] = ()) -> None:
    options = [*("--" + name.replace("_", "-") for name in names), *short]
    more: dict[str, Any] = {"dest": names[0], "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
    if kind is bool:
        group.add_argument(*options, action=argparse.BooleanOptionalAction, **more)
    elif kind == tuple[str, ...]:
        group.add_argument(*options, nargs="+", action="extend", metavar="TEXT", **more)
    elif kind is int and names[0].endswith("_bytes"):
        group.add_argument(*options, type=_size, metavar="BYTES", **more)
    elif kind in (float, int, int | None):
        group.add_argument(*options, type=_number(float if kind is float else int), metavar="N", **more)
    else:
        group.add_argument(*options, metavar="TEXT", **more)


def _number(kind: type) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r:.60}") from None

    return number


def _size(text: str) -> int:
    try:
        return nbytes("it", text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem).removeprefix("it ")) from None


def _words(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each field."""
    words = _WORDS.findall(kind.__doc__ or "")
    return {name: " ".join(text.split()) for names, text in words for name in names.split(", ")}
