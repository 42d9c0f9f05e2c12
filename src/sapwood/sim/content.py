"""The content double: an executor stand-in whose memory holds digests, and which fails at the first wrong read.

Every token slot of every page holds a digest of (namespace, all tokens up to it); a state slot holds (depth, digest).
Nothing is computed, but everything is checked:

- every read compares what is in memory with what the request's own tokens say must be there;
- memory that is free, newly given out, or written by a failed step is poisoned;
- a page that holds another request's content is never written;
- the writes of a step are seen by its own and by later steps' reads, by transfers and by copies that run before a
  batch only once it is done, and not at all if it failed; what a doomed step touches is poisoned when it ends;
- steps run late (when they are finished, not when they are issued), their rows in shuffled order;
- transfers move bytes at a moment of the caller's choice, and notice if their pages were touched in between;
- what is backed up goes to a depot, under its hashes, and is what a fetch of these hashes brings.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.cache import CacheGroup, HybridPrefixCache, Namespace, Operation, PageCopy, StoreOperation
from sapwood.cache.families import family_class
from sapwood.store.protocol import unbroken_run

from .depot import Depot

Digests = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
POISON = np.uint64(0xDEADDEADDEADDEAD)
ZERO_STATE = np.uint64(0x5EED)
_BASE = 0x9E3779B97F4A7C15  # odd: a polynomial in it, modulo 2**64, tells token sequences apart


class ContentError(AssertionError):
    """Something was read, written or moved that is not what it should be."""


def prefix_digests(namespace: Namespace, tokens: Sequence[int]) -> Digests:
    """A digest for each position, of the namespace and all tokens up to it."""
    values = np.asarray(tokens, np.uint64) + np.uint64(1)
    powers = np.cumprod(np.full(len(values), _BASE, np.uint64))
    seed = np.uint64(int.from_bytes(namespace.digest()[:8].ljust(8, b"\1"), "little"))
    sums: Digests = np.cumsum(values * powers, dtype=np.uint64) + seed
    return sums ^ (sums >> np.uint64(29)) ^ np.arange(len(values), dtype=np.uint64)


@dataclass
class ContentRow:
    """One request's part of a batch: positions [start, start + length), and where its memory is."""

    id: str
    start: int
    length: int
    tables: Mapping[str, npt.NDArray[np.int32]]
    write_from: Mapping[str, int]
    samples: bool


@dataclass
class _Step:
    rows: list[ContentRow]
    copies: list[PageCopy]
    touches: dict[str, set[int]]  # by group
    ran: bool = False
    doomed: bool = False
    lengths: dict[str, int] = field(default_factory=dict)  # how many tokens a request had before this step sampled
    sampled: dict[str, int] = field(default_factory=dict)


@dataclass
class _Request:
    namespace: Namespace
    tokens: list[int]
    digests: Digests


class Memory:
    """One group in one tier: rows of bytes, as an engine has them. A page is its digests, its depth and a rest.

    0         8 * width   + 8                    page_bytes
    | values  | depth     | the rest: follows from the last value, and has to travel too |
    """

    def __init__(self, rows: Bytes, width: int) -> None:
        end = 8 * width
        if rows.shape[1] < end + 8:
            raise ValueError(f"pages must have at least {end + 8} bytes to hold {width} digests, got {rows.shape[1]}")
        self.rows = rows
        self.values = rows[:, :end].view(np.uint64)
        self.depths = rows[:, end : end + 8].view(np.int64)[:, 0]  # state slots: how many tokens they have seen
        self.rest = rows[:, end + 8 :]
        self.writer = np.zeros(self.values.shape, np.int64)  # the step that wrote it and is not done; 0 = settled
        self.maker: dict[int, str] = {}  # which request wrote into a page
        self.values[:] = POISON
        self.depths[:] = 0

    def poison(self, pages: npt.NDArray[Any]) -> None:
        self.values[pages] = POISON
        self.writer[pages] = 0
        self.depths[pages] = -1
        for page in np.asarray(pages).tolist():
            self.maker.pop(page, None)

    def fill_rest(self, pages: npt.NDArray[Any]) -> None:
        if self.rest.shape[1]:
            self.rest[pages] = self.values[pages, -1:].astype(np.uint8)

    def broken(self, pages: npt.NDArray[Any]) -> bool:
        """Whether the rest of a page whose last value is right is wrong."""
        if not self.rest.shape[1]:
            return False
        return bool((self.rest[pages] != self.values[pages, -1:].astype(np.uint8)).any())


