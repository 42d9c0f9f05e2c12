"""Carrying out what plans say of tiers: loads and saves with a mover, lookups, fetches and backups with a store.

    plan --begin--> loads, saves ------------------> mover   device <-> host
                    lookups, fetches, backups -----> store   host <-> backend, in a process or on threads of its own
                                                       |
    scheduler <--events-- poll <--- what is over ------+     and ticks of the clock

Nothing here waits for bytes, and nothing is decided: what goes wrong is an event that says so. Pages belong to an
operation until its event, so an event waits until nobody can touch them any more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from sapwood.cache import StoreOperation
from sapwood.scheduler import (
    BackupDone,
    Event,
    FetchDone,
    LoadDone,
    LookupDone,
    Plan,
    SaveDone,
    Scheduler,
    StoreUp,
    Tick,
)
from sapwood.store import InterpreterYield, JobDone, Released, Store, StoreError, timeout_for
from sapwood.store.threads import Wakeup

from .movers import Kind, Mover

log = logging.getLogger(__name__)

StoreKind = Literal["lookup", "fetch", "backup"]
# Seconds for which a thread may keep the interpreter: by default a store could block a step for 5 ms.
_SWITCH_SECONDS = 0.0002
_SWITCH_SECONDS_IN_A_STEP = 0.001  # the same while a step is at work here
_STORE_TIMEOUT_SHARE = 0.9  # of the scheduler's patience: what has come by then finds those who wait for it
_MAX_LOOKUP_PAGES = 1024  # about so many pages are looked up by one job
_MOVER_POLL_SECONDS = 0.0005  # seconds between two looks at a mover that works on its own: it cannot call


class _StoreJob(NamedTuple):
    """What a job of the store is for."""

    kind: StoreKind
    operations: Sequence[Any]  # several lookups or backups, or one fetch
    deadline: float


class _Held(NamedTuple):
    """A job that is over, and whose memory the backend still has."""

    job: _StoreJob
    events: list[Event]


class _First(contextlib.AbstractContextManager[None]):
    """`with` it, a step goes before the threads of a store: they stop where they can. Python itself would have a step
    let go whenever one of them has waited for `_SWITCH_SECONDS`, and then wait until that one has a processor and takes
    its turn; so meanwhile they wait for longer."""

    def __init__(self, gate: InterpreterYield) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate.__enter__()
        sys.setswitchinterval(_SWITCH_SECONDS_IN_A_STEP)

    def __exit__(self, *_: object) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._gate.__exit__()


class _Switching:
    """How long a thread may keep the interpreter while any engine of this process has threads of a store: the first one
    that opens sets it, and after the last one it is what it was before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines = 0
        self._before = 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._engines:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_SECONDS)
            self._engines += 1

    def end(self) -> None:
        with self._lock:
            self._engines -= 1
            if not self._engines:
                sys.setswitchinterval(self._before)


_switching = _Switching()


