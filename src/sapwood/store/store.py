"""The store as its caller sees it. The work is done by threads of this process (jobs.py) or by another (process.py).

Arguments are checked here, before anything begins; calls that a failing or busy store need not get are refused here,
which costs next to nothing.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .breaker import Breaker
from .keys import HASH_BYTES, Fingerprint
from .protocol import JobDone, Kind, Released, StoreError
from .threads import InterpreterYield
from .values import Arena, digests

log = logging.getLogger("sapwood.store")

_READS = 16  # queues of questions and reads may be so many times as long as that of writes, which can be dropped
Hashes = Sequence[bytes] | bytes | bytearray | memoryview


class Store(ABC):
    """Pages by key, in a backend. One caller submits and polls; nothing it calls here waits for the backend.

    Page ids are rows of the registered arrays; 0 means that a group has no part at a page, as everywhere in Sapwood.
    No call removes a namespace's pages: evicting it from a cache leaves them in the store, where they are found again
    under the same adapter, salt and version. docs/store.md ("Who shares") explains what to do instead.
    """

    # `with store.gate:` its threads yield the interpreter; None if it has no threads in this process.
    gate: InterpreterYield | None = None

    def __init__(
        self,
        fingerprint: Fingerprint,
        shown: str,
        queue_pages: int,
        breaker: Breaker | None,
        on_report: Callable[[], None] | None,
    ) -> None:
        if not isinstance(fingerprint, Fingerprint):
            raise ValueError(f"fingerprint must be a Fingerprint, got {fingerprint!r:.60}")
        if not isinstance(queue_pages, int) or isinstance(queue_pages, bool) or queue_pages < 1:
            raise ValueError(f"queue_pages must be an integer of at least 1, got {queue_pages!r:.60}")
        self.fingerprint = fingerprint
        self.breaker = Breaker() if breaker is None else breaker  # of exists and get
        self.write_breaker = self.breaker.another()
        self.on_report = on_report  # called on a worker's thread, if there is one, whenever a part of a job is over
        self._shown = shown
        self._queue_pages = queue_pages
        self._arenas: dict[str, Arena] = {}
        # By kind: the keys of all jobs so far, and how many of them do not wait any more.
        self._given: dict[Kind, int] = {"exists": 0, "get": 0, "put": 0}
        self._taken: dict[Kind, int] = {"exists": 0, "get": 0, "put": 0}
        self._asked = dict.fromkeys(("submitted", "empty", "dropped", "refused"), 0)
        self._reports: deque[JobDone | Released] = deque()
        self._jobs = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._shown}>"

    # ---- what the caller does

    def register(self, group: str, array: NDArray[np.uint8]) -> None:
        """Host memory of a group: a uint8 array [pages, page_bytes], whose row p is page p. Kept until `close`."""
        arena = Arena(self.fingerprint, group, array)
        if group in self._arenas:
            raise ValueError(f"group {group!r} must be registered once, and was before")
        self._register(arena)
        self._arenas[group] = arena

    def exists(self, hashes: Hashes, groups: Mapping[str, ArrayLike], *, timeout: float) -> int | None:
        """Ask which pages seem to be there: `groups` has, for each group, one entry a hash, not 0 where it is asked.

        The answer is a hint: only `get` knows.
        """
        return self._submit("exists", hashes, groups, timeout)

    def get(self, hashes: Hashes, targets: Mapping[str, ArrayLike], *, timeout: float) -> int | None:
        """Bring pages: `targets` has, for each group, the page each hash goes to; 0 where it has no part."""
        return self._submit("get", hashes, targets, timeout)

    def put(self, hashes: Hashes, sources: Mapping[str, ArrayLike], *, timeout: float) -> int | None:
        """Keep pages: `sources` has, for each group, the page each hash comes from; 0 where it has no part."""
        return self._submit("put", hashes, sources, timeout)

    @abstractmethod
    def poll(self) -> list[JobDone | Released]:
        """All that became known since the last call. Never waits."""

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Wait until `poll` has reports, or for so many seconds. True if it has."""

    @abstractmethod
    def drain(self, timeout: float) -> bool:
        """Wait until no job is under way and all memory is the caller's; the reports stay to be polled. False if that
        takes longer."""

    @abstractmethod
    def close(self, timeout: float = 5.0) -> bool:
        """Begin no more jobs, and wait for those under way. False if the memory may still be touched."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counts since the start, and the present state. It holds no secrets."""

    def fileno(self) -> int | None:
        """A file that is readable when there may be reports to poll; None where `on_report` is called instead."""
        return None

    # ---- on the caller's thread

    @property
    def _away(self) -> bool:
        """Whether the store is not there, for now."""
        return False

    @property
    def _clogged(self) -> bool:
        """Whether no more jobs can be handed over, for now."""
        return False

    @abstractmethod
    def _register(self, arena: Arena) -> None:
        """Let the workers know the memory of a group."""

    @abstractmethod
    def _begin(
        self, id: int, kind: Kind, hashes: bytes, arenas: list[Arena], pages: NDArray[np.int64], deadline: float
    ) -> None:
        """Begin a job. `pages` has a row for each hash, a column for each group, and at least one that is not 0."""

    def _submit(self, kind: Kind, hashes: Hashes, pages: Mapping[str, ArrayLike], timeout: float) -> int | None:
        breaker = self._breaker_of(kind)
        # A store that cannot be read is not written to either; one that cannot be written to is still read.
        for asked in (breaker, self.breaker) if kind == "put" else (breaker,):
            if (asked.state == "open" or self._away) and not self._closed:
                asked.refused += 1
                self._asked["refused"] += 1
                return None
        run = digests(hashes)
        n = len(run) // HASH_BYTES
        arenas = []
        table = np.zeros((n, len(pages)), np.int64)
        for i, (group, ids) in enumerate(pages.items()):
            arena = self._arenas.get(group)
            if arena is None:
                raise ValueError(f"group {group!r:.60} must be registered; registered are {list(self._arenas)!r:.200}")
            column = np.asarray(ids)
            if column.shape != (n,) or (n and column.dtype.kind not in "iub"):
                raise ValueError(
                    f"pages of group {group!r} must be {n} integers, one a hash, got {column.dtype} {column.shape}"
                )
            if n and kind != "exists" and not (int(column.min()) >= 0 and int(column.max()) < arena.pages):
                raise ValueError(f"pages of group {group!r} must be from 0 to {arena.pages - 1}, got {ids!r:.60}")
            arenas.append(arena)
            table[:, i] = (column != 0) if kind == "exists" else column
        if not (isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r:.60}")
        if self._closed:
            raise StoreError(f"the store {self._shown} is closed")
        keys = int(np.count_nonzero(table))
        most = self._queue_pages if kind == "put" else _READS * self._queue_pages
        waiting = self._given[kind] - self._taken[kind]
        if (waiting and waiting + keys > most) or self._clogged:
            self._asked["dropped"] += 1
            return None
        if keys and not breaker.allow():
            self._asked["refused"] += 1
            return None
        self._jobs = id = self._jobs + 1
        self._asked["submitted"] += 1
        if keys:
            self._given[kind] += keys
            self._begin(id, kind, run, arenas, table, time.monotonic() + timeout)
        else:
            self._asked["empty"] += 1
            nothing = {arena.group: np.zeros(n, np.bool_) for arena in arenas}
            self._reports.append(JobDone(id, kind, nothing, dict(nothing), "", False))
        return id

    def _breaker_of(self, kind: Kind) -> Breaker:
        return self.write_breaker if kind == "put" else self.breaker

    def _judge(self, kind: Kind, failed: str, neglected: bool, answered: bool, why: str) -> None:
        """Let a job that is over count for or against the store."""
        breaker, writes = self._breaker_of(kind), kind == "put"
        if failed in ("timeout", "error") and neglected:
            if breaker.failure(kind):
                what = "written to" if writes else "asked"
                log.warning("store %s is not %s any more for now (%s)", self._shown, what, why or failed)
        elif answered:
            if breaker.success(kind):
                log.warning("store %s %s again", self._shown, "takes pages" if writes else "answers")
        else:  # it never came to the backend: other jobs were before it
            breaker.unknown()
