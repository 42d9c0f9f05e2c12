"""Decode steps of our whole scheduler, beside the peer's: every row computes one token and yields the next.

A step is what lies between two batches on the device: advance with the tokens of the one before, make the next plan,
read it. The tokens and the events that carry them are prepared outside, on both sides: the peer takes an object a row,
and the ratio with the making of those stands beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from sapwood.cache import CacheGroup
from sapwood.scheduler import SaveDone, StepDone

from . import ours, peer
from .timing import Figure, Taken, alternate, clock

PAGE = 16
PAGES = 1 << 16
SHORTEST = 100  # tokens of a prompt
NEW = 4096  # tokens a request may generate: more than any run here takes
SCALED = "scaled us"


def prompts(lengths: Sequence[int]) -> list[ours.Ints]:
    rng = np.random.default_rng(11)
    return [rng.integers(1, 150_000, length, np.int32) for length in lengths]


def spread(rows: int) -> list[int]:
    """Lengths of prompts whose rows cross pages evenly: in every step as many as in any other."""
    return [SHORTEST + 7 * i % 112 for i in range(rows)]


def hybrid(rows: int) -> list[CacheGroup]:
    """Windows that slide while these rows decode, and slots for their working states and checkpoints."""
    return [
        CacheGroup("full", "full", PAGES),
        CacheGroup("window", "window", PAGES, window=128),
        CacheGroup("state", "state", 4 * rows),
    ]


class Rows:
    """Requests that decode. `run` takes them one page further and returns what a step took."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.pages: list[list[float]] = []  # what every step took, by runs
        self.rng = np.random.default_rng(12)

    def step(self) -> float:
        raise NotImplementedError

    def run(self) -> float:
        taken = [self.step() for _ in range(PAGE)]
        self.pages.append(taken)
        return fmean(taken)

    def spread_of(self, scale: float) -> str:
        """Median, mean, p99 and max of a step, scaled, without the run that does not count."""
        each = sorted(seconds for page in self.pages[1:] for seconds in page)
        figures = (median(each), fmean(each), each[int(0.99 * len(each))], each[-1])
        return "/".join(f"{figure * scale * 1e6:.0f}" for figure in figures)

    def worst(self) -> float:
        """The median, over all runs, of the worst step in each."""
        return median(max(page) for page in self.pages[1:])


class Ours(Rows):
    def __init__(
        self, lengths: Sequence[int], groups: Sequence[CacheGroup], events: bool = False, overlap: int = 0
    ) -> None:
        super().__init__(len(lengths))
        budget = sum(lengths) + len(lengths)
        self.scheduler = ours.scheduler(PAGE, groups, len(lengths), budget, events=events, overlap=overlap)
        self.events = events
        self.plans: list[Any] = []  # in flight, oldest first
        specs = [ours.request(f"r{i}", tokens, NEW) for i, tokens in enumerate(prompts(lengths))]
        self.scheduler.submit(specs)
        self.warm()

    def warm(self) -> None:
        """Prefill until all rows decode."""
        self.plans = [self.scheduler.next_plan() for _ in range(1 + self.scheduler.config.overlap)]
        while len(self.plans[-1].batch.ids) < self.rows or (self.plans[-1].batch.lengths != 1).any():
            self.step()

    def step(self) -> float:
        scheduler = self.scheduler
        plan = self.plans.pop(0)
        tokens = self.rng.integers(1, 150_000, int(plan.batch.samples.sum()), np.int32)
        event: list[Any] = [StepDone(plan.step, tokens)]
        event += [SaveDone(save.op, True) for save in plan.saves]
        begin = clock()
        scheduler.advance(event)
        if self.events:
            scheduler.drain_events()
        self.plans.append(scheduler.next_plan())
        ours.read(self.plans[-1])
        return clock() - begin


class Theirs(Rows):
    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(len(lengths))
        self.making: list[float] = []  # what the events of every step took to make
        self.scheduler: Any = peer.scheduler(PAGE, PAGES, len(lengths), sum(lengths) + len(lengths))
        specs = [peer.request(f"r{i}", tokens.tolist()) for i, tokens in enumerate(prompts(lengths))]
        self.scheduler.submit_requests(specs)
        self.ids, *_ = peer.read(self.scheduler.next_execution_plan())
        assert len(self.ids) == self.rows

    def step(self) -> float:
        scheduler = self.scheduler
        tokens = self.rng.integers(1, 150_000, self.rows, np.int32).tolist()
        begin = clock()
        event = peer.sampled(list(zip(self.ids, tokens, strict=True)), [])
        made = clock()
        scheduler.advance(event)
        self.ids, _, _, extends = peer.read(scheduler.next_execution_plan())
        taken = clock() - made
        assert len(self.ids) == self.rows and not extends
        self.making.append(made - begin)
        return taken


