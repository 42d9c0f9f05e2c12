"""Mooncake over TCP: a real master, a real provider, our client; each of them is killed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sapwood.store import Breaker

from . import kit


@pytest.fixture
def own(alone: kit.Alone, tmp_path: Path) -> Iterator[kit.Mooncake]:
    """Servers that this test may kill; the test runs in their network namespace."""
    servers = kit.Mooncake(alone, tmp_path, segment=32 * kit.MIB)
    try:
        with alone.inside():
            yield servers
    finally:
        servers.close()


def test_t08_provider_and_master_die(own: kit.Mooncake) -> None:
    """The provider dies: what it had is said to exist and cannot be had, so nothing counts. The master dies: calls
    block for seconds, jobs end by their deadline all the same, and no call of the store waits. Both come back: so does
    the store.

    Mutation: negative codes are taken for sizes; the store trusts what exists says.
    """
    now = [0.0]
    with kit.Desk(own.uri, breaker=Breaker(failures=3, seconds=10, clock=lambda: now[0])) as desk:
        assert desk.put(range(10)).run() == 10 and desk.get(range(10)).run() == 10
        own.provider.kill()
        assert desk.get(range(10)).run() == 0
        assert desk.exists(range(10)).run() == 10, "this is what Mooncake says"
        own.master.kill()
        done = []
        while desk.store.breaker.state != "open":
            done.append(desk.wait(desk.store.get(kit.hashes(1), {"full": [1]}, timeout=0.5)))
            assert done[-1].failed in ("timeout", "error"), "the first may fail at once, then it blocks for 4 s"
        assert not any(one.run() for one in done)
        assert any(one.held for one in done), (
            "its calls let other threads run: those that blocked were told of meanwhile"
        )
        assert desk.store.get(kit.hashes(1), {"full": [1]}, timeout=0.5) is None, "the breaker is open"
        assert all(desk.released(one.job) for one in done if one.held)
        own.master.start()
        kit.until(lambda: kit.can_connect(own.port), "the master")
        own.provider = own.provide()

        def kept() -> bool:
            now[0] += 11
            job = desk.store.put(kit.hashes(1), desk.write([1], ["full"]), timeout=8)
            return job is not None and desk.wait(job).run() == 1

        kit.until(kept, "a page to be kept")
        assert desk.get([1], ["full"]).run() == 1
        assert desk.store.stats()["breaker"]["recovered"] >= 1
        assert desk.store.stats()["backend"]["codes"]


def test_t12_a_full_provider(own: kit.Mooncake) -> None:
    """More than its memory: what does not fit is counted as full or evicted by Mooncake, never wrong.

    Mutation: the code for no room counts as an error.
    """
    print_ = kit.fingerprint(kit.MIB, groups=kit.layout(kit.MIB)[:1])
    with kit.Desk(own.uri, print_, pages=49) as desk:
        done = desk.put(range(48))
        stored = done.ok["full"]
        assert 16 <= stored.sum() < 48 and done.failed == "" and desk.store.stats()["full"] > 0
        got = desk.get(range(48)).ok["full"]
        assert np.all(got <= stored) and got.sum() >= 8


def test_t10_our_client_dies(own: kit.Mooncake, tmp_path: Path) -> None:
    """A client killed while it backs up: another one finds whole pages or none.

    Mutation: the header does not hold the checksum.
    """
    code = f"""
from tests.store import kit
desk = kit.Desk({own.uri!r})
print("ready", flush=True)
while True:
    for low in range(0, 40, 8):
        desk.put(range(low, low + 8))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(random.Random(1).uniform(0.02, 0.2))
    process.kill()
    process.wait()
    with kit.Desk(own.uri) as desk:
        desk.get(range(40))  # compares every byte
        assert sum(desk.store.stats()["bad"].values()) == 0
