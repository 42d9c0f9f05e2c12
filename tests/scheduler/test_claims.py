"""Stories of requests that wait while what was fetched for them stays on host (cases T07, T12, T14, T17, T18)."""

from __future__ import annotations

import pytest

from sapwood.cache import HybridPrefixCache
from sapwood.scheduler import RequestSpec

from .driver import BASE, each_layout, toks
from .store_run import PAGE, StoreRun
from .test_store import PROMPT, fetching, stocked

OTHER = toks(2, 6 * PAGE + 1)


def both(layout: str = "full"):
    """A store that has two prompts of six pages."""
    run = StoreRun(layout, depot=stocked(layout))
    run.serve("maker", OTHER)
    run.close()
    return run.depot


def busy(run: StoreRun, tokens: int = 60) -> None:
    """Somebody more urgent has the only place there is."""
    run.submit("hog", toks(90, 2), tokens, priority=-2)
    assert run.turn().batch.ids == ["hog"]


def land_fetches(run: StoreRun, *specs: RequestSpec) -> None:
    """Submit requests, one after the other; what they lack has come to host."""
    for spec in specs:
        run.submit_all([spec])
        (lookup,) = run.turn().lookups
        land_fetch(run, lookup.op)


def land_fetch(run: StoreRun, lookup: int) -> None:
    """The store answers one lookup, and brings what it has."""
    run.tell(run.executor.land(lookup, True))
    run.turn()
    assert run.land("fetch") == 1


def crowd(run: StoreRun, n: int = 6, pages: int = 9) -> None:
    """Others come and go before those who wait, and want all of host."""
    for at in range(n):
        run.submit(f"crowd{at}", toks(50 + at, pages * PAGE), 1, priority=-1, reads_cache=False)
    run.see_to("hog", *(f"crowd{at}" for at in range(n)))


def staying(run: StoreRun) -> dict[str, int]:
    return run.cache.stats()["staying"]


@each_layout
def test_t17_what_was_fetched_stays_while_its_request_waits(layout):
    """Six pages have come to host; six others come in before, each with nine pages to save on a host of fourteen. When
    its turn comes, nothing of the six is computed.

    Mutation: `Prefetch.fetch_done` makes no claims; or `HostPins._pages` leaves out windows or snapshots.
    """
    run = StoreRun(layout, depot=stocked(layout), host=14, batch=1)
    busy(run, 5)
    land_fetches(run, RequestSpec("ann", PROMPT, 1))
    assert all(staying(run).values()) and run.scheduler.stats()["store"]["staying"] == 1
    crowd(run)
    run.see_to("ann")
    assert run.ended["ann"].cached == 6 * PAGE and run.first_rows()[-1] == "ann"
    assert not any(staying(run).values())
    run.close()


@each_layout
def test_t17_without_a_claim_it_would_be_gone(layout, monkeypatch):
    """The same story where nothing stays: so the one above is about something."""
    monkeypatch.setattr(HybridPrefixCache, "pin_on_host", lambda *_: (0, False))
    run = StoreRun(layout, depot=stocked(layout), host=14, batch=1)
    busy(run, 5)
    land_fetches(run, RequestSpec("ann", PROMPT, 1))
    crowd(run)
    run.see_to("ann")
    assert run.ended["ann"].cached == 0
    run.close()


@each_layout
def test_t17_t18_everybody_who_waited_for_a_fetch_has_a_claim(layout):
    """Two wait for one fetch. The first is aborted: for the second it stays.

    Mutation: `Prefetch.fetch_done` makes a claim for the one who asked.
    """
    run = StoreRun(layout, depot=stocked(layout), host=14, batch=1)
    busy(run, 8)
    run.submit_all([RequestSpec("ann", PROMPT, 1), RequestSpec("bob", PROMPT, 1)])
    run.turn()
    run.land("lookup")
    run.turn()
    held = run.land("fetch") and staying(run)
    assert run.scheduler.stats()["store"]["staying"] == 2
    assert held["full" if "full" in held else "wide"] <= 6, "a page that two wait for counts once"
    run.abort("ann")
    assert staying(run) == held
    crowd(run)
    run.see_to("bob")
    assert run.ended["bob"].cached == 6 * PAGE
    run.close()


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("how", ["abort", "unload", "flush"])
def test_t07_a_claim_ends_with_its_request_and_with_its_namespace(layout, how):
    """The one who waits is aborted, or its namespace goes: nothing is held, and after a flush host is free at once.

    Mutation: `Book.end` forgets claims; or `HybridPrefixCache.flush` does not end stays before it unhooks.
    """
    run = StoreRun(layout, depot=stocked(layout), batch=1)
    busy(run)
    land_fetches(run, RequestSpec("ann", PROMPT, 1))
    if how == "abort":
        run.abort("ann")
    elif how == "unload":
        run.scheduler.evict_namespace(BASE)
    else:
        run.scheduler.flush()
    run.cache.check()
    assert not any(staying(run).values())
    if how != "abort":
        assert run.host("free") == {group.name: group.host_pages for group in run.cache.groups}
        run.see_to("hog", "ann")
        assert run.ended["ann"].cached == 0
    run.close()


