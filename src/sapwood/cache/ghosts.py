"""The ghost memory: where in the tree something was evicted, and when. Bounded in bytes, and no token leaves it.

A ghost is found by what stands before it: the checksum of all tokens up to there (crc32 of a stream does not care
where nodes were split) and the first page that is gone.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .node import Node
    from .tree import Tree

_OVERHEAD = 240  # what an entry costs beside its page of tokens: key tuple, integers, dictionary slot

Key = tuple[bytes, int, int, bytes]


class Ghosts:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._gone: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._gone)

    def remember(self, node: Node, keep: int, tree: Tree) -> None:
        """The pages of `node` from `keep` on are about to leave the tree."""
        if not self.limit_bytes or not node.root.attached:
            return
        first = keep * tree.page_bytes
        page = bytes(node.edge[first : first + tree.page_bytes])
        key = (node.root.digest, node.start + keep, crc_at(node, keep, tree.page_bytes), page)
        if key in self._gone:
            self._gone.move_to_end(key)
        else:
            self.used_bytes += _OVERHEAD + len(page)
        self._gone[key] = tree.clock.now
        while self.used_bytes > self.limit_bytes:
            (_, _, _, page), _ = self._gone.popitem(last=False)
            self.used_bytes -= _OVERHEAD + len(page)

    def since(self, digest: bytes, depth: int, crc: int, page: bytes) -> int | None:
        """When the page that followed `depth` was evicted, or None if no ghost knows."""
        return self._gone.get((digest, depth, crc, page))

    def forget(self, digest: bytes) -> None:
        """Nothing of this namespace was ever here."""
        for key in [key for key in self._gone if key[0] == digest]:
            del self._gone[key]
            self.used_bytes -= _OVERHEAD + len(key[3])

    def clear(self) -> None:
        self._gone.clear()
        self.used_bytes = 0


def crc_at(node: Node, pages: int, page_bytes: int) -> int:
    """The checksum of all tokens from the root to the end of the first `pages` pages of `node`."""
    chain = []
    at = node if pages == node.n else node.parent
    while at is not None and at.crc is None:
        chain.append(at)
        at = at.parent
    crc = 0 if at is None or at.crc is None else at.crc
    for at in reversed(chain):
        crc = at.crc = zlib.crc32(at.edge, crc)
    if pages == node.n:
        return crc
    return zlib.crc32(memoryview(node.edge)[: pages * page_bytes], crc)
