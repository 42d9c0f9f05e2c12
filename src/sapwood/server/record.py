"""A trace of what the server sees, in JSON lines that `python -m sapwood.sim replay` and `sapwood bench serve` read:

    {"timestamp": 1250, "input_length": 1100, "output_length": 80, "hash_ids": [8231, 5077, 1906]}

`timestamp`: ms from the recorder's start to the request's arrival. `hash_ids`: one for each 512 tokens of the prompt,
the last one for what is left; equal ids mean an equal prefix up to and including that block, in the same namespace.
Lines stand in the order in which requests end, and a reader sorts them. There is no text in it and no token: an id is
53 bits of a keyed hash of everything up to there, and the key is forgotten with the recorder unless it was given.

What such a trace cannot say: that a prompt goes on with what was generated before it, and that two prompts part inside
a block. A replay counts those tokens as computed.

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
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.cache import whole_number

from .finished import Finished

log = logging.getLogger(__name__)
BLOCK = 512  # tokens of one hash id
KEPT = 4  # files that were put aside
_EVERY = 1.0  # seconds
_WAITING = 1 << 26  # tokens that may wait to be hashed; prompts beyond them are dropped
_BATCH = 1 << 20  # bytes that are written at once, about
_BITS = 53  # of an id: what every JSON reader takes as a whole number


class _Seen(NamedTuple):
    """A prompt that is to be written."""

    ms: int
    namespace: bytes
    ids: npt.NDArray[np.int32]
    output: int


class TraceRecorder:
    """`salt`: the key of the hashes; None for a random one. Recorders with one salt give equal prefixes equal ids.

    A file that is there already is put aside: its times are of another start. A disk that fails costs lines, which
    `dropped` counts, and is said once. `finished` is called by one thread; `flush` and `close` by any.
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
        self._tokens = 0  # that were ever given, but for dropped prompts ...
        self._hashed = 0  # ... and of these, that do not wait any more
        self._refused = 0  # prompts for which there was no room to wait
        self._lost = 0  # lines that the disk did not take
        self._failing = False  # the disk, and that was said
        self._lock = threading.Lock()  # of all that has to do with the file
        self._file = -1
        self._size = 0
        try:
            if self.path.exists() and self.path.stat().st_size:
                self._put_aside()
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
        """Each prompt of a request that was computed."""
        if self._closing.is_set():
            return
        ms = max(0, int((done.arrived - self._start) * 1e3))
        output = -(-done.completion_tokens // max(1, len(done.reasons)))  # of each sample, in the mean
        for prompt in done.prompts:
            if not prompt.reason or not len(prompt.ids):
                continue
            if self._tokens - self._hashed > _WAITING:
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
                if lines and (size > _BATCH or self._size + size + len(line) > self._max_bytes):
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
            self._shut()

    def _run(self) -> None:
        while not self._closing.wait(_EVERY):
            self.flush()

    # ---- lines

    def _line(self, seen: _Seen) -> bytes:
        fields = {
            "timestamp": seen.ms,
            "input_length": len(seen.ids),
            "output_length": seen.output,
            "hash_ids": list(self._hashes(seen.namespace, seen.ids)),
        }
        return json.dumps(fields).encode() + b"\n"

    def _hashes(self, namespace: bytes, ids: npt.NDArray[np.int32]) -> Iterator[int]:
        raw = np.ascontiguousarray(ids, "<i4").tobytes()
        parent = hashlib.blake2b(namespace, digest_size=32, key=self._salt, person=b"namespace").digest()
        for begin in range(0, len(raw), 4 * BLOCK):
            block = raw[begin : begin + 4 * BLOCK]
            parent = hashlib.blake2b(parent + block, digest_size=32, key=self._salt, person=b"block").digest()
            yield int.from_bytes(parent[:8], "big") >> (64 - _BITS)

    # ---- the file

    def _write(self, lines: list[bytes]) -> None:
        """All of these lines; or, if the disk fails, none."""
        data = b"".join(lines)
        try:
            if self._file < 0:
                self._open()
            if self._size and self._size + len(data) > self._max_bytes:
                self._shut()
                self._put_aside()
                self._open()
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._lost += len(lines)
            self._take_back()
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

    def _take_back(self) -> None:
        """Half a line would make the file unreadable."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            self._shut()

    def _shut(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            with contextlib.suppress(OSError):
                os.close(file)

    def _put_aside(self) -> None:
        """FILE becomes FILE.1, FILE.1 becomes FILE.2, and so on; the oldest goes."""
        for number in range(KEPT - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path, f"{self.path}.1")
