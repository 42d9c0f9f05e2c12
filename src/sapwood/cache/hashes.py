"""The sha256 chain of pages: computed once a page, when it is real, and only if events or a store want it.

    digest(page) = sha256(digest(page before) || tokens as u32 little-endian)

The first page of the default namespace has no parent bytes; that of any other namespace has the namespace's digest.
"""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .node import Node

if sys.byteorder != "little":  # tokens are compared and hashed as the bytes they are kept in
    raise ImportError("sapwood.cache needs a little-endian machine")


def chain(parent: bytes, tokens: bytes | bytearray | memoryview, page_bytes: int) -> bytearray:
    """The digests of consecutive pages, one after the other."""
    sha256 = hashlib.sha256
    digests = []
    view = bytes(tokens)
    for at in range(0, len(view), page_bytes):
        parent = sha256(parent + view[at : at + page_bytes]).digest()
        digests.append(parent)
    return bytearray(b"".join(digests))


def ensure_hashes(node: Node, upto: int, page_bytes: int) -> bytearray:
    """The digests of at least the first `upto` pages of `node`, computed now where they were not."""
    todo = [(node, upto)]
    while True:
        at, n = todo[-1]
        have = 0 if at.hashes is None else len(at.hashes) // 32
        if have < n:
            if have:
                assert at.hashes is not None
                parent = bytes(at.hashes[-32:])
            else:
                above = at.parent
                assert above is not None
                if above.parent is None:
                    parent = at.root.digest
                elif above.hashes is not None and len(above.hashes) == 32 * above.n:
                    parent = bytes(above.hashes[-32:])
                else:
                    todo.append((above, above.n))
                    continue
            more = chain(parent, memoryview(at.edge)[have * page_bytes : n * page_bytes], page_bytes)
            if at.hashes is None:
                at.hashes = more
            else:
                at.hashes += more
        todo.pop()
        if not todo:
            assert at.hashes is not None
            return at.hashes
