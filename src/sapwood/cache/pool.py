"""Page pools: who owns each page of one group in one tier. Nothing here knows tokens, trees or requests.

A page has exactly one owner at any time, kept in a byte a page, so that a double release or a page given
out twice is an error at once and not a wrong answer later. Beside the owner a page has a reader count: how
many leases, copies and transfers read it *by page* (windows, snapshots, and all that was unhooked).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

FREE: Final = 0
LEASE: Final = 1
TREE: Final = 2
FLIGHT: Final = 3
UNHOOKED: Final = 4
OWNERS: Final = ("free", "leases", "tree", "flight", "unhooked")[1:]
_NOBODY: Final = 255  # of the null page
_NAMES: Final = ("free", "a lease", "the tree", "something in flight", "an unhooked namespace")


class PoolError(RuntimeError):
    """Pages were given back or moved by somebody who does not own them, or more were asked for than there are."""


class PagePool:
    """The pages 1..capacity of one group in one tier; page 0 is never given out."""

    __slots__ = (
        "_low",
        "_owner",
        "_scratch",
        "_stack",
        "by_page",
        "capacity",
        "counts",
        "idle",
        "name",
        "owner",
        "page_bytes",
        "readers",
        "watch",
    )

    def __init__(self, name: str, capacity: int, page_bytes: int = 0, by_page: bool = False) -> None:
        self.name = name
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.owner = bytearray(capacity + 1)
        self.owner[0] = _NOBODY
        self._owner = np.frombuffer(self.owner, np.uint8)
        self._stack = np.arange(1, capacity + 1, dtype=np.int32)  # free from `_low` on; grows towards the front
        self._low = 0
        self._scratch: npt.NDArray[np.int32] | None = None
        self.counts = [capacity, 0, 0, 0, 0]
        self.readers: npt.NDArray[np.int32] = np.zeros(capacity + 1, np.int32)
        self.by_page = by_page  # eviction goes page by page, not by leaves of the tree
        self.idle = 0  # if so: pages of the tree that nobody reads, which is what eviction may take
        self.watch: Callable[[str, Ids], None] | None = None  # called with "taken" or "freed": for content checks

    @property
    def free(self) -> int:
        return self.capacity - self._low

    @property
    def used_bytes(self) -> int:
        return self._low * self.page_bytes

    def allocate(self, n: int, owner: int) -> Ids:
        """Take n pages. Raises PoolError, with nothing changed, if there are fewer."""
        low = self._low
        if not 0 <= n <= self.capacity - low:
            raise PoolError(f"{self.name}: {n} pages asked for, {self.free} of {self.capacity} are free")
        ids = self._stack[low : low + n].copy()
        self._low = low + n
        if n == 1:
            self.owner[ids[0]] = owner
        else:
            self._owner[ids.astype(np.intp)] = owner
        self.counts[FREE] -= n
        self.counts[owner] += n
        if self.watch is not None and n:
            self.watch("taken", ids)
        return ids

    def release(self, ids: Ids, owner: int) -> None:
        """Give pages back that `owner` owns. Raises PoolError, with nothing changed, if one is not its own."""
        n = len(ids)
        if not n:
            return
        if n == 1:
            self._one(int(ids[0]), owner, FREE)
        else:
            at = self._owned(ids, owner)
            self._different(ids, at)
            self._owner[at] = FREE
        low = self._low
        self._stack[low - n : low] = ids
        self._low = low - n
        self.counts[owner] -= n
        self.counts[FREE] += n
        if self.watch is not None:
            self.watch("freed", ids)

    def move(self, ids: Ids, old: int, new: int) -> None:
        """Hand (different) pages from one owner to another."""
        n = len(ids)
        if not n:
            return
        if n == 1:
            self._one(int(ids[0]), old, new)
        else:
            self._owner[self._owned(ids, old)] = new
        self.counts[old] -= n
        self.counts[new] += n

    def _one(self, page: int, old: int, new: int) -> None:
        if not 0 < page <= self.capacity or self.owner[page] != old:
            self._complain(page, old)
        self.owner[page] = new

    def read_one(self, page: int) -> None:
        """`read` for a single page."""
        if self.by_page and not self.readers[page] and self.owner[page] == TREE:
            self.idle -= 1
        self.readers[page] += 1

    def unread_one(self, page: int) -> None:
        """`unread` for a single page."""
        count = int(self.readers[page]) - 1
        if count < 0:
            raise PoolError(f"{self.name}: page {page} has no reader to leave")
        self.readers[page] = count
        if not count:
            owner = self.owner[page]
            if owner == UNHOOKED:
                self.release(np.array([page], np.int32), UNHOOKED)
            elif self.by_page and owner == TREE:
                self.idle += 1

    def read(self, ids: Ids) -> None:
        """One more reader for each of `ids`, which must be different pages."""
        if len(ids) <= 1:
            if len(ids):
                self.read_one(int(ids[0]))
            return
        at = ids.astype(np.intp)
        before = self.readers[at]
        if self.by_page:
            self.idle -= int(np.count_nonzero((before == 0) & (self._owner[at] == TREE)))
        self.readers[at] = before + 1

    def unread(self, ids: Ids) -> None:
        """One reader less for each of `ids`; unhooked ones that nobody reads now are freed."""
        if len(ids) <= 1:
            if len(ids):
                self.unread_one(int(ids[0]))
            return
        at = ids.astype(np.intp)
        counts = self.readers[at] - 1
        if int(counts.min()) < 0:
            raise PoolError(f"{self.name}: page {int(ids[counts < 0][0])} has no reader to leave")
        self.readers[at] = counts
        owners = self._owner[at][counts == 0].tobytes()
        if self.by_page:
            self.idle += owners.count(TREE)
        if UNHOOKED in owners:
            self.release(ids[(counts == 0) & (self._owner[at] == UNHOOKED)], UNHOOKED)

    def add_readers(self, ids: Ids) -> None:
        """One reader for each of `ids`, pages of the tree since just now, so never idle before."""
        self.readers[ids.astype(np.intp)] += 1

    def free_ids(self) -> Ids:
        ids: Ids = self._stack[self._low :].copy()
        return ids

    def _owned(self, ids: Ids, owner: int) -> npt.NDArray[np.intp]:
        """`ids` as an index (numpy is three times faster with its own integers), seen to be pages of `owner`."""
        at = ids.view(np.uint32).astype(np.intp)  # a negative id becomes a huge one
        try:
            right = self._owner[at].tobytes().count(owner) == len(ids)
        except IndexError:
            right = False
        if not right:
            for page in ids.tolist():
                if not 0 < page <= self.capacity or self.owner[page] != owner:
                    self._complain(page, owner)
        return at

    def _different(self, ids: Ids, at: npt.NDArray[np.intp]) -> None:
        n = len(ids)
        if n <= 32:
            twice = len(set(ids.tolist())) != n
        else:
            if self._scratch is None:
                self._scratch = np.zeros(self.capacity + 1, np.int32)
            order = np.arange(n, dtype=np.int32)
            self._scratch[at] = order
            twice = 1 in (self._scratch[at] != order).tobytes()
        if twice:
            raise PoolError(f"{self.name}: the same page is named twice in one call")

    def _complain(self, page: int, owner: int) -> None:
        if not 0 < page <= self.capacity:
            raise PoolError(f"{self.name}: unknown page {page} (pages are 1 to {self.capacity})")
        raise PoolError(f"{self.name}: page {page} belongs to {_NAMES[self.owner[page]]}, not to {_NAMES[owner]}")
