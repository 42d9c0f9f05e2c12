"""The content-checking executor over real memory: a mover and a store move the bytes, and it looks at what arrived.

    device rows --mover--> host rows --store--> a backend --store--> host rows of another engine ...
         |                     |                                          |
         +---- digests --------+------------- digests --------------------+   each checked when its event says so

Give it the arrays that a mover and a store work on, as they are: `[pages + 1, page_bytes]`, by group and tier. Run a
plan with `execute`, after its transfers were started, and show it every event (`arrived`) before the scheduler sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sapwood.cache import CacheGroup, Operation, StoreOperation
from sapwood.cache.families import family_class
from sapwood.scheduler import BackupDone, Event, FetchDone, LoadDone, LookupDone, SaveDone, Scheduler

from .content import Bytes, ContentDouble, ContentError
from .depot import Depot
from .executor import ContentExecutor


def least_page_bytes(page_size: int, group: CacheGroup) -> int:
    """What a page of a group must have, for its digests to fit."""
    slot = family_class(group.family)(group, 0, page_size).shape == "slot"
    return 8 * (1 if slot else page_size) + 8


class WitnessDouble(ContentDouble):
    """Moves nothing. The depot remembers what was ever to be backed up: nothing else may come back under a hash."""

    def __init__(
        self,
        page_size: int,
        groups: Sequence[CacheGroup],
        seed: int,
        vocabulary: int,
        depot: Depot | None,
        memory: Mapping[tuple[str, str], Bytes],
    ) -> None:
        super().__init__(page_size, groups, seed, vocabulary, depot, memory)
        self.moves: dict[int, tuple[str, Operation, dict[str, Bytes]]] = {}
        self.trades: dict[int, tuple[StoreOperation, dict[str, Bytes]]] = {}

    def start(self, kind: str, operation: Operation) -> None:
        before = {}
        for name, (sources, _) in operation.pages.items():
            there, _ = self._ends(kind, name)
            self._settled(operation, name, there, sources[sources != 0])
            before[name] = there.rows[sources].copy()
        self.moves[operation.op] = (kind, operation, before)

    def landed(self, op: int, ok: bool) -> None:
        """A save or load is over, and if it is ok its bytes are there."""
        kind, operation, before = self.moves.pop(op)
        for name, (sources, targets) in operation.pages.items():
            there, here = self._ends(kind, name)
            part = sources != 0
            if not np.array_equal(there.rows[sources][part], before[name][part]):
                raise ContentError(f"{kind} {op}: {name}: a source page was changed under it")
            if ok and not np.array_equal(here.rows[targets][part], before[name][part]):
                raise ContentError(f"{kind} {op}: {name}: a target page is not what its source was")
            for page in targets[part].tolist():
                here.maker[page] = f"{kind} {op}"

    def exchange(self, kind: str, operation: StoreOperation) -> None:
        before = {}
        for name, pages in operation.pages.items():
            host = self._host_of(kind, operation, name, pages)
            if kind == "backup":
                before[name] = host.rows[pages].copy()
                for at in pages.nonzero()[0].tolist():
                    if not self.depot.put(name, operation.hashes[at], before[name][at], 0):
                        raise ContentError(f"backup {operation.op}: {name}: page {at} has the hash of something else")
        self.trades[operation.op] = (operation, before)

    def brought(self, op: int, pages: int) -> None:
        """A fetch is over: this many pages are there in every group that has a part."""
        operation, _ = self.trades.pop(op)
        for name, ids in operation.pages.items():
            for at in ids[:pages].nonzero()[0].tolist():
                known = self.depot.get(name, operation.hashes[at])
                if known is not None and not np.array_equal(self.memory[name, "host"].rows[ids[at]], known[0]):
                    raise ContentError(f"fetch {op}: {name}: page {at} is not what was backed up")

    def kept(self, op: int) -> None:
        """A backup is over, one way or the other."""
        operation, before = self.trades.pop(op)
        for name, pages in operation.pages.items():
            part = pages != 0
            if not np.array_equal(self.memory[name, "host"].rows[pages][part], before[name][part]):
                raise ContentError(f"backup {op}: {name}: a host page was changed under it")


class Witness(ContentExecutor):
    """Runs the batches of plans whose transfers a mover and a store carry out."""

    double: WitnessDouble

    def __init__(
        self,
        scheduler: Scheduler,
        memory: Mapping[tuple[str, str], Bytes],
        seed: int = 0,
        vocabulary: int = 97,
        depot: Depot | None = None,
    ) -> None:
        self._memory = memory
        super().__init__(scheduler, seed, vocabulary, depot)

    def make_double(self, seed: int, vocabulary: int, depot: Depot | None) -> WitnessDouble:
        cache = self.scheduler.cache
        return WitnessDouble(cache.page_size, cache.groups, seed, vocabulary, depot, self._memory)

    def arrived(self, event: Event) -> None:
        """An event reports that a transfer is over. ContentError if what is there is not what should be."""
        if not isinstance(event, LoadDone | SaveDone | LookupDone | FetchDone | BackupDone):
            return
        if event.op not in self.moving:
            raise ContentError(f"{event}: nothing of that number is under way")
        kind = self.moving.pop(event.op)
        if type(event).__name__ != f"{kind.title()}Done":
            raise ContentError(f"{event}: operation {event.op} is a {kind}")
        if isinstance(event, LookupDone):
            del self.lookups[event.op]
        elif isinstance(event, FetchDone):
            self.double.brought(event.op, event.pages if event.ok else 0)
        elif isinstance(event, BackupDone):
            self.double.kept(event.op)
        else:
            self.double.landed(event.op, event.ok)
