"""Figures of a whole engine loop with host memory and a store: what a store costs a step, above all when it is dead.

The loop is the real one, on real memory; only the model is missing: an executor answers at once. 64 chats decode, each
request that ends makes room for another, whose prompt begins as others did. CPU is that of the loop's thread.

A start or poll of transfers takes longer by the wall clock than its own CPU because

    it sleeps      for a lock, for Python's own, for a file: all of it counts as blocked by the store
    it is ready    but the store has its processor: counts too. Taken for it is all CPU that the store's process and
                   other threads of this one had meanwhile: never too little, and too much where there are several
                   processors. If it stayed on a processor on which none of the store's threads may run, those of this
                   process alone count
                   but another process has its processor: that is not the store's, and stands beside
    it runs        on a processor that the host of a virtual machine has given to others: beside too

The kernel counts how often a thread slept, and how long it was ready and did not run (schedstat, without which it
counts as asleep).
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from sapwood.cache import CacheGroup
from sapwood.engine import DeviceArena, EngineLoop, HostArena, NumpyMover, Tiers
from sapwood.engine.transfer.arena import aligned
from sapwood.scheduler import Event, Plan, RequestSpec, Scheduler, SchedulerConfig, StepDone
from sapwood.store import Fingerprint, GroupLayout, Store, open_store

from .timing import Figure, clock

PAGE, PAGE_BYTES = 16, 4096
RUNNING, PROMPT, SHARED, OUTPUT = 64, 512, 256, 64
PAGES = 16384
BLOCK_BAR = 1.0  # ms
WORTH_A_LOOK = 1e-4  # seconds


class Model:
    """Answers every row that samples with the same token."""

    def execute(self, plan: Plan) -> Sequence[Event]:
        if not plan.batch.ids:
            return ()
        assert plan.step is not None
        return [StepDone(plan.step, np.full(int(plan.batch.samples.sum()), 7, np.int32))]


class Clocks:
    """Of the thread that made it: how often it slept, the wall clock, its CPU, its time ready but not running, the CPU
    of the other threads, that of the store's process, and the processor it is on."""

    def __init__(self, store: Store | None) -> None:
        self._pid = pid = store.stats()["process"]["pid"] if store is not None else 0
        self._store = (~pid << 3) | 2 if pid else None  # as Linux numbers the clock of a process
        self._file: int | None = None
        self._keeping = ctypes.PyDLL(None)
        self._text = ctypes.create_string_buffer(128)
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            print("no schedstat here: what other processes take from a step counts as blocked by its store")

    def now(self) -> tuple[float, ...]:
        ready = 0.0
        if self._file is not None:
            # os.pread would let go of the interpreter, and wait for it: that would be measured.
            self._keeping.pread(self._file, self._text, 127, ctypes.c_long(0))
            ready = int(self._text.value.split()[1]) * 1e-9
        wall, cpu, process = time.perf_counter(), clock(), time.process_time()
        store = 0.0 if self._store is None else time.clock_gettime(self._store)
        slept, processor = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, self._keeping.sched_getcpu()
        return slept, wall, cpu, ready, process - cpu, store, processor

    def store_runs_on(self, processor: float) -> bool:
        """Whether a thread of the store's process may."""
        tasks = os.listdir(f"/proc/{self._pid}/task") if self._pid else []
        return any(processor in os.sched_getaffinity(int(task)) for task in tasks)


class Lost(NamedTuple):
    """What a start or poll took by the wall beyond its CPU, and how much of it the store may have to answer for."""

    asleep: float
    blocked: float
    whole: float


class Timed(Tiers):
    """Tiers that note how long each start and poll took beyond their own work."""

    def __init__(self, scheduler: Scheduler, mover: NumpyMover, store: Store | None) -> None:
        super().__init__(scheduler, mover, store)
        self.clocks = Clocks(store)
        self.lost: list[Lost] = []
        self.timing = False  # it costs CPU, so not while that is measured

    def begin(self, plan: Plan) -> None:
        if not self.timing:
            super().begin(plan)
            return
        before = self.clocks.now()
        super().begin(plan)
        self.note(before)

    def poll(self) -> list[Event]:
        if not self.timing:
            return super().poll()
        before = self.clocks.now()
        events = super().poll()
        self.note(before)
        return events

    def note(self, before: tuple[float, ...]) -> None:
        after = self.clocks.now()
        slept, wall, cpu, ready, others, store, moved = (now - then for now, then in zip(after, before, strict=True))
        whole = max(0.0, wall - cpu)
        asleep = max(0.0, whole - ready) if slept else 0.0
        if moved or ready < WORTH_A_LOOK or self.clocks.store_runs_on(after[-1]):
            others += store
        self.lost.append(Lost(asleep, asleep + min(ready, others), whole))


