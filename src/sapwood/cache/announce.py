"""Telling what happens to pages: hashes when they become real, events when they come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .events import MEDIUM, BlockRemoved, BlockStored
from .hashes import ensure_hashes
from .node import Node
from .pool import Ids

if TYPE_CHECKING:
    from .tree import Tree


def tell_stored(tree: Tree, node: Node, tier: int, first: int, last: int) -> None:
    """Announce the pages [first, last) of the path to `node`, all of them real in `tier` since just now."""
    if first >= node.start:
        low, high, size = first - node.start, last - node.start, tree.page_bytes
        hashes = ensure_hashes(node, high, size)
        tree.events.append(
            BlockStored(
                bytes(hashes[32 * low : 32 * high]),
                _parent_digest(tree, node, low),
                bytes(node.edge[low * size : high * size]),
                tree.page_size,
                MEDIUM[tier],
                node.root.namespace,
            )
        )
        return
    parts = tree.cover(node, first, last)
    parts.reverse()
    digests: list[bytes] = []
    tokens: list[bytes] = []
    parent: bytes | None = None
    for at, low, high in parts:
        hashes = ensure_hashes(at, high, tree.page_bytes)
        if not digests:
            parent = _parent_digest(tree, at, low)
        digests.append(bytes(hashes[32 * low : 32 * high]))
        tokens.append(bytes(memoryview(at.edge)[low * tree.page_bytes : high * tree.page_bytes]))
    if digests:
        tree.events.append(
            BlockStored(b"".join(digests), parent, b"".join(tokens), tree.page_size, MEDIUM[tier], node.root.namespace)
        )


def hash_path(tree: Tree, node: Node, first: int, last: int) -> None:
    """Compute the hashes of the pages [first, last) of the path to `node`."""
    for at, _, high in reversed(tree.cover(node, first, last)):
        ensure_hashes(at, high, tree.page_bytes)


def _parent_digest(tree: Tree, node: Node, low: int) -> bytes | None:
    if low:
        assert node.hashes is not None
        return bytes(node.hashes[32 * (low - 1) : 32 * low])
    parent = node.parent
    assert parent is not None
    if parent.parent is None:
        return None
    return bytes(ensure_hashes(parent, parent.n, tree.page_bytes)[-32:])


def tell_removed(tree: Tree, node: Node, tier: int, columns: range | Ids) -> None:
    """Announce that pages of `node` (counted from its start) leave a tier, the deepest first."""
    if not len(columns) or not node.root.hooked:
        return
    hashes = ensure_hashes(node, int(columns[-1]) + 1, tree.page_bytes)
    rows = np.frombuffer(bytes(hashes), np.uint8).reshape(-1, 32)
    gone = rows[np.asarray(columns, np.int64)[::-1]].tobytes()
    tree.events.append(BlockRemoved(gone, MEDIUM[tier], node.root.namespace))
