"""A bell for somebody who waits for files: any thread can ring it."""

from __future__ import annotations

import contextlib
import os


class Bell:
    """`fileno()` is readable from `ring` to `clear`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._rung = False

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        if not self._rung:  # whoever clears it looks afterwards: what came before this is seen
            self._rung = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._write, b"!")

    def clear(self) -> None:
        if self._rung:
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 64)

    def __del__(self) -> None:
        os.close(self._read)
        os.close(self._write)
