"""What the tree holds now: as events, for a router that comes late or has missed some; and as nodes, for an
administrator. The tree stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .events import KVEvent, announce_stored, announced
from .group import DEVICE, HOST
from .node import Node
from .roots import Root
from .tree import Tree

if TYPE_CHECKING:
    from .facade import HybridPrefixCache

_SHOWN_TOKENS = 16  # of a node


def held_events(cache: HybridPrefixCache) -> list[KVEvent]:
    """A `BlockStored` for everything that is announced and was not removed since: tier by tier, each path from its root
    down. After an `AllBlocksCleared` they are worth as much as all events up to now, drained or not. Changes
    nothing but hashes that were not computed yet."""
    tree = cache._tree
    undrained, tree.events = tree.events, []
    try:
        for tier in range(len(tree.tiers)):
            for root in tree.roots.values():
                _announce(tree, root, tier)
        return tree.events
    finally:
        tree.events = undrained


def _announce(tree: Tree, root: Root, tier: int) -> None:
    stack: list[Node] = list(root.top.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        columns = announced(tree, node, tier)
        if not len(columns):
            continue
        first, last = int(columns[0]), int(columns[-1]) + 1
        if last - first == len(columns):
            announce_stored(tree, node, tier, node.start + first, node.start + last)
        else:  # a window has holes, and snapshots stand apart
            for run in np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1):
                announce_stored(tree, node, tier, node.start + int(run[0]), node.start + int(run[-1]) + 1)


def outline(tree: Tree, most: int) -> dict[str, Any]:
    """Up to `most` nodes in all, parents before their children, and how many there are."""
    nodes: list[dict[str, Any]] = []
    total = 0
    waiting: list[tuple[Node, int]] = []
    for number, root in enumerate(tree.roots.values()):
        waiting += [(child, -1 - number) for child in _recent(root.top)]
    while waiting:
        node, parent = waiting.pop()
        total += 1
        if len(nodes) >= most:
            waiting += [(child, parent) for child in node.children.values()]
            continue
        nodes.append(_shown(tree, node, parent))
        waiting += [(child, len(nodes) - 1) for child in reversed(_recent(node))]
    spaces = [
        {
            "adapter": None if space.adapter is None else space.adapter.hex(),
            "salted": space.salt is not None,
            "version": space.version,
            "requests": root.bound,
        }
        for space, root in tree.roots.items()
    ]
    return {"namespaces": spaces, "nodes": nodes, "total": total}


def _recent(node: Node) -> list[Node]:
    return sorted(node.children.values(), key=lambda child: child.copies[DEVICE].used, reverse=True)


def _shown(tree: Tree, node: Node, parent: int) -> dict[str, Any]:
    """`parent`: the place of a node in the list; of a root, -1 less its place among the namespaces."""
    return {
        "parent": parent,
        "start": node.start * tree.page_size,
        "tokens": node.n * tree.page_size,
        "first_tokens": memoryview(bytes(node.edge[: 4 * _SHOWN_TOKENS])).cast("i").tolist(),
        "device_pages": node.copies[DEVICE].count,
        "host_pages": node.copies[HOST].count if tree.has_host else 0,
        "pinned": node.copies[DEVICE].holds > 0,
        "used": node.copies[DEVICE].used,
        "promised": bool(node.promised),
    }
