"""Evicting a namespace: its root is unhooked at once, and what somebody still reads goes when the last reader does."""

from __future__ import annotations

import numpy as np

from .events import announce_removed, announced
from .flight import note_promises
from .lease import Lease
from .node import Node, Root
from .page_ids import Ids
from .pool import TREE, UNHOOKED
from .readers import count_all, counts
from .tree import Tree


def detach_namespace(tree: Tree, root: Root, silently: bool) -> None:
    """Nobody new can find anything under `root`, ghosts included. Who is bound to it ends under it.

    Every holder turns its pins into reader counts by page; then the tree below the root is taken apart, so that no
    detached tree has to be kept: a page with readers is counted as unhooked, all others are free now.
    """
    count_all(tree)
    for holder in root.holders:
        if isinstance(holder, Lease):
            note_promises(tree, holder)  # one that waits for a load may find promised pages on its path by now
        holder.detach(tree)
    below: list[Node] = []
    stack = list(root.top.children.values())
    while stack:
        node = stack.pop()
        below.append(node)
        stack.extend(node.children.values())
    pages: dict[tuple[int, int], list[Ids]] = {}
    for node in reversed(below):
        for t, copy in enumerate(node.copies):
            if tree.announcing and not silently:
                announce_removed(tree, node, t, announced(tree, node, t))
            if not copy.holds:
                tree.tiers[t].leaves.evictable -= copy.count
            for g in tree.sliding:  # from now on the readers of these pages are counted by page
                for page, count in counts(copy, g, node.start).items():
                    tree.tiers[t].pools[g].readers[page] = count
            for g, shape in enumerate(tree.shape_of):
                pages.setdefault((t, g), []).append(shape.ids(copy, g))
    root.attached = False
    root.makers.clear()
    del tree.roots[root.namespace]
    if root.holders:
        tree.detached_roots[root] = None
    for node in below:
        node.parent = None
        node.children, node.recent, node.promised, node.loading, node.saving = {}, None, None, None, None
        tree.leave_queues(node)
    root.top.children, root.top.recent = {}, None
    tree.nodes -= len(below)
    tree.version += 1
    tree.ghosts.forget(root.digest)
    for (t, g), parts in pages.items():
        pool = tree.tiers[t].pools[g]
        ids = np.concatenate(parts)
        read = pool.readers[ids] > 0
        if pool.by_page:
            pool.idle -= int(np.count_nonzero(~read))
        pool.move(ids[read].tobytes(), TREE, UNHOOKED)
        pool.release(ids[~read].tobytes(), TREE)
