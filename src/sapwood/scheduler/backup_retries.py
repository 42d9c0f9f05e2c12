"""Spans whose backup failed, was refused, or fell into an outage ("owed" to the store). They are offered again.

Without it a span that was not kept is a hole: what is stored below it later can never be served. Time is counted in
ticks. A store that is unwell is not hammered: after a failure one span at a time goes out, at growing distances, until
one gets through; and a span that is refused again and again, when others are not, is given up.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import NamedTuple

from sapwood.cache import Span

_MAX_SPANS = 1024  # spans remembered; beyond it the oldest is dropped, and counted
_MAX_RETRIES_PER_PLAN = 4  # offered with a plan, so that what is new is not queued behind an outage
_MAX_RETRIES_IN_FLIGHT = 16  # retries at a time: a store drops backups when its queue is full
_MAX_TRIES = 8  # times a span is offered
_RETRY_TICKS = 100  # ticks until the next try after a failure; twice as many after each further one
_MAX_RETRY_TICKS = 6400


class _Entry(NamedTuple):
    due: int  # not before that tick
    number: int  # in the order in which they came
    tries: int
    span: Span


class BackupRetries:
    def __init__(self) -> None:
        self._now: deque[_Entry] = deque()  # fell into an outage: due as soon as the store answers, oldest first
        self._later: list[_Entry] = []  # failed: by when they are due
        self.trying: dict[int, int] = {}  # operations under way -> which try it is
        self.counts = {"offered_again": 0, "not_backed_up": 0}
        self._numbers = 0
        self._pause = 0  # ticks; 0: the last backup got through
        self._resume = 0  # the tick at which the store is asked again, if not

    def add(self, span: Span, due: int, tries: int = 0) -> None:
        """Host has it and the store has not."""
        if tries >= _MAX_TRIES:
            self.counts["not_backed_up"] += 1
            return
        self._numbers += 1
        entry = _Entry(due, self._numbers, tries, span)
        if tries:
            insort(self._later, entry, key=lambda entry: entry[:2])
        else:
            self._now.append(entry)
        if len(self) > _MAX_SPANS:  # the oldest span goes; in a long outage this happens with every save
            if self._now:
                self._now.popleft()
            else:
                self._later.pop(0)
            self.counts["not_backed_up"] += 1

    def __len__(self) -> int:
        return len(self._now) + len(self._later)

    def due(self, ticks: int) -> list[_Entry]:
        """What to offer with the next plan."""
        most = min(_MAX_RETRIES_PER_PLAN, _MAX_RETRIES_IN_FLIGHT - len(self.trying))
        if self._pause:
            most = 1 if ticks >= self._resume and not self.trying else 0
        taken: list[_Entry] = []
        while len(taken) < most and self._later and self._later[0].due <= ticks:
            taken.append(self._later.pop(0))
        while len(taken) < most and self._now:
            taken.append(self._now.popleft())
        return taken

    def take_all(self) -> list[_Entry]:
        """Everything, whatever the pauses: the engine ends, and cannot offer it later."""
        taken = [*self._later, *self._now]
        self._later.clear()
        self._now.clear()
        return taken

    def spans(self) -> list[Span]:
        return [entry.span for entry in (*self._later, *self._now)]

    def tries(self, op: int, tries: int) -> None:
        """An operation is under way for a span that was offered before."""
        self.trying[op] = tries
        self.counts["offered_again"] += 1

    def got_through(self, op: int) -> None:
        """The store has kept something."""
        self.trying.pop(op, None)
        self._pause = 0

    def resume(self, ticks: int) -> None:
        """The store says that it is well again: try it with one span."""
        self._resume = ticks

    def failed(self, op: int, span: Span | None, ticks: int) -> None:
        """A backup was not kept. `span`: what host has of it, if a request could still find it."""
        tries = self.trying.pop(op, 0) + 1
        self._pause = min(_MAX_RETRY_TICKS, 2 * self._pause or _RETRY_TICKS)
        self._resume = ticks + self._pause
        if span is not None:
            self.add(span, ticks + min(_MAX_RETRY_TICKS, _RETRY_TICKS << (tries - 1)), tries)

    def wake_in(self, ticks: int) -> int | None:
        """Ticks until something can be offered; None if nothing can before an event."""
        if not len(self) or len(self.trying) >= (1 if self._pause else _MAX_RETRIES_IN_FLIGHT):
            return None
        due = self._now[0].due if self._now else self._later[0].due
        return max(1, max(due, self._resume if self._pause else 0) - ticks)
