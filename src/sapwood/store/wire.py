"""How a store and its process talk: frames over a socket, a few numbers each and raw bytes. Nothing is ever pickled.

What goes each way:

    to the process     OPEN (JSON, once)  REGISTER (with a file)  JOB  CLOSE
    from it            OPENED  REGISTERED  REFUSED (kind of error, words)  TAKEN  COUNTS (JSON)  DONE  RELEASED
    a frame            length of the body | kind | body
"""

from __future__ import annotations

import collections
import json
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .keys import HASH_BYTES, Fingerprint, GroupLayout
from .protocol import JobDone, Kind, StoreError

OPEN, REGISTER, JOB, CLOSE, OPENED, REGISTERED, REFUSED, TAKEN, COUNTS, DONE, RELEASED = range(1, 12)
KINDS: Final[tuple[Kind, ...]] = ("exists", "get", "put")
FAILURES = ("", "timeout", "error", "closed")
READ_BYTES = 256 << 10  # bytes that are read at once

_FILES = socket.CMSG_SPACE(4 * 16)  # more than enough: a frame has one file at most
_HEAD = struct.Struct("<IB")
_REGISTER = struct.Struct("<HQIQ")  # group, pages, bytes of a page, where in the file
_JOB = struct.Struct("<QBdIH")  # id, kind, deadline, hashes, groups; then groups, hashes, a page for each of both
_DONE = struct.Struct("<QBBBBH")  # id, failure, held, neglected, answered, size of why; then why, a byte for each page
_ABREAST = struct.Struct("<H")
_TAKEN = struct.Struct("<3Q")
_ID = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")


def frame(kind: int, body: bytes = b"") -> bytes:
    return _HEAD.pack(len(body), kind) + body


class Frames:
    """Bytes as they come, cut into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: memoryview) -> list[tuple[int, bytes]]:
        rest = self._rest
        rest += data
        frames = []
        at = 0
        while len(rest) - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(rest, at)
            begin = at + _HEAD.size
            if len(rest) < begin + size:
                break
            at = begin + size
            frames.append((kind, bytes(rest[begin:at])))
        del rest[:at]
        return frames


class Connection:
    """An end of the socket. Its owner never waits: bytes that cannot be sent yet are kept and sent with later calls."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._came = select.poll()  # asking first costs a third of a BlockingIOError
        self._came.register(end, select.POLLIN)
        self._frames = Frames()
        self._room = memoryview(bytearray(READ_BYTES))
        self._unsent: collections.deque[tuple[memoryview, tuple[int, ...]]] = collections.deque()
        self.unsent = 0  # bytes
        self.files: collections.deque[int] = collections.deque()  # received, in the order of their frames
        self.lost = False  # the other end is closed

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes, file: int | None = None) -> None:
        """Never waits. A file stays the caller's, and must stay open until `unsent` is 0."""
        if self.lost:
            return
        self._unsent.append((memoryview(data), () if file is None else (file,)))
        self.unsent += len(data)
        self.flush()

    def flush(self) -> None:
        while self._unsent and not self.lost:
            data, files = self._unsent.popleft()
            try:
                if files:
                    sent = socket.send_fds(self._socket, [data], files)
                else:
                    sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:  # frames from before can still be read
                self._unsent.clear()
                self.unsent = 0
                return
            self.unsent -= sent
            if sent < len(data):
                self._unsent.appendleft((data[sent:], () if sent else files))
                return

    def receive(self) -> list[tuple[int, bytes]]:
        frames: list[tuple[int, bytes]] = []
        while not self.lost and self._came.poll(0):
            try:
                n, came, _, _ = self._socket.recvmsg_into([self._room], _FILES)
            except BlockingIOError:
                break
            except OSError:
                n = 0
            if n == 0:
                self.lost = True
                break
            for _, _, files in came:
                self.files.extend(struct.unpack(f"@{len(files) // 4}i", files))
            frames += self._frames.feed(self._room[:n])
            if n < len(self._room):
                break
        return frames

    def close(self) -> None:
        self.lost = True
        self._unsent.clear()
        self.unsent = 0
        self._socket.close()


# ---- opening


