"""`sapwood serve`: arguments from the command line, the environment and a file, and a server run with them."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sapwood.engine.arguments import add_engine_arguments, add_fields, given_flags
from sapwood.engine.flags import EngineConfig, from_flags

from .config import ServerConfig

_PREFIX = "SAPWOOD_"
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
    made.add_argument("--factory", default="sapwood.server.opened:model", help=argparse.SUPPRESS)
    made.add_argument("--factory-flags", default=None, help=argparse.SUPPRESS)
    add_fields(made.add_argument_group("server"), ServerConfig)
    add_engine_arguments(made)
    return made


def main(arguments: Sequence[str]) -> int:
    made = parser()
    try:
        asked = made.parse_args([*_from_elsewhere(made, arguments, os.environ), *arguments])
        config = _server_config(asked, os.environ)
        flags = _engine_flags(asked)
    except (ValueError, OSError) as problem:
        sys.stderr.write(f"sapwood serve: {problem}\n")
        return 2
    from .listen import ServeError, open_socket
    from .running import run

    try:
        socket = open_socket(config.host, config.port, config.uds)
    except ServeError as problem:
        sys.stderr.write(f"sapwood serve: {problem}\n")
        return 1
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(config, flags, asked.factory, socket))
    finally:
        socket.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


# ---- flags from elsewhere


def _from_elsewhere(
    made: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """What a file and the environment say, as arguments that come before those of the command line."""
    known = {action.dest: action for action in made._actions if action.option_strings}
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=environment.get(f"{_PREFIX}CONFIG"))
    path = first.parse_known_args(arguments)[0].config
    found: list[str] = []
    for name, value in (_read(path) if path is not None else {}).items():
        name = name.replace("-", "_")
        if name == "model" and not any(not each.startswith("-") for each in arguments[:1]):
            found += ["--model", str(value)]
            continue
        if name not in known or name in ("help", "config"):
            raise ValueError(f"{path}: there is no flag {name!r:.60}")
        found += _as_arguments(known[name], value)
    for name, text in environment.items():
        dest = name.removeprefix(_PREFIX).lower()
        if name.startswith(_PREFIX) and dest in known and dest not in ("config", "help", "api_key", "admin_key"):
            found += _as_arguments(known[dest], _plain(text))
    return found


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
    option = next(each for each in action.option_strings if each.startswith("--") and not each.startswith("--no-"))
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{option} must be true or false, got {value!r:.60}")
        return [option if value else "--no-" + option[2:]]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [option, json.dumps(value) if isinstance(value, dict) else str(value)]


def _plain(text: str) -> Any:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text) if len(text) < 6 else text


def _server_config(asked: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    given = {each.name: getattr(asked, each.name) for each in fields(ServerConfig) if hasattr(asked, each.name)}
    for name in ("api_key", "served_model_name", "lora_modules", "allowed_origins"):
        if name in given:
            given[name] = tuple(given[name])
    if "api_key" not in given and environment.get("SAPWOOD_API_KEY"):
        given["api_key"] = tuple(environment["SAPWOOD_API_KEY"].split(","))
    if "admin_key" not in given and environment.get("SAPWOOD_ADMIN_KEY"):
        given["admin_key"] = environment["SAPWOOD_ADMIN_KEY"]
    if given.get("lora_modules") and not getattr(asked, "enable_lora", False):
        raise ValueError("lora_modules needs --enable-lora")
    if given.get("kv_events_config") is not None:
        from .kv_events_config import KVEventsConfig

        KVEventsConfig.from_json(given["kv_events_config"])
    return ServerConfig(**given)


def _engine_flags(asked: argparse.Namespace) -> dict[str, Any]:
    """The flags of the engine, checked; what a server has by default and a script has not is added."""
    if asked.factory_flags is not None:
        return dict(json.loads(asked.factory_flags))
    flags = given_flags(asked)
    model = flags.pop("model", None) if asked.model_tag is None else asked.model_tag
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


def default_store() -> str:
    """Files in the user's cache folder: 20 GiB, or a tenth of what the disk has free."""
    from urllib.parse import quote

    from sapwood.engine.usercache import cache_folder

    folder = cache_folder("store")
    disk = os.statvfs(folder)
    size = min(20 << 30, disk.f_bavail * disk.f_frsize // 10)
    return f"file://{quote(str(folder))}?size={max(64 << 20, size)}"
