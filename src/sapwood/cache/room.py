"""Making room: whether a tier can give what is asked of each group, all or none, and then giving it."""

from __future__ import annotations

from collections.abc import Mapping

from .readers import count_all
from .tree import Tree


class Room:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def available(self, tier: int, g: int) -> int:
        """Pages of a group that are free or that eviction can free. Exact."""
        tree = self.tree
        pool = tree.tiers[tier].pools[g]
        if tree.uncounted and g in tree.sliding:
            count_all(tree)
        return pool.free + (pool.idle if pool.by_page else tree.tiers[tier].leaves.evictable)

    def has(self, tier: int, need: Mapping[int, int]) -> bool:
        """Whether all of it is free already."""
        pools = self.tree.tiers[tier].pools
        for g, n in need.items():  # noqa: SIM110  (a loop: this is asked of every request)
            if n > pools[g].free:
                return False
        return True

    def can_make(self, tier: int, need: Mapping[int, int], less: Mapping[int, int] | None = None) -> bool:
        """The dry run: would `make` succeed, if `less` pages of each group could not be evicted? Changes nothing."""
        pools = self.tree.tiers[tier].pools
        for g, n in need.items():
            # What is free is there whatever `less` says: that only tells of pages which eviction could have taken.
            if n > pools[g].free and n > self.available(tier, g) - (less.get(g, 0) if less else 0):
                return False
        return True

    def made(self, tier: int, need: Mapping[int, int]) -> bool:
        """`make` if it would succeed; else False, with nothing changed."""
        if self.has(tier, need):
            return True
        if not self.can_make(tier, need):
            return False
        self.make(tier, need)
        return True

    def make(self, tier: int, need: Mapping[int, int]) -> None:
        """Evict until every group has its pages free. Closed groups first: what falls with them helps the others."""
        tree = self.tree
        pools = tree.tiers[tier].pools
        if tree.uncounted and any(need.get(g, 0) > pools[g].free for g in tree.paged):
            count_all(tree)
        short = 0
        for g in tree.closed:
            short = max(short, need.get(g, 0) - pools[g].free)
        if short > 0:
            tree.closed_pages.evict(tier, short)
        for g, n in need.items():
            short = n - pools[g].free
            if short > 0:
                tree.tiers[tier].queues[g].evict(short)
