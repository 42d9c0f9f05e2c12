"""Who comes first: a store's threads stay out of the interpreter while the thread they work for is at work.

Only one thread runs Python at a time. One that lets go of the interpreter, for a copy or a read, gets it back when the
others wait for something themselves; two that handle small files pass it to and fro between them for milliseconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

_MAX_WAIT_SECONDS = 0.02  # seconds after which a thread goes on all the same: pages have deadlines too


class InterpreterYield:
    """Shut `with gate:` by one thread, which never waits here. The others `give_way` wherever they can stop."""

    def __init__(self, patience: float = _MAX_WAIT_SECONDS) -> None:
        self._patience = patience
        self._shut = False
        self._stopped: deque[threading.Lock] = deque()  # one a thread that waits

    def __enter__(self) -> None:
        self._shut = True

    def __exit__(self, *_: object) -> None:
        self._shut = False
        with contextlib.suppress(IndexError):  # one may lose its patience in between
            while self._stopped:
                self._stopped.popleft().release()

    def give_way(self) -> None:
        """Wait while it is shut, if it is."""
        if not self._shut:
            return
        mine = threading.Lock()
        mine.acquire()
        self._stopped.append(mine)
        # It may have been opened just before, by one who did not see this lock.
        if not self._shut or not mine.acquire(timeout=self._patience):
            with contextlib.suppress(ValueError):
                self._stopped.remove(mine)
