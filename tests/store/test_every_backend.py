"""One suite for every backend: file, memory, faulty (without a fault), Redis, a Redis cluster of three, Mooncake."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import struct

import numpy as np
import pytest

from sapwood.cache import Namespace, token_bytes
from sapwood.cache.hashes import chain
from sapwood.store import StoreError
from sapwood.store.values import Item

from ..conftest import Place
from . import kit

_fresh = itertools.count()


@pytest.fixture
def mine(request: pytest.FixtureRequest) -> kit.Fingerprint:
    """A model that no other test has."""
    return kit.fingerprint(weights=hashlib.sha256(f"{request.node.nodeid} {next(_fresh)}".encode()).digest())


def test_what_was_put_comes_back(place: Place, mine: kit.Fingerprint) -> None:
    """Pages of three groups, one of them of an odd size, come back byte for byte; asked again, they still exist.

    Mutation: `Item.page` begins one page too early.
    """
    with place.desk(mine) as desk:
        put = desk.put(range(20))
        assert (put.run(), put.failed, put.held) == (20, "", False)
        got = desk.get(range(20))
        assert (got.run(), got.failed, got.held) == (20, "", False)
        assert desk.exists(range(22)).run() == 20
        stats = desk.store.stats()
        assert (stats["hit"], stats["stored"], stats["miss"]) == (60, 60, 0)


def test_a_hit_is_the_unbroken_run_over_all_groups(place: Place, mine: kit.Fingerprint) -> None:
    """One group lacks page 5, another page 8: five pages were hit. Memory of pages that were not asked for stays as it
    is, and so does the null page.

    Mutation: `unbroken_run` takes the longest run of any group.
    """
    with place.desk(mine) as desk:
        desk.put(range(12), ["full"])
        desk.put([0, 1, 2, 3, 4, 6, 7, 8, 9], ["window"])
        desk.put([3, 4, 5, 6, 7], ["state"])
        desk.wipe()
        targets = {"full": range(1, 11), "window": range(11, 21), "state": [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]}
        job = desk.store.get(kit.hashes(*range(10)), {g: list(t) for g, t in targets.items()}, timeout=20)
        done = desk.wait(job)
        assert done.run() == 5
        assert done.ok["window"].tolist() == [True] * 5 + [False] + [True] * 4
        assert done.ok["state"].tolist() == [False] * 3 + [True] * 5 + [False] * 2
        assert all((memory[0] == 0xEE).all() for memory in desk.memory.values())
        assert (desk.memory["full"][11:] == 0xEE).all()
        want = kit.content("window", 6, desk.memory["window"].shape[1])
        assert np.array_equal(desk.memory["window"][17], want)


def test_more_pages_than_a_part(place: Place, mine: kit.Fingerprint) -> None:
    """A job larger than what a backend is given at once comes back whole.

    Mutation: `_take` hands out every part from the first key on.
    """
    with place.desk(mine, pages=301) as desk:
        assert desk.put(range(300), ["full"]).run() == 300
        assert desk.get(range(300), ["full"]).run() == 300


def test_t13_two_servers_share(place: Place, mine: kit.Fingerprint) -> None:
    """What one server has put, a second one with the same fingerprint gets; and the first may be gone by then.

    Mutation: the fingerprint holds the process id.
    """
    with place.desk(mine) as one:
        one.put(range(8))
    with place.desk(dataclasses.replace(mine, groups=mine.groups[::-1])) as two:
        assert two.get(range(8)).run() == 8, "the order in which groups are declared does not matter"


def test_t09_servers_that_differ_never_share(place: Place, mine: kit.Fingerprint) -> None:
    """Other weights, dtype, page size, rank, ranks, layout, window, family: nothing is found, though all keys have the
    same chain hashes.

    Mutation: `Fingerprint.digest` leaves out any one field.
    """
    full, window, state = mine.groups
    others = [
        dataclasses.replace(mine, weights=bytes(32)),
        dataclasses.replace(mine, dtype="float8_e4m3"),
        dataclasses.replace(mine, page_size=32),
        dataclasses.replace(mine, ranks=2),
        dataclasses.replace(mine, rank=1, ranks=2),
        dataclasses.replace(mine, groups=(full, dataclasses.replace(window, window=256), state)),
        dataclasses.replace(mine, groups=(full, dataclasses.replace(window, family="full", window=None), state)),
        dataclasses.replace(mine, groups=(full, window, dataclasses.replace(state, layout="heads first"))),
        dataclasses.replace(mine, groups=(full, window)),
    ]
    with place.desk(mine) as desk:
        desk.put(range(3))
    for other in others if place.kind in ("file", "memory") and not place.process else others[1:5:3]:
        with place.desk(other) as desk:
            got = desk.get(range(3))
            assert not any(ok.any() for ok in got.ok.values()), other
            assert got.failed == ""


def test_l07_l14_the_namespace_is_in_the_key(place: Place, mine: kit.Fingerprint) -> None:
    """Equal tokens under adapters, salts and versions: each finds its own pages and nobody else's.

    Mutation: the chain hash begins without the namespace.
    """
    tokens = token_bytes(range(64))
    spaces = [
        Namespace(),
        Namespace(adapter=b"X"),
        Namespace(salt="X"),
        Namespace(adapter=b"X", salt="X"),
        Namespace(version=1),
    ]
    runs = [bytes(chain(space.digest(), tokens, 64)) for space in spaces]
    assert len(set(runs)) == len(spaces)
    with place.desk(mine) as desk:
        for n, run in enumerate(runs[:3]):
            desk.memory["full"][1:5] = n + 1
            assert desk.wait(desk.store.put(run, {"full": [1, 2, 3, 4]}, timeout=20)).run() == 4
        for n, run in enumerate(runs):
            desk.wipe()
            done = desk.wait(desk.store.get(run, {"full": [1, 2, 3, 4]}, timeout=20))
            assert done.run() == (4 if n < 3 else 0)
            if n < 3:
                assert (desk.memory["full"][1:5] == n + 1).all()


def test_l08_other_weights_under_the_same_name(place: Place, mine: kit.Fingerprint) -> None:
    """An adapter is loaded again with other weights, after a restart: its digest differs, and nothing old is found.

    Mutation: `Namespace.digest` leaves out the adapter.
    """
    tokens = token_bytes(range(32))
    old, new = (Namespace(adapter=hashlib.sha256(weights).digest()) for weights in (b"v1", b"v2"))
    with place.desk(mine) as desk:
        desk.wait(desk.store.put(bytes(chain(old.digest(), tokens, 64)), {"full": [1, 2]}, timeout=20))
    with place.desk(mine) as desk:
        done = desk.wait(desk.store.get(bytes(chain(new.digest(), tokens, 64)), {"full": [1, 2]}, timeout=20))
        assert done.run() == 0
        done = desk.wait(desk.store.get(bytes(chain(old.digest(), tokens, 64)), {"full": [1, 2]}, timeout=20))
        assert done.run() == 2


BAD_HEADS = {
    "magic": lambda head: bytes(len(head)),
    "version": lambda head: head[:8] + struct.pack("<H", 2) + head[10:],
    "fingerprint": lambda head: head[:24] + bytes(32) + head[56:],
    "key": lambda head: head[:56] + bytes(32) + head[88:],
    "length": lambda head: head[:16] + struct.pack("<Q", 999) + head[24:],
    "checksum": lambda head: head[:88] + bytes(16) + head[104:],
}


def test_t08_a_value_that_does_not_fit_is_a_miss(
    place: Place, mine: kit.Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header of another kind, version, model, key or length, or a checksum that is wrong: a miss, counted by reason.
    It is deleted, so that the next put mends it: its key is ours, whatever a crash or somebody else left there.

    Mutation: `Item.check` leaves out that comparison (checksum), or the store never deletes.
    """
    right = Item.head
    with contextlib.ExitStack() as stack:
        desk = stack.enter_context(place.desk(mine))
        writer = stack.enter_context(place.desk(mine, process=False)) if place.process else desk
        desk.put(["right"], ["full"])
        for n, (reason, change) in enumerate(BAD_HEADS.items(), 1):
            monkeypatch.setattr(Item, "head", lambda item, change=change: change(right(item)))
            writer.put([reason], ["full"])
            monkeypatch.undo()
            got = desk.get([reason, "right"], ["full"])
            assert got.ok["full"].tolist() == [False, True] and got.failed == "", reason
            bad = desk.store.stats()["bad"]
            assert {name: n for name, n in bad.items() if n} == dict.fromkeys(list(BAD_HEADS)[:n], 1)
            assert desk.exists([reason], ["full"]).run() == 0
            desk.put([reason], ["full"])
            assert desk.get([reason, "right"], ["full"]).run() == 2


