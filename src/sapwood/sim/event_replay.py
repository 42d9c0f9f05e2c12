"""What a router believes that has heard every KV event, held against what the tree really has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from sapwood.cache import AllBlocksCleared, BlockRemoved, BlockStored, HybridPrefixCache, KVEvent, Namespace
from sapwood.cache.families import family_class
from sapwood.store.keys import HASH_BYTES

Block = tuple[Namespace, bytes]  # equal tokens in two namespaces are two blocks


class Replay:
    """Rebuilds what an engine holds in one tier ("GPU" or "CPU") from its events alone."""

    def __init__(self, cache: HybridPrefixCache, medium: str = "GPU") -> None:
        self.cache = cache
        self.medium = medium
        closed = [g for g, group in enumerate(cache.groups) if family_class(group.family).closed]
        self.group = closed[0] if closed else 0  # the one that events speak of
        self.closed = bool(closed)
        self.held: dict[Block, Block | None] = {}  # each block's parent
        self.children: dict[Block, int] = {}
        self.count = 0

    def hear(self, events: Iterable[KVEvent]) -> None:
        """The next events, in order. AssertionError if one cannot be."""
        for event in events:
            self.count += 1
            if isinstance(event, AllBlocksCleared):
                self.held, self.children = {}, {}
            elif event.medium != self.medium:
                assert event.medium in ("GPU", "CPU"), event
            elif isinstance(event, BlockStored):
                self._stored(event)
            else:
                self._removed(event)

    def _stored(self, event: BlockStored) -> None:
        size = 4 * event.block_size
        assert event.block_size == self.cache.page_size, event
        assert len(event.tokens) // size == len(event.digests) // HASH_BYTES > 0, event
        before = event.parent_digest
        for at in range(len(event.digests) // HASH_BYTES):
            page = event.tokens[at * size : (at + 1) * size]
            digest = event.digests[HASH_BYTES * at : HASH_BYTES * (at + 1)]
            parent = event.namespace.digest() if before is None else before
            assert hashlib.sha256(parent + page).digest() == digest, f"page {at} has a wrong hash: {event}"
            block, above = (event.namespace, digest), None if before is None else (event.namespace, before)
            assert block not in self.held, f"stored twice: {event}"
            if (
                self.closed and above is not None and self.medium == "GPU"
            ):  # a copy on host may have its parent elsewhere
                assert above in self.held, f"stored before its parent: {event}"
                self.children[above] = self.children.get(above, 0) + 1
            self.held[block] = above
            before = digest

    def _removed(self, event: BlockRemoved) -> None:
        for at in range(0, len(event.digests), HASH_BYTES):
            block = (event.namespace, event.digests[at : at + HASH_BYTES])
            assert block in self.held, f"removed, and was not there: {event}"
            above = self.held.pop(block)
            if self.closed and self.medium == "GPU":
                assert not self.children.pop(block, 0), f"removed before its children: {event}"
                if above is not None:
                    self.children[above] -= 1

    def compare(self) -> None:
        """With no step in flight, all that the tree has is real, and announced."""
        really = self._really()
        heard = set(self.held)
        assert really == heard, (
            f"the tree has {len(really - heard)} blocks that no event told of, and lacks {len(heard - really)}"
        )

    def _really(self) -> set[Block]:
        """From the tree itself. There is no public way to list it, and no other place that needs one."""
        found: set[Block] = set()
        size = 4 * self.cache.page_size
        slot = family_class(self.cache.groups[self.group].family).shape == "slot"
        for namespace, root in self.cache._tree.roots.items():
            stack = [(node, namespace.digest()) for node in root.top.children.values()]
            while stack:
                node, digest = stack.pop()
                pages = node.copies[0 if self.medium == "GPU" else 1].pages[self.group]
                if slot:
                    there = [node.start + at + 1 in (pages or ()) for at in range(node.n)]
                else:
                    there = np.frombuffer(bytes(pages), np.int32).astype(bool).tolist() if pages else []
                    there += [False] * (node.n - len(there))  # on host, a prefix of the node
                for at in range(node.n):
                    digest = hashlib.sha256(digest + bytes(node.edge[at * size : (at + 1) * size])).digest()
                    if there[at]:
                        found.add((namespace, digest))
                stack += [(child, digest) for child in node.children.values()]
        return found
