"""KV events: what the tree really holds, told block by block to whoever routes requests. A log, drained by the caller.

An event keeps tokens and digests as the bytes they already are; the lists a router wants are made when asked for,
so that announcing a long prompt costs the scheduler's step nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from .namespace import Namespace

MEDIUM: Final = ("GPU", "CPU", "STORAGE")


def block_hash(digest: bytes) -> int:
    """The wire form of a page's sha256: its first 8 bytes as a signed big-endian integer."""
    return int.from_bytes(digest[:8], "big", signed=True)


def _block_hashes(digests: bytes) -> list[int]:
    hashes: list[int] = np.frombuffer(digests, ">i8")[::4].tolist()
    return hashes


class BlockStored(NamedTuple):
    """Pages that became real in a tier: consecutive pages of one path, root side first. `parent_digest` is that of the
    page before them, None for the first page of a path, whose chain begins with `namespace.digest()`."""

    digests: bytes
    parent_digest: bytes | None
    tokens: bytes
    block_size: int
    medium: str
    namespace: Namespace

    @property
    def block_hashes(self) -> list[int]:
        return _block_hashes(self.digests)

    @property
    def parent_block_hash(self) -> int | None:
        return None if self.parent_digest is None else block_hash(self.parent_digest)

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.tokens, np.int32).tolist()
        return ids


class BlockRemoved(NamedTuple):
    """Pages that left a tier, children before their parents."""

    digests: bytes
    medium: str
    namespace: Namespace

    @property
    def block_hashes(self) -> list[int]:
        return _block_hashes(self.digests)


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Everything this engine had announced is gone, in all its tiers."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