def test_first_come_first_kept(place: Place, mine: kit.Fingerprint) -> None:
    """A key that is there already is not written again: a page's key says what its bytes are.

    Mutation: FileBackend.put does not look whether the file is there.
    """
    with place.desk(mine) as desk:
        desk.put([1], ["full"])
        desk.memory["full"][1] = 0
        done = desk.wait(desk.store.put(kit.hashes(1), {"full": [1]}, timeout=20))
        assert done.run() == 1
        assert desk.get([1], ["full"]).run() == 1


def test_nothing_to_do(place: Place, mine: kit.Fingerprint) -> None:
    """No keys, or none with a part in any group: done at once, and that is a run of all of them.

    Mutation: an empty job is put in the queue.
    """
    with place.desk(mine) as desk:
        assert desk.wait(desk.store.get([], {"full": []}, timeout=1)).run() == 0
        assert desk.wait(desk.store.get(kit.hashes(1, 2), {"full": [0, 0]}, timeout=1)).run() == 2


def test_drain_and_close(place: Place, mine: kit.Fingerprint) -> None:
    """After `drain` everything has been reported and nothing is held; after `close` nothing more is taken.

    Mutation: `close` does not set `_closed`.
    """
    desk = place.desk(mine)
    sources = desk.write(range(10))
    jobs = [desk.store.put(kit.hashes(*range(10)), sources, timeout=20) for _ in range(5)]
    assert desk.store.drain(20)
    assert sorted(report.job for report in desk.store.poll()) == sorted(jobs)
    assert desk.store.stats()["held_pages"] == 0
    assert desk.store.close(20)
    with pytest.raises(StoreError, match="closed"):
        desk.store.get(kit.hashes(1), {"full": [1]}, timeout=1)
    assert desk.store.close(1), "closing twice is fine"
