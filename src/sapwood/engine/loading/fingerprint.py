"""What weights *are*, in 32 bytes: a digest of their content, never of a name. No torch here.

Reading all weights at every start would take longer than loading them, so the digest of a file is remembered in the
user's cache folder for as long as the file system says that the file has not changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from .usercache import cache_folder, write_whole

DIGEST_BYTES = 32
_CHUNK = 32 << 20  # files are digested in chunks, so that one large file keeps all cores busy
_SETTLED_NS = 2_000_000_000  # a file written this recently could change again within one tick of its clock
_NOT_CONTENT = ("_name_or_path", "transformers_version")  # keys of a config that say nothing about the model


def weights_digest(weights: Sequence[Path], config: Mapping[str, Any], dtype: str) -> bytes:
    """The digest of a model that computes in `dtype`: the content of its weight files, in their order, and its config.

    It is `weights` in `sapwood.store.keys.Fingerprint`, beside what the fingerprint says of layout.
    """
    return _digest(config, dtype, b"files", b"".join(file_digest(path) for path in weights))


def dummy_digest(seed: int, config: Mapping[str, Any], dtype: str) -> bytes:
    """The same for seeded random weights: config, dtype and seed say all about them."""
    return _digest(config, dtype, b"dummy", str(seed).encode())


def file_digest(path: Path) -> bytes:
    """The digest of one file's bytes, remembered by path, device, inode, size and both times of change."""
    path = path.resolve()
    seen = _state(path)
    known = _recall(path, seen)
    if known is not None:
        return known
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        starts = range(0, max(1, os.stat(path).st_size), _CHUNK)
        chunks = threads.map(lambda start: _chunk_digest(path, start), starts)
        digest = hashlib.sha256(b"".join(chunks)).digest()
    if _state(path) != seen:
        raise OSError(f"{path} changes while it is read: wait until whoever writes it is done")
    if time.time_ns() - max(seen["mtime_ns"], seen["ctime_ns"]) > _SETTLED_NS:
        _remember(path, seen, digest)
    return digest


def _digest(config: Mapping[str, Any], dtype: str, kind: bytes, content: bytes) -> bytes:
    fields = {key: value for key, value in config.items() if key not in _NOT_CONTENT}
    parts = (b"sapwood.weights.1", json.dumps(fields, sort_keys=True).encode(), dtype.encode(), kind, content)
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def _chunk_digest(path: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        left = _CHUNK
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.digest()


def _state(path: Path) -> dict[str, int]:
    """What changes when a file does. The time of the inode's change cannot be set by the program that writes the
    file."""
    stat = os.stat(path)
    return {
        "device": stat.st_dev,
        "inode": stat.st_ino,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
    }


def _note(path: Path) -> Path:
    return cache_folder("digests") / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"


def _recall(path: Path, seen: dict[str, int]) -> bytes | None:
    try:
        note = json.loads(_note(path).read_text())
        digest = bytes.fromhex(note.pop("digest"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # never seen, or not a note of ours
    return digest if note == {"path": str(path), **seen} and len(digest) == DIGEST_BYTES else None


def _remember(path: Path, seen: dict[str, int], digest: bytes) -> None:
    with suppress(OSError):  # no cache folder to write to: the next start reads the file again
        write_whole(_note(path), json.dumps({"path": str(path), **seen, "digest": digest.hex()}))
