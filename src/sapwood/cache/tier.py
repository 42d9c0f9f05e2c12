"""A tier: one memory of pages, with its pools and its queues of what can be evicted. What a node has there is
`node.copies[tier]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .eviction import LeafQueue, PageQueue
from .group import DEVICE, TIERS
from .pool import PagePool

if TYPE_CHECKING:
    from .tree import Tree


class Tier:
    """pools    by group: who owns each of its pages here
    leaves   the closed pages, which go leaf by leaf
    queues   by group that is not closed: the pages that nothing reads
    evicted  by group: how many pages have gone
    """

    __slots__ = ("evicted", "index", "leaves", "name", "pools", "queues")

    def __init__(self, tree: Tree, index: int) -> None:
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
