"""An engine whose store is in a process of its own: hits after a restart, kills in the middle, rest until it tells."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from sapwood.engine import HostArena
from sapwood.store import Breaker, open_store
from sapwood.store.process import CAN_START
from sapwood.store.spawn import place_of

from .machine import PAGE, PATIENCE, PROMPT, Machine, each_layout, toks

pytestmark = [pytest.mark.server, pytest.mark.skipif(not CAN_START, reason="needs Linux: memfd_create, epoll")]


def machine(tmp_path, layout="full", options="", **more):
    more.setdefault("breaker", Breaker(failures=3, seconds=0.1))
    uri = f"{'faulty+' if options else ''}file://{tmp_path}/store?size=10MiB{options}"
    return Machine(layout, uri, process=True, **more)


def process(engine):
    return engine.store.stats()["process"]


@each_layout
def test_what_one_life_computed_the_next_one_finds(tmp_path, layout):
    """Backed up by one engine, fetched by the next, in every layout; and no thread of the engine had a part in it.

    Mutation: the worker maps the memory of a group at another place.
    """
    threads = threading.active_count()
    interval = sys.getswitchinterval()
    first = machine(tmp_path, layout)
    first.serve("ann", PROMPT)
    assert threading.active_count() == threads and sys.getswitchinterval() == interval
    first.close()
    second = machine(tmp_path, layout)
    assert second.serve("ben", PROMPT).cached >= 4 * PAGE
    second.close()
    assert second.tiers.stats()["pages_fetched"] >= 4


def test_rest_ends_when_the_store_has_news(tmp_path):
    """Who rests is woken by the answer, by `wake` from another thread, and by nothing else.

    Mutation: `Tiers._listen` does not wait for the file of the store.
    """
    engine = machine(tmp_path, options="&slow=0.2")
    engine.submit("ann", PROMPT)
    engine.step()
    begin = time.monotonic()
    assert engine.tiers.wait(600) and time.monotonic() - begin < PATIENCE
    engine.see_to("ann")
    engine.settle()
    begin = time.monotonic()
    assert not engine.tiers.wait(0.1) and 0.09 < time.monotonic() - begin < PATIENCE
    waker = threading.Timer(0.1, engine.tiers.wake)
    waker.start()
    assert engine.tiers.wait(600)
    waker.join()
    engine.close()


@each_layout
def test_t10_the_process_is_killed_in_the_middle_of_everything(tmp_path, layout, monkeypatch):
    """Requests come and go while the store's process is killed: each gets the right answer, nothing leaks, and in the
    end the store serves again.

    Mutation: `ProcessStore._bury` reports what was under way as done.
    """
    monkeypatch.setattr("sapwood.store.process._STEADY_SECONDS", 0.0)
    engine = machine(tmp_path, layout, tick_seconds=0.001)
    for n in range(12):
        engine.submit(f"r{n}", toks(n % 4, 6 * PAGE + 1), 2)
        engine.step()
        if n % 4 == 2 and process(engine)["alive"]:
            os.kill(process(engine)["pid"], signal.SIGKILL)
        engine.see_to(f"r{n}")
    engine.until(lambda: process(engine)["restarts"] and process(engine)["alive"], what="another process")
    engine.until(lambda: engine.store.breaker.state != "open", what="the breaker")
    engine.serve("last", toks(99, 6 * PAGE + 1), 2)
    engine.close()


def test_a_dead_process_is_started_again_while_the_engine_rests(tmp_path):
    """Nobody asks for anything: the end of the process is noticed all the same, and it is started again.

    Mutation: `Tiers` polls a store only while jobs are under way.
    """
    engine = machine(tmp_path)
    engine.serve("ann", PROMPT)
    os.kill(process(engine)["pid"], signal.SIGKILL)
    until = time.monotonic() + PATIENCE
    while not (process(engine)["restarts"] and process(engine)["alive"]):
        assert time.monotonic() < until
        engine.tiers.wait(0.5)
    engine.until(lambda: engine.store.breaker.state != "open", what="the breaker")
    assert engine.serve("ben", PROMPT).cached
    engine.close()


def test_a_host_arena_can_be_seen_by_another_process(tmp_path):
    """The arena lies in memory that a store's process maps, each group from its beginning.

    Mutation: `HostArena` takes plain memory.
    """
    engine = machine(tmp_path, "full+state")
    for rows in engine.arena.pages.values():
        place = place_of(rows)
        assert place is not None and place.offset == 0
    engine.close()
    plain = Machine("full", f"file://{tmp_path}/other?size=10MiB")
    store = open_store("memory://", plain.fingerprint, process=True)
    with pytest.raises(ValueError, match="HostArena"):
        store.register("full", plain.device["full"])
    store.register("full", HostArena(plain.groups).pages["full"])
    store.close()
    plain.close()