class Tiers:
    """The tiers of one scheduler, in the hands of a mover and a store. All but `wake` is called by one thread.

    The mover's host arena is registered with the store. A tick is `tick_seconds` of `clock`; without a store nobody
    counts ticks. With one that has threads here, its `on_report` is taken, and threads of this process take turns
    every 0.2 ms, and every ms while a step begins or polls; open it with `process=True` and no step waits for it. A
    lookup and a fetch are given up shortly before the scheduler loses its patience; a backup when it has taken longer
    than `backup_seconds` and its size explain. While the store's breaker is open, the scheduler knows (`StoreUp`) and
    asks nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        mover: Mover | None = None,
        store: Store | None = None,
        *,
        tick_seconds: float = 0.01,
        backup_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (isinstance(tick_seconds, int | float) and 0 < tick_seconds < math.inf):
            raise ValueError(f"tick_seconds must be a number above 0, got {tick_seconds!r:.60}")
        _fit(scheduler, mover, store)
        self.scheduler = scheduler
        self._config = scheduler.config
        self._cache = scheduler.cache
        self._mover = mover
        self._store = store
        self._first: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._tick = tick_seconds
        self._backup_seconds = backup_seconds
        self._clock = clock
        self._began = clock()
        self._ticks = 0  # that were told
        self._up = True  # the store, as was told
        self._moves: dict[int, Kind] = {}
        self._jobs: dict[int, _StoreJob] = {}
        self._held: dict[int, _Held] = {}  # by job: told when the backend has returned
        self._ready: list[Event] = []  # for the next poll
        self._wakeup = Wakeup()
        self._sleeper = select.poll()
        self._sleeper.register(self._wakeup, select.POLLIN)
        self._woken = False
        self._closed = False
        self._counts = dict.fromkeys(("loads", "saves", "lookups", "fetches", "backups", "failed", "refused"), 0)
        self._pages = dict.fromkeys(("fetched", "backed_up"), 0)
        self._skipped = False  # whether it was said that host has no room
        if store is not None and mover is not None:
            self._page_bytes = {group.name: group.page_bytes for group in mover.host.groups}
            for name, pages in mover.host.pages.items():
                store.register(name, pages)
            self._listen(store)

    def _listen(self, store: Store) -> None:
        """Be woken by what the store has to tell, and go before its threads if it has any here."""
        file = store.fileno()
        if file is not None:
            self._sleeper.register(file, select.POLLIN)
        else:
            store.on_report = self._wakeup.ring
        if store.gate is not None:
            _switching.begin()
            self._first = _First(store.gate)

    # ---- from plan to events

    def begin(self, plan: Plan) -> None:
        """Start the transfers of a plan. Saves see what is on the device now: they take pages of steps that are done,
        so the batch of this plan may run before, after or beside them."""
        with self._first:
            if self._mover is not None:
                for kind, operations in (("save", plan.saves), ("load", plan.loads)):
                    for operation in operations:
                        self._moves[operation.op] = kind  # type: ignore[assignment]
                        self._counts[f"{kind}s"] += 1
                        self._mover.start(kind, operation.op, operation.pages)  # type: ignore[arg-type]
            if plan.lookups:
                self._look_up(plan.lookups)
            for fetch in plan.fetches:
                self._counts["fetches"] += 1
                ticks = self._config.fetch_ticks + self._config.page_ticks * len(fetch.hashes)
                self._ask("fetch", [fetch], fetch.hashes, fetch.pages, _STORE_TIMEOUT_SHARE * ticks * self._tick)
            if plan.backups:
                self._back_up(plan.backups)

    def poll(self) -> list[Event]:
        """What became known since the last call, and the ticks that have passed. Never waits."""
        with self._first:
            self._collect()
        events, self._ready = self._ready, []
        if not self._skipped and self._cache.pages_skipped:
            self._skipped = True
            log.warning(
                "host memory has no room for %d pages that were to be saved: they will be computed again. More host "
                "memory (host_cache) would keep them; stats()['cache']['transfers'] counts them as pages_skipped",
                self._cache.pages_skipped,
            )
        if self._store is not None:
            ticks = math.floor((self._clock() - self._began) / self._tick + 1e-6)
            if ticks > self._ticks:
                events.append(Tick(ticks - self._ticks))
                self._ticks = ticks
            if self._up != (self._store.breaker.state != "open"):
                self._up = not self._up
                events.append(StoreUp(self._up))
        return events

    # ---- waiting

    def wait(self, timeout: float | None) -> bool:
        """Until there is something to poll, or somebody calls `wake`, or for so many seconds. False if it was that."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self._wakeup.clear()
            self._collect()
            if self._ready or self._woken:
                self._woken = False
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._sleep(min(left, self._next_look()))

    def wake(self) -> None:
        """End a `wait` that is under way, or the next one. Any thread may call it."""
        self._woken = True
        self._wakeup.ring()

    def seconds_to(self, ticks: int) -> float:
        """Until `poll` will have told of so many ticks more."""
        return max(0.0, self._began + (self._ticks + ticks) * self._tick - self._clock())

    @property
    def busy(self) -> bool:
        """Whether anything is under way, or waits for `poll`."""
        return bool(self._moves or self._jobs or self._held or self._ready)

    def drain(self, timeout: float) -> bool:
        """Until nothing is under way and all memory is the caller's. True if so in time; `poll` tells of it all."""
        until = time.monotonic() + timeout
        while True:
            self._wakeup.clear()
            self._collect()
            if not (self._moves or self._jobs or self._held):
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._sleep(min(left, self._next_look()))

    def close(self, timeout: float = 5.0) -> bool:
        """Close mover and store: nothing more is begun. What was under way is over, and can be polled. False if a
        backend has not returned even then: keep the host arena, it may still be written to."""
        if not self._closed and self._store is not None and (file := self._store.fileno()) is not None:
            self._sleeper.unregister(file)  # it will be closed
        self._closed = True
        if self._mover is not None:
            self._mover.close()
        returned = self._store is None or self._store.close(timeout)
        if isinstance(self._first, _First):
            self._first = contextlib.nullcontext()
            _switching.end()
        self._collect()
        return returned

    @property
    def backed_up(self) -> int:
        """Pages that the store has said to have kept."""
        return self._pages["backed_up"]

    def say_unwritten(self) -> None:
        """Nothing will be written any more: log how much the store should have had besides."""
        if self._store is None or self._mover is None:
            return
        lost = Counter(self.scheduler.unwritten())
        for job, events in self._held.values():
            for operation, event in zip(job.operations, events, strict=True):
                if isinstance(event, BackupDone) and not event.ok:
                    lost.update({name: int(np.count_nonzero(ids)) for name, ids in operation.pages.items()})
        if pages := lost.total():
            size = sum(n * self._page_bytes[name] for name, n in lost.items())
            uri = self._store.stats()["uri"]
            log.warning("store %s: %d pages (%d bytes) could not be written before the engine ended", uri, pages, size)

    def stats(self) -> dict[str, Any]:
        """Operations since the beginning, those under way, and what mover and store say themselves.

        failed   operations that brought or kept less than was asked for, those refused included
        refused  what the store did not even try: its breaker is open, its queue full, or it is closed
        held     operations that are over, but for a backend that still has their memory
        """
        return {
            **self._counts,
            "pages_fetched": self._pages["fetched"],
            "pages_backed_up": self._pages["backed_up"],
            "under_way": len(self._moves) + len(self._jobs) + len(self._held),
            "held": sum(len(held.events) for held in self._held.values()),
            "mover": self._mover.stats() if self._mover is not None else {},
            "store": self._store.stats() if self._store is not None else {},
        }

    # ---- inside

    def _look_up(self, lookups: Sequence[Any]) -> None:
        """The lookups of a plan, many to a job: a burst of requests costs not much more than one."""
        self._counts["lookups"] += len(lookups)
        patience = _STORE_TIMEOUT_SHARE * self._config.lookup_ticks * self._tick
        jobs = _together(lookups)
        if self._store is not None and self._store.breaker.state != "closed":
            # Whether it answers again is tried with one request: if it does not, that one has waited, and no other.
            jobs = chain(_together(lookups[:1]), _together(lookups[1:]))
        for some, hashes in jobs:
            ones = np.ones(len(hashes), np.bool_)
            self._ask("lookup", some, hashes, dict.fromkeys(self._page_bytes, ones), patience)

    def _back_up(self, backups: Sequence[StoreOperation]) -> None:
        self._counts["backups"] += len(backups)
        for some, hashes in _together(backups):
            pages = {
                name: np.concatenate([one.pages.get(name, np.zeros(len(one.hashes), np.int32)) for one in some])
                for name in self._page_bytes
            }
            timeout = timeout_for(sum(self._bytes_of(one) for one in some), self._backup_seconds)
            self._ask("backup", some, hashes, pages, timeout)

    def _ask(
        self, kind: StoreKind, operations: Sequence[Any], hashes: list[bytes], pages: dict[str, Any], timeout: float
    ) -> None:
        """Give the store a job; if it does not take it, the answer is that there is nothing."""
        assert self._store is not None
        ask = {"lookup": self._store.exists, "fetch": self._store.get, "backup": self._store.put}[kind]
        try:
            number = ask(hashes, pages, timeout=timeout)
        except StoreError as error:
            if not self._closed:
                log.warning("%s %s: %s", kind, operations[0].op, error)
            number = None
        if number is None:
            self._counts["refused"] += len(operations)
            for operation in operations:
                self._tell(_nothing(kind, operation.op))
        else:
            self._jobs[number] = _StoreJob(kind, operations, time.monotonic() + timeout)

    def _bytes_of(self, operation: StoreOperation) -> int:
        return sum(int(np.count_nonzero(ids)) * self._page_bytes[name] for name, ids in operation.pages.items())

    def _collect(self) -> None:
        if self._moves and self._mover is not None:
            for op, ok in self._mover.poll():
                self._tell(LoadDone(op, ok) if self._moves.pop(op) == "load" else SaveDone(op, ok))
        if self._store is not None:  # also if nothing is under way: its process may have to be started again
            for report in self._store.poll():
                if isinstance(report, Released):
                    if held := self._held.pop(report.job, None):
                        for event in held.events:
                            self._tell(event)
                elif report.job in self._jobs:
                    self._over(report)

    def _over(self, done: JobDone) -> None:
        job = self._jobs.pop(done.job)
        kind, operations, _ = job
        if kind == "lookup":  # it has no memory to hold
            begin = 0
            for lookup in operations:
                end = begin + len(lookup.hashes)
                there = {name: ok[begin:end] for name, ok in done.ok.items()}
                self._tell(LookupDone(lookup.op, self._cache.servable_run(lookup.start_page, there)))
                begin = end
            return
        events: list[Event] = []
        if kind == "fetch":
            run = done.run()
            events.append(FetchDone(operations[0].op, run > 0, run))
            self._pages["fetched"] += run
        else:
            begin = 0
            for backup in operations:
                part = slice(begin, begin + len(backup.hashes))
                begin = part.stop
                lost = [(asked[part] & ~done.ok[name][part]).any() for name, asked in done.asked.items()]
                events.append(BackupDone(backup.op, not any(lost)))
                self._pages["backed_up"] += 0 if any(lost) else len(backup.hashes)
        if done.held:
            self._held[done.job] = _Held(job, events)
            return
        for event in events:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        self._counts["failed"] += not getattr(event, "ok", True)
        self._ready.append(event)

    def _sleep(self, seconds: float) -> None:
        if seconds < 0.001:  # less than it can be told to wait for files
            time.sleep(max(0.0, seconds))
        else:
            self._sleeper.poll(None if seconds == math.inf else seconds * 1e3)

    def _next_look(self) -> float:
        """Seconds after which something may be over that nobody calls for: a mover's work, a deadline."""
        if self._moves:
            return _MOVER_POLL_SECONDS
        if not self._jobs:
            return math.inf
        return max(
            _MOVER_POLL_SECONDS,
            min(job.deadline for job in self._jobs.values()) - time.monotonic() + _MOVER_POLL_SECONDS,
        )


