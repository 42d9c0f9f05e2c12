"""A matched path, and the questions families ask of it. Short-lived: valid until the tree next changes shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .group import DEVICE, HOST
from .page_ids import HOLE, page_at

if TYPE_CHECKING:
    from .node import Node
    from .roots import Root
    from .tree import Tree

_NONE: dict[int, int] = {}


def agree(edge: bytes | bytearray, tokens: bytes, offset: int, page_bytes: int) -> int:
    """How many whole pages of `edge` stand in `tokens` at `offset`: a bisection of memcmps."""
    low, high = 0, min(len(edge), len(tokens) - offset) // page_bytes
    view = memoryview(edge)
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(view[low * page_bytes : middle * page_bytes], offset + low * page_bytes):
            low = middle
        else:
            high = middle - 1
    return low


class Path:
    """Nodes from below the root down; the last may be matched in part. `tier` is the farthest one to read from."""

    __slots__ = ("depth", "nodes", "root", "tier", "tree", "wrong")

    def __init__(self, tree: Tree, root: Root, nodes: list[Node], depth: int) -> None:
        self.tree = tree
        self.root = root
        self.nodes = nodes
        self.depth = depth
        self.wrong = 0  # children that were guessed wrong on the way
        self.tier = HOST if tree.has_host else DEVICE

    def deepest_closed(self, limit: int) -> int:
        # Closure: a node keeps a copy somewhere while a child has any, so the deepest one with a copy decides.
        for node in reversed(self.nodes):
            if node.copies[DEVICE].count or (self.tier and node.copies[HOST].count):
                end = node.start + node.n
                if end > limit:
                    end = limit
                return self._readable(end) if self.tree.waits_for_real else end
        return 0

    def device_closed(self, limit: int) -> int:
        """How far closed groups have all pages on the device."""
        for node in reversed(self.nodes):
            if node.copies[DEVICE].count:
                return self._readable(min(limit, node.start + node.n))
        return 0

    def _readable(self, depth: int) -> int:
        """`depth`, or less where a closed family does not read what is only promised."""
        tree = self.tree
        if tree.promises and tree.waits_for_real:
            return min(depth, tree.first_promised(self.nodes[-1]))
        return depth

    def last_missing(self, index: int, low: int, high: int) -> int:
        waits_for_real = self.tree.promises > 0 and not self.tree.families[index].reads_promised
        for node in reversed(self.nodes):
            start = node.start
            if start >= high:
                continue
            first = low - start if low > start else 0
            pages = node.copies[DEVICE].pages[index]
            # Four zero bytes in a row are a hole, or two ids beside each other: only then look closer.
            if (
                pages is None
                or len(pages) < 4 * min(high - start, node.n)
                or pages.find(HOLE, 4 * first, 4 * (high - start)) >= 0
                or (waits_for_real and node.promised)
            ):
                missing = self._last_hole(node, index, first, min(high - start, node.n))
                if missing >= 0:
                    return start + missing
            if start <= low:
                break
        return -1

    def _last_hole(self, node: Node, index: int, first: int, last: int) -> int:
        there = np.zeros(last - first, np.bool_)
        for copy in (node.copies[DEVICE], node.copies[HOST] if self.tier else None):
            if copy is not None and copy.pages[index] is not None:
                here = np.frombuffer(bytes(copy.pages[index]), np.int32)[first:last] != 0
                there[: len(here)] |= here
        if not self.tree.families[index].reads_promised:
            for promise in node.promised or ():
                for low, high in promise.ranges(index, False):
                    there[max(0, low - node.start - first) : max(0, high - node.start - first)] = False
        holes = (~there).nonzero()[0]
        return first + int(holes[-1]) if len(holes) else -1

    def device_pages(self, index: int, spans: list[tuple[int, int]], end: int) -> bytearray:
        """A table of `end` columns with the device pages of a group that lie in `spans`."""
        table = bytearray(4 * end)
        for low, high in spans:
            for node in reversed(self.nodes):
                start = node.start
                if start >= high:
                    continue
                pages = node.copies[DEVICE].pages[index]
                if pages is not None:
                    first = low - start if low > start else 0
                    here = pages[4 * first : 4 * (high - start)]
                    table[4 * (start + first) : 4 * (start + first) + len(here)] = here
                if start <= low:
                    break
        return table

    def device_run(self, index: int, low: int, high: int) -> bytearray:
        """The device pages of a group from `low` on, at most to `high`, as far as there is no hole."""
        pages = self.device_pages(index, [(low, high)], high)[4 * low :]
        if HOLE in pages:
            holes = (np.frombuffer(bytes(pages), np.int32) == 0).nonzero()[0]
            if len(holes):
                del pages[4 * int(holes[0]) :]
        return pages

    def host_page(self, index: int, column: int) -> int:
        """The host page of a group at a column of the path, or 0."""
        for node in reversed(self.nodes):
            if node.start <= column:
                pages = node.copies[HOST].pages[index] if self.tree.has_host else None
                return page_at(pages, column - node.start)
        return 0

    def holding(self, depth: int) -> Node:
        """The node that has the page which ends at `depth`."""
        for node in reversed(self.nodes):
            if node.start < depth:
                return node
        raise AssertionError("a path has no page that ends there")

    def deepest_slot(self, index: int, limit: int) -> int:
        for node in reversed(self.nodes):
            if node.start >= limit:
                continue
            deepest = 0
            for depth in reversed(node.copies[DEVICE].pages[index] or _NONE):
                if depth <= limit:
                    deepest = depth
                    break
            if self.tier:
                for depth in reversed(node.copies[HOST].pages[index] or _NONE):
                    if depth <= limit:
                        if depth > deepest:
                            deepest = depth
                        break
            if deepest:
                return deepest
        return 0
