"""What is stored: a header and the bytes of one page of one group. A value that does not fit its header is a miss.

    0      8        10      12     16        24            56      88         104    128
    magic  version  group   zeros  length    fingerprint   hash    checksum   zeros  | page bytes ...

Everything before the checksum is known before a value is read, so it is compared as it is; the checksum is xxh3_128 of
the page's bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .keys import HASH_BYTES, Fingerprint, key_prefix

MAGIC = b"SAPWOOD\0"
VERSION = 1
HEAD_BYTES = 128
REASONS = ("short", "magic", "version", "fingerprint", "length", "key", "checksum")

_ARENA = struct.Struct("<8sHHIQ32s")  # what all pages of a group have in common; then the hash
_KNOWN = slice(0, _ARENA.size + HASH_BYTES)
_CHECKSUM = slice(_KNOWN.stop, _KNOWN.stop + 16)
_PADDING = bytes(HEAD_BYTES - _CHECKSUM.stop)

try:
    import xxhash

    checksum = xxhash.xxh3_128_digest
except ImportError:  # an engine without a store runs all the same; `open_store` reports what is missing

    def checksum(page: memoryview) -> bytes:  # type: ignore[misc]
        raise ModuleNotFoundError("a store needs the package xxhash: pip install xxhash")


class Arena:
    """The registered host memory of one group, page after page."""

    __slots__ = ("address", "array", "fingerprint", "group", "head", "index", "page_bytes", "pages", "prefix", "view")

    def __init__(self, fingerprint: Fingerprint, group: str, array: NDArray[np.uint8]) -> None:
        layouts = fingerprint.in_order()
        names = [layout.name for layout in layouts]
        if group not in names:
            raise ValueError(f"group must be one of the fingerprint's {names!r:.200}, got {group!r:.60}")
        self.index = names.index(group)
        self.page_bytes = layouts[self.index].page_bytes
        if not (
            isinstance(array, np.ndarray)
            and array.dtype == np.uint8
            and array.ndim == 2
            and array.shape[1] == self.page_bytes
            and array.flags.c_contiguous
            and array.flags.writeable
        ):
            got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else repr(array)
            raise ValueError(
                f"memory of group {group!r} must be a writeable C-contiguous uint8 array [pages, {self.page_bytes}], "
                f"got {got:.60}"
            )
        self.group = group
        self.array = array
        self.pages = len(array)
        self.address = int(array.ctypes.data)
        self.view = memoryview(array.reshape(-1))  # type: ignore[arg-type]
        self.fingerprint = fingerprint.digest()
        self.prefix = key_prefix(self.fingerprint, self.index)
        self.head = _ARENA.pack(MAGIC, VERSION, self.index, 0, self.page_bytes, self.fingerprint)


class Item:
    """One page of a job: the key it is stored under and the memory it lies in."""

    __slots__ = ("arena", "hash", "name", "number", "page")

    def __init__(self, arena: Arena, number: int, digest: bytes) -> None:
        self.arena = arena
        self.number = number
        self.hash = digest
        self.name = arena.prefix + digest.hex()
        size = arena.page_bytes
        self.page = arena.view[number * size : (number + 1) * size]

    @property
    def address(self) -> int:
        return self.arena.address + self.number * self.arena.page_bytes

    def head(self) -> bytes:
        """The header of the value: reads the whole page for its checksum."""
        return b"".join((self.arena.head, self.hash, checksum(self.page), _PADDING))

    def check(self, head: bytes | bytearray | memoryview, size: int) -> str:
        """Why the `size` bytes that were put in the page under this header are not its value; empty if they are."""
        arena = self.arena
        if len(head) < HEAD_BYTES:
            return "short"
        if head[_KNOWN] != arena.head + self.hash:
            magic, version, group, _, _, fingerprint = _ARENA.unpack(head[: _ARENA.size])
            if magic != MAGIC:
                return "magic"
            if version != VERSION:
                return "version"
            if fingerprint != arena.fingerprint:
                return "fingerprint"
            return "key" if group != arena.index or head[_ARENA.size : _KNOWN.stop] != self.hash else "length"
        if size != arena.page_bytes:
            return "short" if size < arena.page_bytes else "length"
        return "" if head[_CHECKSUM] == checksum(self.page) else "checksum"


def digests(hashes: Sequence[bytes] | bytes | bytearray | memoryview) -> bytes:
    """Chain hashes as one run of bytes: given so, or as a sequence of digests."""
    if isinstance(hashes, bytes | bytearray | memoryview):
        run = bytes(hashes)
        if len(run) % HASH_BYTES:
            raise ValueError(f"hashes must be {HASH_BYTES} bytes each, got {len(run)} bytes")
        return run
    for digest in hashes:
        if len(digest) != HASH_BYTES:
            raise ValueError(f"hashes must be {HASH_BYTES} bytes each, got one of {len(digest)}")
    return b"".join(hashes)