def _beside(mine: Rows, its: Taken, other: Rows | None = None, theirs: Taken | None = None) -> str:
    scale = its.scaled / its.seconds
    text = f"median/mean/p99/max {mine.spread_of(scale)} scaled us"
    if isinstance(other, Theirs) and theirs is not None:
        scale = theirs.scaled / theirs.seconds
        made = [fmean(other.making[at : at + PAGE]) for at in range(PAGE, len(other.making), PAGE)]
        text += f"; C++ {other.spread_of(scale)}; means with its events made: {its.over(theirs.plus(made)):.3g}"
    return text


def against_peer(repeats: int) -> Iterator[Figure]:
    a_row: dict[int, float] = {}
    for rows, bar in ((64, 1.0), (256, None), (1024, 0.25)):
        mine = Ours(spread(rows), ours.full(PAGES))
        runs = {"mine": mine.run}
        theirs = None
        if peer.installed():
            theirs = Theirs(spread(rows))
            runs["theirs"] = theirs.run
        taken = alternate(repeats, **runs)
        a_row[rows] = taken["mine"].us / rows
        what = f"decode step, {rows:,} running"
        if theirs is not None:
            beside = _beside(mine, taken["mine"], theirs, taken["theirs"])
            yield Figure(f"{what} / C++", taken["mine"].over(taken["theirs"]), "ratio", bar, beside)
        else:
            yield Figure(what, taken["mine"].us, SCALED, None, _beside(mine, taken["mine"]))
    how = "; ".join(f"{rows:,} running: {us:.2f}" for rows, us in a_row.items())
    yield Figure("  a row of 1,024 / a row of 64", a_row[1024] / a_row[64], "ratio", 1.0, f"scaled us a row: {how}")


def crossing(repeats: int) -> Iterator[Figure]:
    """All rows fill a page with one step, and need another for the next."""
    rows = 1024
    mine = Ours([SHORTEST] * rows, ours.full(PAGES))
    runs = {"mine": mine.run}
    theirs = None
    if peer.installed():
        theirs = Theirs([SHORTEST] * rows)
        runs["theirs"] = theirs.run
    taken = alternate(repeats, **runs)
    scale = taken["mine"].scaled / taken["mine"].seconds * 1e6
    beside = _beside(mine, taken["mine"], theirs, taken.get("theirs"))
    yield Figure(f"all {rows:,} cross a page in one step, a row", mine.worst() * scale / rows, SCALED, 4, beside)
    if theirs is not None:
        yield Figure("  that step / C++'s worst", mine.worst() / theirs.worst(), "ratio", None)


def many_groups(repeats: int) -> Iterator[Figure]:
    for rows, bar in ((64, None), (1024, 3.0)):
        plain, mixed = Ours(spread(rows), ours.full(PAGES)), Ours(spread(rows), hybrid(rows), events=True)
        taken = alternate(repeats, plain=plain.run, mixed=mixed.run)
        what = f"decode, full + window + state, events / full, {rows:,}"
        yield Figure(what, taken["mixed"].over(taken["plain"]), "ratio", bar, _beside(mixed, taken["mixed"]))


def ahead(repeats: int) -> Iterator[Figure]:
    """Every plan is made before the tokens of the one before it are known."""
    for rows, bar in ((64, None), (1024, 1.15)):
        plain, early = Ours(spread(rows), ours.full(PAGES)), Ours(spread(rows), ours.full(PAGES), overlap=1)
        taken = alternate(repeats, plain=plain.run, early=early.run)
        what = f"decode, two plans in flight / one, {rows:,}"
        yield Figure(what, taken["early"].over(taken["plain"]), "ratio", bar, _beside(early, taken["early"]))


def write_through(rows: int = 1024) -> Iterator[Figure]:
    """Every page that is filled goes to host as well, in spans of 32: so over as many steps as fill a span."""
    plain = Ours(spread(rows), ours.full(PAGES))
    saving = Ours(spread(rows), [CacheGroup("full", "full", PAGES, host_pages=2 * PAGES)])
    taken = alternate(34, plain=plain.run, saving=saving.run)
    saved = saving.scheduler.stats()["cache"]["transfers"]["pages_saved"]
    ratio = fmean(taken["saving"].each) / fmean(taken["plain"].each)
    beside = f"{_beside(saving, taken['saving'])}; {saved:,} pages saved"
    yield Figure(f"decode, {rows:,}, written through to host / not, means", ratio, "ratio", 2.0, beside)


def figures(repeats: int) -> Iterator[Figure]:
    yield from against_peer(repeats)
    yield from crossing(repeats)
    yield from many_groups(repeats)
    yield from ahead(repeats)
    yield from write_through()
