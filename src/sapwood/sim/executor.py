"""The content-checking executor: runs plans on the content double, and holds each against the contract before it does.

Every request is made known to it (`submit`), so it knows what each plan must show. `execute` runs a plan at once;
`begin` and then `done` or `fail` leave a gap in which a driver can do what happens to engines while a step runs.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.cache import Namespace, PageCopy, token_bytes
from sapwood.scheduler import (
    BackupDone,
    FetchDone,
    LoadDone,
    LookupDone,
    RequestSpec,
    SaveDone,
    Scheduler,
    StepDone,
    StepFailed,
)

from .content import POISON, ContentDouble, ContentError, ContentRow
from .depot import Depot

Ids = npt.NDArray[np.int32]
_ARRAYS = ("slots", "starts", "lengths", "tokens", "cached", "samples")
_TRANSFERS = ("loads", "saves", "lookups", "fetches", "backups")
Landed = LoadDone | SaveDone | LookupDone | FetchDone | BackupDone


@dataclass
class Life:
    """One request as the executor knows it, from `submit` on. An id that is used again is another life."""

    id: str
    name: str  # in the double, where no two lives share a name
    namespace: Namespace
    prompt: int
    max_tokens: int
    reads: bool
    writes: bool
    known: list[int]  # the prompt, and what its steps have sampled
    slot: int | None = None
    end: int = 0  # where its last planned row ended
    cached: int = 0  # of its last planned row
    real: int = 0  # where its last row that was done ended
    reached: int = 0  # the furthest of these
    settled: int = 0  # `cached` of the last row that was done
    flying: int = 0  # its rows in flight
    work: int = 0  # positions computed in steps that were done, each as often as it was
    unsure: int = 0  # samples of steps in flight
    upset: int = 0  # how many steps had failed and requests been retracted when its last row was planned
    steady: bool = True  # no step has failed and no request been retracted between its rows

    @property
    def generated(self) -> list[int]:
        return self.known[self.prompt :]


@dataclass
class _SimulatedStep:
    plan: Any
    lives: list[Life]
    rows: list[ContentRow]
    entries: list[tuple[str, int, Ids, Ids]]  # group, slot, columns its row reads, what they held when it went out
    batch: bytes  # as it went out
    doomed: bool = False


def batch_bytes(batch: Any) -> bytes:
    """All a batch says, as bytes."""
    return b"|".join(
        [
            "\n".join(batch.ids).encode(),
            *(np.asarray(getattr(batch, name)).tobytes() for name in _ARRAYS),
            *(name.encode() + np.asarray(batch.write_from[name]).tobytes() for name in sorted(batch.write_from)),
            b",".join(b"-" if adapter is None else adapter for adapter in batch.adapters),
        ]
    )


class ContentExecutor:
    """Runs the plans of one scheduler on digests instead of tensors. ContentError at the first thing that is wrong."""

    def __init__(self, scheduler: Scheduler, seed: int = 0, vocabulary: int = 97, depot: Depot | None = None) -> None:
        self.scheduler = scheduler
        self.config = scheduler.config
        self.double = self.make_double(seed, vocabulary, depot)
        self.double.attach(scheduler.cache)
        self.random = random.Random(seed)
        self.lives: dict[str, Life] = {}
        self.slots: dict[int, Life] = {}  # the request last seen in a slot
        self.flights: deque[_SimulatedStep] = deque()
        self.step: int | None = None  # of the last plan
        self.moving: dict[int, str] = {}  # transfers under way
        self.lookups: dict[int, Any] = {}  # and questions to the store
        self.tables: dict[str, Ids] = {}  # as the changes of all plans so far make them
        self.owners: dict[int, str] = {}  # by slot, as plans have seated them
        self.generation: tuple[int, list[str], list[int], list[bytes | None]] = (
            0,
            [],
            [],
            [],
        )  # of the last decode rows
        self.failures = 0
        self.failed_when = 0  # how many had failed when the last plan with rows came
        self.moves = 0  # slots lost between two rows of a request: it must have been retracted
        self._lived = 0

    def make_double(self, seed: int, vocabulary: int, depot: Depot | None) -> ContentDouble:
        cache = self.scheduler.cache
        return ContentDouble(cache.page_size, cache.groups, seed, vocabulary, depot)

    def submit(self, spec: RequestSpec) -> Life:
        """Make a request known, before the scheduler hears of it."""
        tokens = np.frombuffer(token_bytes(spec.tokens), np.int32).tolist()
        self._lived += 1
        name = f"{spec.id}#{self._lived}" if spec.id in self.lives else spec.id
        life = Life(
            spec.id,
            name,
            spec.namespace,
            len(tokens),
            spec.max_tokens,
            spec.reads_cache,
            spec.writes_cache,
            tokens,
        )
        self.lives[spec.id] = life
        self.double.request(name, spec.namespace, tokens)
        return life

    def execute(self, plan: Any) -> list[StepDone]:
        """Run a plan at once. Returns its StepDone; nothing for a plan without rows."""
        self.begin(plan)
        return self.done() if self.flights else []

    def begin(self, plan: Any) -> None:
        """A plan goes out. It is checked now, and runs when it is done."""
        if plan.empty:
            _must(not any(getattr(plan, kind) for kind in _TRANSFERS), "an empty plan with transfers")
            return
        for kind, operations in (("load", plan.loads), ("save", plan.saves)):
            for operation in operations:
                _must(operation.op not in self.moving, f"{kind} {operation.op} is under way already")
                self.double.start(kind, operation)
                self.moving[operation.op] = kind
        self._begin_store(plan)
        _must(self.step is None or plan.step == self.step + 1, f"step {plan.step} comes after step {self.step}")
        _must(len(self.flights) <= self.config.overlap, f"{len(self.flights)} plans are in flight already")
        self.step = plan.step
        flight = self._read(plan)
        self.double.issue(plan.step, flight.rows, list(plan.copies))
        if flight.rows:
            self.flights.append(flight)
        else:
            self.double.done(plan.step)

    def _begin_store(self, plan: Any) -> None:
        for kind, operations in (("lookup", plan.lookups), ("fetch", plan.fetches), ("backup", plan.backups)):
            for operation in operations:
                _must(self.config.store, f"a {kind}, and there is no store")
                _must(operation.op not in self.moving, f"{kind} {operation.op} is under way already")
                _must(len(operation.hashes) > 0, f"{kind} {operation.op} is for nothing")
                self.moving[operation.op] = kind
                if kind == "lookup":
                    least = self.config.prefetch_threshold
                    _must(len(operation.hashes) >= least, f"a lookup of {len(operation.hashes)} pages of {least}")
                    self.lookups[operation.op] = operation
                else:
                    self.double.exchange(kind, operation)

    def land(self, op: int, ok: bool, losing: float = 0.0, lying: bool = False) -> Landed:
        """A transfer is over: its bytes have arrived, or it failed. Returns its event. A store may have lost something
        on the way, or say in a lookup what is not true."""
        kind = self.moving.pop(op)
        if kind == "lookup":
            return LookupDone(op, self._found(self.lookups.pop(op), ok, lying))
        if kind == "fetch":
            return FetchDone(op, ok, self.double.fetched(op, ok, losing))
        if kind == "backup":
            self.double.backed_up(op, ok)
            return BackupDone(op, ok)
        self.double.land(op, ok)
        return LoadDone(op, ok) if kind == "load" else SaveDone(op, ok)

    def _found(self, lookup: Any, ok: bool, lying: bool) -> int:
        if lying:
            return self.random.randint(0, len(lookup.hashes))
        there = {name: self.double.depot.there(name, lookup.hashes) for name in self.double.groups}
        return self.scheduler.cache.servable_run(lookup.start_page, there) if ok else 0

    def done(self) -> list[StepDone]:
        """The oldest plan in flight is done."""
        flight = self._oldest()
        step = flight.plan.step
        sampled = self.double.done(step)
        if not flight.doomed:
            self._entries_stayed(flight)
        if flight.doomed:  # counts as failed whatever it says
            sampled = {row.id: self.random.randrange(self.double.vocabulary) for row in flight.rows if row.samples}
        for i, (life, row) in enumerate(zip(flight.lives, flight.rows, strict=True)):
            if flight.doomed:
                continue
            life.settled = int(flight.plan.batch.cached[i])
            life.real = row.start + row.length
            life.reached = max(life.reached, life.real)
            life.work += row.length
            if row.samples:
                life.unsure -= 1
                life.known.append(sampled[row.id])
        tokens: dict[str, int] | Ids
        if self.random.random() < 0.5:
            tokens = {life.id: sampled[life.name] for life in flight.lives if life.name in sampled}
        else:
            tokens = np.array([sampled[row.id] for row in flight.rows if row.samples], np.int32)
        return [StepDone(step, tokens)]

    def fail(self, reason: str) -> list[StepFailed]:
        """The oldest plan in flight fails, and all later ones with it: what they wrote is garbage."""
        flight = self._oldest()
        self.double.fail(flight.plan.step)
        self.failures += 1
        if not flight.doomed:
            for each in (flight, *self.flights):
                each.doomed = True
                for life in each.lives:
                    life.unsure = life.flying = 0
        return [StepFailed(flight.plan.step, reason)]

    def _oldest(self) -> _SimulatedStep:
        if not self.flights:
            raise ValueError("no plan is in flight")
        flight = self.flights.popleft()
        if not flight.doomed:
            for life in flight.lives:
                life.flying -= 1
        _must(batch_bytes(flight.plan.batch) == flight.batch, f"the batch of step {flight.plan.step} changed in flight")
        return flight

    def _entries_stayed(self, flight: _SimulatedStep) -> None:
        """What a plan's rows read stands in the tables as it went out, but that a real page of equal content may have
        replaced a duplicate."""
        for group, slot, columns, before in flight.entries:
            now = flight.plan.tables[group][slot][columns]
            values = self.double.memory[group, "device"].values
            for at in (now != before).nonzero()[0].tolist():
                theirs = values[now[at]]
                same = now[at] and (theirs != POISON).all() and (theirs == values[before[at]]).all()
                _must(
                    bool(same),
                    f"step {flight.plan.step}: {group}: entry {int(columns[at])} of slot {slot} was {int(before[at])} "
                    f"when the plan went out and is {int(now[at])} before it is done",
                )

    # ---- the plan against the contract

    def _read(self, plan: Any) -> _SimulatedStep:
        """The rows of a plan as the double runs them. ContentError if they are not what the contract says."""
        batch, config = plan.batch, self.config
        rows = len(batch.ids)
        groups = self.double.groups
        for what in ("slots", "starts", "lengths", "cached", "samples", "adapters"):
            _must(len(getattr(batch, what)) == rows, f"{what} has {len(getattr(batch, what))} entries for {rows} rows")
        _must(not rows or set(batch.write_from) == set(groups), f"write_from is of groups {sorted(batch.write_from)}")
        _must(set(plan.tables) == set(groups), f"tables are of groups {sorted(plan.tables)}")
        for name, begins in batch.write_from.items():
            _must(len(begins) == rows, f"write_from of {name} has {len(begins)} entries for {rows} rows")
        _must(len(set(batch.ids)) == rows, f"an id has two rows: {batch.ids}")
        _must(rows <= config.max_batch_size, f"{rows} rows, max_batch_size is {config.max_batch_size}")
        total = int(np.sum(batch.lengths)) if rows else 0
        _must(total <= config.max_batch_tokens, f"{total} tokens, max_batch_tokens is {config.max_batch_tokens}")
        _must(len(batch.tokens) == total, f"{len(batch.tokens)} tokens in rows of {total}")
        slots = np.asarray(batch.slots).tolist()
        _must(len(set(slots)) == rows, f"two rows share a slot: {slots}")
        adapters = {adapter for adapter in batch.adapters if adapter is not None}
        if config.max_loras:
            _must(len(adapters) <= config.max_loras, f"{len(adapters)} adapters, max_loras is {config.max_loras}")

        upset = self.failures + int(self.scheduler.cache.stats()["retracted"])
        flight = _SimulatedStep(plan, [], [], [], batch_bytes(batch))
        at = 0
        for i, id in enumerate(batch.ids):
            _must(id in self.lives, f"{id!r} was never submitted")
            life = self.lives[id]
            start, length = int(batch.starts[i]), int(batch.lengths[i])
            _must(length >= 1 and start >= 0, f"{id}: a row of {length} tokens from {start}")
            tokens = batch.tokens[at : at + length]
            at += length
            self._same_tokens(life, start, tokens)
            self._same_slot(life, slots[i])
            self._adds_up(life, start, length, int(batch.cached[i]), upset)
            _must(batch.adapters[i] == life.namespace.adapter, f"{id}: the adapter is not that of its namespace")
            row = self._row(plan, i, life, start, length)
            flight.lives.append(life)
            flight.rows.append(row)
            for name, table in row.tables.items():
                columns = self._columns(name, start, start + length)
                flight.entries.append((name, slots[i], columns, table[columns]))
        for copy in plan.copies:
            self._copy(copy)
        for when in ("before", "after"):
            ends = [(copy.group, copy.source, copy.target) for copy in plan.copies if copy.when == when]
            sources = {(group, source) for group, source, _ in ends}
            clash = [(group, target) for group, _, target in ends if (group, target) in sources]
            _must(not clash, f"step {plan.step}: {clash} are written and read by copies {when} the batch")
        if rows:
            self._changes(plan)
        return flight

    def _changes(self, plan: Any) -> None:
        """The changes of a plan make of the tables before it what it shows; and every slot has the owner that plans
        have seated there."""
        batch, everything = plan.batch, self.failures > self.failed_when
        self.failed_when = self.failures
        _must(set(plan.changes) == set(plan.tables), f"changes are of groups {sorted(plan.changes)}")
        for name, table in plan.tables.items():
            places, values = plan.changes[name]
            size = table.shape[0] * table.shape[1]
            mirror = self.tables.get(name)
            grown = mirror is not None and len(mirror) != size
            if mirror is None or grown:
                mirror = self.tables[name] = np.zeros(size, np.int32)
            _must(len(np.unique(places)) == len(places), f"step {plan.step}: {name}: an entry changes twice")
            if everything or grown:
                _must(len(places) == size, f"step {plan.step}: {name}: {len(places)} of {size} entries are told")
            elif len(places) < size:
                _must(bool((mirror[places] != values).all()), f"step {plan.step}: {name}: a change that is none")
            mirror[places] = values
            _must(np.array_equal(mirror, table.reshape(-1)), f"step {plan.step}: {name}: a change was not told")
        self.owners.update(plan.seated)
        for slot, id in zip(np.asarray(batch.slots).tolist(), batch.ids, strict=True):
            _must(self.owners.get(slot) == id, f"step {plan.step}: {id} has slot {slot} and was not seated there")
        n, (generation, *before) = batch.decodes, self.generation
        now = [batch.ids[:n], np.asarray(batch.slots)[:n].tolist(), batch.adapters[:n]]
        _must((batch.generation > 0) == (n > 0), f"step {plan.step}: {n} decode rows of generation {batch.generation}")
        if n:
            _must(
                generation != batch.generation or before == now, f"step {plan.step}: rows changed, the generation not"
            )
            self.generation = (batch.generation, now[0], now[1], now[2])

    def _same_tokens(self, life: Life, start: int, tokens: Ids) -> None:
        known = len(life.known)
        end = start + len(tokens)
        _must(end <= known + life.unsure, f"{life.id}: a row up to {end}, only {known + life.unsure} tokens exist")
        expected = life.known[start:end] + [-1] * (end - max(start, known))
        if tokens.tolist() != expected:
            at = next(
                i for i, (ours, theirs) in enumerate(zip(tokens.tolist(), expected, strict=True)) if ours != theirs
            )
            raise ContentError(
                f"{life.id}: token {start + at} is {expected[at]}, the batch has {int(tokens[at])} (row from {start})"
            )

    def _same_slot(self, life: Life, slot: int) -> None:
        """A request keeps its slot; one that lost it since its last row must have been retracted."""
        if life.slot is not None and (life.slot != slot or self.slots[slot] is not life):
            self.moves += 1
            retracted = int(self.scheduler.cache.stats()["retracted"])
            _must(
                self.moves <= retracted,
                f"{life.id}: was in slot {life.slot} and is in slot {slot}; slots were lost {self.moves} times, "
                f"requests retracted {retracted} times",
            )
        life.slot = slot
        self.slots[slot] = life

    def _adds_up(self, life: Life, start: int, length: int, cached: int, upset: int) -> None:
        """What was cached and what was computed make the whole, and nothing is computed twice without need."""
        _must(0 <= cached < life.prompt, f"{life.id}: {cached} of {life.prompt} prompt tokens cached")
        _must(life.reads or not cached, f"{life.id}: {cached} tokens cached, and it reads nothing from the cache")
        if len(life.known) > life.prompt:
            _must(cached == life.cached, f"{life.id}: cached was {life.cached} at its first token, now {cached}")
        # Found in the cache is what lies beyond the furthest position it was at when its last step was done.
        been, had = (life.end, life.cached) if life.flying else (life.reached, life.settled)
        _must(
            cached == had + max(0, start - max(been, life.reached)),
            f"{life.id}: its row starts at {start}, it had been at {been}; cached was {had} and is {cached}",
        )
        if life.upset == upset or not life.end:
            _must(start >= life.end, f"{life.id}: its row starts at {start}, the last one ended at {life.end}")
        else:
            life.steady = False
        life.end, life.cached, life.upset = start + length, cached, upset
        life.flying += 1

    def _row(self, plan: Any, i: int, life: Life, start: int, length: int) -> ContentRow:
        batch, end = plan.batch, start + length
        exist = len(life.known) + life.unsure
        samples = bool(batch.samples[i])
        _must(samples == (end == exist), f"{life.id}: samples is {samples} for a row up to {end} of {exist} tokens")
        life.unsure += samples
        tables, begins = {}, {}
        for name in self.double.groups:
            table = plan.tables[name]
            slot = int(batch.slots[i])
            _must(0 <= slot < len(table), f"{life.id}: slot {slot} of a table of {len(table)} slots")
            columns = 1 if name in self.double.slots else -(-end // self.double.page_size)
            _must(
                columns <= table.shape[1], f"{life.id}: {name}: needs {columns} columns, the table has {table.shape[1]}"
            )
            tables[name] = np.array(table[slot][:columns], np.int32)
            pages = self.double.groups[name].device_pages
            wrong = (tables[name] < 0) | (tables[name] > pages)
            _must(not wrong.any(), f"{life.id}: {name}: no page {tables[name][wrong][:1]}, there are {pages}")
            begins[name] = int(batch.write_from[name][i])
            _must(begins[name] >= start, f"{life.id}: {name}: writes from {begins[name]}, its row starts at {start}")
        return ContentRow(life.name, start, length, tables, begins, samples)

    def _columns(self, name: str, start: int, end: int) -> Ids:
        """The entries of a group's table that a row reads or writes."""
        if name in self.double.slots:
            return np.zeros(1, np.int32)
        size = self.double.page_size
        spans = (*self.double.families[name].reads(start), (start, end))
        columns = [np.arange(low // size, -(-high // size), dtype=np.int32) for low, high in spans if low < high]
        return np.unique(np.concatenate(columns))

    def _copy(self, copy: PageCopy) -> None:
        _must(copy.group in self.double.groups, f"a copy is of group {copy.group!r}")
        pages = self.double.groups[copy.group].device_pages
        zero = copy.group in self.double.slots
        _must(
            0 < copy.target <= pages and (zero or copy.source > 0) and 0 <= copy.source <= pages,
            f"{copy.group}: copies {copy.source} to {copy.target}, pages are 1 to {pages}",
        )
        _must(copy.when in ("before", "after"), f"{copy.group}: a copy runs {copy.when!r}")


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContentError(otherwise)
