"""`sapwood serve`: flags from the command line, the environment and a file, and a server that runs with them."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sapwood.engine.arguments import add_engine_arguments, add_fields, add_foreign, given_flags, parsed
from sapwood.engine.flags import EngineConfig, check_store, from_flags, like
from sapwood.engine.foreign import take_foreign
from sapwood.engine.loading.preflight import check_start

from .config import ServerConfig
from .foreign import FOREIGN
from .observe.logs import set_up
from .preflight import check_server

log = logging.getLogger(__name__)
_PREFIX = "SAPWOOD_"
_TEST_VARIABLES = {"SAPWOOD_TEST_CACHE", "SAPWOOD_TEST_VENVS"}
_SECRETS = ("api_key", "admin_key")  # their variables are read by `_server_config`, and become no arguments
_EPILOG = """\
examples:
  sapwood serve                                   the default model, SmolLM2-135M
  sapwood serve /models/qwen3-8b --port 8080      a folder with config.json and safetensors
  sapwood serve model.gguf --host-cache 16GiB --store redis://cache:6379/0
  sapwood serve /models/base --enable-lora --lora-root /models/adapters

Flags may also stand in a file (--config server.yaml, .toml or .json: max_model_len: 8192), or in the environment
(SAPWOOD_MAX_MODEL_LEN=8192). The command line goes first, then the environment, then the file.
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sapwood serve",
        usage="sapwood serve [MODEL] [flags]",
        description="Serve a model over HTTP, as OpenAI's API: chat completions, completions, responses and messages.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="a folder, a .gguf file or a hub's id; nothing: the default model"
    )
    made.add_argument("--config", metavar="FILE", help="flags in a file: YAML, TOML or JSON")
    made.add_argument("--factory", default="sapwood.server.process.loaded_model:model", help=argparse.SUPPRESS)
    made.add_argument("--factory-flags", default=None, help=argparse.SUPPRESS)
    add_fields(made.add_argument_group("server"), ServerConfig)
    add_engine_arguments(made)
    add_foreign(made, FOREIGN)
    return made


