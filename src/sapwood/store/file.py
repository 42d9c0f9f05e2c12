"""`file:///path?size=20GiB`: one file a value, in one folder that several processes use at once.

    sapwood-store       what this folder is, and its version
    usage, tmp/         how many bytes the folder holds (folder.py)
    00/ ... ff/         values, by the sha256 of their key: header, zeros up to 4096, page

A value is written to tmp/ and moved to its place whole. A get opens the file by its name: the index serves eviction
only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .folder import UNCOUNTED, ByteLedger, charge, check_folder, claim, reason_of
from .protocol import FAILED, MISSING, Backend, Got, PutResult, StoreError
from .values import HEAD_BYTES, Item

_BLOCK = 4096  # the header's room: so that pages can be read straight from the disk to where they belong
# No room for this page, and nothing against the others; ENOTEMPTY: a folder with something in it is in its place.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTEMPTY}
# From opening what is no value: a link, a socket, a device that is not there, a file of another user.
_FOREIGN = {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.EPERM}
_TOUCH_AFTER_SECONDS = 30.0  # seconds within which a second use of a file is not written to disk
_EVICTION_BATCH_FILES = 1024  # files that are evicted at once: other processes wait for the ledger meanwhile


class KnownFile(NamedTuple):
    """A file as this process last saw it."""

    charge: int
    used: float


class FileBackend(Backend):
    workers = 3  # two write, or all read
    part_pages = 128
    small_bytes = 128 << 10  # two threads at once take twice as long as in turn, and keep others from the interpreter

    def __init__(self, root: str, limit: int, trusted: bool = False) -> None:
        self.root = root
        self.limit = limit
        try:
            os.makedirs(root, mode=0o700, exist_ok=True)
            if not trusted:
                check_folder(root)
            claim(root)
            self._ledger = ByteLedger(root, limit)
        except TimeoutError as error:
            raise StoreError(f"file store {root}: {error}") from None
        except OSError as error:
            raise StoreError(
                f"file store {root}: {reason_of(error)}; the folder must be one this user can write to"
            ) from None
        self._local = threading.local()
        self._aligned: set[int] = set()
        self._direct = True  # until the file system refuses it
        self._lock = threading.Lock()  # guards the attributes below
        self._index: OrderedDict[bytes, KnownFile] = OrderedDict()  # least recently used first
        self._known = 0
        self._evicted = self._scans = 0
        self._counted_at = 0  # of ledger.taken(), when the files were last counted
        self._scanning = threading.Lock()
        self._scanned = threading.Event()
        self._closing = False
        self._scanner = threading.Thread(target=self._first_scan, name="sapwood-store-scan", daemon=True)
        self._scanner.start()

    def register(self, group: str, array: NDArray[np.uint8]) -> None:
        need = charge(_BLOCK + array.shape[1])
        if need > self.limit:
            raise StoreError(
                f"size of file store {self.root} is {self.limit} bytes; "
                f"one page of group {group!r} needs {need}: give it more"
            )
        if array.ctypes.data % _BLOCK == 0 and array.shape[1] % _BLOCK == 0:
            self._aligned.add(array.ctypes.data)

    # ---- reading

    def exists(self, names: Sequence[str]) -> list[bool]:
        there = []
        for name in names:
            self.gate.give_way()
            there.append(_is_file(self._path(_digest(name))))
        return there

    def get(self, items: Sequence[Item]) -> Iterator[Got]:
        head = self._head()
        start = head[:HEAD_BYTES]
        now = time.time()
        used: list[bytes] = []
        try:
            for i, item in enumerate(items):
                digest = _digest(item.name)
                try:
                    fd = _open(self._path(digest))
                except (FileNotFoundError, NotADirectoryError):
                    yield Got(i, b"", MISSING)
                    continue
                except OSError:  # too many open files, a bad sector: this one key
                    yield Got(i, b"", FAILED)
                    continue
                if fd is None:  # like an empty file: a miss, and the store deletes it
                    yield Got(i, b"", 0)
                    continue
                try:
                    self.gate.give_way()
                    size = self._read(fd, head, item)
                    self.gate.give_way()
                    if self._recently_touched(digest, now):
                        used.append(digest)
                    else:
                        self._touch(digest, fd, charge(size), now)
                except OSError:  # a bad sector, a stale handle: this one key
                    yield Got(i, b"", FAILED)
                    continue
                finally:
                    os.close(fd)
                yield Got(i, start if size >= _BLOCK else head[: min(size, HEAD_BYTES)], max(0, size - _BLOCK))
        finally:
            self._use(used)

    def _read(self, fd: int, head: memoryview, item: Item) -> int:
        """A file in the page cache is copied from there. Others are read straight from the disk if possible, and not
        into the page cache: the host tier keeps the page from now on."""
        into = [head, item.page]
        whole = _BLOCK + len(item.page)
        if self._direct and item.arena.address in self._aligned:
            try:
                size = os.preadv(fd, into, 0, os.RWF_NOWAIT)
                if size == whole:
                    return size
            except BlockingIOError:
                try:
                    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
                    return os.preadv(fd, into, 0)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._direct = False
                    fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self._direct = False
        size = os.preadv(fd, into, 0)
        while _BLOCK <= size < whole:  # a signal, or a file that is really short
            more = os.preadv(fd, [item.page[size - _BLOCK :]], size)
            if not more:
                break
            size += more
        return size

    # ---- writing

    def put(self, items: Sequence[Item]) -> Iterator[PutResult]:
        new: list[tuple[int, Item, bytes]] = []
        for i, item in enumerate(items):
            self.gate.give_way()
            digest = _digest(item.name)
            if self._there(digest, _BLOCK + len(item.page)):
                yield PutResult(i, "")
            else:
                new.append((i, item, digest))
        # Room for all at once, unless that is a large part of the limit.
        need = sum(charge(_BLOCK + len(item.page)) for _, item, _ in new)
        batches = [new] if need <= self.limit // 8 else [[one] for one in new]
        for batch in batches:
            yield from self._put(batch)

    def _put(self, batch: list[tuple[int, Item, bytes]]) -> Iterator[PutResult]:
        if not batch:
            return
        charges = [charge(_BLOCK + len(item.page)) for _, item, _ in batch]
        if not self._take(sum(charges)):
            for i, _, _ in batch:
                yield PutResult(i, "full")
            return
        kept = 0
        try:
            for (i, item, digest), cost in zip(batch, charges, strict=True):
                lost = ""
                try:
                    self._write(item, digest)
                    kept += cost
                    self._note(digest, cost, time.time())
                except OSError as error:
                    lost = "full" if error.errno in _FULL else "error"
                yield PutResult(i, lost)
        finally:
            self._ledger.settle(sum(charges), kept)

    def _write(self, item: Item, digest: bytes) -> None:
        head = self._head()
        head[:HEAD_BYTES] = item.head()
        head[HEAD_BYTES:] = bytes(_BLOCK - HEAD_BYTES)
        temporary = self._ledger.temporary()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                self.gate.give_way()
                size = os.writev(fd, [head, item.page])
                while size < _BLOCK + len(item.page):  # the disk is full, or a signal came: the rest shows which
                    rest = item.page[size - _BLOCK :] if size >= _BLOCK else head[size:]
                    size += os.pwrite(fd, rest, size)
            finally:
                os.close(fd)
            self.gate.give_way()
            place = self._path(digest)
            try:
                os.rename(temporary, place)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
                os.rename(temporary, place)
            except IsADirectoryError:  # anything else in its place was replaced
                os.rmdir(place)
                os.rename(temporary, place)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def delete(self, names: Sequence[str]) -> None:
        self._remove([_digest(name) for name in names])

    def stats(self) -> dict[str, Any]:
        return {
            "used": self._ledger.used(),
            "limit": self.limit,
            "evicted": self._evicted,
            "known": len(self._index),
            "scans": self._scans,
            "direct": self._direct and bool(self._aligned),
        }

    def close(self) -> None:
        self._closing = True
        self._scanner.join()
        self._ledger.close()

    # ---- eviction

    def _take(self, n: int) -> bool:
        """Take room for n bytes; evicts the least recently used files if need be."""
        over = self._ledger.take(n)
        if not over:
            return True
        if n > self.limit:
            return False
        self._scanned.wait()
        counted = False
        while over := self._ledger.take(n):
            if over != UNCOUNTED and not self._outdated() and self._evict(over):
                continue
            if counted:
                return False
            self._scan()
            counted = True
        return True

    def _outdated(self) -> bool:
        """Whether other processes wrote so much that this process's order of use is not the folder's any more. Then
        the files are scanned again, but not before another tenth of the limit was written."""
        return self._known < 0.9 * min(self._ledger.used(), self.limit) and (
            self._ledger.taken() - self._counted_at > self.limit // 10
        )

    def _evict(self, over: int) -> bool:
        """Evict files that count at least `over`, as far as they are known, and one batch at most. False if no file
        went."""
        going: list[bytes] = []
        while over > 0 and len(going) < _EVICTION_BATCH_FILES:
            self.gate.give_way()
            with self._lock:
                if not self._index:
                    break
                digest, known = self._index.popitem(last=False)
                self._known -= known.charge
            try:
                used = os.lstat(self._path(digest)).st_mtime
            except OSError:
                continue
            if used > known.used + 1:  # another process has used it since
                self._note(digest, known.charge, used)
                continue
            going.append(digest)
            over -= known.charge
        return self._remove(going)

    def _remove(self, digests: Sequence[bytes]) -> bool:
        with self._lock:
            for digest in digests:
                known = self._index.pop(digest, None)
                self._known -= known.charge if known else 0
        files, freed = self._ledger.remove([self._path(digest) for digest in digests])
        self._evicted += files
        return freed > 0

    def _there(self, digest: bytes, size: int) -> bool:
        """Whether a file of this size is there already, which is a use of it."""
        try:
            fd = _open(self._path(digest))
        except OSError:
            return False
        if fd is None:
            return False
        try:
            self.gate.give_way()
            if os.fstat(fd).st_size != size:
                return False
            now = time.time()
            if self._recently_touched(digest, now):
                self._use([digest])
            else:
                self._touch(digest, fd, charge(size), now)
        finally:
            os.close(fd)
        return True

    def _recently_touched(self, digest: bytes, now: float) -> bool:
        """Whether the file's mtime is near enough to now."""
        known = self._index.get(digest)
        return known is not None and now <= known.used + _TOUCH_AFTER_SECONDS

    def _touch(self, digest: bytes, fd: int, cost: int, now: float) -> None:
        with contextlib.suppress(OSError):  # a file system that became read-only still serves
            os.utime(fd, (now, now))
        self._note(digest, cost, now)

    def _use(self, digests: Sequence[bytes]) -> None:
        """These are the most recently used now, in the order of this process."""
        with self._lock:
            for digest in digests:
                if digest in self._index:
                    self._index.move_to_end(digest)

    def _note(self, digest: bytes, cost: int, used: float) -> None:
        with self._lock:
            before = self._index.pop(digest, None)
            self._index[digest] = KnownFile(cost, used)
            self._known += cost - (before.charge if before else 0)

    def _first_scan(self) -> None:
        try:
            self._scan()
        except OSError:
            pass  # the first put that needs room tries again
        finally:
            self._scanned.set()

    def _scan(self) -> None:
        """Look at every file: corrects the count and the order of eviction. There may be a million files, so no call
        keeps the interpreter for all of them at once, as a sort of tuples would."""
        with self._scanning:
            mark = self._ledger.begin_count()
            began = time.time()
            times, costs = array("d"), array("q")
            digests: list[bytes] = []
            for shard in range(256):
                if self._closing:
                    return
                try:
                    entries = os.scandir(f"{self.root}/{shard:02x}")
                except (FileNotFoundError, NotADirectoryError):
                    continue
                with entries:
                    for entry in entries:
                        try:
                            found = entry.stat(follow_symlinks=False)
                            digest = bytes.fromhex(entry.name)
                        except (FileNotFoundError, ValueError):
                            continue
                        if not stat.S_ISREG(found.st_mode):
                            continue
                        times.append(found.st_mtime)
                        costs.append(charge(found.st_size))
                        digests.append(digest)
                        self.gate.give_way()
            index: OrderedDict[bytes, KnownFile] = OrderedDict()
            for i in map(int, np.argsort(np.frombuffer(times))) if times else ():
                index[digests[i]] = KnownFile(costs[i], times[i])
                self.gate.give_way()
            with self._lock:
                before = self._index
                for digest, known in before.items():  # files written or used meanwhile are newer in the old index
                    if known.used >= began if digest not in index else known.used > index[digest].used:
                        index[digest] = known
                        index.move_to_end(digest)
                self._index = index
                self._known = sum(known.charge for known in index.values())
            self._ledger.end_count(mark, sum(costs))
            self._counted_at = mark.taken
            self._scans += 1
            while before:
                before.popitem()
                self.gate.give_way()

    # ---- helpers

    def _path(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self.root}/{name[:2]}/{name}"

    def _head(self) -> memoryview:
        """A block for a header, aligned, one a thread."""
        head = getattr(self._local, "head", None)
        if head is None:
            head = self._local.head = memoryview(mmap.mmap(-1, _BLOCK))
        return head


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _open(path: str) -> int | None:
    """Open a value's file. None if something else is in its place, which must neither be waited for (a FIFO) nor read
    (a device, the target of a link), or if it may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in _FOREIGN:
            return None
        raise
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    if not regular:
        os.close(fd)
        return None
    return fd


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
