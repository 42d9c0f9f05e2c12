"""Sliding pages: those of a group that is not closed. They come and go one by one, and may have holes between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .announce import tell_removed
from .pool import TREE, Ids

if TYPE_CHECKING:
    from .node import Copy, Node
    from .tree import Tree


class SlidingPages:
    """Of one group."""

    def __init__(self, tree: Tree, g: int) -> None:
        self.tree = tree
        self.g = g

    def split(self, upper: Node, lower: Node, tier: int) -> None:
        """A node has been cut: its upper half takes its pages and their readers."""
        g, k, top, low = self.g, upper.n, upper.copies[tier], lower.copies[tier]
        pages, reads = low.pages[g], low.reads[g]
        if pages is not None:
            top.pages[g] = pages[: 4 * k]
            low.pages[g] = pages[4 * k :] or None
            self.tree.tiers[tier].queues[g].add(upper, top)
        if reads is not None:
            top.reads[g], low.reads[g] = reads[:k], reads[k:]
        more = low.reader_overflow
        if more:
            end, mine = upper.start + k, top.reader_overflow or {}
            top.reader_overflow = mine | {key: n for key, n in more.items() if key[0] == g and key[1] < end}
            low.reader_overflow = {key: n for key, n in more.items() if key[0] != g or key[1] >= end}

    def free_from(self, node: Node, tier: int, keep: int) -> None:
        """Free what `node` has in a tier from its page `keep` on. Nothing may read it."""
        g, copy = self.g, node.copies[tier]
        if copy.pages[g] is not None:
            self.drop(node, tier, range(keep, node.n))
            copy.pages[g] = copy.pages[g][: 4 * keep] if keep else None
        reads = copy.reads[g]
        if reads is not None:
            del reads[keep:]

    def drop(self, node: Node, tier: int, columns: range | Ids) -> int:
        """Free pages of `node`, by columns from its start; they become holes. Nothing may read them. Returns how many
        there were."""
        tree, g = self.tree, self.g
        held = node.copies[tier].pages[g]
        if not held:
            return 0
        pages = np.frombuffer(held, np.int32)
        at = np.asarray(columns, np.int64)
        at = at[at < len(pages)]
        at = at[pages[at] != 0]
        if not len(at):
            return 0
        if tree.announcing and g == tree.announced_group:
            tell_removed(tree, node, tier, at)
        pool = tree.tiers[tier].pools[g]
        ids = pages[at]
        pages[at] = 0
        pool.release(ids, TREE)
        pool.idle -= len(ids)
        tree.count_evicted(node, tier, g, len(ids))
        tree.version += 1
        return len(ids)

    def enqueue(self, node: Node, tier: int) -> None:
        """Pages of `node` may have lost their protection, or their last reader."""
        copy = node.copies[tier]
        if copy.pages[self.g]:
            self.tree.tiers[tier].queues[self.g].add(node, copy)

    def has_any(self, copy: Copy) -> bool:
        return bool(copy.pages[self.g])

    def ids(self, copy: Copy, g: int) -> Ids:
        ids = np.frombuffer(bytes(copy.pages[g] or b""), np.int32)
        found: Ids = ids[ids != 0]
        return found

    def columns(self, node: Node, tier: int, g: int) -> Ids:
        """Which pages of `node`, from its start, are in a tier."""
        return np.frombuffer(bytes(node.copies[tier].pages[g] or b""), np.int32).nonzero()[0].astype(np.int32)
