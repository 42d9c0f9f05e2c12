"""Page pools against a model that is a dict: owners, readers and idle pages, for runs, scattered pages and crowds."""

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
        assert pool.read_counts()[1:].tolist() == list(self.reads.values())
        assert [pool.read_by(page) for page in self.reads] == list(self.reads.values())
        assert list(pool.owner[1:]) == list(self.owner.values())
        assert pool.idle == sum(owner == TREE and not self.reads[page] for page, owner in self.owner.items())
        assert sorted(pool.free_ids().tolist()) == [page for page, owner in self.owner.items() if owner == FREE]


def some(rng: random.Random, pages: list[int]) -> list[int]:
    """Different pages: a few, or many; side by side, or anywhere."""
    n = min(len(pages), rng.choice([1, 2, 5, 9, 20, 70]))
    if rng.random() < 0.5:
        at = rng.randrange(len(pages) - n + 1)
        return sorted(pages)[at : at + n]
    return rng.sample(pages, n)


@pytest.mark.parametrize("seed", range(8))
def test_f01_readers_are_counted_as_a_dict_would(seed):
    """Whatever reads and leaves, in whatever shape, as arrays, as bytes or one by one, the counts are exact; a page of
    an evicted namespace is free when its last reader leaves.

    Mutation: any of the quick roads of `read_raw` and `unread_raw` (a run, a few, scattered) forgets `idle`, or takes a
    page of a crowd for one with 255 readers.
    """
    rng = random.Random(seed)
    pool, model = PagePool("window", 120, by_page=True), Model(120)
    for page in pages_of(pool.take(100, LEASE)):
        model.owner[page] = LEASE
    mine = [page for page, owner in model.owner.items() if owner == LEASE]
    pool.hand(ids_of(mine), LEASE, TREE)
    pool.idle += len(mine)
    model.owner.update(dict.fromkeys(mine, TREE))
    for turn in range(900):
        there = [page for page, owner in model.owner.items() if owner != FREE]
        pages = some(rng, there)
        if rng.random() < (0.9 if turn % 300 < 150 else 0.3):  # crowds gather, and go
            for _ in range(rng.choice([1, 1, 1, 90])):
                one_by_one = rng.random() < 0.2
                if one_by_one:
                    for page in pages:
                        pool.read_one(page)
                else:
                    pool.read_raw(ids_of(pages))
                for page in pages:
                    model.reads[page] += 1
        else:
            pages = [page for page in pages if model.reads[page]]
            way = rng.choice(["raw", "each", "one"])
            before = pool.idle
            if way == "raw":
                became = pool.unread_raw(ids_of(pages)) if pages else False
            elif way == "each":
                became = bool(pool.unread_each(pages))
            else:
                became = sum([pool.unread_one(page) for page in pages]) > 0
            assert became == (pool.idle > before)
            for page in pages:
                model.reads[page] -= 1
                if model.owner[page] == UNHOOKED and not model.reads[page]:
                    model.owner[page] = FREE
        if turn % 100 == 50:
            read = [page for page in some(rng, there) if model.owner[page] == TREE and model.reads[page]][:3]
            pool.hand(ids_of(read), TREE, UNHOOKED)
            model.owner.update(dict.fromkeys(read, UNHOOKED))
        model.agrees(pool)


def test_f01_more_readers_than_a_byte_can_count():
    """A thousand requests read one window, and leave one after the other: the last makes it idle.

    Mutation: `_ONE_MORE` is used for pages with 255 readers.
    """
    pool = PagePool("window", 40, by_page=True)
    raw = pool.take(40, LEASE)
    pool.share(raw)  # by the lease that made it
    odd = ids_of(pages_of(raw)[::2])
    for _ in range(999):
        pool.read_raw(raw)
    for _ in range(300):
        pool.read_raw(odd)
    assert pool.read_by(1) == 1300 and pool.read_by(2) == 1000 and not pool.idle
    for _ in range(300):
        assert not pool.unread_raw(odd)
    for left in range(999, -1, -1):
        assert pool.unread_raw(raw) == (not left)
        assert pool.read_by(1) == pool.read_by(2) == left
    assert pool.idle == 40
    with pytest.raises(PoolError, match="has no reader to leave"):
        pool.unread_raw(raw)


@pytest.mark.parametrize("n", [1, 3, 9, 40])
def test_l05_unhooked_pages_that_lose_their_last_reader_here_are_not_freed(n):
    """A lease that falls back hands its unhooked pages to a step in flight: they are told, and still unhooked.

    Mutation: `unread_unhooked` frees them, or forgets those of a crowd.
    """
    pool = PagePool("window", 40, by_page=True)
    raw = pool.take(n, LEASE)
    pool.share(raw)
    pool.hand(raw, TREE, UNHOOKED)
    pool.read_one(1)
    for _ in range(300):
        pool.read_raw(raw)
    ids = np.frombuffer(raw, np.int32)
    for _ in range(300):
        assert not len(pool.unread_unhooked(ids))
    assert pool.unread_unhooked(ids).tolist() == ids.tolist()[1:]
    assert pool.unread_unhooked(ids[:1]).tolist() == [1]
    assert pool.counts[UNHOOKED] == n
