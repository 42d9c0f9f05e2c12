"""When to stop asking: a circuit breaker for a store that fails, and a short memory of keys that were not there."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Literal


class Breaker:
    """Opens after `failures` in a row of one kind of call. After `seconds` one probe is let through: if it succeeds,
    all is well again; but a kind that had failed opens it again with its next failure.

    closed --failures in a row--> open --after seconds--> half-open: one probe --ok--> closed
                                   ^-------------------------- failed --------'
    """

    def __init__(self, failures: int = 3, seconds: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        if not isinstance(failures, int) or isinstance(failures, bool) or failures < 1:
            raise ValueError(f"failures must be an integer of at least 1, got {failures!r:.60}")
        if not (isinstance(seconds, int | float) and math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds must be a number above 0, got {seconds!r:.60}")
        self._limit = failures
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}  # by kind: failures in a row
        self._opened_at: float | None = None
        self._probing = False
        self.opened = self.recovered = self.refused = self.probes = 0

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        if self._opened_at is None:
            return "closed"
        return "half-open" if self._probing or self._clock() >= self._opened_at + self._seconds else "open"

    def allow(self) -> bool:
        """Whether a call may be made now; half-open, only the first. Never waits: False while another thread reports
        how a call went."""
        if self._opened_at is None:
            return True
        if not self._lock.acquire(blocking=False):
            self.refused += 1
            return False
        try:
            if self._opened_at is None:
                return True
            if self._probing or self._clock() < self._opened_at + self._seconds:
                self.refused += 1
                return False
            self._probing = True
            self.probes += 1
            return True
        finally:
            self._lock.release()

    def another(self) -> Breaker:
        """A breaker with the same limits, for another kind of use."""
        return Breaker(self._limit, self._seconds, self._clock)

    def success(self, kind: str = "") -> bool:
        """A call of this kind was answered. True if that closes the breaker."""
        if not self._rows and self._opened_at is None:
            return False
        with self._lock:
            self._rows.pop(kind, None)
            closes = self._opened_at is not None and self._probing
            if closes:
                self._close()
            return closes

    def failure(self, kind: str = "") -> bool:
        """A call of this kind failed or was not answered in time. True if that opens the breaker."""
        with self._lock:
            row = self._rows[kind] = self._rows.get(kind, 0) + 1
            if self._opened_at is not None:
                if self._probing:
                    self._probing = False
                    self._opened_at = self._clock()
                return False
            if row < self._limit:
                return False
            self._opened_at = self._clock()
            self.opened += 1
            return True

    def trip(self) -> None:
        """Open at once: the store is gone."""
        with self._lock:
            self.opened += self._opened_at is None
            self._opened_at = self._clock()
            self._probing = False

    def renew(self) -> None:
        """The store is there again: close, as after a probe that went well."""
        with self._lock:
            if self._opened_at is not None:
                self._close()

    def _close(self) -> None:
        self._opened_at = None
        self._probing = False
        self.recovered += 1
        self._rows = {kind: min(n, self._limit - 1) for kind, n in self._rows.items()}

    def unknown(self) -> None:
        """A call that was let through ended without asking the store: another one may be the probe."""
        with self._lock:
            self._probing = False

    def stats(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "opened": self.opened,
            "recovered": self.recovered,
            "refused": self.refused,
            "probes": self.probes,
        }


class Missing:
    """Keys that a get did not find, for a few seconds: asking again so soon is not worth it. Bounded."""

    def __init__(
        self, seconds: float = 5.0, capacity: int = 65536, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not (isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds must be a number of at least 0, got {seconds!r:.60}")
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ValueError(f"capacity must be an integer of at least 1, got {capacity!r:.60}")
        self.seconds = seconds
        self.capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}  # in order of time: every entry lasts as long
        self.spared = 0

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, name: str) -> bool:
        until = self._until.get(name)
        if until is None or until <= self._clock():
            return False
        self.spared += 1
        return True

    def add(self, name: str) -> None:
        now = self._clock()
        with self._lock:
            self._until.pop(name, None)
            while self._until and (len(self._until) >= self.capacity or next(iter(self._until.values())) <= now):
                del self._until[next(iter(self._until))]
            self._until[name] = now + self.seconds

    def discard(self, name: str) -> None:
        """This key is there now."""
        if self._until:
            with self._lock:
                self._until.pop(name, None)

    def stats(self) -> dict[str, int]:
        return {"keys": len(self._until), "spared": self.spared}
