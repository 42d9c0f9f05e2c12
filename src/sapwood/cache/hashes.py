"""The sha256 chain of pages: computed once a page, when it is real, and only if events or a store want it.

    digest(page) = sha256(digest(page before) || tokens as u32 little-endian)

The first page of the default namespace has no parent bytes; that of any other namespace has the namespace's digest.
"""

from __future__ import annotations

import hashlib
import sys
from struct import iter_unpack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .node import Node

if sys.byteorder != "little":  # tokens are compared and hashed as the bytes they are kept in
    raise ImportError("sapwood.cache needs a little-endian machine")


def chain(parent: bytes, tokens: bytes | bytearray | memoryview, page_bytes: int) -> bytearray:
    """The digests of consecutive pages, one after the other."""
    sha256 = hashlib.sha256
    digests = []
    for (page,) in iter_unpack(f"{page_bytes}s", tokens):
        parent = sha256(parent + page).digest()
        digests.append(parent)
    return bytearray(b"".join(digests))


def ensure_hashes(node: Node, upto: int, page_bytes: int) -> bytearray:
    """The digests of at least the first `upto` pages of `node`, computed now where they were not."""
    hashes = node.hashes
    if hashes is not None and len(hashes) >= 32 * upto:
        return hashes
    todo = [node]  # and above it whatever is not hashed to its end
    while not todo[-1].hashes:
        above = todo[-1].parent
        assert above is not None
        if above.parent is None or (above.hashes is not None and len(above.hashes) == 32 * above.n):
            break
        todo.append(above)
    for at in reversed(todo):
        hashes = _extend(at, upto if at is node else at.n, page_bytes)
    assert hashes is not None
    return hashes


def _extend(node: Node, upto: int, page_bytes: int) -> bytearray:
    """Hash the pages of `node` up to `upto`; whatever stands before them is hashed."""
    hashes, above = node.hashes, node.parent
    assert above is not None
    if hashes:
        have = len(hashes) // 32
        hashes += chain(bytes(hashes[-32:]), memoryview(node.edge)[have * page_bytes : upto * page_bytes], page_bytes)
        return hashes
    parent = node.root.digest if not above.hashes else bytes(above.hashes[-32:])
    node.hashes = hashes = chain(parent, memoryview(node.edge)[: upto * page_bytes], page_bytes)
    return hashes
