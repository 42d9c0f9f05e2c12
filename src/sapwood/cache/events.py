"""KV events: what the tree really holds, block by block, for those who route requests; and where they are made.

They are a log that the caller drains. An event keeps tokens and digests as the bytes they already are; the lists that a
router wants are made when they are asked for, so that announcing a long prompt costs the scheduler's step nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from .group import DEVICE
from .hashes import DIGEST_BYTES, digest_above, digests_of, ensure_hashes, hash_path
from .namespace import Namespace
from .node import Node
from .page_ids import Ids

if TYPE_CHECKING:
    from .tree import Tree

MEDIUM: Final = ("GPU", "CPU", "STORAGE")


def block_hash(digest: bytes) -> int:
    """The wire form of a page's sha256: its first 8 bytes as a signed big-endian integer."""
    return int.from_bytes(digest[:8], "big", signed=True)


def _block_hashes(digests: bytes) -> list[int]:
    hashes: list[int] = np.frombuffer(digests, ">i8")[:: DIGEST_BYTES // 8].tolist()
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


def announce_stored(tree: Tree, node: Node, tier: int, first: int, last: int) -> None:
    """Announce the pages [first, last) of the path to `node`, all of them real in `tier` since just now."""
    size = tree.page_bytes
    if first >= node.start:  # all of it in one node, as mostly
        top, low, high = node, first - node.start, last - node.start
        hashes = ensure_hashes(node, high, size)
        digests, tokens = digests_of(hashes, low, high), bytes(node.edge[low * size : high * size])
    else:
        parts = tree.cover(node, first, last)
        top, low, high = parts[-1]
        digests = hash_path(tree, node, first, last)
        hashes = ensure_hashes(top, high, size)
        tokens = b"".join([at.edge[begin * size : end * size] for at, begin, end in reversed(parts)])
    parent = digests_of(hashes, low - 1, low) if low else digest_above(top, size)
    tree.events.append(BlockStored(digests, parent, tokens, tree.page_size, MEDIUM[tier], node.root.namespace))


def announce_removed(tree: Tree, node: Node, tier: int, columns: range | Ids) -> None:
    """Announce that pages of `node` (counted from its start) leave a tier, the deepest first."""
    if not len(columns) or not node.root.attached:
        return
    hashes = ensure_hashes(node, int(columns[-1]) + 1, tree.page_bytes)
    rows = np.frombuffer(bytes(hashes), np.uint8).reshape(-1, DIGEST_BYTES)
    gone = rows[np.asarray(columns, np.int64)[::-1]].tobytes()
    tree.events.append(BlockRemoved(gone, MEDIUM[tier], node.root.namespace))


def announced(tree: Tree, node: Node, tier: int) -> Ids:
    """The pages of `node`, from its start, that events have announced in a tier: those that are real."""
    g = tree.announced_group
    columns = tree.shape_of[g].columns(node, tier, g)
    if tier == DEVICE and node.promised and g not in tree.slots:
        real = [node.is_real(g, node.start + int(at), g in tree.closed) for at in columns]
        columns = columns[np.array(real, np.bool_)]
    return columns
