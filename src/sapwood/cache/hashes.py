"""The sha256 chain of pages: computed once a page, when it is real, and only if events or a store want it.

    digest(page) = sha256(digest(page before) || tokens as u32 little-endian)

The first page of the default namespace has no parent bytes; that of any other namespace has the namespace's digest.
`chain` is the only place where a page is hashed. Digests of pages that follow each other are kept as one row of bytes.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from struct import iter_unpack
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .node import Node
    from .tree import Tree

DIGEST_BYTES: Final = 32
Digests = bytes | bytearray  # of pages that follow each other

if sys.byteorder != "little":  # tokens are compared and hashed as the bytes they are kept in
    raise ImportError("sapwood.cache needs a little-endian machine")


def chain(parent: bytes, tokens: bytes | bytearray | memoryview, page_bytes: int) -> bytearray:
    """The digests of consecutive pages, of which `parent` is the digest of the page before."""
    digests = []
    for (page,) in iter_unpack(f"{page_bytes}s", tokens):
        parent = sha256(parent + page).digest()
        digests.append(parent)
    return bytearray(b"".join(digests))


def digests_of(hashes: Digests, low: int, high: int) -> bytes:
    """The digests of the pages [low, high) of those in `hashes`."""
    return bytes(hashes[DIGEST_BYTES * low : DIGEST_BYTES * high])


def last_digest(hashes: Digests) -> bytes:
    return bytes(hashes[-DIGEST_BYTES:])


def count_of(hashes: Digests) -> int:
    """How many pages these are the digests of."""
    return len(hashes) // DIGEST_BYTES


def divided(hashes: Digests) -> list[bytes]:
    """Each digest by itself."""
    run = bytes(hashes)
    return [run[at : at + DIGEST_BYTES] for at in range(0, len(run), DIGEST_BYTES)]


def is_hashed(node: Node) -> bool:
    """Whether the digests of all pages of `node` are known."""
    return node.hashes is not None and len(node.hashes) == DIGEST_BYTES * node.n


def ensure_hashes(node: Node, upto: int, page_bytes: int) -> bytearray:
    """The digests of at least the first `upto` pages of `node`, computed now where they were not."""
    hashes = node.hashes
    if hashes is not None and len(hashes) >= DIGEST_BYTES * upto:
        return hashes
    todo = [node]  # and the nodes above it that are not hashed to their ends
    while not todo[-1].hashes:
        above = todo[-1].parent
        assert above is not None
        if above.parent is None or is_hashed(above):
            break
        todo.append(above)
    for at in reversed(todo):
        hashes = _extend(at, upto if at is node else at.n, page_bytes)
    assert hashes is not None
    return hashes


def _extend(node: Node, upto: int, page_bytes: int) -> bytearray:
    """Hash the pages of `node` up to `upto`; the pages before them are hashed."""
    hashes, above = node.hashes, node.parent
    assert above is not None
    if hashes:
        new = memoryview(node.edge)[count_of(hashes) * page_bytes : upto * page_bytes]
        hashes += chain(last_digest(hashes), new, page_bytes)
        return hashes
    parent = last_digest(above.hashes) if above.hashes else node.root.digest
    node.hashes = hashes = chain(parent, memoryview(node.edge)[: upto * page_bytes], page_bytes)
    return hashes


def digest_above(node: Node, page_bytes: int) -> bytes | None:
    """The digest of the page before `node`; None if it begins its path."""
    above = node.parent
    assert above is not None
    return last_digest(ensure_hashes(above, above.n, page_bytes)) if above.n else None


def hash_path(tree: Tree, node: Node, first: int, last: int) -> bytes:
    """The digests of the pages [first, last) of the path to `node`."""
    parts = reversed(tree.cover(node, first, last))
    return b"".join([digests_of(ensure_hashes(at, high, tree.page_bytes), low, high) for at, low, high in parts])
