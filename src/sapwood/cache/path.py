"""A matched path, and the questions families ask of it. Short-lived: valid until the tree next changes shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .group import DEVICE, HOST

if TYPE_CHECKING:
    from .node import Node, Root
    from .tree import Tree


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

    __slots__ = ("depth", "nodes", "root", "tier", "tree")

    def __init__(self, tree: Tree, root: Root, nodes: list[Node], depth: int) -> None:
        self.tree = tree
        self.root = root
        self.nodes = nodes
        self.depth = depth
        self.tier = HOST if tree.has_host else DEVICE

    def deepest_closed(self, limit: int) -> int:
        # Closure: a node keeps a copy somewhere while a child has any, so the deepest one with a copy decides.
        for node in reversed(self.nodes):
            if node.device.count or (self.tier and node.host is not None and node.host.count):
                return min(limit, node.start + node.n)
        return 0

    def device_closed(self, limit: int) -> int:
        """How far closed groups have all pages on the device."""
        for node in reversed(self.nodes):
            if node.device.count:
                return min(limit, node.start + node.n)
        return 0

    def last_missing(self, index: int, low: int, high: int) -> int:
        for node in reversed(self.nodes):
            start = node.start
            if start >= high:
                continue
            first, last = max(low - start, 0), min(high - start, node.n)
            there = None
            for copy in (node.device, node.host if self.tier else None):
                if copy is not None and copy.pages[index] is not None:
                    here = np.frombuffer(copy.pages[index], np.int32)[first:last] != 0
                    there = here if there is None else there | here
            if there is None:
                return start + last - 1
            if 0 in there.tobytes():
                return start + first + int((~there).nonzero()[0][-1])
            if start <= low:
                break
        return -1

    def deepest_slot(self, index: int, limit: int) -> int:
        for node in reversed(self.nodes):
            if node.start + node.n <= limit and (
                node.device.pages[index] or (self.tier and node.host is not None and node.host.pages[index])
            ):
                return node.start + node.n
        return 0
