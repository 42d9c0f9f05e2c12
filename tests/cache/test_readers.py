"""Readers by column: against a model that knows for each column of each path who reads it."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from sapwood.cache import CacheGroup, Namespace
from sapwood.cache.group import DEVICE
from sapwood.cache.pool import LEASE, TREE
from sapwood.cache.readers import counts, idle_in, read, unread, unread_columns
from sapwood.cache.tree import Tree


class Wood:
    """A tree of one window group, with a model beside it: by (branch, column), how many read it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tree = Tree(2, (CacheGroup("window", "window", 200, 0, 8),), False, False, 0)
        self.root = self.tree.root_of(Namespace())
        self.reads: Counter[tuple[int, int]] = Counter()
        trunk = self._grow(self.root.top, 0, 8)
        self.ends = [self._grow(trunk, branch, 6) for branch in (1, 2, 3)]

    def _grow(self, parent, branch: int, n: int):
        edge = np.full(2 * n, branch, np.int32).tobytes()
        node = self.tree.attach(parent, edge, n)
        pool = self.tree.device.pools[0]
        raw = pool.allocate(n, LEASE)
        pool.move(raw, LEASE, TREE)
        pages = bytearray(raw)
        for hole in range(n):
            if self.rng.random() < 0.2:
                pool.release(bytes(pages[4 * hole : 4 * hole + 4]), TREE)
                pages[4 * hole : 4 * hole + 4] = bytes(4)
        node.copies[DEVICE].pages[0] = pages
        pool.idle += len(_present(node))
        return node

    @staticmethod
    def at(branch: int, column: int) -> tuple[int, int]:
        return (branch if column >= 8 else -1, column)

    def agrees(self) -> None:
        tree, idle = self.tree, 0
        for branch, end in enumerate(self.ends):
            for node, _, _ in tree.cover(end, 0, end.end):
                reads = node.copies[DEVICE].reads[0]
                here = [self.reads[self.at(branch, node.start + i)] for i in range(node.n)]
                kept = list(reads or bytes(node.n))
                for (_, column), more in (node.copies[DEVICE].reader_overflow or {}).items():
                    kept[column - node.start] += more
                assert kept == here
                pages = np.frombuffer(bytes(node.copies[DEVICE].pages[0]), np.int32).tolist()
                assert counts(node.copies[DEVICE], 0, node.start) == {
                    page: count for page, count in zip(pages, here, strict=True) if page and count
                }
                assert unread_columns(node.copies[DEVICE], 0, 0, node.n) == here.count(0)
                if node.start >= 8 or branch == 0:
                    idle += sum(1 for page, count in zip(pages, here, strict=True) if page and not count)
            here = [(c, self.reads[self.at(branch, c)]) for c in range(end.end)]
            there = {node.start + i for node, _, _ in tree.cover(end, 0, end.end) for i in _present(node)}
            assert idle_in(tree, end, DEVICE, 0, [(2, 11)]) == sum(
                1 for column, count in here if 2 <= column < 11 and not count and column in there
            )
        assert tree.device.pools[0].idle == idle


def _present(node) -> list[int]:
    return np.frombuffer(bytes(node.copies[DEVICE].pages[0]), np.int32).nonzero()[0].tolist()


@pytest.mark.parametrize("seed", range(6))
def test_f10_readers_of_columns_are_counted_as_a_dict_would(seed):
    """Ranges of paths are read and left in any order, nodes are split meanwhile, and crowds gather: every column has
    its readers, and what nobody reads is idle, holes excepted.

    Mutation: `read` or `unread` counts holes as idle; `SlidingPages.split` loses readers, or those of a crowd.
    """
    rng = random.Random(seed)
    wood = Wood(rng)
    held: list[tuple[int, int, int]] = []
    for turn in range(400):
        if rng.random() < (0.75 if turn % 200 < 100 else 0.3) or not held:
            branch, low = rng.randrange(3), rng.randrange(13)
            high = rng.randint(low, 14)
            for _ in range(rng.choice([1, 1, 1, 1, 130])):
                read(wood.tree, wood.ends[branch], DEVICE, 0, low, high)
                held.append((branch, low, high))
                wood.reads.update({wood.at(branch, column): 1 for column in range(low, high)})
        else:
            rng.shuffle(held)
            for branch, low, high in [held.pop() for _ in range(min(len(held), rng.choice([1, 1, 150])))]:
                unread(wood.tree, wood.ends[branch], DEVICE, 0, low, high)
                wood.reads.subtract({wood.at(branch, column): 1 for column in range(low, high)})
        if turn % 40 == 39:
            end = rng.choice(wood.ends)
            node = rng.choice([node for node, _, _ in wood.tree.cover(end, 0, end.end)])
            if node.n > 1:
                wood.tree.split(node, rng.randint(1, node.n - 1))
        wood.agrees()
    for branch, low, high in held:
        unread(wood.tree, wood.ends[branch], DEVICE, 0, low, high)
    wood.reads.clear()
    wood.agrees()
    assert not any(
        node.copies[DEVICE].reader_overflow for end in wood.ends for node, _, _ in wood.tree.cover(end, 0, end.end)
    )


def test_f10_a_reader_that_is_not_there_cannot_leave():
    """Mutation: `unread` lets a count fall below zero."""
    wood = Wood(random.Random(0))
    read(wood.tree, wood.ends[0], DEVICE, 0, 3, 10)
    with pytest.raises(AssertionError, match="no reader to leave"):
        unread(wood.tree, wood.ends[0], DEVICE, 0, 2, 10)
