"""Whole engines with real bytes on every backend: served, evicted, fetched, loaded, shared, restarted; every read and
every arrival is checked by content (cases T01-T03, T06, T08-T10, T12, T13, T17-T19, L, P and F where bytes matter)."""

from __future__ import annotations

import hashlib
import itertools
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from sapwood.cache import CacheGroup, Namespace
from sapwood.scheduler import RequestSpec
from sapwood.sim.depot import Depot
from sapwood.store import Breaker, Faults
from sapwood.store.folder import UNCOUNTED

from ..conftest import Place
from ..scheduler.driver import groups_of
from ..store import kit
from .machine import BASE, HYBRID, PAGE, PATIENCE, PROMPT, Late, Machine, each_hand, each_layout, toks

pytestmark = pytest.mark.server
# Every backend once, on threads: a machine wraps each in faults, and stores in processes are in test_process.py.
PLACES = ("file", "memory", "redis", "cluster", "mooncake")
_fresh = itertools.count()


@pytest.fixture
def weights(request: pytest.FixtureRequest) -> bytes:
    """Of a model that no other test has."""
    return hashlib.sha256(f"{request.node.nodeid} {next(_fresh)}".encode()).digest()


# ---- host


@each_layout
@each_hand
@pytest.mark.parametrize("policy", ["through", "evict"])
def test_t01_f02_lost_on_the_device_and_loaded_from_host(layout, hands, policy):
    """A prompt is computed, written to host, crowded out of the device and asked for again: every group is loaded, byte
    for byte, none of it computed.

    Mutation: `Tiers.begin` starts loads as saves; or a mover leaves out the last byte of a page.
    """
    machine = Machine(layout, pages=24, host=200, hands=hands, host_policy=policy)
    first = machine.serve("ann", PROMPT)
    machine.crowd(8, pages=8)
    again = machine.serve("again", PROMPT)
    assert (first.cached, again.cached, again.computed) == (0, 24, 1)
    assert machine.said["again"] == machine.said["ann"]
    assert machine.mover.stats()["loads"] == machine.tiers.stats()["loads"] == 1
    assert machine.mover.stats()["load_pages"] >= 6
    machine.close()


# ---- store


@each_layout
def test_t17_from_the_store_to_host_to_the_device(place: Place, weights, layout):
    """Crowded out of device and host, a prompt comes back from the store: its six whole pages, none computed again, and
    the answer is that of an engine that never forgets.

    Mutation: `Tiers._over` counts what `exists` said; or a fetch is told before its bytes are there.
    """
    unlimited = Machine(layout, pages=400, host=400)
    want = unlimited.serve("ann", PROMPT, 5)
    machine = Machine(layout, place.uri, pages=12, host=12, weights=weights)
    machine.serve("ann", PROMPT, 5)
    machine.crowd()
    assert machine.cache.explain(BASE, PROMPT).cached == 0, "device and host have forgotten it"
    again = machine.serve("again", PROMPT, 5)
    assert (again.cached, again.computed, again.recomputed) == (24, want.prompt - 24, 0)
    assert machine.said["again"] == unlimited.said["ann"]
    assert machine.tiers.stats()["pages_fetched"] == 6
    if layout == "full":
        assert machine.mover.stats()["load_pages"] == 6
    machine.close()
    unlimited.close()


def test_t02_below_the_threshold_it_computes(place: Place, weights):
    """Fewer whole pages missing than the threshold are not looked for; as many are fetched.

    Mutation: `Tiers.begin` does not ask for every hash.
    """
    maker = Machine(HYBRID, place.uri, weights=weights, prefetch_threshold=4)
    maker.serve("ann", PROMPT)
    maker.close()
    machine = Machine(HYBRID, place.uri, weights=weights, prefetch_threshold=4)
    assert machine.serve("short", PROMPT[: 3 * PAGE + 1]).cached == 0
    assert machine.tiers.stats()["lookups"] == 0
    machine.scheduler.flush()
    assert machine.serve("long", PROMPT).cached == 24
    assert machine.tiers.stats()["lookups"] == machine.tiers.stats()["fetches"] == 1
    machine.close()


