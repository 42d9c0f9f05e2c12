"""Page pools: who owns each page of one group in one tier. Nothing here knows tokens, trees or requests.

A page has exactly one owner at any time, kept in a byte a page, so that a double release or a page given
out twice is an error at once and not a wrong answer later. Beside the owner a page has a reader count: how
many leases, copies and transfers read it *by page* (windows, snapshots, and all that was unhooked).
"""

from __future__ import annotations

from array import array
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
_FEW: Final = 24  # up to so many pages a loop beats numpy, whose every call costs as much as a dozen turns
_NAMES: Final = ("free", "a lease", "the tree", "something in flight", "an unhooked namespace")


class PoolError(RuntimeError):
    """Pages were given back or moved by somebody who does not own them, or more were asked for than there are."""


class PagePool:
    """The pages 1..capacity of one group in one tier; page 0 is never given out."""

    __slots__ = (
        "_low",
        "_owner",
        "_reads",
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
        self._reads = array("i", bytes(4 * (capacity + 1)))
        self.readers: npt.NDArray[np.int32] = np.frombuffer(self._reads, np.int32)  # the same memory
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
        if n <= _FEW:
            owners = self.owner
            for page in ids.tolist():
                owners[page] = owner
        else:
            self._owner[ids.astype(np.intp)] = owner
        self.counts[FREE] -= n
        self.counts[owner] += n
        if self.watch is not None and n:
            self.watch("taken", ids)
        return ids

    def allocate_one(self, owner: int) -> int:
        """`allocate` for a single page."""
        low = self._low
        if low >= self.capacity:
            raise PoolError(f"{self.name}: a page asked for, none of {self.capacity} is free")
        page = int(self._stack[low])
        self._low = low + 1
        self.owner[page] = owner
        self.counts[FREE] -= 1
        self.counts[owner] += 1
        if self.watch is not None:
            self.watch("taken", np.array([page], np.int32))
        return page

    def release(self, ids: Ids, owner: int) -> None:
        """Give pages back that `owner` owns. Raises PoolError, with nothing changed, if one is not its own."""
        n = len(ids)
        if not n:
            return
        if n <= _FEW:
            pages = ids.tolist()
            if len(set(pages)) != n:
                self._twice()
            self._hand(pages, owner, FREE)
        else:
            at = self._owned(ids, owner)
            self._different(n, at)
            self._owner[at] = FREE
        low = self._low
        self._stack[low - n : low] = ids
        self._low = low - n
        self.counts[owner] -= n
        self.counts[FREE] += n
        if self.watch is not None:
            self.watch("freed", ids)

    def release_one(self, page: int, owner: int) -> None:
        """`release` for a single page."""
        self.move_one(page, owner, FREE)
        self._low -= 1
        self._stack[self._low] = page
        if self.watch is not None:
            self.watch("freed", np.array([page], np.int32))

    def move(self, ids: Ids, old: int, new: int) -> None:
        """Hand (different) pages from one owner to another."""
        n = len(ids)
        if not n:
            return
        if n <= _FEW:
            self._hand(ids.tolist(), old, new)
        else:
            self._owner[self._owned(ids, old)] = new
        self.counts[old] -= n
        self.counts[new] += n

    def move_one(self, page: int, old: int, new: int) -> None:
        """`move` for a single page."""
        if not 0 < page <= self.capacity or self.owner[page] != old:
            self._complain(page, old)
        self.owner[page] = new
        self.counts[old] -= 1
        self.counts[new] += 1

    def _hand(self, pages: list[int], old: int, new: int) -> None:
        """`move` for few pages, without the counts."""
        owners = self.owner
        if min(pages) < 0 or max(pages) > self.capacity:
            self._complain(next(page for page in pages if not 0 < page <= self.capacity), old)
        for page in pages:
            if owners[page] != old:
                self._complain(page, old)
        for page in pages:
            owners[page] = new

    def read_one(self, page: int) -> None:
        """`read` for a single page."""
        count = self._reads[page]
        if not count and self.by_page and self.owner[page] == TREE:
            self.idle -= 1
        self._reads[page] = count + 1

    def unread_one(self, page: int) -> bool:
        """`unread` for a single page."""
        count = self._reads[page] - 1
        if count < 0:
            self._unread_by_nobody(page)
        self._reads[page] = count
        if not count:
            owner = self.owner[page]
            if owner == UNHOOKED:
                self.release_one(page, UNHOOKED)
            elif self.by_page and owner == TREE:
                self.idle += 1
                return True
        return False

    def read(self, ids: Ids) -> None:
        """One more reader for each of `ids`, which must be different pages."""
        if len(ids) <= _FEW:
            reads, owners, seen = self._reads, self.owner, 0
            for page in ids.tolist():
                count = reads[page]
                reads[page] = count + 1
                if not count and owners[page] == TREE:
                    seen += 1
            if self.by_page:
                self.idle -= seen
            return
        at = ids.astype(np.intp)
        before = self.readers[at]
        if self.by_page:
            self.idle -= int(np.count_nonzero((before == 0) & (self._owner[at] == TREE)))
        self.readers[at] = before + 1

    def unread(self, ids: Ids) -> bool:
        """One reader less for each of `ids`; unhooked ones that nobody reads now are freed. Returns whether one of
        them became idle, so that eviction should hear of it."""
        if len(ids) <= _FEW:
            return self._unread_few(ids.tolist())
        at = ids.astype(np.intp)
        counts = self.readers[at] - 1
        if int(counts.min()) < 0:
            self._unread_by_nobody(int(ids[counts < 0][0]))
        self.readers[at] = counts
        owners = self._owner[at][counts == 0].tobytes()
        if UNHOOKED in owners:
            self.release(ids[(counts == 0) & (self._owner[at] == UNHOOKED)], UNHOOKED)
        idle = owners.count(TREE) if self.by_page else 0
        self.idle += idle
        return idle > 0

    def _unread_few(self, pages: list[int]) -> bool:
        reads, owners = self._reads, self.owner
        for page in pages:
            if reads[page] < 1:
                self._unread_by_nobody(page)
        idle = 0
        for page in pages:
            count = reads[page] = reads[page] - 1
            if not count:
                if owners[page] == TREE:
                    idle += 1
                elif owners[page] == UNHOOKED:
                    self.release_one(page, UNHOOKED)
        if not self.by_page:
            return False
        self.idle += idle
        return idle > 0

    def _unread_by_nobody(self, page: int) -> None:
        raise PoolError(f"{self.name}: page {page} has no reader to leave")

    def share(self, ids: Ids) -> None:
        """A lease hands pages to the tree and goes on reading them."""
        self.move(ids, LEASE, TREE)
        if len(ids) <= _FEW:
            reads = self._reads
            for page in ids.tolist():
                reads[page] += 1
        else:
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

    def _different(self, n: int, at: npt.NDArray[np.intp]) -> None:
        if self._scratch is None:
            self._scratch = np.zeros(self.capacity + 1, np.int32)
        order = np.arange(n, dtype=np.int32)
        self._scratch[at] = order
        if 1 in (self._scratch[at] != order).tobytes():
            self._twice()

    def _twice(self) -> None:
        raise PoolError(f"{self.name}: the same page is named twice in one call")

    def _complain(self, page: int, owner: int) -> None:
        if not 0 < page <= self.capacity:
            raise PoolError(f"{self.name}: unknown page {page} (pages are 1 to {self.capacity})")
        raise PoolError(f"{self.name}: page {page} belongs to {_NAMES[self.owner[page]]}, not to {_NAMES[owner]}")
