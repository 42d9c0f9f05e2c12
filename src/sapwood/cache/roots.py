"""Namespaces in the tree: a root for each, with everything that is known of it; and how one is evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .events import announce_removed, announced
from .flight import note_promises
from .lease import Lease
from .namespace import Namespace
from .node import Node
from .page_ids import Ids
from .pool import TREE, UNHOOKED
from .readers import count_all, counts

if TYPE_CHECKING:
    from .tree import Tree


class Root:
    """A namespace in the tree, and everything that is bound to it.

    attached  requests can find it; it was not evicted
    bound     requests that are bound to it
    holders   leases and transfers that hold nodes here, oldest first
    makers    by page end: by its last page: leases that will leave a snapshot there
    tally     what its requests asked for and got, and what became of their pages
    misses    how many of its requests missed, by reason
    """

    __slots__ = ("attached", "bound", "digest", "holders", "makers", "misses", "namespace", "tally", "top")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.digest = namespace.digest()
        self.attached = True
        self.bound = 0
        self.holders: dict[Any, None] = {}
        self.makers: dict[int, dict[bytes, list[Any]]] = {}
        self.tally = {
            "requests": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "evicted_pages": 0,
            "saved_pages": 0,
            "loaded_pages": 0,
            "fetched_pages": 0,
        }
        self.misses: dict[str, int] = {}
        self.top: Node

    def below(self) -> list[Node]:
        """All nodes, parents before their children."""
        nodes: list[Node] = []
        stack = list(self.top.children.values())
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(node.children.values())
        return nodes

    def pages(self, tree: Tree) -> list[list[int]]:
        """By tier, by group: how many pages the tree keeps for this namespace. Looks at all of its nodes."""
        nodes = self.below()
        return [
            [sum([len(shape.ids(node.copies[t], g)) for node in nodes]) for g, shape in enumerate(tree.shape_of)]
            for t in range(len(tree.tiers))
        ]

    def report(self) -> dict[str, Any]:
        """Its part of `stats()`."""
        return {"namespace": self.namespace, "bound": self.bound, **self.tally, "misses": dict(self.misses)}


def detach_namespace(tree: Tree, root: Root, silently: bool) -> None:
    """No new request can find anything under `root`, ghosts included. Requests that are bound to it end under it.

    Every holder turns its pins into reader counts by page; then the tree below the root is taken apart, so that no
    detached tree has to be kept: a page with readers is counted as unhooked, all others are free now.
    """
    count_all(tree)
    for holder in root.holders:
        if isinstance(holder, Lease):
            note_promises(tree, holder)  # one that waits for a load may find promised pages on its path by now
        holder.detach(tree)
    below = root.below()
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
