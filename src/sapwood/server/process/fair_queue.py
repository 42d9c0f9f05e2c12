"""A queue whose places and turns are shared equally: things are put in under a name, and one of each name is taken in
turn. Threads put and take."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """`most` things may wait. Where there is no place, whoever has most waiting gives up the newest of it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[str, deque[T]] = {}  # by name; the first is whose turn it is
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return self._count()

    def put(self, name: str, thing: T) -> T | None:
        """What had to give way for it: something of somebody else, itself, or nothing."""
        with self._changed:
            if self._count() >= self._most:
                longest = max(self._waiting, key=lambda each: len(self._waiting[each]))
                if len(self._waiting[longest]) <= len(self._waiting.get(name, ())) + 1:
                    return thing
                gone: T | None = self._waiting[longest].pop()
            else:
                gone = None
            self._waiting.setdefault(name, deque()).append(thing)
            self._changed.notify()
            return gone

    def take(self) -> T | None:
        """The next one; waits for it. None once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            name = next(iter(self._waiting))
            theirs = self._waiting.pop(name)
            thing = theirs.popleft()
            if theirs:
                self._waiting[name] = theirs  # behind all others
            return thing

    def remove(self, wanted: Callable[[T], bool]) -> None:
        """What need not be done any more, if it still waits."""
        with self._changed:
            for name, theirs in list(self._waiting.items()):
                left = deque(thing for thing in theirs if not wanted(thing))
                if left:
                    self._waiting[name] = left  # where it was
                else:
                    del self._waiting[name]

    def close(self) -> list[T]:
        """Nobody takes any more. What was still waiting."""
        with self._changed:
            left = [thing for theirs in self._waiting.values() for thing in theirs]
            self._waiting.clear()
            self._closed = True
            self._changed.notify_all()
            return left

    def _count(self) -> int:
        return sum(map(len, self._waiting.values()))
