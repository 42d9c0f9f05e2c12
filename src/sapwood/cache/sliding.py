"""Sliding pages: those of a group that is not closed. They come and go one by one, and may have holes between them.

A page of a window is worth what it is worth to later requests. A window is read only by a request that begins behind
it. Most requests begin where an earlier one ended, where its prompt ended (models whose template leaves out what was
thought), at a branch point, or at a snapshot; and some a little before the end of a prompt, where a template or a
client has changed its last words:

      BETWEEN             NEAR                 WINDOW          BETWEEN      WINDOW
    ------------[ NEAR_TOKENS before that ][ window ]P-------------------[ window ]E     P end of the last prompt
                                                                                         E end, branch point, snapshot
Eviction takes the least worth first, and a save takes nothing that is BETWEEN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .events import announce_removed
from .page_ids import HOLE, Ids, PageIds, Ranges, as_ids, lengthened, part, put, runs_of, width
from .pool import FLIGHT, TREE
from .readers import unread_columns

if TYPE_CHECKING:
    from .node import Copy, Node
    from .transfer import Transfer
    from .tree import Tree


BETWEEN: Final = 0
NEAR: Final = 1
WINDOW: Final = 2
NEAR_TOKENS: Final = 512
_WORTHS: Final = [bytes([worth]) for worth in (BETWEEN, NEAR, WINDOW)]


class SlidingPages:
    """Of one group.

    window  how many pages before the place where a request begins it reads; 0: all pages are worth the same
    reach   how many pages before such a place can be worth something
    """

    def __init__(self, tree: Tree, g: int) -> None:
        self.tree = tree
        self.g = g
        self.window = tree.families[g].protected_tail_pages()
        self.reach = self.window + -(-NEAR_TOKENS // tree.page_size) if self.window else 0

    def split(self, upper: Node, lower: Node, tier: int) -> None:
        """A node has been cut: its upper half takes its pages and their readers."""
        g, k, top, low = self.g, upper.n, upper.copies[tier], lower.copies[tier]
        pages, reads = low.pages[g], low.reads[g]
        if pages is not None:
            top.pages[g] = part(pages, 0, k)
            low.pages[g] = part(pages, k) or None
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
            copy.pages[g] = part(copy.pages[g], 0, keep) if keep else None
        reads = copy.reads[g]
        if reads is not None:
            del reads[keep:]

    def fill(self, node: Node, tier: int, low: int, ids: PageIds) -> Ranges:
        """Put pages into the holes of `node` from its column `low` on; a hole among them is none. Returns the columns,
        from its start, that took theirs. The caller moves those to the tree."""
        g, copy, high = self.g, node.copies[tier], low + width(ids)
        pages = copy.pages[g] = lengthened(copy.pages[g], low)
        if HOLE in ids or any(part(pages, low, high)):
            pages = copy.pages[g] = lengthened(pages, high)
            there, mine = np.frombuffer(pages, np.int32)[low:high], as_ids(ids)
            new = (there == 0) & (mine != 0)
            there[new] = mine[new]
            filled = [(low + first, low + last) for first, last in runs_of(new)]
        else:
            put(pages, low, ids)
            filled = [(low, high)]
        tier_here = self.tree.tiers[tier]
        for first, last in filled:
            tier_here.pools[g].idle += unread_columns(copy, g, first, last)
        tier_here.queues[g].add(node, copy)
        return filled

    def land(self, transfer: Transfer, g: int) -> Ranges:
        """What came fills the holes of the path, and is freed where one was filled meanwhile. Returns the columns of
        the path that took theirs."""
        tree, tier = self.tree, transfer.tier
        pool = tree.tiers[tier].pools[g]
        raw: PageIds = transfer.came[g]
        kept: Ranges = []
        for begin, end in transfer.ranges[g]:
            for node, low, high in tree.cover(transfer.node, begin, end):
                column = node.start + low
                ids = part(raw, column - begin, column - begin + high - low)
                filled = self.fill(node, tier, low, ids)
                if filled == [(low, high)]:
                    pool.move(ids, FLIGHT, TREE)
                    kept.append((column, column + high - low))
                    continue
                used = np.zeros(high - low, np.bool_)
                for first, last in filled:
                    used[first - low : last - low] = True
                    kept.append((node.start + first, node.start + last))
                pool.move(as_ids(ids)[used].tobytes(), FLIGHT, TREE)
                pool.release(as_ids(ids)[~used].tobytes(), FLIGHT)
            raw = part(raw, end - begin)
        kept.sort()
        return kept

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
            announce_removed(tree, node, tier, at)
        pool = tree.tiers[tier].pools[g]
        ids = pages[at]
        pages[at] = 0
        pool.release(ids.tobytes(), TREE)
        pool.idle -= len(ids)
        tree.count_evicted(node, tier, g, len(ids))
        tree.version += 1
        return len(ids)

    def enqueue(self, node: Node, tier: int) -> None:
        """Pages of `node` may have lost their protection, or their last reader."""
        copy = node.copies[tier]
        if copy.pages[self.g]:
            self.tree.tiers[tier].queues[self.g].add(node, copy)

    def ids(self, copy: Copy, g: int) -> Ids:
        ids = np.frombuffer(bytes(copy.pages[g] or b""), np.int32)
        found: Ids = ids[ids != 0]
        return found

    def columns(self, node: Node, tier: int, g: int) -> Ids:
        """Which pages of `node`, from its start, are in a tier."""
        return np.frombuffer(bytes(node.copies[tier].pages[g] or b""), np.int32).nonzero()[0].astype(np.int32)

    # ---- worth

    def worth(self, node: Node) -> bytearray:
        """By page of `node`: what it is worth to requests that begin in it or below."""
        window, start, end, prompt = self.window, node.start, node.end, node.prompt_end
        found = bytearray(node.n)
        if prompt > start:
            _mark(found, prompt - self.reach - start, prompt - start, NEAR)
        below, prompt_below = self._next_below(node)
        if prompt_below:
            _mark(found, prompt_below - self.reach - start, node.n, NEAR)
            below = min(below, prompt_below) if below else prompt_below
        if below and below - window < end:
            _mark(found, below - window - start, node.n, WINDOW)
        if prompt > start:
            _mark(found, prompt - window - start, prompt - start, WINDOW)
        for depth in self.tree.snapshots.depths(node):
            _mark(found, depth - window - start, depth - start, WINDOW)
        return found

    def _next_below(self, node: Node) -> tuple[int, int]:
        """From the end of `node` on: the first place where requests begin, and the first end of a prompt, down to where
        the path branches, as far below as can matter. 0: none."""
        begins, at, last = 0, node, node.end + self.reach
        while len(at.children) == 1 and at.start + at.n < last:
            (at,) = at.children.values()
            inside = self.tree.snapshots.depths(at)
            if inside and not begins:
                begins = inside[0]
            if at.prompt_end > at.start:
                return begins, at.prompt_end
        if not begins and len(at.children) != 1:
            begins = at.start + at.n
        return begins, 0


def _mark(worths: bytearray, low: int, high: int, worth: int) -> None:
    """The pages [low, high) are worth so much, as far as the node has them."""
    low, high = max(low, 0), min(high, len(worths))
    if low < high:
        worths[low:high] = _WORTHS[worth] * (high - low)
