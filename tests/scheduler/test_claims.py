"""Stories of requests that wait while what was fetched for them stays on host (cases T07, T12, T14, T17, T18)."""

from __future__ import annotations

import pytest

from sapwood.cache import HybridPrefixCache
from sapwood.scheduler import RequestSpec

from .driver import BASE, each_layout, toks
from .shop import PAGE, Shop
from .test_store import PROMPT, fetching, stocked

OTHER = toks(2, 6 * PAGE + 1)


def both(layout: str = "full"):
    """A store that has two prompts of six pages."""
    shop = Shop(layout, depot=stocked(layout))
    shop.serve("maker", OTHER)
    shop.close()
    return shop.depot


def busy(shop: Shop, tokens: int = 60) -> None:
    """Somebody more urgent has the only place there is."""
    shop.submit("hog", toks(90, 2), tokens, priority=-2)
    assert shop.turn().batch.ids == ["hog"]


def land_fetches(shop: Shop, *specs: RequestSpec) -> None:
    """Submit requests, one after the other; what they lack has come to host."""
    for spec in specs:
        shop.submit_all([spec])
        (lookup,) = shop.turn().lookups
        land_fetch(shop, lookup.op)


def land_fetch(shop: Shop, lookup: int) -> None:
    """The store answers one lookup, and brings what it has."""
    shop.tell(shop.executor.land(lookup, True))
    shop.turn()
    assert shop.land("fetch") == 1


def crowd(shop: Shop, n: int = 6, pages: int = 9) -> None:
    """Others come and go before those who wait, and want all of host."""
    for at in range(n):
        shop.submit(f"crowd{at}", toks(50 + at, pages * PAGE), 1, priority=-1, reads_cache=False)
    shop.see_to("hog", *(f"crowd{at}" for at in range(n)))


def staying(shop: Shop) -> dict[str, int]:
    return shop.cache.stats()["staying"]


@each_layout
def test_t17_what_was_fetched_stays_while_its_request_waits(layout):
    """Six pages have come to host; six others come in before, each with nine pages to save on a host of fourteen. When
    its turn comes, nothing of the six is computed.

    Mutation: `Prefetch.fetch_done` makes no claims; or `HostPins._pages` leaves out windows or snapshots.
    """
    shop = Shop(layout, depot=stocked(layout), host=14, batch=1)
    busy(shop, 5)
    land_fetches(shop, RequestSpec("ann", PROMPT, 1))
    assert all(staying(shop).values()) and shop.scheduler.stats()["store"]["staying"] == 1
    crowd(shop)
    shop.see_to("ann")
    assert shop.ended["ann"].cached == 6 * PAGE and shop.first_rows()[-1] == "ann"
    assert not any(staying(shop).values())
    shop.close()


@each_layout
def test_t17_without_a_claim_it_would_be_gone(layout, monkeypatch):
    """The same story where nothing stays: so the one above is about something."""
    monkeypatch.setattr(HybridPrefixCache, "pin_on_host", lambda *_: (0, False))
    shop = Shop(layout, depot=stocked(layout), host=14, batch=1)
    busy(shop, 5)
    land_fetches(shop, RequestSpec("ann", PROMPT, 1))
    crowd(shop)
    shop.see_to("ann")
    assert shop.ended["ann"].cached == 0
    shop.close()


@each_layout
def test_t17_t18_everybody_who_waited_for_a_fetch_has_a_claim(layout):
    """Two wait for one fetch. The first is aborted: for the second it stays.

    Mutation: `Prefetch.fetch_done` makes a claim for the one who asked.
    """
    shop = Shop(layout, depot=stocked(layout), host=14, batch=1)
    busy(shop, 8)
    shop.submit_all([RequestSpec("ann", PROMPT, 1), RequestSpec("bob", PROMPT, 1)])
    shop.turn()
    shop.land("lookup")
    shop.turn()
    held = shop.land("fetch") and staying(shop)
    assert shop.scheduler.stats()["store"]["staying"] == 2
    assert held["full" if "full" in held else "wide"] <= 6, "a page that two wait for counts once"
    shop.abort("ann")
    assert staying(shop) == held
    crowd(shop)
    shop.see_to("bob")
    assert shop.ended["bob"].cached == 6 * PAGE
    shop.close()


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("how", ["abort", "unload", "flush"])
def test_t07_a_claim_ends_with_its_request_and_with_its_namespace(layout, how):
    """The one who waits is aborted, or its namespace goes: nothing is held, and after a flush host is free at once.

    Mutation: `Book.end` forgets claims; or `HybridPrefixCache.flush` does not end stays before it unhooks.
    """
    shop = Shop(layout, depot=stocked(layout), batch=1)
    busy(shop)
    land_fetches(shop, RequestSpec("ann", PROMPT, 1))
    if how == "abort":
        shop.abort("ann")
    elif how == "unload":
        shop.scheduler.evict_namespace(BASE)
    else:
        shop.scheduler.flush()
    shop.cache.check()
    assert not any(staying(shop).values())
    if how != "abort":
        assert shop.host("free") == {group.name: group.host_pages for group in shop.cache.groups}
        shop.see_to("hog", "ann")
        assert shop.ended["ann"].cached == 0
    shop.close()


