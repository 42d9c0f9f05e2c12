"""Page pools: who owns each page of one group in one tier. Nothing here knows tokens, trees or requests.

A page has exactly one owner at any time, kept in a byte a page, so that a double release or a page given
out twice is an error at once and not a wrong answer later. Beside the owner a page has a reader count: how
many leases, copies and transfers read it *by page* (windows, snapshots, and all that was unhooked).

Pages that were given out together mostly lie side by side, and are handed on together: so every operation first looks
whether its pages are such a run, and then works on a slice. Ids come and go as the bytes of int32 that tables are made
of (`take`, `give`, `hand`), or as arrays (`allocate`, `release`, `move`), which cost a little more.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
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
_FEW: Final = 6  # up to so many pages a loop beats looking whether they are a run ...
_SOME: Final = 16  # ... and numpy, whose every call costs as much as a dozen turns
_CROWD: Final = 255  # so many readers, or more
_ONE_MORE: Final = bytes([*range(1, 256), 0])
_ONE_LESS: Final = bytes([255, *range(255)])
_MARKS: Final = [bytes([owner]) for owner in range(5)]
_FIRST: Final = Struct("<i").unpack_from
_NAMES: Final = ("free", "a lease", "the tree", "something in flight", "an unhooked namespace")


_order = b""  # the ids from 0 on, as far as any pool has needed them: what a run is compared with


def _order_upto(capacity: int) -> None:
    global _order
    if len(_order) <= 4 * capacity:
        _order = np.arange(capacity + 1, dtype=np.int32).tobytes()


def _run(raw: bytes | bytearray) -> int:
    """The first of these ids if they lie side by side, in order (then they are different pages), else 0."""
    first = _FIRST(raw)[0]
    return first if raw == _order[4 * first : 4 * first + len(raw)] else 0


def _pairs(counts: bytes, owners: bytes) -> list[tuple[int, int]]:
    return list(zip(counts, owners, strict=True))


class PoolError(RuntimeError):
    """Pages were given back or moved by somebody who does not own them, or more were asked for than there are."""


class PagePool:
    """The pages 1..capacity of one group in one tier; page 0 is never given out."""

    __slots__ = (
        "_crowds",
        "_low",
        "_owner",
        "_places",
        "_reads",
        "_scratch",
        "_stack",
        "_stack_bytes",
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
        _order_upto(capacity)
        self.name = name
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.owner = bytearray(capacity + 1)
        self.owner[0] = _NOBODY
        self._owner = np.frombuffer(self.owner, np.uint8)
        self._stack = np.arange(1, capacity + 1, dtype=np.int32)  # free from `_low` on; grows towards the front
        self._stack_bytes = self._stack.view(np.uint8).data  # the same memory
        self._places = self._stack_bytes.cast("i")  # and again
        self._low = 0
        self._scratch: npt.NDArray[np.int32] | None = None
        self.counts = [capacity, 0, 0, 0, 0]
        self._reads = bytearray(capacity + 1)
        self.readers: npt.NDArray[np.uint8] = np.frombuffer(self._reads, np.uint8)  # the same memory
        self._crowds: dict[int, int] = {}  # pages with more readers than a byte can count: how many more
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
        return np.frombuffer(self.take(n, owner), np.int32)

    def take(self, n: int, owner: int) -> bytes:
        """`allocate`, as bytes."""
        low = self._low
        end = low + n
        if n < 1 or end > self.capacity:
            if not n:
                return b""
            raise PoolError(f"{self.name}: {n} pages asked for, {self.free} of {self.capacity} are free")
        raw = self._stack_bytes[4 * low : 4 * end].tobytes()
        self._low = end
        first = self._places[low]
        if n == 1:
            self.owner[first] = owner
        elif raw == _order[4 * first : 4 * (first + n)]:
            self.owner[first : first + n] = _MARKS[owner] * n
        elif n <= _SOME:
            owners = self.owner
            for page in memoryview(raw).cast("i"):
                owners[page] = owner
        else:
            self._owner[self._stack[low : low + n].astype(np.intp)] = owner
        self.counts[FREE] -= n
        self.counts[owner] += n
        if self.watch is not None:
            self.watch("taken", np.frombuffer(raw, np.int32))
        return raw

    def allocate_one(self, owner: int) -> int:
        """`allocate` for a single page."""
        low = self._low
        if low >= self.capacity:
            raise PoolError(f"{self.name}: a page asked for, none of {self.capacity} is free")
        page = self._places[low]
        self._low = low + 1
        self.owner[page] = owner
        self.counts[FREE] -= 1
        self.counts[owner] += 1
        if self.watch is not None:
            self.watch("taken", np.array([page], np.int32))
        return page

    def release(self, ids: Ids, owner: int) -> None:
        """Give pages back that `owner` owns. Raises PoolError, with nothing changed, if one is not its own."""
        self.give(ids.tobytes(), owner)

    def give(self, raw: bytes | bytearray, owner: int) -> None:
        """`release`, as bytes."""
        n = len(raw) // 4
        if n == 1:
            return self.release_one(_FIRST(raw)[0], owner)
        if not n:
            return
        self._hand(raw, n, owner, FREE)
        low = self._low
        self._stack_bytes[4 * (low - n) : 4 * low] = raw
        self._low = low - n
        self.counts[owner] -= n
        self.counts[FREE] += n
        if self.watch is not None:
            self.watch("freed", np.frombuffer(raw, np.int32))

    def release_one(self, page: int, owner: int) -> None:
        """`release` for a single page."""
        if not 0 < page <= self.capacity or self.owner[page] != owner:
            self._complain(page, owner)
        self.owner[page] = FREE
        self.counts[owner] -= 1
        self.counts[FREE] += 1
        low = self._low = self._low - 1
        self._places[low] = page
        if self.watch is not None:
            self.watch("freed", np.array([page], np.int32))

    def move(self, ids: Ids, old: int, new: int) -> None:
        """Hand (different) pages from one owner to another."""
        self.hand(ids.tobytes(), old, new)

    def hand(self, raw: bytes | bytearray, old: int, new: int) -> None:
        """`move`, as bytes."""
        n = len(raw) // 4
        if not n:
            return
        first = _FIRST(raw)[0]
        if n > 1 and raw == _order[4 * first : 4 * (first + n)] and self.owner.count(old, first, first + n) == n:
            self.owner[first : first + n] = _MARKS[new] * n
        else:
            self._hand(raw, n, old, new)
        self.counts[old] -= n
        self.counts[new] += n

    def move_one(self, page: int, old: int, new: int) -> None:
        """`move` for a single page."""
        if not 0 < page <= self.capacity or self.owner[page] != old:
            self._complain(page, old)
        self.owner[page] = new
        self.counts[old] -= 1
        self.counts[new] += 1

    def _hand(self, raw: bytes | bytearray, n: int, old: int, new: int) -> int:
        """`hand`, without the counts. Returns the first of the ids if they are seen to be a run, else 0."""
        if n <= _FEW:
            self._hand_few(memoryview(raw).cast("i").tolist(), old, new)
            return 0
        first = _run(raw)
        if first > 0 and self.owner.count(old, first, first + n) == n:
            self.owner[first : first + n] = _MARKS[new] * n
            return first
        ids = np.frombuffer(raw, np.int32)
        at = self._owned(ids, old)
        if new == FREE:
            self._different(ids, at)
        self._owner[at] = new
        return 0

    def _hand_few(self, pages: list[int], old: int, new: int) -> None:
        owners = self.owner
        for page in pages:
            if not 0 < page <= self.capacity or owners[page] != old:
                self._complain(page, old)
        if new == FREE and len(set(pages)) < len(pages):
            self._twice()
        for page in pages:
            owners[page] = new

    def read_by(self, page: int) -> int:
        """How many read it."""
        count = self._reads[page]
        return count if count < _CROWD else count + self._crowds.get(page, 0)

    def read_counts(self) -> npt.NDArray[np.int32]:
        """By page: how many read it."""
        counts = self.readers.astype(np.int32)
        for page, more in self._crowds.items():
            counts[page] += more
        return counts

    def count_readers(self, readers: dict[int, int]) -> None:
        """These pages, which nobody was counted to read, have so many readers."""
        for page, count in readers.items():
            self._reads[page] = count if count < _CROWD else _CROWD
            if count > _CROWD:
                self._crowds[page] = count - _CROWD

    def read_one(self, page: int) -> None:
        """`read` for a single page."""
        count = self._reads[page]
        if count == _CROWD:
            self._crowds[page] = self._crowds.get(page, 0) + 1
            return
        if not count and self.by_page and self.owner[page] == TREE:
            self.idle -= 1
        self._reads[page] = count + 1

    def unread_one(self, page: int) -> bool:
        """`unread` for a single page."""
        count = self._reads[page]
        if count > 1:
            if count < _CROWD or not self._one_of_a_crowd(page):
                self._reads[page] = count - 1
            return False
        if not count:
            self._unread_by_nobody(page)
        self._reads[page] = 0
        owner = self.owner[page]
        if owner == TREE:
            if self.by_page:
                self.idle += 1
                return True
        elif owner == UNHOOKED:
            self.release_one(page, UNHOOKED)
        return False

    def _one_of_a_crowd(self, page: int) -> bool:
        """One reader less of a page with more readers than a byte can count; False if it has not."""
        more = self._crowds.get(page, 0)
        if more > 1:
            self._crowds[page] = more - 1
        elif more:
            del self._crowds[page]
        return more > 0

    def unread_each(self, pages: list[int]) -> list[int]:
        """`unread` for one page after the other. Returns where in `pages` those stand that became idle."""
        reads, idle = self._reads, []
        for at, page in enumerate(pages):
            count = reads[page]
            if 1 < count < _CROWD:
                reads[page] = count - 1
            elif self.unread_one(page):
                idle.append(at)
        return idle

    def read(self, ids: Ids) -> None:
        """One more reader for each of `ids`, which must be different pages."""
        self.read_raw(ids.tobytes())

    def read_raw(self, raw: bytes | bytearray) -> None:
        """`read`, as bytes."""
        n = len(raw) // 4
        reads = self._reads
        if n > _FEW:
            first = _run(raw)
            if first > 0:
                before = reads[first : first + n]
                idle = before.count(0) if self.by_page else 0
                if _CROWD not in before and (not idle or self.owner.count(TREE, first, first + n) == n):
                    reads[first : first + n] = before.translate(_ONE_MORE)
                    self.idle -= idle
                    return
            if n > _SOME:
                self._read_scattered(np.frombuffer(raw, np.int32))
                return
        owners, idle = self.owner, 0
        for page in memoryview(raw).cast("i"):
            count = reads[page]
            if count == _CROWD:
                self.read_one(page)
                continue
            reads[page] = count + 1
            if not count and owners[page] == TREE:
                idle += 1
        if idle and self.by_page:
            self.idle -= idle

    def _read_scattered(self, ids: Ids) -> None:
        at = ids.astype(np.intp)
        counts = self.readers[at].tobytes()
        if _CROWD in counts:
            for page in ids.tolist():
                self.read_one(page)
            return
        self.readers[at] = np.frombuffer(counts.translate(_ONE_MORE), np.uint8)
        if self.by_page and 0 in counts:
            owners = self._owner[at].tobytes()
            whole = owners.count(TREE) == len(ids)  # as mostly
            self.idle -= counts.count(0) if whole else _pairs(counts, owners).count((0, TREE))

    def unread(self, ids: Ids) -> bool:
        """One reader less for each of `ids`; unhooked ones that nobody reads now are freed. Returns whether one of
        them became idle, so that eviction should hear of it."""
        return self.unread_raw(ids.tobytes())

    def unread_raw(self, raw: bytes | bytearray) -> bool:
        """`unread`, as bytes."""
        n = len(raw) // 4
        reads = self._reads
        if n > _FEW:
            first = _run(raw)
            if first > 0 and self.owner.count(TREE, first, first + n) == n:
                before = reads[first : first + n]
                if 0 in before:
                    self._unread_by_nobody(first + before.index(0))
                if _CROWD not in before:
                    reads[first : first + n] = before.translate(_ONE_LESS)
                    idle = before.count(1) if self.by_page else 0
                    self.idle += idle
                    return idle > 0
            if n > _SOME:
                return self._unread_scattered(np.frombuffer(raw, np.int32))
        pages = memoryview(raw).cast("i").tolist()
        counts = [reads[page] for page in pages]
        if 0 in counts:
            self._unread_by_nobody(pages[counts.index(0)])
        owners, idle = self.owner, 0
        for page, count in zip(pages, counts, strict=True):
            if 1 < count < _CROWD:
                reads[page] = count - 1
            elif count == 1 and owners[page] == TREE:
                reads[page] = 0
                idle += 1
            else:
                self.unread_one(page)
        if not self.by_page:
            return False
        self.idle += idle
        return idle > 0

    def _unread_scattered(self, ids: Ids) -> bool:
        at = ids.astype(np.intp)
        counts = self.readers[at].tobytes()
        if 0 in counts:
            self._unread_by_nobody(int(ids[counts.index(0)]))
        if _CROWD in counts:
            return max([self.unread_one(page) for page in ids.tolist()])
        self.readers[at] = np.frombuffer(counts.translate(_ONE_LESS), np.uint8)
        if 1 not in counts:
            return False
        owners = self._owner[at].tobytes()
        idle = 0
        if owners.count(TREE) == len(ids):  # as mostly
            idle = counts.count(1)
        else:
            left = _pairs(counts, owners)
            idle = left.count((1, TREE))
            if (1, UNHOOKED) in left:
                gone = [page for page, pair in zip(ids.tolist(), left, strict=True) if pair == (1, UNHOOKED)]
                self.release(np.array(gone, np.int32), UNHOOKED)
        if self.by_page:
            self.idle += idle
        return self.by_page and idle > 0

    def unread_unhooked(self, ids: Ids) -> Ids:
        """One reader less for each of `ids`, which are unhooked. Returns those that nobody reads now: nobody frees
        them but the caller."""
        last = []
        for page in ids.tolist():
            count = self._reads[page]
            if not count:
                self._unread_by_nobody(page)
            if count < _CROWD or not self._one_of_a_crowd(page):
                self._reads[page] = count - 1
            if count == 1:
                last.append(page)
        return np.array(last, np.int32)

    def _unread_by_nobody(self, page: int) -> None:
        raise PoolError(f"{self.name}: page {page} has no reader to leave")

    def share(self, raw: bytes | bytearray) -> None:
        """A lease hands pages, as bytes, to the tree and goes on reading them."""
        n = len(raw) // 4
        first = self._hand(raw, n, LEASE, TREE)
        reads = self._reads  # nobody else reads what a lease has alone
        if first:
            reads[first : first + n] = b"\1" * n
        elif n <= _SOME:
            for page in memoryview(raw).cast("i"):
                reads[page] = 1
        else:
            self.readers[np.frombuffer(raw, np.int32).astype(np.intp)] = 1
        self.counts[LEASE] -= n
        self.counts[TREE] += n

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
