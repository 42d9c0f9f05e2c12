"""How time is taken: thread CPU time, garbage collection off, strictly alternating, medians, scaled to one machine.

A figure without a peer is given in scaled us: as on a machine where the loop of `loop_seconds` takes 36 ms. The loop
runs between the repeats of everything that is measured, so a machine that slows down half-way slows down both.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Literal, NamedTuple

clock = time.thread_time
LOOP_SECONDS = 0.036  # of the machine all scaled figures speak of


class Taken(NamedTuple):
    """One thing measured: the medians of what it took, as it was and scaled to the machine above; and every repeat."""

    seconds: float
    scaled: float
    each: list[float]

    @property
    def us(self) -> float:
        return self.scaled * 1e6

    def over(self, other: Taken) -> float:
        """The ratio to what ran beside it: the median of the ratios of the repeats, which were neighbours in time."""
        return median(mine / theirs for mine, theirs in zip(self.each, other.each, strict=True))

    def plus(self, more: list[float]) -> Taken:
        """The same with what something else took in each repeat."""
        each = [mine + other for mine, other in zip(self.each, more, strict=True)]
        return Taken(median(each), median(each) * self.scaled / self.seconds, each)


class Figure(NamedTuple):
    """One line of the table. `bar` None: for information only; `sense` is the side of it that is right."""

    what: str
    measured: float
    unit: str
    bar: float | None
    beside: str = ""  # the peer's figure, or what else belongs beside it
    sense: Literal["<=", ">="] = "<="

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        right = self.measured <= self.bar if self.sense == "<=" else self.measured >= self.bar
        return "ok" if right else "MISS"


def loop_seconds() -> float:
    """How long this machine takes to count to a million, now."""
    x = 0
    begin = clock()
    for _ in range(1_000_000):
        x += 1  # noqa: SIM113
    return clock() - begin


@contextmanager
def no_gc() -> Iterator[None]:
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def alternate(repeats: int, **runs: Callable[[], float]) -> dict[str, Taken]:
    """Run each of `runs` in turn, `repeats` times after one that does not count. Each returns the seconds it took. The
    order turns round every time: the first one finds colder caches."""
    raw: dict[str, list[float]] = {name: [] for name in runs}
    scaled: dict[str, list[float]] = {name: [] for name in runs}
    with no_gc():
        for run in runs.values():
            run()
        before = loop_seconds()
        order = list(runs)
        for _ in range(repeats):
            taken = {name: runs[name]() for name in order}
            order.reverse()
            gc.collect()  # between the repeats: else each would take its memory anew from the system
            after = loop_seconds()
            for name, seconds in taken.items():
                raw[name].append(seconds)
                scaled[name].append(seconds * LOOP_SECONDS / ((before + after) / 2))
            before = after
    return {name: Taken(median(raw[name]), median(scaled[name]), raw[name]) for name in runs}


def calls(n: int, call: Callable[[], object]) -> Callable[[], float]:
    """A run for `alternate`: the seconds one of `n` calls takes."""

    def run() -> float:
        begin = clock()
        for _ in range(n):
            call()
        return (clock() - begin) / n

    return run
