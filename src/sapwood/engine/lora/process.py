"""Adapters are read apart: each by a process of its own, which may hang, starve or die without a step, request
or other load noticing it. So many at a time, each for so long.

    any thread: read ---- ReadRequest, a file of memory ---> the process (reader.py) --> folder
                     <--- Read, or an error -----
                     and what has not answered in time is killed
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sapwood.store.spawn import Process

from .files import AdapterError
from .reader import Read, ReadRequest, answer_of, asked

log = logging.getLogger(__name__)
AT_ONCE = 8  # adapters that are read at the same time
SECONDS = 60.0  # that one may take
_ENDING = 1.0  # seconds that a killed process may take to be gone
_CODE = """
import os, sys
os.nice(5)
if {path!r} not in sys.path:
    sys.path.insert(0, {path!r})
from sapwood.engine.lora.reader import main
main()
"""


class ReaderBusy(RuntimeError):
    """So many adapters are being read already."""


class ReadTimeout(AdapterError):
    """It was not read in time."""


class Reader:
    """Any thread calls `read`. `code`: what the process runs instead."""

    def __init__(self, seconds: float = SECONDS, at_once: int = AT_ONCE, code: str = _CODE) -> None:
        self.seconds = seconds
        self._at_once = at_once
        self._code = code.format(path=str(Path(__file__).resolve().parents[3]))
        self._lock = threading.Lock()  # of what follows
        self._children: set[_Child] = set()
        self._closed = False

    def read(
        self, path: str, root: str | None, shape: bytes, itemsize: int, room: int | None
    ) -> tuple[Read, mmap.mmap]:
        """An adapter and its memory, which is the caller's. `shape`: the model, from `as_json`. AdapterError if
        there is none, ReaderBusy if it should come again later."""
        until = time.monotonic() + self.seconds
        ask = asked(ReadRequest(path, root, itemsize, room, math.ceil(self.seconds) + 1), shape)
        with _memory() as memory:
            child = self._begin()
            try:
                found = answer_of(child.answers(ask, memory, until))
            except TimeoutError:
                raise ReadTimeout(f"it was not read within {self.seconds:g} seconds (lora_seconds)") from None
            finally:
                self._end(child)
            return found, mmap.mmap(memory, 0)

    def close(self) -> None:
        """Nothing is read any more; callers that wait get an error."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()

    def _begin(self) -> _Child:
        with self._lock:
            for child in [child for child in self._children if child.left and child.gone()]:
                self._children.remove(child)
            if self._closed:
                raise AdapterError("the engine is closed")
            if len(self._children) >= self._at_once:
                raise ReaderBusy(f"{self._at_once} adapters are being read already: try again when one of them is done")
            try:
                child = _Child(self._code)
            except OSError as error:
                raise AdapterError(f"no process to read it with can be started: {error.strerror}") from None
            self._children.add(child)
            return child

    def _end(self, child: _Child) -> None:
        """What cannot be ended, since the system itself waits for a file in its name, counts as long as it is there."""
        if child.end():
            with self._lock:
                self._children.discard(child)
        else:
            child.left = True
            log.warning("process %d was to read an adapter and cannot be ended: its file system hangs", child.pid)


class _Child:
    """One process and the socket to it. `left`: it was killed and is still there."""

    def __init__(self, code: str) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = mine
        self._lock = threading.Lock()  # a process is killed only while it is not being reaped
        self.left = False
        try:
            self._process = Process(code, its)
            self._process.start()
        except OSError:
            mine.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def answers(self, ask: bytes, memory: int, until: float) -> bytes:
        """What it answers. TimeoutError if that is not there in time."""
        parts: list[bytes] = []
        with contextlib.suppress(ConnectionError):
            self._wait(until)
            sent = socket.send_fds(self._socket, [ask[: 1 << 16]], [memory])
            while sent < len(ask):
                self._wait(until)
                sent += self._socket.send(ask[sent:])
            while True:
                self._wait(until)
                part = self._socket.recv(1 << 20)
                if not part:
                    break
                parts.append(part)
        return b"".join(parts)

    def _wait(self, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def kill(self) -> None:
        with self._lock:
            self._process.kill()

    def gone(self) -> bool:
        with self._lock:
            return self._process.gone()

    def end(self) -> bool:
        """Whether it is gone, for certain."""
        self._socket.close()
        self.kill()
        until = time.monotonic() + _ENDING
        while not self.gone():
            left = until - time.monotonic()
            if left <= 0:
                return False
            poll = select.poll()
            if self._process.file >= 0:
                poll.register(self._process.file, select.POLLIN)
            poll.poll(1000 * left if self._process.file >= 0 else 1)
        return True


@contextlib.contextmanager
def _memory() -> Iterator[int]:
    memory = os.memfd_create("sapwood adapter", os.MFD_CLOEXEC)
    try:
        yield memory
    finally:
        os.close(memory)
