"""Which servers share pages through a store: the fingerprint of a server's memory layout, and the key of a page."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

HASH_BYTES = 32  # of the chain hash of a page, as the cache has it
_MAX_GROUPS = 65536


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group as it lies in memory. `layout` describes the bytes of a page in words (layers, heads, order)."""

    name: str
    family: str
    page_bytes: int
    window: int | None = None
    layout: str = ""

    def __post_init__(self) -> None:
        _text("name of a group", self.name, 1, 256)
        _text(f"family of group {self.name!r}", self.family, 1, 64)
        _text(f"layout of group {self.name!r}", self.layout, 0, 4096)
        _whole(f"page_bytes of group {self.name!r}", self.page_bytes, 1, 2**31 - 1)
        if self.window is not None:
            _whole(f"window of group {self.name!r}", self.window, 1, 2**31 - 1)

    def frames(self) -> bytes:
        window = b"" if self.window is None else self.window.to_bytes(8, "little")
        return b"".join(
            (
                _frame(b"name", self.name.encode()),
                _frame(b"family", self.family.encode()),
                _frame(b"bytes", self.page_bytes.to_bytes(8, "little")),
                _frame(b"window", window),
                _frame(b"layout", self.layout.encode()),
            )
        )


@dataclass(frozen=True)
class Fingerprint:
    """Everything that must be equal before two servers may read each other's pages.

    `weights` is a digest of the weights' *content*. The namespace (adapter, salt, version) is in the chain hash of each
    page. The order in which groups are declared does not matter.
    """

    weights: bytes
    dtype: str
    page_size: int
    groups: tuple[GroupLayout, ...]
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        if not isinstance(self.weights, bytes) or not 16 <= len(self.weights) <= 64:
            raise ValueError(f"weights must be a content digest of 16 to 64 bytes, got {self.weights!r:.60}")
        _text("dtype", self.dtype, 1, 64)
        _whole("page_size", self.page_size, 1, 65536)
        if not isinstance(self.groups, tuple) or not 1 <= len(self.groups) <= _MAX_GROUPS:
            raise ValueError(f"groups must be a tuple of at least one GroupLayout, got {self.groups!r:.60}")
        for group in self.groups:
            if not isinstance(group, GroupLayout):
                raise ValueError(f"groups must hold GroupLayout objects, got {group!r:.60}")
        if len({group.name for group in self.groups}) != len(self.groups):
            raise ValueError(f"groups must have different names, got {[group.name for group in self.groups]!r:.60}")
        _whole("ranks", self.ranks, 1, 65536)
        _whole("rank", self.rank, 0, self.ranks - 1)

    def digest(self) -> bytes:
        """sha256 of all fields, each tagged and framed by its length: no two fingerprints spell the same bytes."""
        parts = [
            b"sapwood.fingerprint.1",
            _frame(b"weights", self.weights),
            _frame(b"dtype", self.dtype.encode()),
            _frame(b"page_size", self.page_size.to_bytes(8, "little")),
            _frame(b"rank", self.rank.to_bytes(8, "little")),
            _frame(b"ranks", self.ranks.to_bytes(8, "little")),
        ]
        parts += [_frame(b"group", group.frames()) for group in self.in_order()]
        return hashlib.sha256(b"".join(parts)).digest()

    def in_order(self) -> list[GroupLayout]:
        """The groups as the fingerprint counts them: a group's place here stands for it in keys."""
        return sorted(self.groups, key=lambda group: group.name)


def key_prefix(fingerprint: bytes, group: int) -> str:
    """The key of a page is this and the hex of its chain hash; both parts have one length, so keys never run together.

    `group` is the group's place in `Fingerprint.in_order()`.
    """
    return f"sapwood:1:{fingerprint.hex()}:{group}:"


def _frame(tag: bytes, value: bytes) -> bytes:
    return b"".join((len(tag).to_bytes(1, "little"), tag, len(value).to_bytes(8, "little"), value))


def _text(what: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, str) or not low <= len(value) <= high or not _encodes(value):
        raise ValueError(f"{what} must be a string of {low} to {high} characters, got {value!r:.60}")


def _whole(what: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{what} must be an integer from {low} to {high}, got {value!r:.60}")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