class Opening(NamedTuple):
    """What the process needs to open the store."""

    uri: str
    fingerprint: Fingerprint
    missing_seconds: float
    missing_capacity: int

    def frame(self) -> bytes:
        print_ = self.fingerprint
        groups = [(g.name, g.family, g.page_bytes, g.window, g.layout) for g in print_.groups]
        fields = (print_.weights.hex(), print_.dtype, print_.page_size, groups, print_.rank, print_.ranks)
        return frame(OPEN, json.dumps((self.uri, fields, self.missing_seconds, self.missing_capacity)).encode())

    @classmethod
    def read(cls, body: bytes) -> Opening:
        uri, (weights, dtype, page_size, groups, rank, ranks), seconds, capacity = json.loads(body)
        layouts = tuple(GroupLayout(*group) for group in groups)
        return cls(uri, Fingerprint(bytes.fromhex(weights), dtype, page_size, layouts, rank, ranks), seconds, capacity)


def refusal(error: Exception) -> bytes:
    words = str(error) if isinstance(error, ValueError | StoreError) else f"{type(error).__name__}: {error}"
    return frame(REFUSED, json.dumps((isinstance(error, ValueError), words)).encode())


def read_refusal(body: bytes) -> Exception:
    wrong, words = json.loads(body)
    return ValueError(words) if wrong else StoreError(words)


def register(group: int, shape: tuple[int, int], offset: int) -> bytes:
    return frame(REGISTER, _REGISTER.pack(group, shape[0], shape[1], offset))


def read_register(body: bytes) -> tuple[int, tuple[int, int], int]:
    group, pages, page_bytes, offset = _REGISTER.unpack(body)
    return group, (pages, page_bytes), offset


def registered(abreast: int) -> bytes:
    """`abreast`: how many threads handle pages side by side."""
    return frame(REGISTERED, _ABREAST.pack(abreast))


def read_registered(body: bytes) -> int:
    return int(_ABREAST.unpack(body)[0])


# ---- jobs


class SentJob(NamedTuple):
    id: int
    kind: Kind
    deadline: float  # of the monotonic clock, which all processes of a machine share
    groups: Sequence[int]
    hashes: bytes
    pages: NDArray[Any]

    def frame(self) -> bytes:
        n, groups = self.pages.shape
        table = self.pages.astype("<i4").tobytes()
        size = _JOB.size + 2 * groups + len(self.hashes) + len(table)
        return b"".join(
            (
                _HEAD.pack(size, JOB),
                _JOB.pack(self.id, KINDS.index(self.kind), self.deadline, n, groups),
                struct.pack(f"<{groups}H", *self.groups),
                self.hashes,
                table,
            )
        )

    @classmethod
    def read(cls, body: bytes) -> SentJob:
        id, kind, deadline, n, groups = _JOB.unpack_from(body)
        names = struct.unpack_from(f"<{groups}H", body, _JOB.size)
        begin = _JOB.size + 2 * groups
        end = begin + HASH_BYTES * n
        table = np.frombuffer(body, "<i4", n * groups, end).reshape(n, groups)
        return cls(id, KINDS[kind], deadline, names, body[begin:end], table.astype(np.int64))


class JobReport(NamedTuple):
    """A JobDone as it travels, with what its sender learnt about the store."""

    id: int
    failed: str
    held: bool
    neglected: bool
    answered: bool
    why: str
    ok: bytes

    @classmethod
    def of(cls, done: JobDone, neglected: bool, answered: bool, why: str) -> JobReport:
        ok = b"".join(mine.tobytes() for mine in done.ok.values())
        return cls(done.job, done.failed, done.held, neglected, answered, why[:500], ok)

    def frame(self) -> bytes:
        why = self.why.encode(errors="replace")
        head = _DONE.pack(self.id, FAILURES.index(self.failed), self.held, self.neglected, self.answered, len(why))
        return frame(DONE, head + why + self.ok)

    @classmethod
    def read(cls, body: bytes) -> JobReport:
        id, failed, held, neglected, answered, length = _DONE.unpack_from(body)
        why = body[_DONE.size : _DONE.size + length].decode(errors="replace")
        return cls(id, FAILURES[failed], bool(held), bool(neglected), bool(answered), why, body[_DONE.size + length :])


def released(id: int) -> bytes:
    return frame(RELEASED, _ID.pack(id))


def read_released(body: bytes) -> int:
    return int(_ID.unpack(body)[0])


def taken(counts: dict[Kind, int]) -> bytes:
    return frame(TAKEN, _TAKEN.pack(*(counts[kind] for kind in KINDS)))


def read_taken(body: bytes) -> dict[Kind, int]:
    return dict(zip(KINDS, _TAKEN.unpack(body), strict=True))


def closing(seconds: float) -> bytes:
    return frame(CLOSE, _SECONDS.pack(seconds))


def read_closing(body: bytes) -> float:
    return float(_SECONDS.unpack(body)[0])
