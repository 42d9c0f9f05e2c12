"""The user's cache folder: where things that can be made again are kept from one start to the next. No torch here."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

_UNFINISHED = ".unfinished-"


def cache_folder(*parts: str) -> Path:
    """A folder of ours below $XDG_CACHE_HOME or ~/.cache; made, for this user alone, if it is not there."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("sapwood", *parts):
        folder /= part
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` if it is not there yet.

    Another process that wants a folder beside it waits and finds it ready. One that is killed in the middle leaves a
    folder under another name, which the next one removes: what has the name `folder` is always whole.
    """
    if folder.is_dir():
        return folder
    with open(folder.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however that ends
        if folder.is_dir():
            return folder
        for left in folder.parent.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        unfinished = folder.parent / f"{_UNFINISHED}{os.getpid()}"
        try:
            unfinished.mkdir(mode=0o700)
            make(unfinished)
            for path in (*unfinished.iterdir(), unfinished):
                _sync(path)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write_whole(path: Path, text: str) -> None:
    """Replaces a small file: a reader finds the old text or the new one, never half."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
