"""Page pools against a model that is a dict: owners, readers of single pages, and idle ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sapwood.cache.pool import FREE, LEASE, TREE, UNHOOKED, PagePool, PoolError


def ids_of(pages) -> bytes:
    return np.array(pages, np.int32).tobytes()


def pages_of(raw: bytes) -> list[int]:
    return np.frombuffer(raw, np.int32).tolist()


class Model:
    """What a pool should say."""

    def __init__(self, capacity: int) -> None:
        self.owner = dict.fromkeys(range(1, capacity + 1), FREE)
        self.reads = dict.fromkeys(range(1, capacity + 1), 0)

    def agrees(self, pool: PagePool) -> None:
        assert pool.readers[1:].tolist() == list(self.reads.values())
        assert list(pool.owner[1:]) == list(self.owner.values())
        assert pool.idle == sum(owner == TREE and not self.reads[page] for page, owner in self.owner.items())
        assert sorted(pool.free_ids().tolist()) == [page for page, owner in self.owner.items() if owner == FREE]


@pytest.mark.parametrize("seed", range(4))
def test_f01_readers_are_counted_as_a_dict_would(seed):
    """Whatever reads and leaves, the counts are exact: a slot that nobody reads is idle, and a page of an evicted
    namespace is free when its last reader leaves.

    Mutation: `unread` forgets `idle`, or `unread_unhooked` frees pages that somebody still reads.
    """
    rng = random.Random(seed)
    pool, model = PagePool("state", 60, by_page=True), Model(60)
    mine = pages_of(pool.allocate(50, LEASE))
    pool.move(ids_of(mine), LEASE, TREE)
    pool.idle += len(mine)
    model.owner.update(dict.fromkeys(mine, TREE))
    freed = 0
    for turn in range(600):
        kind = rng.choice([TREE, UNHOOKED])
        there = [page for page, owner in model.owner.items() if owner == kind]
        pages = rng.sample(there, min(len(there), rng.choice([1, 2, 9, 20])))
        detached_roots = kind == UNHOOKED
        if rng.random() < (0.7 if turn % 200 < 100 else 0.3):
            if detached_roots:
                pool.read_unhooked(ids_of(pages))
            for page in pages:
                if not detached_roots:
                    pool.read(page)
                model.reads[page] += 1
        else:
            pages = [page for page in pages if model.reads[page]]
            if detached_roots:
                pool.unread_unhooked(ids_of(pages))
            for page in pages:
                model.reads[page] -= 1
                idle = model.owner[page] == TREE and not model.reads[page]
                assert detached_roots or pool.unread(page) == idle
                if model.owner[page] == UNHOOKED and not model.reads[page]:
                    model.owner[page] = FREE
                    freed += 1
        if turn % 100 == 50:
            read = [page for page, owner in model.owner.items() if owner == TREE and model.reads[page]][:6]
            pool.move(ids_of(read), TREE, UNHOOKED)
            model.owner.update(dict.fromkeys(read, UNHOOKED))
        model.agrees(pool)
    assert freed and TREE in model.owner.values(), "some lost their last reader, and not all were evicted"


def test_l05_an_unhooked_page_goes_with_its_last_reader():
    """Mutation: `unread_unhooked` frees pages that somebody still reads, or lets a count fall below zero."""
    pool = PagePool("window", 40, by_page=True)
    raw = pool.allocate(9, LEASE)
    pool.move(raw, LEASE, UNHOOKED)
    ids = raw
    pool.read(1)
    for _ in range(300):
        pool.read_unhooked(ids)
    for _ in range(299):
        pool.unread_unhooked(ids)
    assert pool.counts[UNHOOKED] == 9
    pool.unread_unhooked(ids)
    assert pool.counts[UNHOOKED] == 1
    assert not pool.unread(1) and pool.free == 40
    with pytest.raises(PoolError, match="has no reader to leave"):
        pool.unread_unhooked(ids)
