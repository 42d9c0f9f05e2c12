"""What the tree holds now, told as events: for a router that comes late, or that has missed some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .announce import announced, tell_stored
from .events import KVEvent
from .node import Node, Root
from .tree import Tree

if TYPE_CHECKING:
    from .facade import HybridPrefixCache


def held_events(cache: HybridPrefixCache) -> list[KVEvent]:
    """A `BlockStored` for everything that is announced and was not removed since: tier by tier, each path from its root
    down. After an `AllBlocksCleared` they say as much as all events up to now, those included that nobody has drained.
    Changes nothing but hashes that were not computed yet."""
    tree = cache._tree
    undrained, tree.events = tree.events, []
    try:
        for tier in range(len(tree.tiers)):
            for root in tree.roots.values():
                _tell(tree, root, tier)
        return tree.events
    finally:
        tree.events = undrained


def _tell(tree: Tree, root: Root, tier: int) -> None:
    stack: list[Node] = list(root.top.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        columns = announced(tree, node, tier)
        if not len(columns):
            continue
        first, last = int(columns[0]), int(columns[-1]) + 1
        if last - first == len(columns):
            tell_stored(tree, node, tier, node.start + first, node.start + last)
        else:  # a window has holes, and snapshots stand apart
            for run in np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1):
                tell_stored(tree, node, tier, node.start + int(run[0]), node.start + int(run[-1]) + 1)
