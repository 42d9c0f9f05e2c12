"""Real traffic through the real scheduler: what a cache of some size would have saved, and how long users would wait.

A trace has a line for each request: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one for
each 512-token block of the input; equal ids stand for equal prefixes. `sapwood serve --record-trace` writes one, with
`near` where a block begins like another: [its index, the other's id, how many tokens]. Blocks are expanded to tokens,
the scheduler plans, and a cost model says how long each step and each transfer takes. Nothing is computed.
"""

from __future__ import annotations

import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.cache import CacheGroup, HybridPrefixCache, Operation
from sapwood.scheduler import (
    BackupDone,
    Event,
    FetchDone,
    LoadDone,
    LookupDone,
    RequestSpec,
    SaveDone,
    Scheduler,
    SchedulerConfig,
)

from .cost import Cost, CostModel, SimulatedExecutor

BLOCK = 512  # tokens of one hash id
_MOST_BLOCKS = (2**31 - 1) // BLOCK
_LINK_BYTES_PER_SECOND = 55e9  # bytes a second, each way between device and host
_TRANSFER_START_SECONDS = 20e-6  # seconds until a transfer moves its first byte
_STORE_BYTES_PER_SECOND = 2e9  # bytes a second, each way between host and store
_STORE_ANSWER_SECONDS = 1e-3  # seconds until a store answers
_PLANS_PER_LOOK = 256  # plans between two calls of `watch`


Parts = tuple[tuple[int, int], ...]  # of a block: up to which token it is as which block


class TraceRequest(NamedTuple):
    """One request of a trace."""

    seconds: float
    length: int
    output: int
    blocks: tuple[int, ...]
    parts: Mapping[int, Parts] = MappingProxyType({})  # of blocks that begin like others, in the whole trace

    def tokens(self) -> npt.NDArray[np.int32]:
        begins = np.array(self.blocks, np.int32) * np.int32(BLOCK)
        tokens = begins[:, None] + np.arange(BLOCK, dtype=np.int32)
        for at, block in enumerate(self.blocks):
            begin = 0
            for end, source in self.parts.get(block, ()):
                tokens[at, begin:end] += np.int32((source - block) * BLOCK)
                begin = end
        return tokens.reshape(-1)[: self.length].astype(np.int32, copy=False)