@each_layout
def test_t03_fetched_pages_land_behind_those_on_host(place: Place, weights, layout):
    """Host has two pages, the store the next four: these land at page 2, and all six are served.

    Mutation: `StoreFetches.begin_fetch` begins at page 0; or hashes begin without what stands before them.
    """
    maker = Machine(layout, place.uri, weights=weights)
    maker.serve("ann", PROMPT)
    maker.close()
    machine = Machine(layout, place.uri, pages=12, host=60, weights=weights)
    machine.serve("before", PROMPT[: 2 * PAGE + 1], reads_cache=False)
    machine.crowd(3, writes_cache=False)
    assert machine.serve("ann", PROMPT).cached == 24
    assert machine.tiers.stats()["pages_fetched"] == 4
    machine.close()


@each_layout
@pytest.mark.parametrize("lost", [0, 3, 5])
def test_t06_a_fetch_that_brings_a_part(place: Place, weights, layout, lost):
    """A page is gone from the store that is said to be there: the unbroken run before it lands, the rest is computed.

    Mutation: `Tiers._over` takes the number of pages asked for.
    """
    maker = Machine(layout, place.uri, weights=weights)
    maker.serve("ann", PROMPT)
    maker.close()
    machine = Machine(layout, place.uri, weights=weights)
    machine.backend.faults = Faults(lie=1.0)
    machine.backend.delete([machine.names(PROMPT)[lost]])
    end = machine.serve("ann", PROMPT)
    assert machine.tiers.stats()["pages_fetched"] == lost
    if layout == "full":
        assert end.cached == lost * PAGE
    assert not any(machine.pages("host", "flight").values())
    machine.close()


# ---- T08


TROUBLE = {
    "dead": {"fail": 1.0},
    "slow": {"slow": 0.25},
    "full": {"full": 1.0},
    "lying": {"lie": 1.0},
    "lossy": {"partial": 0.4},
    "corrupting": {"corrupt": 1.0},
    "torn": {"torn": 1.0},
    "hanging": {"hang": 1.0, "hang_seconds": 0.3},
}