class Engine:
    def __init__(self, store: Callable[[], Store] | None = None) -> None:
        group = CacheGroup("full", "full", PAGES, host_pages=PAGES, page_bytes=PAGE_BYTES)
        config = SchedulerConfig(PAGE, [group], 8192, RUNNING, store=store is not None)
        scheduler = Scheduler(config)
        mover = NumpyMover(DeviceArena({"full": aligned((PAGES + 1, PAGE_BYTES))}), HostArena([group]))
        self.tiers = Timed(scheduler, mover, store() if store is not None else None)
        self.loop = EngineLoop(scheduler, Model(), self.tiers)
        self.rng = np.random.default_rng(5)
        self.shared = self.rng.integers(1, 150_000, SHARED, np.int32)
        self.asked = 0

    def submit(self) -> None:
        specs = []
        while len(self.loop.live) + len(specs) < RUNNING:
            self.asked += 1
            own = self.rng.integers(1, 150_000, PROMPT - SHARED, np.int32)
            # Not all alike: chats in step with each other cost less, and a store that lets some wait gets them out of
            # step, whatever it costs itself.
            output = int(self.rng.integers(OUTPUT // 2, OUTPUT + OUTPUT // 2))
            specs.append(RequestSpec(f"r{self.asked}", np.concatenate([self.shared, own]), output))
        if specs:
            self.loop.submit(specs)

    def run(self, requests: int) -> float:
        """Until so many requests are over: what steps with rows took of their thread's CPU, a token that came out."""
        taken, tokens, over = 0.0, 0, 0
        while over < requests:
            self.submit()
            begin = clock()
            step = self.loop.step()
            if step.plan.batch.ids:  # else it only looked at the time: while all requests wait for the store, say
                taken += clock() - begin
            tokens += int(step.plan.batch.samples.sum())
            over += len(step.ended)
            self.loop.rest(0.01)
        return taken / tokens


def fingerprint() -> Fingerprint:
    return Fingerprint(bytes(32), "bfloat16", PAGE, (GroupLayout("full", "full", PAGE_BYTES),), rank=0, ranks=1)


def figures(quick: bool) -> Iterator[Figure]:
    with TemporaryDirectory(prefix="sapwood-bench-") as folder:
        yield from _figures(Path(folder), 5 if quick else 15)


def _stores(folder: Path) -> dict[str, Callable[[], Store]]:
    def opened(uri: str) -> Callable[[], Store]:
        return lambda: open_store(uri, fingerprint(), process=True)

    return {
        "hanging": opened("faulty+memory://?hang=1&hang_seconds=600"),
        "refusing": opened("faulty+memory://?fail=1"),
        "slow": opened("faulty+memory://?slow=0.05"),
        "file": opened(f"file://{folder}/store?size=4GiB"),
    }


def _longest(lost: Sequence[Lost]) -> float:
    return max(one.whole for one in lost)


def _figures(folder: Path, repeats: int) -> Iterator[Figure]:
    engines = {"none": Engine()} | {name: Engine(store) for name, store in _stores(folder).items()}
    gc.collect()
    gc.disable()
    try:
        for engine in engines.values():
            engine.run(16 * RUNNING)  # does not count: the caches fill, breakers open
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(repeats):
            for name, engine in engines.items():
                taken[name].append(engine.run(2 * RUNNING))
        for _ in range(repeats):  # apart: the clocks cost CPU
            for name, engine in engines.items():
                engine.tiers.timing = True
                engine.run(2 * RUNNING)
                engine.tiers.timing = False
                if name == "file":  # it would write on while others are measured
                    engine.tiers.drain(5.0)
    finally:
        gc.enable()
    plain = taken["none"]
    for name, bar in (("hanging", 1.1), ("refusing", 1.1), ("slow", None), ("file", None)):
        ratio = median(mine / none for mine, none in zip(taken[name], plain, strict=True))
        beside = f"{median(taken[name]) * 1e6:.1f} / {median(plain) * 1e6:.1f} us of CPU a token"
        yield Figure(f"steps, 64 chats, host and a store ({name}) / host alone", ratio, "ratio", bar, beside)
    for name in ("hanging", "refusing", "slow", "file"):
        lost = engines[name].tiers.lost
        each = sorted(one.blocked for one in lost)
        often, asleep = each[int(0.999 * len(each))], max(one.asleep for one in lost)
        whole, alone = _longest(lost), _longest(engines["none"].tiers.lost)
        beside = (
            f"{len(each):,} starts and polls, 99.9 % under {often * 1e3:.2f} ms; asleep {asleep * 1e3:.2f} at most; "
            f"with what other processes took {whole * 1e3:.2f}, and host alone {alone * 1e3:.2f}"
        )
        yield Figure(f"  longest that a step was blocked by it ({name})", each[-1] * 1e3, "ms", BLOCK_BAR, beside)
    for engine in engines.values():
        engine.loop.close(0.5)