def _together(operations: Sequence[Any]) -> Iterator[tuple[Sequence[Any], list[bytes]]]:
    """Operations in parts for one job each, and the hashes of all their pages."""
    at = 0
    while at < len(operations):
        first = at
        hashes: list[bytes] = []
        while at < len(operations) and len(hashes) < _MAX_LOOKUP_PAGES:
            hashes += operations[at].hashes
            at += 1
        yield operations[first:at], hashes


def _nothing(kind: StoreKind, op: int) -> Event:
    if kind == "lookup":
        return LookupDone(op, 0)
    return FetchDone(op, False, 0) if kind == "fetch" else BackupDone(op, False)


def _fit(scheduler: Scheduler, mover: Mover | None, store: Store | None) -> None:
    """ValueError unless scheduler, memory and store speak of the same pages."""
    if not isinstance(scheduler, Scheduler):
        raise ValueError(f"scheduler must be a Scheduler, got {scheduler!r:.60}")
    hosted = [group for group in scheduler.cache.groups if group.host_pages]
    if hosted and mover is None:
        raise ValueError(f"mover must be given: group {hosted[0].name!r} has {hosted[0].host_pages} host pages")
    if mover is not None and not isinstance(mover, Mover):
        raise ValueError(f"mover must be a Mover, got {mover!r:.60}")
    if store is not None and not isinstance(store, Store):
        raise ValueError(f"store must be a Store, as open_store makes it, got {store!r:.60}")
    if mover is not None:
        arena = {group.name: group for group in mover.host.groups}
        for group in hosted:
            if group.name not in arena:
                raise ValueError(f"the host arena must have group {group.name!r}, has {sorted(arena)}")
            have = {"host": arena[group.name].host_pages, "device": mover.device.pages[group.name]}
            for tier, want in (("host", group.host_pages), ("device", group.device_pages)):
                if have[tier] < want:
                    raise ValueError(
                        f"the {tier} arena must have {want} pages of group {group.name!r}, as the scheduler gives out, "
                        f"has {have[tier]}"
                    )
    if scheduler.config.store != (store is not None):
        raise ValueError(
            "store must be given to Tiers and be True in SchedulerConfig, or neither; got "
            f"{'a store' if store is not None else 'none'} and {scheduler.config.store}"
        )
    if store is not None and mover is not None:
        _fit_store(scheduler, mover, store)


def _fit_store(scheduler: Scheduler, mover: Mover, store: Store) -> None:
    print_ = store.fingerprint
    if print_.page_size != scheduler.config.page_size:
        raise ValueError(
            f"page_size of the store's fingerprint must be the scheduler's {scheduler.config.page_size}, "
            f"got {print_.page_size}"
        )
    layouts = {group.name: group for group in print_.groups}
    groups = {group.name: group for group in scheduler.cache.groups}
    if set(layouts) != set(groups):
        raise ValueError(
            f"groups of the store's fingerprint must be the scheduler's {sorted(groups)}, got {sorted(layouts)}"
        )
    arena = {group.name: group.page_bytes for group in mover.host.groups}
    for name, group in groups.items():
        want = (group.family, group.window, arena[name])
        got = (layouts[name].family, layouts[name].window, layouts[name].page_bytes)
        if want != got:
            raise ValueError(
                f"group {name!r} of the store's fingerprint must have family, window and page_bytes {want}, got {got}"
            )
    if store.on_report is not None:
        raise ValueError("on_report of the store must be None: Tiers waits for its reports")
