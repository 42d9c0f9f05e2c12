"""Wakes a thread that waits for files (`select`): any other thread can ring it."""

from __future__ import annotations

import contextlib
import os
import sys

_ONE = (1).to_bytes(8, sys.byteorder)
_ALL = 1 << 16  # bytes: as much as a pipe holds


class Wakeup:
    """`fileno()` is readable from `ring` to `clear`.

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
        with contextlib.suppress(BlockingIOError):  # it is full of rings that nobody has cleared
            os.write(self._write, _ONE)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody has rung
            os.read(self._read, _ALL)

    def __del__(self) -> None:
        for file in {self._read, self._write}:
            os.close(file)
