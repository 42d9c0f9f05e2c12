"""Telling what happens to pages: hashes when they become real, events when they come and go."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from .events import MEDIUM, BlockRemoved, BlockStored
from .group import DEVICE
from .hashes import ensure_hashes
from .node import Node
from .page_ids import Ids

if TYPE_CHECKING:
    from .tree import Cover, Tree

_new = tuple.__new__  # a NamedTuple in a third of the time
_GPU = MEDIUM[DEVICE]


def tell_stored(tree: Tree, node: Node, tier: int, first: int, last: int) -> None:
    """Announce the pages [first, last) of the path to `node`, all of them real in `tier` since just now."""
    tell_parts(tree, tree.cover(node, first, last), tier)


def tell_parts(tree: Tree, parts: Cover, tier: int) -> None:
    """`tell_stored` for pages whose nodes are at hand, deepest first."""
    size = tree.page_bytes
    node, low, high = parts[0]
    hashes = node.hashes
    if hashes is None or len(hashes) < 32 * high:
        hashes = ensure_hashes(node, high, size)
    if len(parts) == 1:
        digests, tokens = bytes(hashes[32 * low : 32 * high]), bytes(node.edge[low * size : high * size])
    else:
        parts = parts[::-1]
        digests = b"".join([at.hashes[32 * low : 32 * high] for at, low, high in parts])  # type: ignore[index]
        tokens = b"".join([at.edge[low * size : high * size] for at, low, high in parts])
        node, low, _ = parts[0]
        hashes = node.hashes
        assert hashes is not None
    parent = bytes(hashes[32 * low - 32 : 32 * low]) if low else _digest_above(tree, node)
    stored = (digests, parent, tokens, tree.page_size, MEDIUM[tier], node.root.namespace)
    tree.events.append(_new(BlockStored, stored))


def tell_page(tree: Tree, node: Node, page: bytes) -> None:
    """`tell_stored` on the device for one page more at the end of `node`: the loop of decoding rows."""
    hashes, n = node.hashes, node.n
    if hashes and len(hashes) == 32 * n - 32:
        parent = bytes(hashes[32 * n - 64 :])
        digest = sha256(parent + page).digest()
        hashes += digest
    else:
        above = node.parent
        if hashes is not None or n > 1 or above is None or not above.hashes or len(above.hashes) != 32 * above.n:
            tell_stored(tree, node, DEVICE, node.end - 1, node.end)
            return
        parent = bytes(above.hashes[-32:])
        digest = sha256(parent + page).digest()
        node.hashes = bytearray(digest)
    tree.events.append(_new(BlockStored, (digest, parent, page, tree.page_size, _GPU, node.root.namespace)))


def hash_path(tree: Tree, node: Node, first: int, last: int) -> None:
    """Compute the hashes of the pages [first, last) of the path to `node`."""
    for at, _, high in reversed(tree.cover(node, first, last)):
        ensure_hashes(at, high, tree.page_bytes)


def _digest_above(tree: Tree, node: Node) -> bytes | None:
    """The digest of the page before `node`, if there is one."""
    parent = node.parent
    assert parent is not None
    if parent.parent is None:
        return None
    hashes = parent.hashes
    if hashes is None or len(hashes) < 32 * parent.n:
        hashes = ensure_hashes(parent, parent.n, tree.page_bytes)
    return bytes(hashes[-32:])


def tell_removed(tree: Tree, node: Node, tier: int, columns: range | Ids) -> None:
    """Announce that pages of `node` (counted from its start) leave a tier, the deepest first."""
    if not len(columns) or not node.root.attached:
        return
    hashes = ensure_hashes(node, int(columns[-1]) + 1, tree.page_bytes)
    rows = np.frombuffer(bytes(hashes), np.uint8).reshape(-1, 32)
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
