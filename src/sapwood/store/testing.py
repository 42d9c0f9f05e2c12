"""Backends for tests and simulation: values in this process, and any backend with faults on purpose.

    memory://name?size=1GiB                          shared by every store of that name
    faulty+file:///path?size=1GiB&seed=1&corrupt=0.1  slow, hanging, partial, lying, corrupting or full

Which keys a fault hits depends on the seed, the key and how often it was asked for, not on the order in which threads
run.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .protocol import MISSING, Backend, Got, PutResult, StoreError
from .values import HEAD_BYTES, Item


class SharedValues:
    """What all stores of one name share: values in order of use, and how many bytes they have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: OrderedDict[str, bytes] = OrderedDict()
        self.used = 0


class MemoryBackend(Backend):
    _named: dict[str, SharedValues] = {}  # noqa: RUF012
    workers = 2

    def __init__(self, name: str, limit: int) -> None:
        self._shared = self._named.setdefault(name, SharedValues()) if name else SharedValues()
        self._limit = limit
        self._evicted = 0

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self._shared.values for name in names]

    def get(self, items: Sequence[Item]) -> Iterator[Got]:
        shared = self._shared
        for i, item in enumerate(items):
            with shared.lock:
                value = shared.values.get(item.name)
                if value is not None:
                    shared.values.move_to_end(item.name)
            if value is None:
                yield Got(i, b"", MISSING)
                continue
            size = min(max(0, len(value) - HEAD_BYTES), len(item.page))
            item.page[:size] = memoryview(value)[HEAD_BYTES : HEAD_BYTES + size]
            yield Got(i, value[:HEAD_BYTES], max(0, len(value) - HEAD_BYTES))

    def put(self, items: Sequence[Item]) -> Iterator[PutResult]:
        shared = self._shared
        for i, item in enumerate(items):
            if item.name in shared.values:
                yield PutResult(i, "")
                continue
            value = b"".join((item.head(), item.page))
            with shared.lock:
                while shared.values and shared.used + len(value) > self._limit:
                    shared.used -= len(shared.values.popitem(last=False)[1])
                    self._evicted += 1
                fits = shared.used + len(value) <= self._limit
                if fits:
                    shared.used += len(value) - len(shared.values.pop(item.name, b""))
                    shared.values[item.name] = value
            yield PutResult(i, "" if fits else "full")

    def delete(self, names: Sequence[str]) -> None:
        shared = self._shared
        with shared.lock:
            for name in names:
                shared.used -= len(shared.values.pop(name, b""))

    def stats(self) -> dict[str, Any]:
        return {"used": self._shared.used, "limit": self._limit, "evicted": self._evicted}


@dataclass(frozen=True)
class Faults:
    """What goes wrong; all but the two times are shares of the calls or keys, from 0 to 1."""

    slow: float = 0.0  # seconds that every call takes longer
    hang: float = 0.0  # calls that hang until `release()` or for `hang_seconds`, and then do their work all the same
    hang_seconds: float = 3600.0
    fail: float = 0.0  # calls that raise
    partial: float = 0.0  # keys that get does not find and put does not keep
    lie: float = 0.0  # keys that exist, if one asks, whether they do or not
    corrupt: float = 0.0  # keys whose bytes come back changed
    torn: float = 0.0  # keys whose value comes back short
    full: float = 0.0  # keys for which there is no room

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            most = float("inf") if one.name in ("slow", "hang_seconds") else 1
            if not (isinstance(value, int | float) and 0 <= value <= most):
                raise ValueError(f"{one.name} must be a number from 0 to {most}, got {value!r:.60}")


class FaultyBackend(Backend):
    """`faults` can be changed at any time."""

    def __init__(self, inner: Backend, seed: int, faults: Faults | None = None) -> None:
        self.inner = inner
        self.seed = seed
        self.faults = faults or Faults()
        self.workers = inner.workers
        self.part_pages = inner.part_pages
        self.part_bytes = inner.part_bytes
        self.small_bytes = inner.small_bytes
        self.gate = inner.gate
        self.done = Counter[str]()  # faults that were really made
        self._asked = Counter[str]()
        self._lock = threading.Lock()
        self._free = threading.Event()

    def release(self) -> None:
        """Let every call that hangs go on, once."""
        with self._lock:
            free, self._free = self._free, threading.Event()
        free.set()

    def register(self, group: str, array: NDArray[np.uint8]) -> None:
        self.inner.register(group, array)

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._begin("exists", names)
        there = self.inner.exists(names)
        return [yes or self._hit("lie", name) for yes, name in zip(there, names, strict=True)]

    def get(self, items: Sequence[Item]) -> Iterator[Got]:
        self._begin("get", [item.name for item in items])
        for got in self.inner.get(items):
            item = items[got.at]
            if self._hit("partial", item.name):
                yield Got(got.at, b"", MISSING)
            elif got.size > 0 and self._hit("corrupt", item.name):
                item.page[self._number(item.name) % len(item.page)] ^= 0x40
                yield got
            elif got.size > 0 and self._hit("torn", item.name):
                size = self._number(item.name) % got.size
                item.page[size:] = bytes(len(item.page) - size)
                yield Got(got.at, got.head, size)
            else:
                yield got

    def put(self, items: Sequence[Item]) -> Iterator[PutResult]:
        self._begin("put", [item.name for item in items])
        kept = []
        for i, item in enumerate(items):
            if self._hit("full", item.name):
                yield PutResult(i, "full")
            elif self._hit("partial", item.name):
                yield PutResult(i, "error")
            else:
                kept.append(i)
        for i, lost in self.inner.put([items[i] for i in kept]):
            yield PutResult(kept[i], lost)

    def delete(self, names: Sequence[str]) -> None:
        self.inner.delete(names)

    def stats(self) -> dict[str, Any]:
        return {"faults": dict(self.done), **self.inner.stats()}

    def close(self) -> None:
        self.release()
        self.inner.close()

    def _begin(self, call: str, names: Sequence[str]) -> None:
        """Faults of a whole call."""
        name = f"{call} {names[0] if names else ''}"
        free, faults = self._free, self.faults
        if faults.slow:
            free.wait(faults.slow)
        if self._hit("hang", name):
            free.wait(faults.hang_seconds)
        if self._hit("fail", name):
            raise StoreError("a fault that was asked for")

    def _hit(self, fault: str, name: str) -> bool:
        share = getattr(self.faults, fault)
        if not share:
            return False
        with self._lock:
            self._asked[name] += 1
            nth = self._asked[name]
            hit = self._number(f"{fault} {nth} {name}") < share * 2**64
            self.done[fault] += hit
        return bool(hit)

    def _number(self, name: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest(), "little")
