"""A trace of what the server sees, in JSON lines that `python -m sapwood.sim replay` and `sapwood bench serve` read:

    {"timestamp": 1250, "input_length": 1100, "output_length": 80, "hash_ids": [8231, 507, 1906], "near": [1, 441, 300]}

`timestamp`: ms from the recorder's start to the request's arrival. `hash_ids`: one for each 512 tokens of the prompt,
the last one for what is left; equal ids mean an equal prefix up to and including that block, in the same namespace.
`near`, which a reader may ignore: the block at index 1, seen for the first time, begins with the same 300 tokens as
block 441 behind the same prefix; so prompts that part inside a block are known to share what is before.

Lines are in the order in which requests end; a reader sorts them. There is no text in a trace and no token: an id is 53
bits of a keyed hash of everything up to there, and the key is forgotten with the recorder unless it was given. A trace
does not show that a prompt goes on with tokens generated before it: a replay computes those again.

    finished --> waiting --(once a second, on a thread of its own)--> hashed, written --> FILE, FILE.1 ... FILE.4
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import threading
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.cache import whole_number

from .figures import Finished

log = logging.getLogger(__name__)
BLOCK_TOKENS = 512  # tokens of one hash id
MAX_OLD_FILES = 4  # files that are kept beside the present one
_FLUSH_SECONDS = 1.0
_MAX_WAITING_TOKENS = 1 << 26  # tokens that may wait to be hashed; prompts beyond them are dropped
_REMEMBERED_BLOCKS = 32768  # blocks whose tokens are remembered (64 MiB), to find prompts that part inside of one
_WRITE_BYTES = 1 << 20  # bytes that are written at once, about
_BITS = 53  # of an id: what every JSON reader takes as a whole number


class _Seen(NamedTuple):
    """A prompt to be written."""

    ms: int
    namespace: bytes
    ids: npt.NDArray[np.int32]
    output: int


class TraceRecorder:
    """`salt`: the key of the hashes; None for a random one. Recorders with one salt give equal prefixes equal ids.

    A file that is there already is renamed: its times are those of another start. If the disk fails, lines are lost;
    `dropped` counts them, and the log has one warning. One thread calls `finished`, any thread `flush` and `close`.
    """

    def __init__(self, path: str | Path, max_bytes: int, salt: bytes | None) -> None:
        whole_number("max_bytes", max_bytes, 1, 1 << 40)
        if salt is not None and not 1 <= len(salt) <= 64:
            raise ValueError(f"salt must have 1 to 64 bytes, got {len(salt)}")
        self.path = Path(path)
        self.written = 0  # lines
        self._max_bytes = max_bytes
        self._salt = secrets.token_bytes(32) if salt is None else salt
        self._start = time.monotonic()
        self._waiting: deque[_Seen] = deque()
        self._tokens = 0  # of all prompts so far, but for dropped ones
        self._hashed = 0  # of these: do not wait any more
        self._siblings = _Siblings()
        self._refused = 0  # prompts for which there was no room to wait
        self._lost = 0  # lines that the disk did not take
        self._failing = False  # the disk fails, and the log has the warning
        self._lock = threading.Lock()  # guards the file, and what is about to be written
        self._file = -1
        self._size = 0
        try:
            if self.path.exists() and self.path.stat().st_size:
                self._rotate()
            self._open()
        except OSError as error:
            raise ValueError(f"record_trace must be a file that can be written: {error}") from None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Prompts that are not in the trace."""
        return self._refused + self._lost

    def finished(self, done: Finished) -> None:
        """Take each prompt of the request that was computed."""
        if self._closing.is_set():
            return
        ms = max(0, int((done.arrived - self._start) * 1e3))
        output = -(-done.completion_tokens // max(1, len(done.reasons)))  # of each sample, in the mean
        for prompt in done.prompts:
            if not prompt.cache.reason or not len(prompt.ids):
                continue
            if self._tokens - self._hashed > _MAX_WAITING_TOKENS:
                self._refused += 1
                continue
            self._tokens += len(prompt.ids)
            self._waiting.append(_Seen(ms, done.namespace, prompt.ids, output))

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            lines: list[bytes] = []
            size = 0
            while self._waiting:
                seen = self._waiting.popleft()
                self._hashed += len(seen.ids)
                line = self._line(seen)
                if lines and (size > _WRITE_BYTES or self._size + size + len(line) > self._max_bytes):
                    self._write(lines)
                    lines, size = [], 0
                lines.append(line)
                size += len(line)
            if lines:
                self._write(lines)

    def close(self) -> None:
        """Write what waits, and no more after that."""
        self._closing.set()
        self._thread.join()
        self.flush()
        with self._lock:
            self._close_file()

    def _run(self) -> None:
        while not self._closing.wait(_FLUSH_SECONDS):
            self.flush()

    # ---- lines

    def _line(self, seen: _Seen) -> bytes:
        raw = np.ascontiguousarray(seen.ids, "<i4").tobytes()
        parent = hashlib.blake2b(seen.namespace, digest_size=32, key=self._salt, person=b"namespace").digest()
        ids: list[int] = []
        near: tuple[int, int, int] | None = None
        for begin in range(0, len(raw), 4 * BLOCK_TOKENS):
            block = raw[begin : begin + 4 * BLOCK_TOKENS]
            digest = hashlib.blake2b(parent + block, digest_size=32, key=self._salt, person=b"block").digest()
            id = int.from_bytes(digest[:8], "big") >> (64 - _BITS)
            like = self._siblings.nearest(parent, id, block)
            if like is not None:  # at most one: all blocks behind a new one are new
                near = (len(ids), *like)
            ids.append(id)
            parent = digest
        fields = {
            "timestamp": seen.ms,
            "input_length": len(seen.ids),
            "output_length": seen.output,
            "hash_ids": ids,
            **({} if near is None else {"near": near}),
        }
        return json.dumps(fields).encode() + b"\n"

    # ---- the file

    def _write(self, lines: list[bytes]) -> None:
        """All of these lines; or, if the disk fails, none."""
        data = b"".join(lines)
        try:
            if self._file < 0:
                self._open()
            if self._size and self._size + len(data) > self._max_bytes:
                self._close_file()
                self._rotate()
                self._open()
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._lost += len(lines)
            self._truncate()
            if not self._failing:
                self._failing = True
                log.warning("the trace cannot be written, and lacks requests from now on: %s", error)
            return
        if self._failing:
            self._failing = False
            log.warning("the trace is written again; it lacks %d requests", self._lost)
        self._size += len(data)
        self.written += len(lines)

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size

    def _truncate(self) -> None:
        """Remove half a line, which would make the file unreadable."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            with contextlib.suppress(OSError):
                os.close(file)

    def _rotate(self) -> None:
        """FILE becomes FILE.1, FILE.1 becomes FILE.2, and so on; the oldest goes."""
        for number in range(MAX_OLD_FILES - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path, f"{self.path}.1")


class _Siblings:
    """The blocks seen last, sorted behind their prefix: a block begins like one of its neighbours for longest."""

    def __init__(self) -> None:
        self._behind: dict[bytes, list[tuple[bytes, int]]] = {}
        self._seen: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()  # id -> prefix, tokens

    def nearest(self, parent: bytes, id: int, block: bytes) -> tuple[int, int] | None:
        """Of the blocks behind the same prefix, the one that begins like this one for longest, and for how many tokens;
        None if there is none, or if this one is known. From now on it is."""
        if id in self._seen:
            self._seen.move_to_end(id)
            return None
        siblings = self._behind.setdefault(parent, [])
        at = bisect_left(siblings, (block, id))
        beside = siblings[max(0, at - 1) : at + 1]
        tokens, like = max(((_common(block, other), known) for other, known in beside), default=(0, 0))
        siblings.insert(at, (block, id))
        self._seen[id] = (parent, block)
        if len(self._seen) > _REMEMBERED_BLOCKS:
            self._forget()
        return (like, tokens) if tokens else None

    def _forget(self) -> None:
        id, (parent, block) = self._seen.popitem(last=False)
        siblings = self._behind[parent]
        del siblings[bisect_left(siblings, (block, id))]
        if not siblings:
            del self._behind[parent]


def _common(one: bytes, other: bytes) -> int:
    """How many tokens two blocks begin with alike."""
    length = min(len(one), len(other)) // 4
    differ = np.frombuffer(one, "<i4", length) != np.frombuffer(other, "<i4", length)
    return int(differ.argmax()) if differ.any() else length