class ContentDouble:
    """Holds digests where an engine holds K, V and states. Drive it beside a cache, and let it complain."""

    def __init__(
        self,
        page_size: int,
        groups: Sequence[CacheGroup],
        seed: int = 0,
        vocabulary: int = 97,
        depot: Depot | None = None,
        memory: Mapping[tuple[str, str], Bytes] | None = None,
    ) -> None:
        self.page_size = page_size
        self.groups = {group.name: group for group in groups}
        self.families = {g.name: family_class(g.family)(g, i, page_size) for i, g in enumerate(groups)}
        self.slots = {name for name, family in self.families.items() if family.shape == "slot"}
        self.vocabulary = vocabulary
        self.random = random.Random(seed)
        self.memory: dict[tuple[str, str], Memory] = {}
        for group in groups:
            width = 1 if group.name in self.slots else page_size
            for tier, pages in (("device", group.device_pages), ("host", group.host_pages)):
                given = memory.get((group.name, tier)) if memory is not None else None
                rows = np.zeros((pages + 1, 8 * width + 8), np.uint8) if given is None else given
                self.memory[group.name, tier] = Memory(rows, width)
        self.requests: dict[str, _Request] = {}
        self.steps: dict[int, _Step] = {}
        self.transfers: dict[int, tuple[str, Operation, dict[str, tuple[Digests, Digests]]]] = {}
        self.depot = depot if depot is not None else Depot()
        self.exchanges: dict[int, tuple[str, StoreOperation, dict[str, Digests]]] = {}
        self.computed = 0  # positions computed by steps that were done

    def attach(self, cache: HybridPrefixCache) -> None:
        """Poison every page whenever it is given out or given back. Nothing may be given back that a step in flight
        touches, whether that step still counts or not."""

        def watch(group: str, tier: str, what: str, pages: npt.NDArray[Any]) -> None:
            self.memory[group, tier].poison(pages)
            if what == "freed" and tier == "device":
                for step, at in self.steps.items():
                    both = at.touches[group].intersection(pages.tolist())
                    if both:
                        doomed = ", which is doomed" if at.doomed else ""
                        raise ContentError(f"page {min(both)} of {group} is freed, and step {step} touches it{doomed}")

        cache.watch(watch)

    def _touched(self, rows: list[ContentRow], copies: list[PageCopy]) -> dict[str, set[int]]:
        """By group: the pages and slots that a step reads, writes or copies."""
        touched: dict[str, set[int]] = {name: set() for name in self.groups}
        for row in rows:
            end = row.start + row.length
            for name, table in row.tables.items():
                if name in self.slots:
                    touched[name].add(int(table[0]))
                    continue
                for low, high in (*self.families[name].reads(row.start), (row.start, end)):
                    if low < high:
                        columns = np.asarray(table)[low // self.page_size : -(-high // self.page_size)]
                        touched[name].update(columns.tolist())
        for copy in copies:
            touched[copy.group].update((copy.source, copy.target))
        return touched

    # ---- requests

    def request(self, name: str, namespace: Namespace, tokens: Iterable[int]) -> None:
        """Make a request's tokens known; generated ones are added as steps sample them."""
        known = list(tokens)
        self.requests[name] = _Request(namespace, known, prefix_digests(namespace, known))

    def tokens(self, name: str) -> list[int]:
        return self.requests[name].tokens

    # ---- steps

    def issue(self, step: int, rows: list[ContentRow], copies: list[PageCopy]) -> None:
        """A plan goes out. It runs when it is finished, or when a later one must."""
        if self.steps and step <= max(self.steps):
            raise ContentError(f"step {step} was issued after step {max(self.steps)}")
        self.steps[step] = _Step(rows, copies, self._touched(rows, copies))

    def done(self, step: int) -> dict[str, int]:
        """Finish a step well: its writes settle. Returns the sampled token of each row that samples."""
        self._run_up_to(step)
        at = self.steps.pop(step)
        if at.doomed:
            self._ruin(step, at)
            return {}
        for memory in self.memory.values():
            memory.writer[memory.writer == step] = 0
        self.computed += sum(row.length for row in at.rows)
        return at.sampled

    def fail(self, step: int) -> None:
        """A step fails: what it and all later ones wrote is garbage, whether they have run or not."""
        if self.random.random() < 0.5:
            self._run_up_to(step)
        at = self.steps.pop(step)
        self._ruin(step, at)
        if at.doomed:
            return
        for later in self.steps.values():
            later.doomed = True
            for name, length in later.lengths.items():
                self._cut(name, length)
        for name, length in at.lengths.items():
            self._cut(name, length)

    def _cut(self, name: str, length: int) -> None:
        request = self.requests.get(name)
        if request is not None and len(request.tokens) > length:
            del request.tokens[length:]
            request.digests = request.digests[:length]

    def _ruin(self, step: int, at: _Step) -> None:
        """Everything a failed step may have written, it has written, and wrong."""
        for (_, tier), memory in self.memory.items():
            if tier == "device":
                hit = memory.writer == step
                memory.values[hit] = POISON
                memory.writer[hit] = 0
                memory.depths[hit.any(axis=1)] = -1
        for row in at.rows:
            for name, table in row.tables.items():
                memory = self.memory[name, "device"]
                if name in self.slots:
                    memory.poison(table[:1])
                    continue
                first = max(row.start, row.write_from[name])
                for position in range(first, row.start + row.length):
                    page = int(table[position // self.page_size])
                    memory.values[page, position % self.page_size] = POISON
        for copy in at.copies:
            self.memory[copy.group, "device"].values[copy.target] = POISON
            self.memory[copy.group, "device"].depths[copy.target] = -1

    def _run_up_to(self, step: int) -> None:
        for number in sorted(self.steps):
            at = self.steps[number]
            if number <= step and not at.ran:
                at.ran = True
                if not at.doomed:
                    self._run(number, at)

    def _run(self, step: int, at: _Step) -> None:
        for copy in at.copies:
            if copy.when == "before":
                self._copy(step, copy)
        rows = list(at.rows)
        self.random.shuffle(rows)
        for row in rows:  # in every layer K and V of the whole batch are written before attention reads
            self._write(step, row)
        self.random.shuffle(rows)
        for row in rows:
            self._read(step, row)
        for copy in at.copies:
            if copy.when == "after":
                self._copy(step, copy)
        for row in at.rows:
            if row.samples:
                self._sample(at, row)

    def _expected(self, row: ContentRow) -> Digests:
        request = self.requests[row.id]
        if len(request.digests) < row.start + row.length:
            raise ContentError(
                f"{row.id}: computes up to {row.start + row.length}, knows {len(request.digests)} tokens"
            )
        return request.digests

    def _write(self, step: int, row: ContentRow) -> None:
        digests = self._expected(row)
        end = row.start + row.length
        for name, table in row.tables.items():
            memory = self.memory[name, "device"]
            if name in self.slots:
                self._scan(step, row, memory, int(table[0]), digests)
                continue
            first = max(row.start, row.write_from[name])
            if first >= end:
                continue
            positions = np.arange(first, end)
            pages = table[positions // self.page_size]
            if not pages.all():
                raise ContentError(f"{row.id}: {name}: writes position {int(positions[pages == 0][0])} into no page")
            offsets = positions % self.page_size
            before = memory.values[pages, offsets]
            clash = (before != POISON) & (before != digests[first:end])
            if clash.any():
                at = int(clash.nonzero()[0][0])
                raise ContentError(f"{row.id}: {name}: overwrites page {int(pages[at])}, in use for other tokens")
            for page in np.unique(pages).tolist():
                maker = memory.maker.setdefault(page, row.id)
                if maker != row.id:
                    raise ContentError(f"{row.id}: {name}: writes into page {page}, which {maker} has written")
            memory.values[pages, offsets] = digests[first:end]
            memory.writer[pages, offsets] = step
            memory.fill_rest(pages)

    def _scan(self, step: int, row: ContentRow, memory: Memory, slot: int, digests: Digests) -> None:
        before = ZERO_STATE if row.start == 0 else digests[row.start - 1]
        if not slot or int(memory.depths[slot]) != row.start or memory.values[slot, 0] != before:
            raise ContentError(
                f"{row.id}: step {step} begins at {row.start}, slot {slot} holds a state after "
                f"{int(memory.depths[slot])} tokens"
                + (" of something else" if memory.depths[slot] == row.start else "")
            )
        if memory.broken(np.array([slot])):
            raise ContentError(f"{row.id}: step {step}: slot {slot} did not come whole")
        memory.values[slot, 0] = digests[row.start + row.length - 1]
        memory.depths[slot] = row.start + row.length
        memory.writer[slot] = step
        memory.fill_rest(np.array([slot]))

    def _read(self, step: int, row: ContentRow) -> None:
        digests = self._expected(row)
        end = row.start + row.length
        for name, table in row.tables.items():
            if name in self.slots:
                continue
            memory = self.memory[name, "device"]
            for low, high in (*self.families[name].reads(row.start), (row.start, end)):
                if low >= high:
                    continue
                positions = np.arange(low, high)
                columns = positions // self.page_size
                if columns[-1] >= len(table):
                    raise ContentError(f"{row.id}: {name}: reads position {high - 1}, has {len(table)} pages")
                pages = table[columns]
                wrong = (pages == 0) | (memory.values[pages, positions % self.page_size] != digests[low:high])
                if wrong.any():
                    at = int(wrong.nonzero()[0][0])
                    self._complain(step, row, name, int(positions[at]), int(pages[at]), memory)
                if memory.broken(pages[positions % self.page_size == self.page_size - 1]):
                    raise ContentError(f"{row.id}: step {step} reads {name}: a page did not come whole")

    def _complain(self, step: int, row: ContentRow, name: str, position: int, page: int, memory: Memory) -> None:
        value = memory.values[page, position % self.page_size]
        what = "is the null page" if not page else "is poisoned" if value == POISON else "holds something else"
        raise ContentError(
            f"{row.id}: step {step} reads {name} at position {position} for a row from {row.start}: page {page} {what}"
        )

    def _sample(self, at: _Step, row: ContentRow) -> None:
        request = self.requests[row.id]
        end = row.start + row.length
        if len(request.tokens) < end:
            raise ContentError(f"{row.id}: samples after {end} tokens, has {len(request.tokens)}")
        token = int(request.digests[end - 1] % np.uint64(self.vocabulary))
        at.sampled[row.id] = token
        if len(request.tokens) > end:  # a row that was given up, and comes again, samples the same
            return
        at.lengths[row.id] = end
        request.tokens.append(token)
        request.digests = prefix_digests(request.namespace, request.tokens)

    def _copy(self, step: int, copy: PageCopy) -> None:
        memory = self.memory[copy.group, "device"]
        if copy.group in self.slots:
            if copy.source == 0:
                memory.values[copy.target, 0], memory.depths[copy.target] = ZERO_STATE, 0
            else:
                if memory.values[copy.source, 0] == POISON:
                    raise ContentError(f"{copy.group}: step {step} copies slot {copy.source}, which is poisoned")
                if copy.when == "before" and memory.writer[copy.source, 0]:
                    raise ContentError(f"{copy.group}: step {step} copies slot {copy.source} before it is real")
                memory.values[copy.target] = memory.values[copy.source]
                memory.depths[copy.target] = memory.depths[copy.source]
            memory.writer[copy.target] = step
            memory.fill_rest(np.array([copy.target]))
            return
        part = slice(0, copy.tokens)
        if (memory.values[copy.source, part] == POISON).any():
            raise ContentError(f"{copy.group}: step {step} copies page {copy.source}, which is poisoned")
        if memory.writer[copy.source, part].any():
            raise ContentError(f"{copy.group}: step {step} copies page {copy.source} before it is real")
        memory.values[copy.target, part] = memory.values[copy.source, part]
        memory.writer[copy.target, part] = step

    # ---- transfers

    def start(self, kind: str, operation: Operation) -> None:
        """A save or load begins. Its bytes move at `land`; until then no step may touch its pages."""
        before = {}
        for name, (sources, targets) in operation.pages.items():
            there, here = self._ends(kind, name)
            self._settled(operation, name, there, sources[sources != 0])
            before[name] = (there.values[sources].copy(), here.values[targets].copy())
        self.transfers[operation.op] = (kind, operation, before)

    def land(self, op: int, ok: bool) -> None:
        """The bytes of a transfer arrive, or (not ok) arrive wrong."""
        kind, operation, before = self.transfers.pop(op)
        for name, (sources, targets) in operation.pages.items():
            there, here = self._ends(kind, name)
            part = sources != 0
            if not np.array_equal(there.values[sources][part], before[name][0][part]):
                raise ContentError(f"{kind} {op}: {name}: a source page was changed under it")
            if not np.array_equal(here.values[targets][part], before[name][1][part]):
                raise ContentError(f"{kind} {op}: {name}: somebody else wrote into a target page")
            if not ok:
                here.values[targets[part]] = POISON
                continue
            here.values[targets[part]] = there.values[sources[part]]
            here.depths[targets[part]] = there.depths[sources[part]]
            for page in targets[part].tolist():
                here.maker[page] = f"{kind} {op}"

    def exchange(self, kind: str, operation: StoreOperation) -> None:
        """A fetch or a backup begins. Until it is over nothing else may touch its host pages."""
        before = {}
        for name, pages in operation.pages.items():
            before[name] = self._host_of(kind, operation, name, pages).values[pages].copy()
        self.exchanges[operation.op] = (kind, operation, before)

    def _host_of(self, kind: str, operation: StoreOperation, name: str, pages: npt.NDArray[np.int32]) -> Memory:
        """The host memory of a group, for an exchange that begins: a page a hash, and backups take what is settled."""
        host = self.memory[name, "host"]
        if len(pages) != len(operation.hashes):
            raise ContentError(f"{kind} {operation.op}: {name}: {len(pages)} pages, {len(operation.hashes)} hashes")
        if kind == "backup":
            self._settled(operation, name, host, pages[pages != 0])
        return host

    def backed_up(self, op: int, ok: bool) -> None:
        """A backup is over: the depot has what host has, unless it failed; then it may have some of it."""
        operation = self._exchanged("backup", op)
        for name, pages in operation.pages.items():
            host = self.memory[name, "host"]
            for at, page in enumerate(pages.tolist()):
                if page and (ok or self.random.random() < 0.5):
                    key = operation.hashes[at]
                    if not self.depot.put(name, key, host.values[page].copy(), int(host.depths[page])):
                        raise ContentError(f"backup {op}: {name}: page {at} has the hash of something else")

    def fetched(self, op: int, ok: bool, losing: float = 0.0) -> int:
        """A fetch is over: host has what the depot had, but for what was lost on the way. Returns the unbroken run."""
        operation = self._exchanged("fetch", op)
        arrived = {}
        for name, pages in operation.pages.items():
            host = self.memory[name, "host"]
            arrived[name] = np.zeros(len(pages), np.bool_)
            for at, page in enumerate(pages.tolist()):
                value = self.depot.get(name, operation.hashes[at]) if page else None
                if value is None or not ok or self.random.random() < losing:
                    if page:
                        host.values[page] = POISON
                    continue
                host.values[page], host.depths[page] = value
                arrived[name][at] = True
        return unbroken_run(arrived, operation.pages) if ok else 0

    def _exchanged(self, kind: str, op: int) -> StoreOperation:
        begun, operation, before = self.exchanges.pop(op)
        if begun != kind:
            raise ContentError(f"operation {op} is a {begun}, not a {kind}")
        for name, pages in operation.pages.items():
            part = pages != 0
            if not np.array_equal(self.memory[name, "host"].values[pages][part], before[name][part]):
                raise ContentError(f"{kind} {op}: {name}: a host page was changed under it")
        return operation

    def _ends(self, kind: str, name: str) -> tuple[Memory, Memory]:
        device, host = self.memory[name, "device"], self.memory[name, "host"]
        return (device, host) if kind == "save" else (host, device)

    @staticmethod
    def _settled(
        operation: Operation | StoreOperation, name: str, memory: Memory, pages: npt.NDArray[np.int32]
    ) -> None:
        if (memory.values[pages] == POISON).any():
            raise ContentError(f"transfer {operation.op}: {name}: takes a page that is poisoned or part-filled")
        if memory.writer[pages].any():
            raise ContentError(f"transfer {operation.op}: {name}: takes a page before its step is done")
