"""Evicting a namespace: its root is unhooked at once, and what somebody still reads goes when the last reader does."""

from __future__ import annotations

import numpy as np

from .announce import tell_removed
from .flight import is_real, note_promises
from .group import DEVICE
from .lease import Lease
from .node import Node, Root
from .pool import TREE, UNHOOKED, Ids
from .readers import count_all, counts
from .tree import Tree, as_ids


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
        for t in tree.tiers:
            if tree.announcing and not silently:
                tell_removed(tree, node, t, _announced(tree, node, t))
            copy = tree.copy_in(node, t)
            if not copy.holds:
                tree.leaf_lrus[t].evictable -= copy.count
            for g in tree.sliding:  # from now on the readers of these pages are counted by page
                for page, count in counts(copy, g, node.start).items():
                    tree.pools[t][g].readers[page] = count
            for g in range(len(tree.groups)):
                held = copy.pages[g]
                if held:
                    ids = np.array([*held.values()], np.int32) if g in tree.slots else as_ids(held)
                    pages.setdefault((t, g), []).append(ids[ids != 0])
    root.attached = False
    root.makers.clear()
    del tree.roots[root.namespace]
    if root.holders:
        tree.detached_roots[root] = None
    for node in below:
        node.parent = None
        node.children, node.recent, node.promised, node.loading, node.saving = {}, None, None, None, None
        for t in tree.tiers:
            tree.leave_queues(tree.copy_in(node, t), t)
    root.top.children, root.top.recent = {}, None
    tree.nodes -= len(below)
    tree.version += 1
    tree.ghosts.forget(root.digest)
    for (t, g), parts in pages.items():
        pool = tree.pools[t][g]
        ids = np.concatenate(parts)
        read = pool.readers[ids] > 0
        if pool.by_page:
            pool.idle -= int(np.count_nonzero(~read))
        pool.move(ids[read], TREE, UNHOOKED)
        pool.release(ids[~read], TREE)


def _announced(tree: Tree, node: Node, tier: int) -> Ids:
    """The columns of `node`, from its start, that routers have been told of in a tier."""
    copy = tree.copy_in(node, tier)
    g = tree.announced_group
    if g in tree.slots:
        columns = np.array(sorted([depth - node.start - 1 for depth in copy.pages[g] or ()]), np.int32)
    elif g in tree.closed:
        columns = np.arange(copy.count, dtype=np.int32)
    else:
        columns = as_ids(copy.pages[g] or b"").nonzero()[0].astype(np.int32)
    if tier == DEVICE and node.promised and g not in tree.slots:
        real = [is_real(tree, node, g, node.start + int(at)) for at in columns]
        columns = columns[np.array(real, np.bool_)]
    return columns