def read_trace(path: Path | str, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace in order of arrival. ValueError with the line that cannot be read."""
    asked: list[TraceRequest] = []
    numbers: dict[int, int] = {}  # ids may be hashes: blocks are numbered in the order in which they are read
    parts: dict[int, Parts] = {}
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(asked) >= limit:
                break
            if line.strip():
                one, near = _read_line(path, number, line)
                blocks = tuple(numbers.setdefault(block, len(numbers)) for block in one.blocks)
                if near is not None:
                    block, like = blocks[near[0]], numbers.setdefault(near[1], len(numbers))
                    if block != like:
                        parts.setdefault(block, _begins_like(parts.get(like, ()), like, near[2]))
                asked.append(one._replace(blocks=blocks, parts=parts))
    if not asked:
        raise ValueError(f"{path} has no requests")
    if len(numbers) > _MOST_BLOCKS:
        raise ValueError(f"{path} has {len(numbers)} different blocks, and {_MOST_BLOCKS} can be replayed: use --limit")
    return sorted(asked, key=lambda one: one.seconds)


def _begins_like(parts: Parts, block: int, tokens: int) -> Parts:
    """The parts of what begins with so many tokens of a block with these parts."""
    found = [(end, source) for end, source in parts if end < tokens]
    source = next((source for end, source in parts if end >= tokens), block)
    return (*found, (tokens, source))


def _read_line(path: Path | str, number: int, line: str) -> tuple[TraceRequest, tuple[int, int, int] | None]:
    try:
        fields = json.loads(line)
        seconds = float(fields["timestamp"]) / 1e3
        length, output = int(fields["input_length"]), int(fields["output_length"])
        blocks = tuple(int(block) for block in fields["hash_ids"])
        near = None
        if fields.get("near") is not None:
            index, like, tokens = map(int, fields["near"])
            near = (index, like, tokens)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}, line {number}: not a request of a trace: {error!r:.100}") from None
    if not (seconds >= 0 and length >= 1 and output >= 0 and len(blocks) == -(-length // BLOCK)):
        raise ValueError(
            f"{path}, line {number}: a request needs a timestamp from 0 on, one token or more, and one hash id for "
            f"each {BLOCK} of them; got {length} tokens and {len(blocks)} ids"
        )
    if not all(0 <= block < 2**64 for block in blocks):
        raise ValueError(f"{path}, line {number}: hash ids must be from 0 to 2**64 - 1")
    if near is not None and not (0 <= near[0] < len(blocks) and 0 <= near[1] < 2**64 and 1 <= near[2] <= BLOCK):
        raise ValueError(
            f"{path}, line {number}: near must be the index of a block, a hash id and 1 to {BLOCK} tokens, got {near}"
        )
    return TraceRequest(seconds, length, max(1, output), blocks), near


def unlimited_rate(asked: Iterable[TraceRequest]) -> float:
    """The part of all blocks that a cache without limits, which shares nothing in flight, would have had."""
    seen: set[int] = set()
    blocks = hits = 0
    for one in asked:
        blocks += len(one.blocks)
        hits += sum(block in seen for block in one.blocks)
        seen.update(one.blocks)
    return hits / blocks if blocks else 0.0


@dataclass(frozen=True)
class Replayed:
    """What a trace did to one configuration. Times are simulated seconds."""

    device_pages: int
    host_pages: int
    store_pages: int
    requests: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int  # of those, loaded from host
    store_tokens: int  # brought to host from the store; what waits too long for its turn is evicted again unused
    cached_blocks: int
    blocks: int
    computed_tokens: int  # of prompts, the first time
    recomputed_tokens: int
    retractions: int
    steps: int
    seconds: float
    queueing: tuple[float, float]  # mean and 99th percentile, until the first row
    first_token: tuple[float, float]  # the same, until the first token

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def host_rate(self) -> float:
        return self.host_tokens / max(1, self.prompt_tokens)

    @property
    def store_rate(self) -> float:
        return self.store_tokens / max(1, self.prompt_tokens)

    @property
    def block_rate(self) -> float:
        return self.cached_blocks / max(1, self.blocks)


class _Store:
    """Pages by group and hash, the least recently used of which go when they are more than `room` bytes."""

    def __init__(self, groups: Sequence[CacheGroup], room: int) -> None:
        self.room = room
        self.sizes = {group.name: group.page_bytes or 1 for group in groups}
        self.kept: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self.bytes = 0

    def has(self, name: str, one: bytes) -> bool:
        found = (name, one) in self.kept
        if found:
            self.kept.move_to_end((name, one))
        return found

    def there(self, hashes: Sequence[bytes]) -> dict[str, npt.NDArray[np.bool_]]:
        """By group: which of these pages it has."""
        return {name: np.array([self.has(name, one) for one in hashes], np.bool_) for name in self.sizes}

    def run(self, hashes: Sequence[bytes], pages: Mapping[str, npt.NDArray[Any]]) -> int:
        """How many of these, from the first on, are there, in every group that wants them."""
        for at, one in enumerate(hashes):
            if not all(self.has(name, one) for name, ids in pages.items() if ids[at]):
                return at
        return len(hashes)

    def put(self, hashes: Sequence[bytes], pages: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, ids in pages.items():
            for at in ids.nonzero()[0].tolist():
                if not self.has(name, hashes[at]):
                    self.kept[name, hashes[at]] = None
                    self.bytes += self.sizes[name]
        while self.bytes > self.room:
            (name, _), _ = self.kept.popitem(last=False)
            self.bytes -= self.sizes[name]


class _Link:
    """Transfers between device, host and store: one after the other in each direction."""

    def __init__(self, cache: HybridPrefixCache, page_bytes: float, store: int) -> None:
        self.cache = cache
        self.page_bytes = {group.name: group.page_bytes or page_bytes for group in cache.groups}
        self.store = _Store(cache.groups, store)
        self.free = {"load": 0.0, "save": 0.0, "fetch": 0.0, "backup": 0.0}
        self.coming: list[tuple[float, int, Event]] = []

    def start(self, kind: str, operations: Sequence[Operation], now: float) -> None:
        for operation in operations:
            moved = self._bytes({name: sources for name, (sources, _) in operation.pages.items()})
            done = LoadDone(operation.op, True) if kind == "load" else SaveDone(operation.op, True)
            self._takes(kind, now, _TRANSFER_START_SECONDS + moved / _LINK_BYTES_PER_SECOND, done)

    def ask_store(self, plan: Any, now: float) -> None:
        """What a fetch finds decides what comes, not what a lookup was answered."""
        for asked in plan.lookups:
            pages = self.cache.servable_run(asked.start_page, self.store.there(asked.hashes))
            heapq.heappush(self.coming, (now + _STORE_ANSWER_SECONDS, asked.op, LookupDone(asked.op, pages)))
        for fetch in plan.fetches:
            pages = self.store.run(fetch.hashes, fetch.pages)
            moved = self._bytes({name: ids[:pages] for name, ids in fetch.pages.items()})
            self._takes(
                "fetch",
                now,
                _STORE_ANSWER_SECONDS + moved / _STORE_BYTES_PER_SECOND,
                FetchDone(fetch.op, pages > 0, pages),
            )
        for backup in plan.backups:
            self.store.put(backup.hashes, backup.pages)
            self._takes(
                "backup",
                now,
                _STORE_ANSWER_SECONDS + self._bytes(backup.pages) / _STORE_BYTES_PER_SECOND,
                BackupDone(backup.op, True),
            )

    def _bytes(self, pages: Mapping[str, npt.NDArray[Any]]) -> float:
        return sum(int(np.count_nonzero(ids)) * self.page_bytes[name] for name, ids in pages.items())

    def _takes(self, kind: str, now: float, seconds: float, event: Any) -> None:
        self.free[kind] = max(now, self.free[kind]) + seconds
        heapq.heappush(self.coming, (self.free[kind], event.op, event))

    def arrived(self, now: float) -> Iterator[Event]:
        while self.coming and self.coming[0][0] <= now:
            yield heapq.heappop(self.coming)[2]


class TraceReplay:
    """One trace through one scheduler."""

    def __init__(
        self,
        asked: Sequence[TraceRequest],
        config: SchedulerConfig,
        model: Cost,
        watch: Callable[[int, float], None],
        store: int = 0,
    ) -> None:
        self.asked = asked
        self.config = config
        self.scheduler = Scheduler(config)
        shares = getattr(model, "again", None) is not None
        self.executor = SimulatedExecutor(model, page_size=config.page_size if shares else None)
        self.link = _Link(self.scheduler.cache, model.kv_bytes * config.page_size, store)
        self.watch = watch
        self.next = 0  # of the requests that have not arrived
        self.refused = 0
        self.fetched = 0  # pages that came from the store
        self.begun: dict[str, float] = {}
        self.waited: list[float] = []
        self.first: dict[str, float] = {}
        self.sums = dict.fromkeys(("prompt", "cached", "computed", "recomputed", "blocks", "cached_blocks", "ended"), 0)

    def run(self) -> Replayed:
        scheduler, executor = self.scheduler, self.executor
        plans = 0
        while True:
            self._arrive()
            events = list(self.link.arrived(executor.seconds))
            self.fetched += sum(event.pages for event in events if isinstance(event, FetchDone))
            self._close(scheduler.advance(events))
            plan = scheduler.next_plan()
            self._close(plan.ended)
            if plan.empty:
                if not self._skip_to_next():
                    break
                continue
            self.link.start("load", plan.loads, executor.seconds)
            self.link.start("save", plan.saves, executor.seconds)
            self.link.ask_store(plan, executor.seconds)
            for id in plan.batch.ids[len(plan.batch.ids) - self._chunks(plan) :]:
                self._began(id)
            done = executor.execute(plan)
            self._tokens(plan)
            self._close(scheduler.advance(done))
            plans += 1
            if plans % _PLANS_PER_LOOK == 0:
                self.watch(self.sums["ended"], self.sums["cached"] / max(1, self.sums["prompt"]))
        return self._report()

    @staticmethod
    def _chunks(plan: Any) -> int:
        """Rows that are no decodes come last: these alone can be the first row of a request."""
        lengths = plan.batch.lengths
        single = int(np.argmax(lengths > 1)) if (lengths > 1).any() else len(lengths)
        return len(lengths) - max(0, single - 1)

    def _began(self, id: str) -> None:
        if id not in self.begun:
            self.begun[id] = self.executor.seconds
            self.waited.append(self.executor.seconds - self.asked[int(id)].seconds)

    def _tokens(self, plan: Any) -> None:
        rows = self._chunks(plan)
        begin = len(plan.batch.ids) - rows
        for id, samples in zip(plan.batch.ids[begin:], plan.batch.samples[begin:].tolist(), strict=True):
            if samples and id not in self.first:
                self.first[id] = self.executor.seconds - self.asked[int(id)].seconds

    def _arrive(self) -> None:
        specs = []
        while self.next < len(self.asked) and self.asked[self.next].seconds <= self.executor.seconds:
            one = self.asked[self.next]
            spec = RequestSpec(str(self.next), one.tokens(), one.output)
            self.next += 1
            if self.scheduler.cache.too_long(one.length + one.output - 1):
                self.refused += 1
            else:
                specs.append(spec)
        if specs:
            self.scheduler.submit(specs)

    def _skip_to_next(self) -> bool:
        """Nothing can run: go on when a request arrives, or a transfer is over."""
        times = [self.asked[self.next].seconds] if self.next < len(self.asked) else []
        if self.link.coming:
            times.append(self.link.coming[0][0])
        if not times:
            return False
        self.executor.seconds = max(self.executor.seconds, min(times))
        return True

    def _close(self, ended: Iterable[Any]) -> None:
        for end in ended:
            blocks = self.asked[int(end.id)].blocks
            self.sums["ended"] += 1
            self.sums["prompt"] += end.prompt
            self.sums["cached"] += end.cached
            self.sums["computed"] += end.computed
            self.sums["recomputed"] += end.recomputed
            self.sums["blocks"] += len(blocks)
            self.sums["cached_blocks"] += (end.cached + (end.cached == end.prompt - 1)) // BLOCK

    def _report(self) -> Replayed:
        stats = self.scheduler.stats()
        sums = self.sums
        group = self.config.groups[0]
        return Replayed(
            group.device_pages,
            group.host_pages,
            self.link.store.room // (group.page_bytes or 1),
            sums["ended"],
            self.refused,
            sums["prompt"],
            sums["cached"],
            min(sums["cached"], stats["cache"]["transfers"]["pages_loaded"] * self.config.page_size),
            min(sums["cached"], self.fetched * self.config.page_size),
            sums["cached_blocks"],
            sums["blocks"],
            sums["computed"],
            sums["recomputed"],
            stats["retractions"],
            self.executor.steps,
            self.executor.seconds,
            _spread(self.waited),
            _spread(list(self.first.values())),
        )


def _spread(values: list[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    return float(np.mean(values)), float(np.percentile(values, 99))


def replay_trace(
    asked: Sequence[TraceRequest],
    device_pages: int,
    host_pages: int = 0,
    page_size: int = 16,
    max_batch_tokens: int = 8192,
    max_batch_size: int = 256,
    policy: str = "fcfs",
    model: Cost | None = None,
    watch: Callable[[int, float], None] = lambda done, rate: None,
    store_pages: int = 0,
) -> Replayed:
    """Run a trace through a scheduler with one full-attention group of this many pages. A store needs host pages."""
    config = SchedulerConfig(
        page_size=page_size,
        groups=[CacheGroup("attention", "full", device_pages, host_pages)],
        max_batch_tokens=max_batch_tokens,
        max_batch_size=max_batch_size,
        policy=policy,
        store=store_pages > 0,
    )
    return TraceReplay(asked, config, model or CostModel(), watch, store_pages).run()