def main(arguments: Sequence[str]) -> int:
    try:
        options, config = server_flags(arguments, os.environ)
        set_up(config.log_format, config.log_level)
        flags = engine_flags(options)
        secret = _secret(config, flags.get("store"))
        warn_of_unknown(os.environ)
        folder = None if options.factory_flags is not None else check_start(EngineConfig(**flags))
        check_server(config, folder, not flags.get("skip_tokenizer_init"))
    except (ValueError, OSError) as problem:
        sys.stderr.write(f"sapwood serve: {' '.join(str(problem).split())}\n")
        return 2
    import uvloop

    from .lifecycle import run
    from .listen import ServeError, open_socket

    try:
        socket = open_socket(config.host, config.port, config.uds)
    except ServeError as problem:
        sys.stderr.write(f"sapwood serve: {problem}\n")
        return 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(config, flags, options.factory, socket, secret))
    finally:
        socket.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def server_flags(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[argparse.Namespace, ServerConfig]:
    """All flags, of the command line, the environment and the file; and those of the server, checked."""
    made = parser()
    options = parsed(made, [*_from_file_and_environment(made, arguments, environment), *arguments])
    return options, _server_config(options, environment)


def engine_flags(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of the engine, checked. Flags of vLLM that mean nothing here get a line in the log, or are refused."""
    for name in FOREIGN:
        if hasattr(options, name):
            take_foreign(name, getattr(options, name), FOREIGN)
    return _engine_flags(options)


def warn_of_unknown(environment: Mapping[str, str]) -> None:
    """Warn of variables with our prefix that belong to no flag: a mistyped one would be ignored in silence."""
    options = (option for action in parser()._actions for option in action.option_strings)
    known = {_PREFIX + _name(option).upper() for option in options if _has_name(option)}
    for name in sorted(environment.keys() - known - _TEST_VARIABLES):
        if name.startswith(_PREFIX):
            log.warning("there is no flag for the variable %s%s", name, like(name, known))


# ---- flags from elsewhere


def _has_name(option: str) -> bool:
    """Whether files and the environment may name this option."""
    return option.startswith("--") and not option.startswith("--no-")


def _name(option: str) -> str:
    """The name of an option in a file."""
    return option.lstrip("-").replace("-", "_")


def _from_file_and_environment(
    made: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """The flags of a file and of the environment, as arguments that come before those of the command line. A flag with
    several values has all of them from one place."""
    known = {_name(option): a for a in made._actions for option in a.option_strings if _has_name(option)}
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=environment.get(f"{_PREFIX}CONFIG"))
    path = first.parse_known_args(arguments)[0].config
    found: dict[str, list[str]] = {}
    for name, value in (_read(path) if path is not None else {}).items():
        action = known.get(str(name).replace("-", "_"))
        if action is None or action.dest in ("help", "config"):
            raise ValueError(f"{path}: there is no flag {name!r:.60}{like(str(name).replace('-', '_'), known)}")
        found[action.dest] = _as_arguments(action, value)
    for name, text in environment.items():
        action = known.get(name.removeprefix(_PREFIX).lower()) if name.startswith(_PREFIX) else None
        if action is not None and action.dest not in ("help", "config", *_SECRETS):
            found[action.dest] = _as_arguments(action, _plain(name, action, text))
    named = {_name(word.partition("=")[0]) for word in arguments if word.startswith("--")}
    replaced = {known[name].dest for name in named & known.keys() if known[name].nargs == "+"}
    return [word for dest, words in found.items() if dest not in replaced for word in words]


def _read(path: str) -> dict[str, Any]:
    text = Path(path).expanduser().read_text()
    try:
        if path.endswith(".toml"):
            read: Any = tomllib.loads(text)
        elif path.endswith(".json"):
            read = json.loads(text)
        else:
            import yaml  # type: ignore[import-untyped]

            read = yaml.safe_load(text) or {}
    except Exception as error:  # three readers with errors of their own
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"{path}: must hold names and values, got {read!r:.60}")
    return read


def _as_arguments(action: argparse.Action, value: Any) -> list[str]:
    option = next(filter(_has_name, action.option_strings))
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{option} must be true or false, got {value!r:.60}")
        return [option if value else "--no-" + option[2:]]
    words = [_word(each) for each in (value if isinstance(value, list) else [value])]
    return [f"{option}={words[0]}"] if len(words) == 1 else [option, *words]


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _json_list(name: str, words: Sequence[str]) -> list[Any]:
    """Values of a flag. A word may be a JSON list of several."""
    found: list[Any] = []
    for word in words:
        try:
            read = json.loads(word) if word.startswith("[") else word
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} must be words or a JSON list of them, got {word!r:.60} ({error!s:.60})") from None
        found += read if isinstance(read, list) else [read]
    return found


def _plain(name: str, action: argparse.Action, text: str) -> Any:
    """The value that a variable's text would be in a file."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    return _json_list(name, [text]) if action.nargs == "+" else text


def _server_config(options: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    given = {each.name: getattr(options, each.name) for each in fields(ServerConfig) if hasattr(options, each.name)}
    for name in ("api_key", "served_model_name", "lora_modules", "allowed_origins", "allowed_hosts"):
        if name in given:
            given[name] = tuple(map(_word, _json_list(name, given[name])))
    if "api_key" not in given and environment.get("SAPWOOD_API_KEY"):
        given["api_key"] = tuple(environment["SAPWOOD_API_KEY"].split(","))
    if "admin_key" not in given and environment.get("SAPWOOD_ADMIN_KEY"):
        given["admin_key"] = environment["SAPWOOD_ADMIN_KEY"]
    if given.get("lora_modules") and not getattr(options, "enable_lora", False):
        raise ValueError("lora_modules needs --enable-lora")
    if given.get("kv_events_config") is not None:
        from .process.kv_events_config import KVEventsConfig

        KVEventsConfig.from_json(given["kv_events_config"])
    return ServerConfig(**given)


def _engine_flags(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of the engine, checked, with the defaults that a server has and a script has not."""
    flags = given_flags(options)
    if options.factory_flags is not None:
        from_flags(None, flags)
        given = dict(json.loads(options.factory_flags))
        if given.get("store") is not None:
            check_store(given["store"])
        return given
    model = flags.pop("model", None) if options.model_tag is None else options.model_tag
    flags.pop("model", None)
    flags.setdefault("host_cache", "auto")
    caching = flags.get("enable_prefix_caching", True) and flags["host_cache"] != "0"
    if flags.get("store") == "none":
        flags["store"] = None
    elif flags.get("store") is None and caching:
        flags["store"] = default_store()
    flags.setdefault("progress", sys.stderr.isatty())
    config = from_flags(model, flags)
    return {each.name: getattr(config, each.name) for each in fields(EngineConfig)}


def _secret(config: ServerConfig, store: str | None) -> bytes | None:
    """The secret of salts, if salts are made of keys."""
    if not config.salt_by_key:
        return None
    from .salt_key import salt_key

    return salt_key(config.salt_key_file, store)


def default_store() -> str:
    """Files in the user's cache folder: 20 GiB, or a tenth of what the disk has free."""
    from urllib.parse import quote

    from sapwood.engine.loading.usercache import cache_folder

    folder = cache_folder("store")
    disk = os.statvfs(folder)
    size = min(20 << 30, disk.f_bavail * disk.f_frsize // 10)
    return f"file://{quote(str(folder))}?size={max(64 << 20, size)}"
