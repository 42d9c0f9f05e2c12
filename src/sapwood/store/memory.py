"""`memory://name?size=1GiB`: values in this process, shared by every store of that name. For tests and simulation."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from .protocol import MISSING, Backend, Got, PutResult
from .values import HEAD_BYTES, Item


class SharedValues:
    """What all stores of one name share: values in order of use, and their bytes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: OrderedDict[str, bytes] = OrderedDict()
        self.used = 0


class MemoryBackend(Backend):
    _shelves: dict[str, SharedValues] = {}  # noqa: RUF012
    workers = 2

    def __init__(self, name: str, limit: int) -> None:
        self._shelf = self._shelves.setdefault(name, SharedValues()) if name else SharedValues()
        self._limit = limit
        self._evicted = 0

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self._shelf.values for name in names]

    def get(self, items: Sequence[Item]) -> Iterator[Got]:
        shared = self._shelf
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
        shared = self._shelf
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
        shared = self._shelf
        with shared.lock:
            for name in names:
                shared.used -= len(shared.values.pop(name, b""))

    def stats(self) -> dict[str, Any]:
        return {"used": self._shelf.used, "limit": self._limit, "evicted": self._evicted}
