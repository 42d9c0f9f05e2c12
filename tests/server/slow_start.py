"""`sapwood serve` whose start stands still where a test wants it: `python -m tests.server.slow_start FOLDER serve ...`.
A part of the start says that it is held, and goes on when the file of its name in FOLDER is gone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sapwood.bench.paced import paced
from sapwood.cli import main
from sapwood.server import lifecycle as running

PARTS = {"tokenizer": "AsyncTokenizer", "template": "find_template", "defaults": "generation_defaults"}


def hold(folder: Path, part: str) -> None:
    file = folder / part
    if file.exists():
        sys.stderr.write(f"held: {part}\n")
        while file.exists():
            time.sleep(0.01)


def held(flags: Mapping[str, Any], progress: Callable[[str], None], events: bool) -> Any:
    """The factory of an engine that may be held too, and while it reads an adapter."""
    given = dict(flags)
    folder = Path(given.pop("holds"))
    hold(folder, "engine")
    opened = paced(given, progress, events)
    adapters = opened.engine.requests.adapters
    read = adapters.read

    def slowly(path: str, root: str | None = None) -> bytes:
        hold(folder, Path(path).name)
        return read(path, root)

    adapters.read = slowly
    return opened


def slow(folder: Path, part: str, does: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(*given: Any) -> Any:
        hold(folder, part)
        return does(*given)

    return slowly


if __name__ == "__main__":
    for part, name in PARTS.items():
        setattr(running, name, slow(Path(sys.argv[1]), part, getattr(running, name)))
    sys.exit(main(sys.argv[2:]))
