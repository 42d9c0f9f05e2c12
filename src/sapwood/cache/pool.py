"""Page pools: the owner of each page of one group in one tier. Nothing here knows tokens, trees or requests.

A page has exactly one owner at any time, kept in a byte a page, so that a double release or a page given
out twice is an error at once and not a wrong answer later. Beside the owner a page has a reader count: how
many leases and transfers read it *by page* (snapshots, and all that was unhooked; windows are read by column of
the tree, see readers.py).

`allocate`, `release` and `move` change owners; `read` and `unread` change reader counts. Pages that were allocated
together mostly lie side by side, and move together: so each operation first looks whether its pages are such a run, and
then works on a slice.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from .page_ids import Ids, PageIds, as_ids, first_of, one

FREE: Final = 0
LEASE: Final = 1
TREE: Final = 2
FLIGHT: Final = 3
UNHOOKED: Final = 4
OWNERS: Final = ("free", "leases", "tree", "flight", "unhooked")[1:]
_NULL_OWNER: Final = 255  # of the null page
_LOOP_MAX_PAGES: Final = 6  # up to so many pages a loop is quicker than looking whether they are a run
_RUN_CHECK_MIN_PAGES: Final = 16  # up to so many a loop is quicker than numpy's calls
_MARKS: Final = [bytes([owner]) for owner in range(5)]
_NAMES: Final = ("free", "a lease", "the tree", "something in flight", "an unhooked namespace")


_order = b""  # the ids from 0 on, as far as any pool has needed them: what a run is compared with


def _order_upto(capacity: int) -> None:
    global _order
    if len(_order) <= 4 * capacity:
        _order = np.arange(capacity + 1, dtype=np.int32).tobytes()


def _run(raw: PageIds) -> int:
    """The first of these ids if they lie side by side, in order (then they are different pages), else 0."""
    first = first_of(raw)
    return first if raw == _order[4 * first : 4 * first + len(raw)] else 0


class PoolError(Exception):
    """Pages were given back or moved for an owner that does not have them, or more were asked for than there are."""


class PagePool:
    """The pages 1..capacity of one group in one tier; page 0 is never given out."""

    __slots__ = (
        "_owner",
        "_places",
        "_reads",
        "_scratch",
        "_stack",
        "_stack_bytes",
        "by_page",
        "capacity",
        "free",
        "idle",
        "name",
        "owned",
        "owner",
        "page_bytes",
        "readers",
        "watch",
    )

    def __init__(self, name: str, capacity: int, page_bytes: int = 0, by_page: bool = False) -> None:
        _order_upto(capacity)
        self.name = name
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.owner = bytearray(capacity + 1)
        self.owner[0] = _NULL_OWNER
        self._owner = np.frombuffer(self.owner, np.uint8)
        self._stack = np.arange(1, capacity + 1, dtype=np.int32)  # the last `free` of them are free
        self._stack_bytes = self._stack.view(np.uint8).data  # the same memory
        self._places = self._stack_bytes.cast("i")  # and again
        self._scratch: npt.NDArray[np.int32] | None = None
        self.free = capacity
        self.owned = [0, 0, 0, 0, 0]  # by owner: how many pages
        self._reads = array("i", bytes(4 * (capacity + 1)))
        self.readers: Ids = np.frombuffer(self._reads, np.int32)  # the same memory
        self.by_page = by_page  # eviction goes page by page, not by leaves of the tree
        self.idle = 0  # if so: pages of the tree without a reader, which is what eviction may take
        self.watch: Callable[[str, Ids], None] | None = None  # called with "taken" or "freed": for content checks

    @property
    def counts(self) -> list[int]:
        """How many pages are free, and how many each owner has."""
        return [self.free, *self.owned[1:]]

    @property
    def used_bytes(self) -> int:
        return (self.capacity - self.free) * self.page_bytes

    def allocate(self, n: int, owner: int) -> bytes:
        """The ids of n free pages, which are `owner`'s now. Raises PoolError, with nothing changed, if there are not so
        many."""
        free = self.free
        if not 0 < n <= free:
            if not n:
                return b""
            raise PoolError(f"{self.name}: {n} pages asked for, {free} of {self.capacity} are free")
        self.free = free - n
        low = self.capacity - free
        raw = self._stack_bytes[4 * low : 4 * (low + n)].tobytes()
        first = self._places[low]
        if raw == _order[4 * first : 4 * (first + n)]:
            self.owner[first : first + n] = _MARKS[owner] * n
        elif n <= _RUN_CHECK_MIN_PAGES:
            owners = self.owner
            for page in memoryview(raw).cast("i"):
                owners[page] = owner
        else:
            self._owner[self._stack[low : low + n].astype(np.intp)] = owner
        self.owned[owner] += n
        if self.watch is not None:
            self.watch("taken", np.frombuffer(raw, np.int32))
        return raw

    def release(self, raw: PageIds, owner: int) -> None:
        """Give pages back that `owner` owns. Raises PoolError, with nothing changed, if one is not its own."""
        n = len(raw) // 4
        if not n:
            return
        self._change_owner(raw, n, owner, FREE)
        low = self.capacity - self.free
        self._stack_bytes[4 * (low - n) : 4 * low] = raw
        self.free += n
        self.owned[owner] -= n
        if self.watch is not None:
            self.watch("freed", np.frombuffer(raw, np.int32))

    def move(self, raw: PageIds, old: int, new: int) -> None:
        """Make (different) pages of one owner those of another. Raises PoolError, as `release` does."""
        n = len(raw) // 4
        if not n:
            return
        self._change_owner(raw, n, old, new)
        self.owned[old] -= n
        self.owned[new] += n

    def _change_owner(self, raw: PageIds, n: int, old: int, new: int) -> None:
        """Without the counts."""
        owners = self.owner
        if n <= _LOOP_MAX_PAGES:
            pages = memoryview(raw).cast("i").tolist()
            for page in pages:
                if not 0 < page <= self.capacity or owners[page] != old:
                    self._complain(page, old)
            if n > 1 and new == FREE and len(set(pages)) < n:
                self._twice()
            for page in pages:
                owners[page] = new
            return
        first = _run(raw)
        if first > 0 and owners.count(old, first, first + n) == n:
            owners[first : first + n] = _MARKS[new] * n
            return
        ids = np.frombuffer(raw, np.int32)
        at = self._owned(ids, old)
        if new == FREE:
            self._different(ids, at)
        self._owner[at] = new

    def read(self, page: int) -> None:
        """One more reader for a page, which a pool of slots may have to let go some day."""
        count = self._reads[page]
        if not count and self.by_page and self.owner[page] == TREE:
            self.idle -= 1
        self._reads[page] = count + 1

    def unread(self, page: int) -> bool:
        """One reader less; an unhooked page without readers is freed. Returns whether it became idle, so that
        eviction should hear of it."""
        count = self._reads[page]
        if not count:
            self._no_reader(page)
        self._reads[page] = count - 1
        if count == 1:
            owner = self.owner[page]
            if owner == UNHOOKED:
                self.release(one(page), UNHOOKED)
            elif owner == TREE and self.by_page:
                self.idle += 1
                return True
        return False

    def read_unhooked(self, raw: PageIds) -> None:
        """One more reader for each of these different pages, which are unhooked, or will be."""
        self.readers[as_ids(raw)] += 1

    def unread_unhooked(self, raw: PageIds) -> None:
        """One reader less for each of these, which are unhooked; those that nothing reads now are freed."""
        ids = as_ids(raw)
        counts = self.readers[ids]
        if not counts.all():
            self._no_reader(int(ids[counts == 0][0]))
        self.readers[ids] = counts - 1
        self.release(ids[counts == 1].tobytes(), UNHOOKED)

    def _no_reader(self, page: int) -> None:
        raise PoolError(f"{self.name}: page {page} has no reader to leave")

    def free_ids(self) -> Ids:
        ids: Ids = self._stack[self.capacity - self.free :].copy()
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
        if self._scratch is None:
            self._scratch = np.zeros(self.capacity + 1, np.int32)
        order = np.arange(len(ids), dtype=np.int32)
        self._scratch[at] = order
        if 1 in (self._scratch[at] != order).tobytes():
            self._twice()

    def _twice(self) -> None:
        raise PoolError(f"{self.name}: the same page is named twice in one call")

    def _complain(self, page: int, owner: int) -> None:
        if not 0 < page <= self.capacity:
            raise PoolError(f"{self.name}: unknown page {page} (pages are 1 to {self.capacity})")
        raise PoolError(f"{self.name}: page {page} belongs to {_NAMES[self.owner[page]]}, not to {_NAMES[owner]}")
