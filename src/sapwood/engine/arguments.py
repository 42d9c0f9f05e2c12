"""The flags of an engine as arguments of a command line, made from EngineConfig: there is one list of flags. No torch
here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

from .flags import ALIASES, NOT_HERE, EngineConfig, from_flags

_WORDS = re.compile(r"^    (\w+(?:, \w+)*)  +(.*(?:\n {8,}.*)*)$", re.M)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Every field of EngineConfig by its name with dashes. What others have and we have not is taken as well, for
    `engine_config` to refuse it by name."""
    group = parser.add_argument_group("engine")
    add_fields(group, EngineConfig)
    for name, (value, _) in NOT_HERE.items():
        _add(group, [name], str if value is None else type(value), argparse.SUPPRESS)


def add_fields(group: Any, kind: type) -> None:
    """Options for the fields of a dataclass, with what its docstring says of each as help."""
    words, kinds = _words(kind), get_type_hints(kind)
    for field in fields(kind):
        names = [field.name, *(alias for alias, name in ALIASES.items() if name == field.name)]
        default = "" if field.default in (None, ()) else f" (default {field.default})"
        _add(group, names, kinds[field.name], words.get(field.name, "") + default)


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags of an engine that were given, by their names with underscores."""
    known = {*(field.name for field in fields(EngineConfig)), *NOT_HERE}
    return {name: value for name, value in vars(arguments).items() if name in known}


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """What was given, checked: a ValueError names the flag."""
    flags = given_flags(arguments)
    return from_flags(flags.pop("model", None), flags)


def _add(group: Any, names: list[str], kind: Any, help: str) -> None:
    options = ["--" + name.replace("_", "-") for name in names]
    more: dict[str, Any] = {"dest": names[0], "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
    if kind is bool:
        group.add_argument(*options, action=argparse.BooleanOptionalAction, **more)
    elif kind == tuple[str, ...]:
        group.add_argument(*options, nargs="+", action="extend", metavar="TEXT", **more)
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


def _words(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each field."""
    said = _WORDS.findall(kind.__doc__ or "")
    return {name: " ".join(text.split()) for names, text in said for name in names.split(", ")}
