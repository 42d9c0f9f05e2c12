"""The folder of a file store: whether it may be used, and how many bytes it holds, counted by all its processes.

    sapwood-store       marks the folder as a store, with its version
    usage               used | taken since ever | boot | checksum    one record, changed under the lock
    tmp/<owner>.owner   taken and not settled                        one for each process, locked while it lives
    tmp/<owner>.<n>     files being written by that process

Room is taken before a file is written and given back after it is gone, so a limit holds at all times. A process that
is killed in between leaves the count too high, never too low; counting the files again sets it right, and a damaged
record too. All of it is under one file lock, which the kernel releases when a process dies. A process that is stopped
while it has the lock blocks nobody for long: calls that need the ledger fail with a TimeoutError, and values can be
read all the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import stat
import struct
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .protocol import StoreError

log = logging.getLogger("sapwood.store")

_VERSION = 1
_MARK = "sapwood-store"
_USAGE = struct.Struct("<QQ16s")
_CHECK = struct.Struct("<I")  # of the record before it
_OWED = struct.Struct("<Q")
UNCOUNTED = 2**62  # more than any limit: nothing can be taken before the files have been counted
_BLOCK = 4096
_ENTRY = 512  # what a file costs beside its blocks: its entry in a folder, its inode
_OPEN_LOCK_SECONDS = 5.0  # seconds that opening the folder waits for the lock
_LOCK_SECONDS = 1.0  # seconds that later calls wait for it: pages have deadlines
_LOCK_RETRY_SECONDS = (0.0001, 0.01)  # seconds between two tries, at first and at most


def check_folder(root: str) -> None:
    """A page has a checksum and no signature: a user who can write to the folder decides what a model has read.
    StoreError if other users can; for a group only a warning, since many folders belong to a group of one."""
    try:
        found = os.stat(root)
    except FileNotFoundError:
        return
    if found.st_uid not in (0, os.geteuid()):
        problem = f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}"
    elif found.st_mode & stat.S_IWOTH:
        problem = f"everybody may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        if found.st_mode & stat.S_IWGRP:
            log.warning(
                "file store %s: its group may write to it, and so change what is read from the cache (chmod g-w)", root
            )
        return
    raise StoreError(
        f"file store {root}: {problem}, who could change what is read from the cache; give it a folder of its own, "
        "such as a new one below this, or add trusted=1 to its URI if all who may write there are"
    )


def check_place(root: str) -> None:
    """StoreError where such a folder can be neither made nor written to."""
    above = root
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise StoreError(f"file store {root}: {above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise StoreError(f"file store {root}: {above} cannot be written to")


def reason_of(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def claim(root: str) -> None:
    """Make the folder a store, or check that it is one."""
    path = os.path.join(root, _MARK)
    right = f"sapwood file store {_VERSION}\n"
    if not os.path.exists(path):
        if any(not name.startswith(_MARK) for name in os.listdir(root)) and not os.path.exists(path):
            raise StoreError(f"file store {root}: the folder has other things in it; give it one of its own")
        mine = f"{path}.{os.getpid()}.{threading.get_ident()}"
        try:
            with open(mine, "w") as file:
                file.write(right)
            os.rename(mine, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(mine)
    with open(path, errors="replace", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = file.read(100)
    if found != right:
        raise StoreError(
            f"file store {root}: it is {found.strip()!r:.60}, and this Sapwood reads {right.strip()!r}: "
            "give it another folder, or empty this one"
        )


# ---- how many bytes it holds


def charge(size: int) -> int:
    """What a file of this size counts."""
    return -(-size // _BLOCK) * _BLOCK + _ENTRY


_KEPT = (
    "another process has kept the lock of its ledger (`usage`) for {:g} s, and may be stopped: let it go on, or end it"
)


class Mark(NamedTuple):
    """How things stood when a count of the files began."""

    taken: int
    owed: int


class ByteLedger:
    def __init__(self, root: str, limit: int) -> None:
        self.limit = limit
        self._tmp = os.path.join(root, "tmp")
        os.makedirs(self._tmp, mode=0o700, exist_ok=True)
        self._thread = threading.Lock()
        self._usage = os.open(os.path.join(root, "usage"), os.O_RDWR | os.O_CREAT, 0o600)
        self._numbers = itertools.count()
        self._owed = 0
        self._settled: deque[tuple[int, int]] = deque()  # what was taken and kept, and is not in the ledger yet
        self._name = uuid.uuid4().hex
        self._owner = -1
        self._last = (0, 0, b"")
        try:
            with self._locked(_OPEN_LOCK_SECONDS):
                self._sweep()
                self._owner = os.open(self._owner_path(self._name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(self._owner, fcntl.LOCK_EX)
                os.pwrite(self._owner, _OWED.pack(0), 0)
                used, taken, boot = self._read()
                if boot != _boot():  # after a crash of the machine the record may be older than the files
                    used = UNCOUNTED
                self._write(used, taken)
        except BaseException:
            self.close()
            raise

    def take(self, n: int) -> int:
        """Take room for n bytes. Returns 0; or how many there are too few, or UNCOUNTED, and nothing was taken."""
        with self._locked():
            used, taken, _ = self._read()
            if used >= UNCOUNTED:
                return UNCOUNTED
            over = used + n - self.limit
            if over > 0:
                return over
            # What is owed is written first: a reader in between sees too much, never too little.
            self._owed += n
            os.pwrite(self._owner, _OWED.pack(self._owed), 0)
            self._write(used + n, taken + n)
            return 0

    def settle(self, taken: int, kept: int) -> None:
        """Of `taken` bytes, `kept` are now files; the rest is given back. If the lock cannot be had, the next call that
        has it does this: until then the count is too high."""
        self._settled.append((taken, kept))
        with contextlib.suppress(TimeoutError), self._locked():
            pass

    def remove(self, paths: Sequence[str]) -> tuple[int, int]:
        """Remove files. Returns how many were removed, and the bytes that this freed. A file that another process has
        removed, or that cannot be removed, frees nothing. Something else in a file's place goes too, if it can be
        removed; it was never counted.

        Under the lock, so that no count of the files falls between a file's removal and the new number of bytes.
        """
        files = freed = 0
        with self._locked():
            for path in paths:
                with contextlib.suppress(OSError):
                    found = os.lstat(path)
                    if stat.S_ISDIR(found.st_mode):
                        os.rmdir(path)
                    else:
                        os.unlink(path)
                    if stat.S_ISREG(found.st_mode):
                        files += 1
                        freed += charge(found.st_size)
            self._free(freed)
        return files, freed

    def used(self) -> int:
        """As it was a moment ago: does not wait for the lock."""
        return self._read()[0]

    def taken(self) -> int:
        """All bytes that were ever taken: grows with what is written."""
        return self._read()[1]

    def begin_count(self) -> Mark:
        """Call before counting all files: also removes the unfinished files of dead processes."""
        with self._locked():
            return Mark(self._read()[1], self._sweep())

    def end_count(self, mark: Mark, found: int) -> int:
        """All files were counted since `mark`. A file that is there now was found, or its room was owed at the mark, or
        it was taken since: their sum is never too low, and the count becomes it if it is lower."""
        with self._locked():
            used, taken, _ = self._read()
            if taken >= mark.taken:  # else the record was damaged since, and what was taken is unknown: count again
                used = min(used, found + mark.owed + taken - mark.taken)
                self._write(used, taken)
            return used

    def temporary(self) -> str:
        """The path of a new file, to be written and then moved to its place."""
        return os.path.join(self._tmp, f"{self._name}.{next(self._numbers)}")

    def close(self) -> None:
        self._last = self._read()
        with contextlib.suppress(OSError):
            os.unlink(self._owner_path(self._name))
        owner, usage = self._owner, self._usage
        self._owner = self._usage = -1  # first: another thread may ask what is used
        for fd in (owner, usage):
            if fd >= 0:
                os.close(fd)

    # ---- under the lock

    @contextlib.contextmanager
    def _locked(self, patience: float = _LOCK_SECONDS) -> Iterator[None]:
        until = time.monotonic() + patience
        if not self._thread.acquire(timeout=patience):
            raise TimeoutError(_KEPT.format(patience))
        try:
            self._lock(until, patience)
            try:
                while self._settled:
                    taken, kept = self._settled.popleft()
                    self._free(taken - kept)
                    self._owed -= taken
                    os.pwrite(self._owner, _OWED.pack(self._owed), 0)
                yield
            finally:
                fcntl.flock(self._usage, fcntl.LOCK_UN)
        finally:
            self._thread.release()

    def _lock(self, until: float, patience: float) -> None:
        """The kernel would wait for ever for a process that is stopped."""
        pause, most = _LOCK_RETRY_SECONDS
        while True:
            try:
                return fcntl.flock(self._usage, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError(_KEPT.format(patience)) from None
            time.sleep(pause)
            pause = min(most, 2 * pause)

    def _read(self) -> tuple[int, int, bytes]:
        if self._usage < 0:  # closed
            return self._last
        for _ in range(3):  # a read without the lock may see half of a write
            record = os.pread(self._usage, _USAGE.size + _CHECK.size, 0)
            if record[_USAGE.size :] == _CHECK.pack(zlib.crc32(record[: _USAGE.size])):
                return _USAGE.unpack_from(record)
        return UNCOUNTED, 0, b""  # new, or damaged

    def _write(self, used: int, taken: int) -> None:
        record = _USAGE.pack(used, taken, _boot())
        os.pwrite(self._usage, record + _CHECK.pack(zlib.crc32(record)), 0)

    def _free(self, n: int) -> None:
        used, taken, _ = self._read()
        if used < UNCOUNTED:
            self._write(max(0, used - n), taken)

    def _owner_path(self, name: str) -> str:
        return os.path.join(self._tmp, f"{name}.owner")

    def _sweep(self) -> int:
        """Remove the files of dead processes; return the bytes that living ones owe. What dead processes owed stays
        counted: part of it may have become files."""
        names = os.listdir(self._tmp)
        owed = 0
        living = set()
        for name in names:
            owner, _, kind = name.rpartition(".")
            if kind != "owner":
                continue
            try:
                fd = os.open(os.path.join(self._tmp, name), os.O_RDWR)
            except (FileNotFoundError, IsADirectoryError):
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                record = os.pread(fd, _OWED.size, 0)
                owed += _OWED.unpack(record)[0] if len(record) == _OWED.size else 0
                living.add(owner)
            finally:
                os.close(fd)
        for name in names:
            if name.rpartition(".")[0] not in living:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(os.path.join(self._tmp, name))
        return owed


def _boot() -> bytes:
    """Which start of the machine this is."""
    global _boot_id
    if _boot_id is None:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                _boot_id = uuid.UUID(file.read().strip()).bytes
        except (OSError, ValueError):
            _boot_id = bytes(16)
    return _boot_id


_boot_id: bytes | None = None
