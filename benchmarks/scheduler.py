"""Figures of the whole scheduler: decode steps, chats, long prompts, bursts, and what the size of the pool costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from sapwood.cache import CacheGroup
from sapwood.scheduler import Scheduler, StepDone

from . import decode, ours, peer, sessions
from .timing import Figure, Taken, alternate, clock

PAGE = 16
K = 1024
SCALED = "scaled us"
NEW = 7  # a token of no meaning


def prompt(tokens: int, seed: int) -> ours.Ints:
    return np.random.default_rng(seed).integers(1, 150_000, tokens, np.int32)


# ---- chats


class Chats:
    """200 chats of 5 turns on our scheduler. Timed is what lies inside submit, next_plan, reading it, and advance."""

    def __init__(self, chats: Sequence[bytes], groups: Sequence[CacheGroup], **config: Any) -> None:
        self.chats = [np.frombuffer(chat, np.int32) for chat in chats]
        self.scheduler = ours.scheduler(sessions.PAGE, groups, sessions.BATCH, sessions.CHUNK, **config)
        self.at: dict[str, tuple[int, int]] = {}  # chat and turn of a live request
        self.asked = self.cached = 0

    def specs(self, coming: list[tuple[int, int]]) -> list[Any]:
        specs = []
        for chat, turn in coming:
            name = f"{chat}.{turn}"
            self.at[name] = chat, turn
            specs.append(ours.request(name, self.chats[chat][: sessions.prompt_length(turn)], sessions.OUTPUT))
        return specs

    def answer(self, batch: Any) -> ours.Ints:
        """The tokens the chats go on with."""
        tokens = []
        ends = (batch.starts + batch.lengths).tolist()
        for name, end, samples in zip(batch.ids, ends, batch.samples.tolist(), strict=True):
            if samples:
                tokens.append(self.chats[self.at[name][0]][end])
        return np.array(tokens, np.int32)

    def run(self) -> sessions.Ran:
        scheduler = self.scheduler
        coming = [(chat, 0) for chat in range(len(self.chats))]
        spent, steps = 0.0, 0
        while coming or self.at:
            specs, coming = self.specs(coming), []
            begin = clock()
            if specs:
                scheduler.submit(specs)
            plan = scheduler.next_plan()
            ours.read(plan)
            spent += clock() - begin
            assert plan.step is not None
            events = [StepDone(plan.step, self.answer(plan.batch))]
            begin = clock()
            ended = scheduler.advance(events)
            spent += clock() - begin
            steps += 1
            for end in ended:
                chat, turn = self.at.pop(end.id)
                assert end.generated == sessions.OUTPUT
                self.asked += end.prompt
                self.cached += end.cached
                if turn + 1 < sessions.TURNS:
                    coming.append((chat, turn + 1))
        return sessions.Ran(spent / sessions.REQUESTS, self.cached / self.asked, steps)


def chats(repeats: int) -> Iterator[Figure]:
    talk = sessions.conversations()
    found: dict[str, float] = {}
    making: list[float] = []

    def noted(name: str, run: Callable[[], sessions.Ran]) -> Callable[[], float]:
        def timed() -> float:
            ran = run()
            found[name] = ran.hit_rate
            if ran.making:
                making.append(ran.making)
            return ran.seconds

        return timed

    runs = {"mine": noted("mine", lambda: Chats(talk, ours.full(sessions.ROOMY)).run())}
    if peer.installed():
        runs["theirs"] = noted("theirs", lambda: sessions.run_peer(talk))
    taken = alternate(repeats, **runs)
    mine = taken["mine"]
    what, peers = "200 chats x 5 turns, a request", ""
    if peer.installed():
        theirs = taken["theirs"]
        peers = f"C++: {found['theirs']:.3f}"
        beside = (
            f"{mine.us:.0f} / {theirs.us:.0f} scaled us; {mine.over(theirs.plus(making[1:])):.3g} with its events made"
        )
        yield Figure(f"{what} / C++", mine.over(theirs), "ratio", 0.75, beside)
    else:
        yield Figure(what, mine.us, SCALED, None)
    yield Figure("  hit rate, 22,739 pages", found["mine"], "", 0.92, peers, ">=")
    tight = Chats(talk, ours.full(sessions.TIGHT), policy="prefix").run()
    plain = Chats(talk, ours.full(sessions.TIGHT)).run()
    peers = f"fcfs: {plain.hit_rate:.3f}"
    if peer.installed():
        peers += f"; C++: {sessions.run_peer(talk, sessions.TIGHT).hit_rate:.3f}"
    yield Figure("  hit rate, 10,635 pages, policy prefix", tight.hit_rate, "", 0.90, peers, ">=")


# ---- long prompts


class Alone:
    """One prompt after the other, each alone: what submit, the plan and reading it take."""

    def __init__(self, pages: int, tokens: int) -> None:
        self.scheduler = ours.scheduler(PAGE, ours.full(pages), 64, tokens)
        self.names = (f"r{i}" for i in itertools.count())

    def take(self, tokens: ours.Ints) -> float:
        scheduler = self.scheduler
        specs = [ours.request(next(self.names), tokens, 1)]
        begin = clock()
        scheduler.submit(specs)
        plan = scheduler.next_plan()
        ours.read(plan)
        taken = clock() - begin
        assert len(scheduler.advance(ours.sampled(plan, NEW))) == 1
        return taken


class AlonePeer:
    def __init__(self, pages: int, tokens: int) -> None:
        self.scheduler = peer.scheduler(PAGE, pages, 64, tokens)
        self.names = (f"r{i}" for i in itertools.count())

    def take(self, tokens: ours.Ints) -> float:
        scheduler, name = self.scheduler, next(self.names)
        specs = [peer.request(name, tokens.tolist())]
        begin = clock()
        scheduler.submit_requests(specs)
        ids, *_ = peer.read(scheduler.next_execution_plan())
        taken = clock() - begin
        assert ids == [name]
        scheduler.advance(peer.sampled([(name, NEW)], []))
        scheduler.advance(peer.sampled([], [name]))
        scheduler.next_execution_plan()
        return taken


def long_prompts(repeats: int) -> Iterator[Figure]:
    most = 128 * K
    pages = (repeats + 3) * most // PAGE  # room for all of them: nothing is evicted
    sides: dict[str, Alone | AlonePeer] = {"mine": Alone(pages, most)}
    if peer.installed():
        sides["theirs"] = AlonePeer(pages, most)
    eight, long = prompt(8 * K, 21), prompt(most, 22)
    seeds = {name: itertools.count(100) for name in sides}
    runs: dict[str, Callable[[], float]] = {}
    for name, side in sides.items():
        side.take(eight)
        side.take(long)
        runs[f"8K {name}"] = lambda side=side: median(side.take(eight) for _ in range(9))
        runs[f"128K {name}"] = lambda side=side: median(side.take(long) for _ in range(3))
        runs[f"cold {name}"] = lambda side=side, name=name: side.take(prompt(most, next(seeds[name])))
    order = sorted(runs, key=lambda name: name.split()[0])  # neighbours in time: the two sides of one thing
    taken = alternate(repeats, **{name: runs[name] for name in order})
    beside = f"C++: {taken['8K theirs'].us:.0f}" if "8K theirs" in taken else ""
    yield Figure("submit + plan, 8K cached", taken["8K mine"].us, SCALED, 60, beside)
    for what, key, bar in (
        ("submit + plan, 128K cached", "128K", 0.6),
        ("submit + plan, 128K cold", "cold", 1.0),
    ):
        yield _beside_peer(what, taken[f"{key} mine"], taken.get(f"{key} theirs"), bar)


def _beside_peer(what: str, mine: Taken, theirs: Taken | None, bar: float) -> Figure:
    if theirs is None:
        return Figure(what, mine.us, SCALED, None)
    beside = f"{mine.us:.0f} / {theirs.us:.0f} scaled us"
    return Figure(f"{what} / C++", mine.over(theirs), "ratio", bar, beside)


# ---- bursts

BURST, LENGTH = 64, 4 * K


def burst(page: int, groups: Sequence[CacheGroup], chunk: int) -> float:
    """Equal prompts at once: prompt tokens computed for all of them, over the tokens of one."""
    scheduler = ours.scheduler(page, groups, BURST, chunk)
    tokens = prompt(LENGTH, 31)
    scheduler.submit([ours.request(f"r{i}", tokens, 32) for i in range(BURST)])
    computed, ended = 0, 0
    while ended < BURST:
        plan = scheduler.next_plan()
        batch = plan.batch
        computed += int(np.clip(LENGTH - batch.starts, 0, batch.lengths).sum())
        ended += len(scheduler.advance(ours.sampled(plan, NEW)))
    return computed / LENGTH


def burst_peer(page: int, chunk: int) -> float:
    scheduler = peer.scheduler(page, BURST * LENGTH // page * 2, BURST, chunk)
    tokens = prompt(LENGTH, 31).tolist()
    scheduler.submit_requests([peer.request(f"r{i}", tokens) for i in range(BURST)])
    computed, left = 0, dict.fromkeys((f"r{i}" for i in range(BURST)), 32)
    while left:
        ids, lengths, prefixes, extends = peer.read(scheduler.next_execution_plan())
        computed += sum(lengths[:extends])
        firsts = [prefixes[at] + lengths[at] for at in range(extends)]
        yields = [name for at, name in enumerate(ids) if at >= extends or firsts[at] == LENGTH]
        for name in yields:
            left[name] -= 1
        over = [name for name in yields if not left[name]]
        scheduler.advance(peer.sampled([(name, NEW) for name in yields], over))
        for name in over:
            del left[name]
    return computed / LENGTH


def bursts() -> Iterator[Figure]:
    for page in (16, 64):
        pages = BURST * LENGTH // page * 2
        full, window = CacheGroup("full", "full", pages), CacheGroup("window", "window", pages, window=1024)
        state = CacheGroup("state", "state", 1024)
        peers = f"; C++: {burst_peer(page, sessions.CHUNK):.4g}" if peer.installed() else ""
        for what, groups, bar in (
            ("full", [full], 1.02),
            ("full + window", [full, window], 1.02),
            ("full + state", [full, state], 1.25 if page == 16 else None),
        ):
            ratio = burst(page, groups, sessions.CHUNK)
            beside = f"with chunks of 2,048: {burst(page, groups, 2048):.4g}{peers}"
            yield Figure(f"burst of {BURST}, computed / distinct, {what}, page {page}", ratio, "ratio", bar, beside)
            peers = ""


# ---- the size of the pool


class Full:
    """A scheduler whose pool is full of prompts that rest: every new request evicts."""

    LENGTH = K

    def __init__(self, pages: int) -> None:
        self.scheduler = ours.scheduler(PAGE, ours.full(pages), 256, 64 * K)
        self.names = (f"r{i}" for i in itertools.count())
        self.rng = np.random.default_rng(41)
        while self.scheduler.cache.stats()["pages"]["full"]["device"]["free"] > 64 * K // PAGE:
            self.batch(64)
        self.batch(64)
        self.batch(64)

    def batch(self, requests: int) -> float:
        """Cold prompts come, are computed and rest: what one of them takes."""
        scheduler = self.scheduler
        tokens = self.rng.integers(1, 150_000, (requests, self.LENGTH), np.int32)
        specs = [ours.request(next(self.names), row, 1) for row in tokens]
        begin = clock()
        scheduler.submit(specs)
        spent, ended = clock() - begin, 0
        while ended < requests:
            begin = clock()
            plan = scheduler.next_plan()
            ours.read(plan)
            spent += clock() - begin
            events = ours.sampled(plan, NEW)
            begin = clock()
            ended += len(scheduler.advance(events))
            spent += clock() - begin
        return spent / requests


class FullDecode(decode.Ours):
    """Rows that decode in such a pool: a page more for one is one evicted."""

    def __init__(self, scheduler: Scheduler, rows: int) -> None:
        decode.Rows.__init__(self, rows)
        self.scheduler, self.events = scheduler, False
        lengths = decode.spread(rows)
        scheduler.submit([ours.request(f"d{i}", t, decode.NEW) for i, t in enumerate(decode.prompts(lengths))])
        self.warm()


def pools(repeats: int, most: int) -> Iterator[Figure]:
    few, many = Full(16 * K), Full(most)
    rested = alternate(repeats, few=lambda: few.batch(16), many=lambda: many.batch(16))
    little, much = FullDecode(few.scheduler, 256), FullDecode(many.scheduler, 256)
    decoded = alternate(repeats, few=little.run, many=much.run)
    size = f"{most // K:,}K pages"
    for what, taken in (("a cold request of 1K", rested), ("a decode step, 256 running", decoded)):
        beside = f"{taken['many'].us:.0f} / {taken['few'].us:.0f} scaled us; the pools are full: both evict"
        ratio = taken["many"].over(taken["few"])
        yield Figure(f"{what}, {size} / 16K pages", ratio, "ratio", 1.5, beside)


def figures(quick: bool) -> Iterator[Figure]:
    repeats = 5 if quick else 15
    yield from decode.figures(repeats)
    yield from chats(3 if quick else 15)
    yield from long_prompts(repeats)
    yield from bursts()
    yield from pools(repeats, (128 if quick else 1024) * K)