def healed(machine: Machine) -> bool:
    """Whether requests are served from the store again: until then each is one that tries."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        machine.scheduler.flush()
        if machine.serve("healing", PROMPT).cached == 24:
            return True
    return False


@pytest.mark.parametrize("layout", ["full", HYBRID])
@pytest.mark.parametrize("trouble", TROUBLE)
def test_t08_a_bad_store_costs_time_and_nothing_else(tmp_path, layout, trouble):
    """A store that fails, dawdles, is full, lies, loses, corrupts, tears or hangs: everybody ends with the right answer
    in bounded time; when it is well again it serves again.

    Mutation: `ThreadStore._get` does not check; or `Tiers._ask` lets a refused job go unanswered.
    """
    uri = f"file://{tmp_path}/store?size=10MiB"
    maker = Machine(layout, uri)
    maker.serve("ann", PROMPT)
    maker.close()
    fast = {"tick_seconds": 0.001, "lookup_ticks": 100, "fetch_ticks": 100}
    machine = Machine(layout, uri, breaker=Breaker(failures=3, seconds=0.1), **fast)
    machine.backend.faults = Faults(**TROUBLE[trouble])
    for n in range(4):
        machine.submit(f"same {n}", PROMPT)
        machine.submit(f"new {n}", toks(90 + n, 6 * PAGE + 1))
        machine.see_to(f"same {n}", f"new {n}")
        machine.scheduler.flush()
    if trouble in ("dead", "corrupting", "torn"):
        assert all(machine.ended[f"same {n}"].cached == 0 for n in range(4))
    machine.backend.faults = Faults()
    machine.backend.release()
    machine.settle()
    assert healed(machine)
    machine.close()


@pytest.mark.parametrize("layout", ["full", HYBRID])
@pytest.mark.parametrize("trouble", ["dead", "full", "lossy"])
def test_t08_what_a_bad_store_did_not_keep_is_offered_again(tmp_path, layout, trouble):
    """Nothing, or a part, of what one engine saves is kept. The store is well again, the engine is idle: it wakes by
    itself to offer it once more, and another engine is served all of it.

    Mutation: `Prefetch.wake_in` thinks of requests alone; or `BackupRetries.due` never gives anything.
    """
    uri = f"file://{tmp_path}/store?size=10MiB"
    machine = Machine(layout, uri, breaker=Breaker(failures=3, seconds=0.1), tick_seconds=0.001)
    machine.backend.faults = Faults(**TROUBLE[trouble])
    machine.serve("ann", PROMPT)
    machine.backend.faults = Faults()
    until = time.monotonic() + PATIENCE
    while machine.scheduler.stats()["store"]["owed"] or machine.tiers.busy:
        assert time.monotonic() < until, "it was never offered"
        machine.step()
        machine.loop.rest(10)
    machine.close()
    other = Machine(layout, uri)
    assert other.serve("bob", PROMPT).cached == 24
    other.close()


def test_t08_a_redis_that_is_killed_and_comes_back(tmp_path, weights):
    """The server dies under an engine: the breaker opens, requests compute. It comes back empty: it is filled again.

    Mutation: `Tiers._ask` raises what the store raises.
    """
    if kit.NO_REDIS:
        pytest.skip(kit.NO_REDIS)
    server, port = kit.redis_server(tmp_path / "redis")
    try:
        uri = f"redis://127.0.0.1:{port}/0?timeout=0.5"
        machine = Machine(HYBRID, uri, weights=weights, breaker=Breaker(failures=2, seconds=0.3))
        machine.serve("ann", PROMPT)
        machine.scheduler.flush()
        assert machine.serve("again", PROMPT).cached == 24
        server.kill()
        machine.scheduler.flush()
        for n in range(4):
            assert machine.serve(f"dead {n}", toks(60 + n, 6 * PAGE + 1)).cached == 0
        assert machine.store.breaker.opened > 0 and machine.scheduler.stats()["store"]["owed"] > 0
        assert machine.store.breaker.state != "closed"
        server, port = kit.redis_server(tmp_path / "redis", port=port)
        assert healed(machine)
        machine.close()
    finally:
        server.kill()


# ---- T09, T10, T12, T13


@pytest.mark.parametrize("differs", ["weights", "dtype", "rank", "ranks", "layout", "page bytes", "page size"])
def test_t09_engines_that_differ_never_share(place: Place, weights, differs):
    """Two engines on one store that differ in anything that makes bytes: neither finds a page of the other, and each
    finds its own.

    Mutation: the fingerprint leaves out the field.
    """
    one = Machine("full", place.uri, weights=weights)
    (layout,) = one.fingerprint.groups
    other: dict = {
        "weights": {"weights": hashlib.sha256(weights).digest()},
        "dtype": {"fingerprint": {"dtype": "float16"}},
        "rank": {"fingerprint": {"rank": 1, "ranks": 2}},
        "ranks": {"fingerprint": {"ranks": 2}},
        "layout": {"fingerprint": {"groups": (replace(layout, layout="V before K"),)}},
        "page bytes": {"groups": [CacheGroup("full", "full", 40), CacheGroup("more", "full", 40)]},
        "page size": {"page": 2 * PAGE},
    }[differs]
    two = Machine("full", place.uri, **{"weights": weights, **other})
    one.serve("ann", PROMPT)
    assert two.serve("bob", PROMPT).cached == 0
    assert two.store.stats()["found"] == two.store.stats()["hit"] == 0
    one.scheduler.flush()
    two.scheduler.flush()
    assert one.serve("ann again", PROMPT).cached == 24
    assert two.serve("bob again", PROMPT).cached == 24
    one.close()
    two.close()


@each_layout
def test_t10_after_a_restart_the_store_serves(place: Place, weights, layout):
    """An engine is closed right after its last request; a fresh one is served all of its prefixes.

    Mutation: `EngineLoop.close` does not write back what is left.
    """
    before = Machine(layout, place.uri, weights=weights)
    for n in range(3):
        before.submit(f"r{n}", toks(n, 6 * PAGE + 1))
    before.see_to("r0", "r1", "r2")
    assert before.loop.close(PATIENCE) == []
    after = Machine(layout, place.uri, weights=weights)
    for n in range(3):
        assert after.serve(f"r{n}", toks(n, 6 * PAGE + 1)).cached == 24
        assert after.said[f"r{n}"] == before.said[f"r{n}"]
    after.close()


@pytest.mark.parametrize("layout", ["full", HYBRID])
def test_t10_killed_at_any_moment_it_never_serves_a_torn_page(tmp_path, layout):
    """Engines are killed with SIGKILL while they back up; a fresh one serves what they left, right to the last byte,
    and finds nothing that is torn.

    Mutation: `FileBackend` writes values in place.
    """
    uri = f"file://{tmp_path}/store?size=20MiB"
    rng = random.Random(layout)
    for life in range(5):
        command = [sys.executable, "-m", "tests.engine.victim", layout, uri, str(life)]
        victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert victim.stdout is not None and victim.stdout.readline() == "backing up\n"
        time.sleep(rng.random() * 0.2)
        victim.kill()
        victim.wait(PATIENCE)
    machine = Machine(layout, uri, pages=100, host=100)
    cached = 0
    for life in range(5):
        for n in range(10):
            prompt = toks(1000 * life + n, 8 * PAGE + 1)
            cached += machine.serve(f"{life} {n}", prompt, 1).cached
    assert cached >= 5 * 8 * PAGE, "what they had backed up is there"
    assert not any(machine.store.stats()["bad"].values())
    machine.close()


def test_t12_byte_limits_hold_under_load(tmp_path):
    """Much more traffic than any tier holds: the files never take more than was allowed, host and device are what they
    were made with, and old prompts still get right answers.

    Mutation: the ledger counts after it writes.
    """
    limit = 200 * 1024
    machine = Machine(HYBRID, f"file://{tmp_path}/store?size={limit}", pages=24, host=24)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, kit.within(tmp_path / "store", limit))
        used = machine.store.stats()["backend"]["used"]
        assert used <= limit or used == UNCOUNTED

    machine.look = look
    for n in range(40):
        machine.serve(f"r{n}", toks(n % 25, 9 * PAGE + 1))
    assert most > limit / 2, "it was used"
    assert machine.arena.nbytes == sum(25 * group.page_bytes for group in machine.groups)
    assert machine.store.stats()["backend"]["evicted"] > 0
    machine.close()


@each_layout
def test_t13_two_engines_share_one_store(place: Place, weights, layout):
    """Chats that go back and forth between two engines: each is served what the other has computed, also while the
    other forgets all it has.

    Mutation: the hashes of a backup begin at page 0.
    """
    depot = Depot()
    engines = [Machine(layout, place.uri, weights=weights, depot=depot, pages=60, host=60) for _ in range(2)]
    chat, told = toks(3, 4 * PAGE + 1), 0  # and how much of it the other engine has seen as a prompt
    for turn in range(6):
        engine, other = engines[turn % 2], engines[1 - turn % 2]
        assert engine.serve(f"turn {turn}", chat, 5).cached >= told - PAGE  # for one page more nobody asks
        told = (len(chat) - 1) // PAGE * PAGE
        chat = engine.lives[f"turn {turn}"].known + toks(70 + turn, PAGE)
        if turn % 3 == 2:
            other.scheduler.flush()
    for engine in engines:
        assert engine.tiers.stats()["pages_fetched"] > 0
        engine.close()


# ---- T18, T19


@each_layout
def test_t18_two_requests_one_fetch_and_one_load(tmp_path, layout):
    """Three requests lack the same pages: one lookup, one fetch, one load, and all are served.

    Mutation: `Prefetch._look_for` does not look at `by_hash`.
    """
    uri = f"memory://{tmp_path}"
    maker = Machine(layout, uri)
    maker.serve("ann", PROMPT)
    maker.close()
    machine = Machine(layout, uri)
    machine.submit_all([RequestSpec(name, PROMPT, 3) for name in ("ann", "bob", "cid")])
    machine.see_to("ann", "bob", "cid")
    stats = machine.tiers.stats()
    assert (stats["lookups"], stats["fetches"], stats["loads"]) == (1, 1, 1)
    assert [machine.ended[name].cached for name in ("ann", "bob", "cid")] == [24, 24, 24]
    machine.close()


@each_layout
def test_t19_a_fetch_that_writes_after_its_deadline_writes_into_its_own_pages(tmp_path, layout):
    """The backend hangs in a get until long after the deadline. The request computes; others need all of host, and do
    not get the pages of the fetch. When the backend writes at last, nobody else's bytes change.

    Mutation: `Tiers._over` tells of a job that is held.
    """
    uri = f"memory://{tmp_path}"
    maker = Machine(layout, uri)
    maker.serve("ann", PROMPT)
    maker.close()
    machine = Machine(layout, uri, pages=12, host=12, tick_seconds=0.001, lookup_ticks=5000, fetch_ticks=50)
    ann = machine.until_a_fetch_is_held(PROMPT)
    flight = machine.pages("host", "flight")
    assert any(flight.values())
    machine.see_to(ann)
    assert machine.ended[ann].cached == 0
    for n in range(4):
        machine.submit(f"crowd {n}", toks(50 + n, 9 * PAGE), reads_cache=False)
        machine.see_to(f"crowd {n}")
        now = machine.pages("host", "flight")
        assert all(now[name] >= n for name, n in flight.items())
    assert machine.tiers.stats()["held"] == 1
    machine.go_on()
    machine.settle()
    assert machine.tiers.stats()["held"] == 0
    machine.close()


def test_t19_a_backup_that_is_late_keeps_what_it_reads(tmp_path):
    """The backend hangs in a put until after its deadline: the host pages it reads stay as they are until it returns,
    whoever needs host; what it stores then is right.

    Mutation: `Tiers._over` tells of a backup that is held.
    """
    machine = Machine(HYBRID, f"memory://{tmp_path}", pages=12, host=12, backup_seconds=0.05)
    machine.backend.stuck = ("put",)
    machine.submit("ann", PROMPT)
    machine.see_to("ann")
    machine.until(lambda: machine.tiers.stats()["held"] >= 1)
    for n in range(4):
        machine.submit(f"crowd {n}", toks(50 + n, 9 * PAGE), reads_cache=False)
        machine.see_to(f"crowd {n}")
    assert machine.tiers.stats()["held"] >= 1
    machine.go_on()
    machine.settle()
    fresh = Machine(HYBRID, f"memory://{tmp_path}", depot=machine.witness.double.depot)
    fresh.serve("ann", PROMPT)
    assert not any(fresh.store.stats()["bad"].values())
    machine.close()
    fresh.close()


# ---- namespaces


SPACES = [
    BASE,
    Namespace(adapter=b"A" * 32),
    Namespace(adapter=b"B" * 32),
    Namespace(salt="tenant"),
    Namespace(adapter=b"A" * 32, salt="tenant"),
    Namespace(version=1),
]


@each_layout
def test_l02_l07_l14_equal_tokens_in_many_namespaces(place: Place, weights, layout):
    """The same prompt as base, under two adapters, salted, both, and of another version: each is computed once, and a
    second engine is served each from its own pages; a namespace nobody has used finds nothing.

    Mutation: the chain of hashes begins without the namespace.
    """
    depot = Depot()
    one = Machine(layout, place.uri, weights=weights, depot=depot, pages=100, host=100)
    two = Machine(layout, place.uri, weights=weights, depot=depot, pages=100, host=100)
    for n, space in enumerate(SPACES):
        assert one.serve(f"r{n}", PROMPT, 6, namespace=space).cached == 0
    for n, space in enumerate(SPACES):
        assert two.serve(f"r{n}", PROMPT, 6, namespace=space).cached == 24
        assert two.said[f"r{n}"] == one.said[f"r{n}"]
    assert len({tuple(said) for said in two.said.values()}) == len(SPACES)
    for space in (Namespace(adapter=b"C" * 32), Namespace(salt="other"), Namespace(salt="A" * 32)):
        assert two.serve(f"new {space}", PROMPT, namespace=space).cached == 0
    one.close()
    two.close()


def test_l08_other_weights_under_the_same_name(place: Place, weights):
    """An adapter is unloaded and other weights come under its name, that is with another digest: nothing of the old is
    found, in memory or in the store, also after a restart; the old one comes back to its own.

    Mutation: `Namespace.digest` frames the adapter's name.
    """
    old, new = Namespace(adapter=b"one content".ljust(32)), Namespace(adapter=b"two content".ljust(32))
    machine = Machine(HYBRID, place.uri, weights=weights)
    machine.serve("old", PROMPT, namespace=old)
    machine.scheduler.evict_namespace(old)
    assert machine.serve("new", PROMPT, namespace=new).cached == 0
    machine.close()
    restarted = Machine(HYBRID, place.uri, weights=weights)
    other = Namespace(adapter=b"three contents".ljust(32))
    assert restarted.serve("other", PROMPT, namespace=other).cached == 0
    assert restarted.serve("old", PROMPT, namespace=old).cached == 24
    restarted.close()


@each_layout
@pytest.mark.parametrize("when", ["looking", "fetching", "loading", "decoding"])
def test_l04_unloaded_under_its_requests(tmp_path, layout, when):
    """An adapter is unloaded while one of its requests looks in the store, fetches, loads or decodes: it ends with the
    right answer, late bytes reach nobody, and its memory is free afterwards.

    Mutation: `StoreFetches.fetch_done` lands under a root that is unhooked.
    """
    space = Namespace(adapter=b"A" * 32)
    uri = f"memory://{tmp_path}"
    maker = Machine(layout, uri)
    maker.serve("ann", PROMPT, namespace=space)
    maker.close()
    machine = Machine(layout, uri)
    machine.submit("ann", PROMPT, 8, namespace=space)
    machine.until_it_is("ann", when)
    machine.scheduler.evict_namespace(space)
    machine.cache.check()
    machine.go_on()
    machine.see_to("ann")
    machine.settle()
    assert machine.ended["ann"].reason == "length"
    assert not any(machine.pages("device", "unhooked").values()) and not any(machine.pages("host", "unhooked").values())
    machine.all_free()
    machine.close()


@each_layout
def test_l13_an_adapter_that_lives_on_host_alone(tmp_path, layout):
    """The whole prefix of an adapter sits on host, from its root down: it is loaded. Then it sits in the store alone:
    it is fetched and loaded.

    Mutation: `HybridPrefixCache.missing` walks the default namespace.
    """
    space = Namespace(adapter=b"A" * 32, salt="s")
    machine = Machine(layout, f"memory://{tmp_path}", pages=12, host=60)
    machine.serve("ann", PROMPT, namespace=space)
    machine.crowd(3, writes_cache=False)
    assert machine.serve("from host", PROMPT, namespace=space).cached == 24
    assert (machine.tiers.stats()["fetches"], machine.tiers.stats()["loads"]) == (0, 1)
    machine.scheduler.evict_namespace(space)
    assert machine.serve("from the store", PROMPT, namespace=space).cached == 24
    assert (machine.tiers.stats()["fetches"], machine.tiers.stats()["loads"]) == (1, 2)
    machine.close()


# ---- what is published, and failures


@each_layout
def test_p08_what_a_running_request_publishes_has_its_keys(place: Place, weights, layout):
    """While one request decodes, what it has said is written through; another engine is served prompt and answer by the
    keys of both.

    Mutation: `publish_rows` hashes from the page's own tokens only.
    """
    depot = Depot()
    one = Machine(layout, place.uri, weights=weights, depot=depot, pages=60, host=60)
    one.cache._publisher.save_pages = 2
    one.submit("ann", PROMPT, 60)
    one.until(lambda: len(one.said["ann"]) > 40)
    one.tiers.drain(20)
    one.until(lambda: one.stored(one.lives["ann"].known[: 9 * PAGE])[-1])
    assert "ann" in one.loop.live
    two = Machine(layout, place.uri, weights=weights, depot=depot, pages=60, host=60)
    known = one.lives["ann"].known[: 10 * PAGE + 1]
    end = two.serve("bob", known)
    assert end.cached >= (6 if "state" in layout else 8) * PAGE
    one.close()
    two.close()


@each_layout
def test_p09_a_failed_step_leaves_nothing_in_any_tier(place: Place, weights, layout):
    """A step fails: nothing of its pages is on host or in the store. Tried again, it is.

    Mutation: `Transfers.offer` takes what is promised.
    """
    machine = Machine(layout, place.uri, weights=weights)
    machine.executor.failures = 2
    machine.submit("ann", PROMPT)
    machine.until(lambda: machine.executor.failures == 0)
    machine.tiers.drain(10)
    assert machine.tiers.stats()["saves"] == machine.tiers.stats()["backups"] == 0
    assert not any(machine.stored(PROMPT))
    machine.see_to("ann")
    machine.settle()
    assert all(machine.stored(PROMPT))
    machine.scheduler.flush()
    assert machine.serve("again", PROMPT).cached == 24
    machine.close()


class LosesAGroup(Late):
    """Fails every transfer of one group, after it has moved the others."""

    lost = ""

    def _move(self, kind, part) -> None:
        if part.group == self.lost:
            raise OSError("the link is down")
        super()._move(kind, part)


@pytest.mark.parametrize("group", ["full", "wide", "narrow", "state"])
def test_f14_f06_one_group_of_a_save_fails(tmp_path, group):
    """A save covers all groups; if the bytes of one do not come, host offers nothing of it, nothing is backed up and
    nothing leaks. Later the link is up again.

    Mutation: `Mover._begin` ends a transfer as ok if any group was moved.
    """
    machine = Machine(HYBRID, f"memory://{tmp_path}", pages=12, host=60, mover=LosesAGroup)
    machine.mover.lost = group
    machine.serve("ann", PROMPT)
    assert machine.tiers.stats()["saves"] > 0 and machine.tiers.stats()["failed"] > 0
    assert not any(machine.pages("host", "flight").values())
    machine.crowd(3, writes_cache=False)
    assert machine.serve("again", PROMPT).cached == 0
    machine.mover.lost = ""
    machine.scheduler.flush()
    machine.serve("third", PROMPT)
    machine.crowd(3, first=70, writes_cache=False)
    assert machine.serve("fourth", PROMPT).cached == 24
    machine.close()


@pytest.mark.parametrize("group", ["full", "wide", "narrow", "state"])
def test_f07_a_load_whose_bytes_do_not_come_is_computed(group):
    """One group of a load fails: the request computes, with the right answer, and all memory comes back.

    Mutation: `Tiers._collect` tells every load as ok.
    """
    groups = groups_of(HYBRID, PAGE, pages=12, slots=2, windows=6)
    machine = Machine(groups=groups, host=60, mover=LosesAGroup)
    machine.serve("ann", PROMPT)
    machine.crowd(3)
    machine.mover.lost = group
    end = machine.serve("again", PROMPT)
    assert (end.cached, end.computed) == (0, 25)
    assert machine.tiers.stats()["failed"] >= 1
    machine.close()


@each_layout
@pytest.mark.parametrize("when", ["looking", "fetching", "loading", "decoding"])
def test_f07_abort_in_any_state(tmp_path, layout, when):
    """Aborted while it looks, fetches, loads or decodes: over at once; what moves goes on into memory that is its own,
    and then everything is free.

    Mutation: `Book.end` frees the targets of a load.
    """
    uri = f"memory://{tmp_path}"
    maker = Machine(layout, uri)
    maker.serve("ann", PROMPT)
    maker.close()
    machine = Machine(layout, uri, pages=12, host=12)
    machine.submit("ann", PROMPT, 8)
    machine.until_it_is("ann", when)
    assert machine.abort("ann").reason == "abort"
    machine.submit("bob", toks(9, (4 if when == "loading" else 9) * PAGE), reads_cache=False)
    machine.see_to("bob")
    machine.go_on()
    machine.close()


@pytest.mark.parametrize("group", ["wide", "narrow", "state"])
def test_f18_a_hole_in_the_store_heals(tmp_path, group):
    """The store has lost all pages of one group: nothing can be served. The prompt is computed and put again, and the
    next engine is served.

    Mutation: `StoreFetches.servable_run` looks at closed groups only.
    """
    uri = f"file://{tmp_path}/store?size=10MiB"
    maker = Machine(HYBRID, uri)
    maker.serve("ann", PROMPT)
    maker.backend.delete(maker.names(PROMPT, group=group))
    maker.close()
    machine = Machine(HYBRID, uri)
    assert machine.serve("ann", PROMPT).cached == 0
    assert machine.tiers.stats()["fetches"] == 0
    machine.close()
    third = Machine(HYBRID, uri)
    assert third.serve("ann", PROMPT).cached == 24
    third.close()


def test_f03_f19_what_was_just_written_to_host_stays(tmp_path):
    """Host is full; a prompt is written back and at once there is pressure: older ones go first, and what is left can
    be reached from the root, byte for byte.

    Mutation: `Saves.land` does not touch what landed.
    """
    machine = Machine(HYBRID, pages=12, host=24)
    for n in range(5):
        machine.serve(f"old {n}", toks(10 + n, 6 * PAGE + 1))
    machine.serve("ann", PROMPT)
    machine.serve("one more", toks(20, 9 * PAGE + 1))
    machine.crowd(2, writes_cache=False)
    assert machine.serve("again", PROMPT).cached == 24
    assert machine.serve("first", toks(10, 6 * PAGE + 1)).cached == 0
    machine.close()