@pytest.mark.parametrize("first", ["early", "late"])
def test_t12_claims_have_half_of_host_and_the_queue_decides(first):
    """Two of six pages each, and half of host is ten. Whoever is served first from the store, the one who came first
    keeps all six; the other keeps four until that one has come in, and then all.

    Mutation: `Claims.make` takes from nobody; `Claims.look_again` does nothing; `HostPins._room` allows everything.
    """
    run = StoreRun(depot=both(), host=20, batch=1)
    busy(run, 8)
    run.submit("early", PROMPT, 12)
    early = run.turn().lookups[0].op
    run.submit("late", OTHER, 1)
    late = run.turn().lookups[0].op
    for op in (early, late) if first == "early" else (late, early):
        land_fetch(run, op)
    claims = {request.id: claim for request, claim in run.scheduler._book.prefetch.claims.of.items()}
    assert staying(run) == {"full": 10} and not claims["early"].short and claims["late"].short
    run.see_to("hog", but=("load",))
    run.turn()
    assert staying(run) == {"full": 6}, "the other has come in"
    assert not claims["late"].short
    run.see_to("early", "late")
    assert run.ended["early"].cached == run.ended["late"].cached == 6 * PAGE
    run.close()


@pytest.mark.parametrize("layout", ["full+window", "full+state"])
def test_t12_a_claim_that_cannot_be_had_leaves_others_theirs(layout):
    """Where a part is of no use, a claim that is too large even alone gets nothing, and takes nothing for good.

    Mutation: `Claims.make` does not give back.
    """
    run = StoreRun(layout, depot=both(layout), host=16, batch=1)
    longer = PROMPT[: 6 * PAGE] + toks(3, 3 * PAGE + 1)
    maker = StoreRun(layout, depot=run.depot)
    maker.serve("longer", longer)
    busy(run, 8)
    run.submit("early", longer, 1)
    early = run.turn().lookups[0].op
    land_fetches(run, RequestSpec("late", OTHER, 1))
    held = staying(run)
    assert any(held.values())
    land_fetch(run, early)
    assert staying(run) == held
    run.see_to("hog", "early", "late")
    run.close()


@each_layout
def test_t14_pages_that_stay_stop_nobody(layout):
    """Claims hold all they may of a small host, while others decode, are saved, retracted and come back: nobody waits
    for the pages that stay, and everybody ends.

    Mutation: `HostPins.begin` pins the device.
    """
    run = StoreRun(layout, depot=both(layout), pages=14, host=12, batch=3, headroom=0, max_overtaken=64)
    for n in range(3):
        run.submit(f"hog{n}", toks(90 + n, PAGE), 24, priority=-2)
    run.turn()
    land_fetches(run, RequestSpec("ann", PROMPT, 1), RequestSpec("bob", OTHER, 1))
    assert any(staying(run).values())
    run.see_to("hog0", "hog1", "hog2", "ann", "bob")
    run.close()


def test_t17_a_fetch_that_came_late_stays_for_one_that_still_waits():
    """Its deadline passed, but nobody let it in before the pages came.

    Mutation: `Prefetch.fetch_done` thinks only of those who have patience.
    """
    run = StoreRun(depot=stocked(), host=14, batch=1, fetch_ticks=5)
    busy(run)
    fetching(run)
    run.tick(5 + 6)
    run.turn()
    assert run.scheduler.stats()["waiting"] == 1
    run.land("fetch")
    assert staying(run) == {"full": 6}
    crowd(run)
    run.see_to("ann")
    assert run.ended["ann"].cached == 6 * PAGE
    run.close()


@pytest.mark.parametrize("layout", ["full", "full+window"])
def test_t17_below_pages_that_are_on_the_device_alone_it_stays_once_they_are_saved(layout):
    """The first two pages are of somebody who runs; the four that follow come from the store. Nothing can be held below
    what only the device has; when that is saved, all of it is.

    Mutation: `HostPins.begin` holds what is below a gap; or `Prefetch.back_up` looks at no claims.
    """
    run = StoreRun(layout, depot=stocked(layout), host=14, batch=1)
    run.submit("hog", PROMPT[: 2 * PAGE + 1], 6, priority=-2, reads_cache=False)
    run.turn()
    land_fetches(run, RequestSpec("ann", PROMPT, 1))
    assert not any(staying(run).values())
    run.submit("next", toks(80, 3), 12, priority=-2)
    while "hog" in run.live:
        run.turn()
    run.turn()
    assert run.land("save") == 1
    run.turn()
    assert staying(run)["full"] == 6
    run.see_to("next", "ann")
    assert run.ended["ann"].cached == 6 * PAGE
    run.close()
