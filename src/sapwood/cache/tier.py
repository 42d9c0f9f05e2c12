"""A tier: one memory of pages, with its pools, its queues of what can be evicted, and the answer to whether it can give
so many pages of every group, all or none. What a node has there is `node.copies[tier]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from .eviction import LeafQueue, PageQueue
from .group import DEVICE, TIERS
from .page_ids import Ids
from .pool import PagePool
from .readers import count_all

if TYPE_CHECKING:
    from .tree import Tree


class Tier:
    """pools    by group: who owns each of its pages here
    leaves   the closed pages, which go leaf by leaf
    queues   by group that is not closed: the pages that nothing reads
    evicted  by group: how many pages have gone
    """

    __slots__ = ("evicted", "index", "leaves", "name", "pools", "queues", "tree")

    def __init__(self, tree: Tree, index: int) -> None:
        self.tree = tree
        self.index = index
        self.name = TIERS[index]
        self.pools = [
            PagePool(
                f"{group.name} on {self.name}",
                group.device_pages if index == DEVICE else group.host_pages,
                group.page_bytes,
                not family.closed,
            )
            for group, family in zip(tree.groups, tree.families, strict=True)
        ]
        self.leaves = LeafQueue()
        self.queues = {g: PageQueue(tree, g, index, k) for k, g in enumerate(tree.sliding + tree.slots)}
        self.evicted = [0] * len(tree.groups)

    def watch(self, seen: Callable[[str, str, str, Ids], None]) -> None:
        """Call `seen(group, tier, "taken" | "freed", pages)` whenever pages change hands with a pool."""
        for group, pool in zip(self.tree.groups, self.pools, strict=True):
            pool.watch = partial(seen, group.name, self.name)

    # ---- room

    def available(self, g: int) -> int:
        """Pages of a group that are free or that eviction can free. Exact."""
        tree, pool = self.tree, self.pools[g]
        if tree.uncounted and g in tree.sliding:
            count_all(tree)
        return pool.free + (pool.idle if pool.by_page else self.leaves.evictable)

    def has_free(self, need: Mapping[int, int]) -> bool:
        """Whether all of it is free already."""
        pools = self.pools
        for g, n in need.items():  # noqa: SIM110  (a loop: this is asked of every request)
            if n > pools[g].free:
                return False
        return True

    def can_make(self, need: Mapping[int, int], less: Mapping[int, int] | None = None) -> bool:
        """The dry run: would `make` succeed, if `less` pages of each group could not be evicted? Changes nothing."""
        for g, n in need.items():
            # Free pages are there whatever `less` is: that speaks only of pages which eviction could have taken.
            if n > self.pools[g].free and n > self.available(g) - (less.get(g, 0) if less else 0):
                return False
        return True

    def try_make(self, need: Mapping[int, int]) -> bool:
        """`make` if it would succeed; else False, with nothing changed."""
        if self.has_free(need):
            return True
        if not self.can_make(need):
            return False
        self.make(need)
        return True

    def make(self, need: Mapping[int, int]) -> None:
        """Evict until every group has its pages free. Closed groups first: what falls with them helps the others."""
        tree, pools = self.tree, self.pools
        if tree.uncounted and any(need.get(g, 0) > pools[g].free for g in tree.paged):
            count_all(tree)
        short = 0
        for g in tree.closed:
            short = max(short, need.get(g, 0) - pools[g].free)
        if short > 0:
            tree.closed_pages.evict(self.index, short)
        for g, n in need.items():
            short = n - pools[g].free
            if short > 0:
                self.queues[g].evict(short)
