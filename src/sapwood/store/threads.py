"""How the threads of a store meet the thread that they work for: they yield the interpreter to it, and they wake it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque

_MAX_WAIT_SECONDS = 0.02  # seconds after which a thread goes on all the same: pages have deadlines too
_ONE = (1).to_bytes(8, sys.byteorder)
_ALL = 1 << 16  # bytes: as much as a pipe holds


class InterpreterYield:
    """One thread holds the gate shut, `with gate:`, and never waits here. The others `give_way` wherever they can stop.

    Only one thread runs Python at a time. One that releases the interpreter, for a copy or a read, gets it back when
    the others wait for something themselves; two that handle small files pass it to and fro between them for
    milliseconds.
    """

    def __init__(self, patience: float = _MAX_WAIT_SECONDS) -> None:
        self._patience = patience
        self._shut = False
        self._stopped: deque[threading.Lock] = deque()  # one for each thread that waits

    def __enter__(self) -> None:
        self._shut = True

    def __exit__(self, *_: object) -> None:
        self._shut = False
        with contextlib.suppress(IndexError):  # a waiting thread may lose its patience in between
            while self._stopped:
                self._stopped.popleft().release()

    def give_way(self) -> None:
        """Wait while the gate is shut."""
        if not self._shut:
            return
        mine = threading.Lock()
        mine.acquire()
        self._stopped.append(mine)
        # The gate may have been opened just before, without this lock being seen.
        if not self._shut or not mine.acquire(timeout=self._patience):
            with contextlib.suppress(ValueError):
                self._stopped.remove(mine)


class Wakeup:
    """Wakes a thread that waits for files (`select`); any other thread can do it. `fileno()` is readable from `ring` to
    `clear`.

    Every `ring` writes and every `clear` reads: a flag that spares the call would be set or read at another moment
    than the file, and a wake-up would be lost in between. Clear first, then look for work: a ring that comes after the
    look is still there at the next wait.
    """

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._read = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:  # not Linux
            self._read, self._write = os.pipe()
            os.set_blocking(self._read, False)
            os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of rings that were not cleared
            os.write(self._write, _ONE)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nothing to clear
            os.read(self._read, _ALL)

    def __del__(self) -> None:
        for file in {self._read, self._write}:
            os.close(file)