@pytest.mark.parametrize("first", ["early", "late"])
def test_t12_claims_have_half_of_host_and_the_queue_decides(first):
    """Two of six pages each, and half of host is ten. Whoever is served first from the store, the one who came first
    keeps all six; the other keeps four until that one has come in, and then all.

    Mutation: `Claims.make` takes from nobody; `Claims.look_again` does nothing; `HostPins._room` allows everything.
    """
    shop = Shop(depot=both(), host=20, batch=1)
    busy(shop, 8)
    shop.submit("early", PROMPT, 12)
    early = shop.turn().lookups[0].op
    shop.submit("late", OTHER, 1)
    late = shop.turn().lookups[0].op
    for op in (early, late) if first == "early" else (late, early):
        land_fetch(shop, op)
    claims = {request.id: claim for request, claim in shop.scheduler._book.prefetch.claims.of.items()}
    assert staying(shop) == {"full": 10} and not claims["early"].short and claims["late"].short
    shop.see_to("hog", but=("load",))
    shop.turn()
    assert staying(shop) == {"full": 6}, "the other has come in"
    assert not claims["late"].short
    shop.see_to("early", "late")
    assert shop.ended["early"].cached == shop.ended["late"].cached == 6 * PAGE
    shop.close()


@pytest.mark.parametrize("layout", ["full+window", "full+state"])
def test_t12_a_claim_that_cannot_be_had_leaves_others_theirs(layout):
    """Where a part is of no use, a claim that is too large even alone gets nothing, and takes nothing for good.

    Mutation: `Claims.make` does not give back.
    """
    shop = Shop(layout, depot=both(layout), host=16, batch=1)
    longer = PROMPT[: 6 * PAGE] + toks(3, 3 * PAGE + 1)
    maker = Shop(layout, depot=shop.depot)
    maker.serve("longer", longer)
    busy(shop, 8)
    shop.submit("early", longer, 1)
    early = shop.turn().lookups[0].op
    land_fetches(shop, RequestSpec("late", OTHER, 1))
    held = staying(shop)
    assert any(held.values())
    land_fetch(shop, early)
    assert staying(shop) == held
    shop.see_to("hog", "early", "late")
    shop.close()


@each_layout
def test_t14_pages_that_stay_stop_nobody(layout):
    """Claims hold all they may of a small host, while others decode, are saved, retracted and come back: nobody waits
    for the pages that stay, and everybody ends.

    Mutation: `HostPins.begin` pins the device.
    """
    shop = Shop(layout, depot=both(layout), pages=14, host=12, batch=3, headroom=0, max_overtaken=64)
    for n in range(3):
        shop.submit(f"hog{n}", toks(90 + n, PAGE), 24, priority=-2)
    shop.turn()
    land_fetches(shop, RequestSpec("ann", PROMPT, 1), RequestSpec("bob", OTHER, 1))
    assert any(staying(shop).values())
    shop.see_to("hog0", "hog1", "hog2", "ann", "bob")
    shop.close()


def test_t17_a_fetch_that_came_late_stays_for_one_that_still_waits():
    """Its deadline passed, but nobody let it in before the pages came.

    Mutation: `Prefetch.fetch_done` thinks only of those who have patience.
    """
    shop = Shop(depot=stocked(), host=14, batch=1, fetch_ticks=5)
    busy(shop)
    fetching(shop)
    shop.tick(5 + 6)
    shop.turn()
    assert shop.scheduler.stats()["waiting"] == 1
    shop.land("fetch")
    assert staying(shop) == {"full": 6}
    crowd(shop)
    shop.see_to("ann")
    assert shop.ended["ann"].cached == 6 * PAGE
    shop.close()


@pytest.mark.parametrize("layout", ["full", "full+window"])
def test_t17_below_pages_that_are_on_the_device_alone_it_stays_once_they_are_saved(layout):
    """The first two pages are of somebody who runs; the four that follow come from the store. Nothing can be held below
    what only the device has; when that is saved, all of it is.

    Mutation: `HostPins.begin` holds what is below a gap; or `Prefetch.back_up` looks at no claims.
    """
    shop = Shop(layout, depot=stocked(layout), host=14, batch=1)
    shop.submit("hog", PROMPT[: 2 * PAGE + 1], 6, priority=-2, reads_cache=False)
    shop.turn()
    land_fetches(shop, RequestSpec("ann", PROMPT, 1))
    assert not any(staying(shop).values())
    shop.submit("next", toks(80, 3), 12, priority=-2)
    while "hog" in shop.live:
        shop.turn()
    shop.turn()
    assert shop.land("save") == 1
    shop.turn()
    assert staying(shop)["full"] == 6
    shop.see_to("next", "ann")
    assert shop.ended["ann"].cached == 6 * PAGE
    shop.close()
