"""Whole engines with real bytes while memory is short and operations dawdle: what is held stays, what is late lands
where it belongs, and nobody loses a place (cases T04, T05, T07, T11, T14-T16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sapwood.cache import CacheGroup, Namespace
from sapwood.scheduler import Event, Plan
from sapwood.sim.depot import Depot
from sapwood.store import Faults

from ..scheduler.driver import groups_of
from .machine import BASE, LAYOUTS, PAGE, PROMPT, Machine, each_layout, toks

pytestmark = pytest.mark.server
SHORT = [(layout, "full") for layout in LAYOUTS] + [(layout, "others") for layout in LAYOUTS if "window" in layout]
OTHER = toks(2, 5 * PAGE + 1)
PATIENT = {"lookup_ticks": 100_000, "fetch_ticks": 100_000}  # nobody computes what it waits for


@pytest.fixture(params=["memory", "file"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path}" if request.param == "memory" else f"file://{tmp_path}/store?size=100MiB"


def stock(layout: str, uri: str, *prompts: Sequence[int]) -> None:
    """Another engine has computed these."""
    maker = Machine(layout, uri)
    for n, prompt in enumerate(prompts or (PROMPT,)):
        maker.serve(f"maker {n}", prompt)
    maker.close()


def run(machine: Machine, id: str, tokens: Sequence[int], max_tokens: int = 1, **more: bool) -> None:
    """One request to its end, while something else hangs. It computes."""
    machine.submit(id, tokens, max_tokens, reads_cache=False, **more)
    machine.see_to(id)


def crowd(machine: Machine, times: int, pages: int, first: int = 50, **more: bool) -> None:
    """Others need memory, while something else hangs."""
    for n in range(first, first + times):
        run(machine, f"crowd {n}", toks(n, pages * PAGE), **more)
        for _ in range(3):
            machine.step()  # what they leave is saved, if it can be


def cached(machine: Machine, tokens: Sequence[int] = PROMPT) -> int:
    """Tokens of a prompt that device and host could serve now."""
    return machine.cache.explain(BASE, tokens).cached


def short_of(family: str, layout: str, pages: int, host: int) -> list[CacheGroup]:
    """The groups of a layout. Host has few pages of the full group, or few of all others, and of the rest many."""
    few = {"full": host, "window": host, "state": 3}
    return [
        replace(group, host_pages=few[group.family] if (group.family == "full") is (family == "full") else 200)
        for group in groups_of(layout, PAGE, pages, slots=20)
    ]


def watch(machine: Machine) -> list[Plan]:
    """The plans with anything in them, from now on."""
    plans: list[Plan] = []
    execute = machine.executor.execute

    def seen(plan: Plan) -> Sequence[Event]:
        plans.append(plan)
        return execute(plan)

    machine.executor.execute = seen  # type: ignore[method-assign]
    return plans


# ---- T04


@each_layout
@pytest.mark.parametrize("meanwhile", ["grown", "grown in part", "evicted", "flushed"])
@pytest.mark.parametrize("when", ["looking", "fetching"])
def test_t04_the_tree_changes_before_fetched_pages_land(uri, layout, meanwhile, when):
    """Two pages of a prompt are here and four are asked of the store; before it answers, or before its pages arrive,
    somebody computes the rest, or a part of it, or the two are evicted. Or six are asked for, and everything is
    forgotten. Every page lands under its own tokens or is dropped, and a later request is served all six.

    Mutation: `StoreFetches._landable` does not look at what is above, or whether the root is hooked; or
    `StoreFetches._above` does not look at what is there; or `ClosedPages.land` keeps what host has already.
    """
    stock(layout, uri)
    machine = Machine(layout, uri, pages=12, host=14, **PATIENT)
    if meanwhile != "flushed":
        machine.serve("before", PROMPT[: 2 * PAGE + 1], 1, reads_cache=False)
    machine.submit("ann", PROMPT)
    machine.until_it_is("ann", when)
    assert cached(machine) == (2 * PAGE if meanwhile != "flushed" else 0)
    if meanwhile == "grown":
        run(machine, "other", PROMPT)
        want = 6 * PAGE
    elif meanwhile == "grown in part":
        run(machine, "other", PROMPT[: 4 * PAGE + 1])
        want = 6 * PAGE
    elif meanwhile == "evicted":
        machine.backend.small_bytes = 0  # else what hangs would keep other small files waiting until their deadlines
        for n in range(6):
            crowd(machine, 1, 9 if when == "looking" else 8, first=50 + n)
            machine.until(lambda: machine.tiers.stats()["under_way"] == 1)  # what hangs: nothing else holds host pages
        assert cached(machine) == 0
        want = 0
    else:
        machine.scheduler.flush()
        want = 0
    assert "ann" in machine.loop.live
    machine.go_on()
    machine.see_to("ann")
    machine.settle()
    assert machine.ended["ann"].cached == want
    assert not any(machine.pages("host", "flight").values())
    assert machine.tiers.stats()["fetches"] == (0 if when == "looking" and not want else 1), "none for nobody"
    assert machine.serve("bob", PROMPT).cached == 6 * PAGE
    machine.close()


# ---- T05


@pytest.mark.parametrize(("layout", "short"), SHORT)
def test_t05_pages_under_a_backup_stay_while_others_go(uri, layout, short):
    """The store hangs in a put, and others need host: the pages that it reads stay, byte for byte, and can be served;
    older ones and newer ones go, or are not saved. When it has returned they go as any other, and are in the store.

    Mutation: `StoreFetches._begin_backup` holds nothing, or only groups that are closed; or `StoreFetches.backup_done`
    never lets go.
    """
    machine = Machine(uri=uri, groups=short_of(short, layout, pages=12, host=12))
    machine.serve("old", OTHER, 1)
    machine.backend.stuck = ("put",)
    run(machine, "ann", PROMPT)
    machine.until(lambda: machine.tiers.stats()["backups"] == 2)
    ((operation, before),) = machine.witness.double.trades.values()
    assert operation.hashes == machine.cache.page_hashes(BASE, PROMPT)
    crowd(machine, 3, 5)
    crowd(machine, 2, 10, first=60, writes_cache=False)
    for name, pages in operation.pages.items():
        part = pages != 0
        assert (machine.arena.pages[name][pages[part]] == before[name][part]).all(), "given to somebody else"
    assert cached(machine, OTHER) < 5 * PAGE, "it was older and nobody held it"
    assert cached(machine) == 6 * PAGE
    assert not any(machine.stored(PROMPT))
    machine.submit("again", PROMPT)
    machine.see_to("again")
    assert machine.ended["again"].cached == 6 * PAGE and machine.tiers.stats()["fetches"] == 0
    machine.go_on()
    machine.settle()
    assert all(machine.stored(PROMPT))
    machine.crowd(6, first=70)
    assert cached(machine) == 0, "nobody holds it any more"
    assert machine.serve("third", PROMPT).cached == 6 * PAGE
    machine.close()


# ---- T07


@each_layout
@pytest.mark.parametrize("comes", ["whole", "in part", "damaged"])
def test_t07_abort_while_fetching(uri, layout, comes):
    """A request is aborted while the store brings its pages: over at once, and nobody else is given these pages while
    the store may write there. What comes whole is there for the next; a part of it, or what is damaged, is freed.

    Mutation: `Prefetch.fetch_done` lands whatever came; or `Prefetch.forget` ends the fetch in the cache.
    """
    stock(layout, uri)
    machine = Machine(layout, uri, pages=12, host=14, **PATIENT)
    machine.serve("before", PROMPT[: 2 * PAGE + 1], 1, reads_cache=False)
    machine.submit("ann", PROMPT)
    machine.until_it_is("ann", "fetching")
    flight = machine.pages("host", "flight")
    assert flight["full"] == 4
    assert machine.abort("ann").reason == "abort"
    run(machine, "bob", toks(9, 7 * PAGE))
    assert all(machine.pages("host", "flight")[name] >= n for name, n in flight.items())
    assert cached(machine) == 2 * PAGE
    if comes == "in part":
        machine.backend.inner.delete(machine.names(PROMPT)[4:5])
    elif comes == "damaged":
        machine.backend.faults = Faults(corrupt=1.0)
    machine.go_on()
    machine.settle()
    machine.backend.faults = Faults()
    assert not any(machine.pages("host", "flight").values())
    assert cached(machine) == (6 if comes == "whole" else 2) * PAGE
    before = machine.tiers.stats()["lookups"]
    end = machine.serve("cid", PROMPT)
    if comes == "whole":
        assert end.cached == 6 * PAGE and machine.tiers.stats()["lookups"] == before
    machine.close()


# ---- T11


@pytest.mark.attack
@each_layout
def test_t11_retracted_requests_come_back_from_host(uri, layout):
    """Eight requests need three times the memory there is, and some are retracted, again and again: nobody is lost or
    aborted, and all answers are right. With room on host they go on from there; without, they compute again.

    Mutation: `Book.retract` does not offer what was left for saving.
    """
    again = {}
    for host in (1, 400):
        groups = groups_of(layout, PAGE, pages=40, slots=40)
        config = {"max_batch_tokens": 64, "max_batch_size": 8, "headroom": 0, "checkpoint_interval": 2}
        machine = Machine(uri=uri, groups=groups, host=host, weights=str(host).encode().ljust(32), **config)
        for n in range(8):
            machine.submit(f"r{n}", toks(n, 5 * PAGE), 40)
        machine.see_to(*(f"r{n}" for n in range(8)))
        assert [machine.ended[f"r{n}"].reason for n in range(8)] == ["length"] * 8
        assert all(len(machine.said[f"r{n}"]) == 40 for n in range(8))
        assert machine.scheduler.stats()["retractions"] > 0
        assert bool(machine.tiers.stats()["loads"]) is (host > 1)
        again[host] = sum(end.recomputed for end in machine.ended.values())
        machine.close()
    assert again[400] < again[1] / 2, again


# ---- T14


@pytest.mark.parametrize(("layout", "short"), SHORT)
@pytest.mark.parametrize("for_a", ["fetch", "load", "save"])
def test_t14_room_is_not_made_from_ones_own_prefix(uri, layout, short, for_a):
    """Two pages of a prompt are where the next four shall go, longest unused, in a tier that is full: a fetch, a load
    or a save of the four evicts others, and all six are served. While they are fetched, the two can be.

    Mutation: `Saves._keep` holds nothing; or `Admission.admit` makes room before it pins what the lease reads.
    """
    if for_a != "save":
        stock(layout, uri)
    groups = short_of(short, layout, pages=40 if for_a == "save" else 12, host=60 if for_a == "load" else 12)
    machine = Machine(uri=uri, groups=groups, **PATIENT)
    plans = watch(machine)
    if for_a == "load":
        machine.serve("before", PROMPT, 1, reads_cache=False)
        machine.crowd(1, pages=10)
    else:
        for id, prompt in {"before": PROMPT[: 2 * PAGE + 1], "old": OTHER, "new": toks(3, 5 * PAGE + 1)}.items():
            machine.serve(id, prompt, 1, reads_cache=False)
        if for_a == "save":
            machine.serve("ann", PROMPT, 1)
        machine.crowd(2, first=60, writes_cache=False)
        assert cached(machine) == (6 if for_a == "save" else 2) * PAGE
    del plans[:]
    machine.submit("again", PROMPT)
    if for_a == "fetch":
        machine.until_it_is("again", "fetching")
        assert cached(machine) == 2 * PAGE
        machine.go_on()
    machine.see_to("again")
    machine.settle()
    assert machine.ended["again"].cached == 6 * PAGE
    assert machine.tiers.stats()["pages_fetched"] == (4 if for_a == "fetch" else 0)
    (load,) = [load for plan in plans for load in plan.loads]
    if for_a == "load":
        assert load.pages["full"][1].all() and len(load.pages["full"][1]) == 4, "the others were there"
    elif for_a == "fetch" or short == "full":  # a save may take windows and snapshots that nobody needs behind it
        assert cached(machine, OTHER) < 5 * PAGE, "it was newer and had to give"
    machine.close()


# ---- T15


@each_layout
@pytest.mark.parametrize("away", ["looking", "fetching", "loading"])
def test_t15_who_was_away_keeps_its_place(uri, layout, away):
    """While one request waits for the store or for its load, those behind it run. When it is back, it comes in before
    one that waits and came later; and if it had come in, its row stands before that of a later one.

    Mutation: `Prefetch._over` or `Book.landed` gives it a new arrival.
    """
    stock(layout, uri)
    size = 2 if away == "loading" else 1  # who loads has a place in the batch
    config = {"max_batch_tokens": PAGE, "max_batch_size": size, **PATIENT}
    machine = Machine(layout, uri, pages=120, host=120, **config)
    plans = watch(machine)
    machine.submit("ann", PROMPT, 1)
    machine.until_it_is("ann", away)
    run(machine, "bob", toks(7, 2 * PAGE), 2)
    machine.submit("cid", toks(8, 40 * PAGE), 1, reads_cache=False)
    machine.until(lambda: plans[-1].batch.ids == ["cid"])
    machine.submit("dan", toks(9, PAGE), 1)
    machine.go_on()
    while machine.scheduler.stats()["fetching"] + machine.scheduler.stats()["loading"]:
        machine.tiers.wait(0.1)  # no row runs meanwhile
        machine.step()
    assert not machine.said["cid"]
    machine.see_to("ann", "cid", "dan")
    assert list(dict.fromkeys(id for plan in plans for id in plan.batch.ids)) == ["bob", "cid", "ann", "dan"]
    assert machine.ended["ann"].cached == 6 * PAGE
    if away == "loading":
        (together,) = [plan.batch.ids for plan in plans if "ann" in plan.batch.ids]
        assert together == ["ann", "cid"]
    machine.close()


# ---- T16


@each_layout
@pytest.mark.parametrize("meanwhile", ["ended", "split", "extended", "both"])
def test_t16_a_late_save_is_backed_up_under_its_own_hashes(uri, layout, meanwhile):
    """The bytes of a save come long after its request has ended, and after its node was split, or extended, or both, in
    two namespaces with equal tokens: host and store have every page under its own tokens and namespace, and another
    engine is served them; a namespace that nobody has used finds nothing.

    Mutation: the hashes of a backup begin at page 0, or without the namespace; or `Saves.save_done` tells of the node
    and not of what was saved.
    """
    depot = Depot()
    spaces = [BASE, Namespace(adapter=b"A" * 32, salt="tenant")]
    machine = Machine(layout, uri, pages=100, host=100, depot=depot)
    machine.mover.stuck = True
    prompts = [PROMPT]
    for n, space in enumerate(spaces):
        machine.submit(f"ann {n}", PROMPT, 6, namespace=space)
        machine.see_to(f"ann {n}")
    machine.until(lambda: machine.tiers.stats()["saves"] == 2)
    if meanwhile in ("split", "both"):
        prompts.append(PROMPT[: 3 * PAGE] + toks(6, 3 * PAGE + 1))
    if meanwhile in ("extended", "both"):
        prompts.append(PROMPT[: 6 * PAGE] + toks(5, 4 * PAGE + 1))
    for n, space in enumerate(spaces):
        for at, prompt in enumerate(prompts[1:]):
            machine.submit(f"more {n} {at}", prompt, 2, namespace=space)
            machine.see_to(f"more {n} {at}")
    assert machine.tiers.stats()["backups"] == 0
    assert not any(machine.stored(prompt, space)[0] for prompt in prompts for space in spaces)
    machine.mover.stuck = False
    machine.settle()
    other = Machine(layout, uri, pages=100, host=100, depot=depot)
    for n, space in enumerate(spaces):
        for at, prompt in enumerate(prompts):
            assert all(machine.stored(prompt, space))
            assert other.serve(f"{n} {at}", prompt, namespace=space).cached == len(prompt) // PAGE * PAGE
    assert other.serve("nobody", PROMPT, namespace=Namespace(salt="tenant")).cached == 0
    assert not any(other.store.stats()["bad"].values())
    machine.close()
    other.close()
