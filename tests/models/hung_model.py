"""Factories of a real model whose adapters hang where a folder has a FIFO called `hangs`: for as long as it takes, or
until they are given up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sapwood.server.process import loaded_model as opened

from .hung_adapters import hanging_reader


def patient(flags: Mapping[str, Any], progress: Callable[[str], None], events: bool) -> Any:
    found = opened.model(flags, progress, events)
    engine: Any = found.engine
    engine.adapters._reader = hanging_reader(flags["lora_seconds"])
    return found


def impatient(flags: Mapping[str, Any], progress: Callable[[str], None], events: bool) -> Any:
    """Only with those that hang: others may take as long as this machine is slow."""
    found = patient(flags, progress, events)
    reader: Any = found.engine.adapters._reader  # type: ignore[attr-defined]
    read, hurried = reader.read, hanging_reader(0.5)

    def either(path: str, root: str, *more: Any) -> Any:
        return (hurried.read if Path(root, path, "hangs").exists() else read)(path, root, *more)

    reader.read = either
    return found
