"""Stories of a store behind the scheduler: lookups, fetches, backups and their deadlines (cases T02-T08, T13, T15, T18,
T19, S11, F20)."""

from __future__ import annotations

import pytest

from sapwood.cache import Namespace
from sapwood.cache.stored import StoreFetches
from sapwood.scheduler import BackupDone, FetchDone, LoadDone, LookupDone, ProtocolError, RequestSpec, StoreUp
from sapwood.sim.depot import Depot

from .driver import BASE, each_layout, toks
from .shop import PAGE, Shop

PROMPT = toks(1, 6 * PAGE + 1)  # six pages and a token


def stocked(layout: str = "full", prompt=PROMPT, namespace: Namespace = BASE) -> Depot:
    """A store that has a prompt another engine has computed."""
    shop = Shop(layout)
    shop.serve("maker", prompt, namespace=namespace)
    assert shop.depot.values
    shop.close()
    return shop.depot


def looking(shop: Shop, id: str = "ann", prompt=PROMPT, **more):
    """Submit a request whose lookup goes out. Returns the lookup."""
    shop.submit(id, prompt, 3, **more)
    (lookup,) = shop.turn().lookups
    return lookup


def fetching(shop: Shop, id: str = "ann", prompt=PROMPT, **more):
    """Submit a request whose fetch goes out. Returns the fetch."""
    looking(shop, id, prompt, **more)
    shop.land("lookup")
    (fetch,) = shop.turn().fetches
    return fetch


# ---- T02, T03


@each_layout
def test_t02_what_the_store_has_is_fetched_and_loaded(layout):
    """A prompt whose six pages are in the store: looked up, fetched to host, loaded; only its last token is computed.

    Mutation: `Prefetch.lookup_done` never begins a fetch; or `StoreFetches.fetch_done` frees everything.
    """
    shop = Shop(layout, depot=stocked(layout))
    lookup = looking(shop)
    assert (lookup.start_page, len(lookup.hashes), lookup.namespace) == (0, 6, BASE)
    assert lookup.hashes == shop.cache.page_hashes(BASE, PROMPT)
    assert shop.scheduler.stats()["fetching"] == 1 and shop.scheduler.stats()["waiting"] == 0
    shop.land("lookup")
    plan = shop.turn()
    (fetch,) = plan.fetches
    assert fetch.hashes == lookup.hashes and not plan.batch.ids
    shop.land("fetch")
    plan = shop.turn()
    assert len(plan.loads) == 1 and not plan.batch.ids
    shop.land("load")
    shop.turn()
    (row,) = shop.rows_by("ann")
    assert (row.start, row.length, row.cached) == (24, 1, 24)
    shop.see_to("ann")
    assert shop.ended["ann"].cached == 24 and shop.ended["ann"].computed == 1
    shop.close()


@each_layout
def test_f20_what_a_small_host_let_through_is_found_in_the_store(layout):
    """Host has a quarter of the pages of a prompt in groups that slide: the store gets it all the same, through one
    host and into another.

    Mutation: `_to_save_of_windows` wants every page, however little it is worth; `StoreFetches._where` fetches all of
    them.
    """
    prompt, small = toks(1, 32 * PAGE + 1), {"pages": 80, "windows": 8}
    shop = Shop(layout, **small)
    shop.serve("maker", prompt)
    assert shop.cache.stats()["transfers"]["saves_skipped"] == 0
    shop.close()
    shop = Shop(layout, depot=shop.depot, **small)
    assert shop.serve("ann", prompt).cached == 32 * PAGE
    assert shop.cache.stats()["transfers"]["fetches"] == 1
    shop.close()


@pytest.mark.parametrize(("pages", "looks"), [(1, False), (3, False), (4, True)])
def test_t02_too_few_missing_pages_are_not_looked_up(pages, looks):
    """Below `prefetch_threshold` whole pages a prompt just computes.

    Mutation: `HybridPrefixCache.missing` compares with `>`; or counts the pages that are here.
    """
    shop = Shop(depot=stocked(), prefetch_threshold=4)
    shop.submit("ann", PROMPT[: pages * PAGE + 1], 1)
    plan = shop.turn()
    assert bool(plan.lookups) is looks and bool(plan.batch.ids) is not looks
    shop.close()


@pytest.mark.parametrize(("there", "fetches"), [(0, False), (3, False), (4, True), (6, True)])
def test_t02_too_few_pages_in_the_store_are_not_fetched(there, fetches):
    """Below `prefetch_threshold` pages in the store the request computes.

    Mutation: `Prefetch.lookup_done` fetches whatever is there.
    """
    shop = Shop(depot=stocked(prompt=PROMPT[: there * PAGE + 1]), prefetch_threshold=4) if there else Shop()
    looking(shop)
    shop.land("lookup")
    plan = shop.turn()
    assert bool(plan.fetches) is fetches and bool(plan.batch.ids) is not fetches
    shop.see_to("ann")
    assert shop.ended["ann"].cached == (there * PAGE if fetches else 0)
    shop.close()


def test_t02_who_reads_nothing_looks_for_nothing():
    """A request with `reads_cache=False` computes every token, whatever the store has.

    Mutation: `Prefetch.arrives` takes everybody.
    """
    shop = Shop(depot=stocked())
    shop.submit("ann", PROMPT, 1, reads_cache=False)
    assert not shop.turn().lookups
    shop.see_to("ann")
    assert shop.ended["ann"].cached == 0
    shop.close()


@each_layout
@pytest.mark.parametrize("tier", ["device", "host"])
def test_t03_fetched_pages_land_behind_those_that_are_here(layout, tier):
    """Two pages are here, the next four in the store: these are asked for from page 2 on, and land there.

    Mutation: `StoreFetches.begin_fetch` begins at page 0; or `HybridPrefixCache.missing` hashes without what stands
    before.
    """
    shop = Shop(layout, depot=stocked(layout), pages=12, batch=8)
    shop.serve("before", PROMPT[: 2 * PAGE + 1], but=("lookup", "fetch"), reads_cache=False)
    if tier == "host":
        for n in range(8):
            shop.serve(f"crowd{n}", toks(50 + n, 10 * PAGE), reads_cache=False, writes_cache=False)
    lookup = looking(shop)
    assert lookup.start_page == 2 and lookup.hashes == shop.cache.page_hashes(BASE, PROMPT)[2:]
    shop.land("lookup")
    (fetch,) = shop.turn().fetches
    assert fetch.start_page == 2
    shop.see_to("ann")
    assert shop.ended["ann"].cached == 24
    shop.close()


# ---- T02, T14: host is too small


def test_t02_a_fetch_is_cut_to_what_host_can_take():
    """Six pages are in the store, host has room for four: these are fetched, and the rest is computed.

    Mutation: `Prefetch.lookup_done` fetches all or nothing; or remembers that it asked for six.
    """
    shop = Shop(depot=stocked(), host=4)
    fetch = fetching(shop)
    assert fetch.hashes == shop.cache.page_hashes(BASE, PROMPT)[:4]
    with pytest.raises(ProtocolError, match="from 0 to 4"):
        shop.scheduler.advance([FetchDone(fetch.op, True, 5)])
    shop.submit("bob", PROMPT, 1)
    assert not shop.turn().lookups, "it has joined"
    shop.see_to("ann", "bob")
    assert shop.ended["ann"].cached == 4 * PAGE and shop.ended["bob"].cached >= 4 * PAGE
    assert shop.scheduler.stats()["store"]["shortened"] == 1
    assert shop.scheduler.stats()["store"]["lookups"] == 1, "a full group can be cut anywhere"
    shop.close()


@pytest.mark.parametrize(("host", "fetches"), [(3, False), (4, True)])
def test_t02_too_little_room_is_no_fetch(host, fetches):
    """Host could take fewer pages than `prefetch_threshold`: the request computes, and it is counted.

    Mutation: `Prefetch.lookup_done` fetches whatever fits.
    """
    shop = Shop(depot=stocked(), host=host, prefetch_threshold=4)
    looking(shop)
    shop.land("lookup")
    plan = shop.turn()
    assert bool(plan.fetches) is fetches and bool(plan.batch.ids) is not fetches
    assert shop.cache.stats()["transfers"]["fetches_skipped"] == (not fetches)
    shop.see_to("ann")
    shop.close()


@pytest.mark.parametrize("layout", ["full+window", "full+state", "full+2windows+state"])
def test_t02_a_fetch_is_cut_where_every_group_can_be_served(layout):
    """Eight pages are in the store and host has room for seven; but windows and snapshots are there for boundaries 3
    and 8 alone. The store is asked again, for seven, and the three with which every group can begin are fetched.

    Mutation: `Prefetch.lookup_done` cuts a fetch of any layout where host is full.
    """
    prompt = toks(1, 8 * PAGE + 1)
    maker = Shop(layout, depot=stocked(layout, prompt=prompt[: 3 * PAGE + 1]))
    maker.serve("maker", prompt)
    hashes = maker.cache.page_hashes(BASE, prompt)
    for group in maker.cache.groups:
        for page in {"full": (), "window": (3, 4), "state": (3, 4, 5, 6)}[group.family]:
            maker.depot.values.pop((group.name, hashes[page]), None)
    shop = Shop(layout, depot=maker.depot, host=7)
    assert looking(shop, prompt=prompt).hashes == hashes
    shop.land("lookup")
    (lookup,) = shop.turn().lookups
    assert (lookup.start_page, lookup.hashes) == (0, hashes[:7])
    assert shop.scheduler.stats()["fetching"] == 1, "it waits on"
    shop.land("lookup")
    (fetch,) = shop.turn().fetches
    assert fetch.hashes == hashes[:3]
    shop.see_to("ann")
    assert shop.ended["ann"].cached == 3 * PAGE
    assert shop.scheduler.stats()["store"]["shortened"] == 1
    shop.close()


def test_t02_a_store_is_asked_for_fewer_pages_once():
    """Host shrinks again before the second answer: the request computes.

    Mutation: `Prefetch.lookup_done` does not look at `cut`: it asks for fewer and fewer.
    """
    shop = Shop("full+window", depot=stocked("full+window"), host=5)
    looking(shop)
    shop.land("lookup")
    assert shop.turn().lookups
    other = toks(9, 2 * PAGE + 1)
    shop.serve("bob", other, reads_cache=False, but=("lookup", "backup"))
    assert shop.ops("backup"), "it keeps two pages on host"
    shop.land("lookup")
    plan = shop.turn()
    assert not plan.lookups and not plan.fetches and plan.batch.ids == ["ann"]
    shop.close()


# ---- T04


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("meanwhile", ["grown", "evicted", "unloaded", "flushed"])
@pytest.mark.parametrize("when", ["answer", "arrival"])
def test_t04_the_tree_changes_under_a_fetch(layout, meanwhile, when):
    """Between the store's answer and the arrival of its pages somebody else computes the same prompt, or what the pages
    follow is evicted: every page still lands under its own tokens, or is dropped. The answers are right.

    Mutation: `StoreFetches.fetch_done` remembers the node that it was to land behind; or lands below what is gone.
    """
    shop = Shop(layout, depot=stocked(layout), pages=12, host=14, batch=8)
    shop.serve("before", PROMPT[: 2 * PAGE + 1], reads_cache=False)
    looking(shop)
    if when == "arrival":
        shop.land("lookup")
        assert shop.turn().fetches
    if meanwhile == "grown":
        shop.serve("other", PROMPT, reads_cache=False, but=("lookup", "fetch"))
    elif meanwhile == "evicted":
        for n in range(6):
            shop.serve(f"crowd{n}", toks(50 + n, 9 * PAGE), reads_cache=False, but=("lookup", "fetch", "backup"))
    elif meanwhile == "unloaded":
        shop.scheduler.evict_namespace(BASE)
    else:
        shop.scheduler.flush()
    shop.cache.check()
    shop.see_to("ann")
    shop.close()


def test_t04_fetched_pages_do_not_land_on_what_is_only_promised():
    """Somebody computes the same and more in a step that is in flight when the fetch arrives, and fails: what was
    promised goes, and nothing of the fetch stands below it.

    Mutation: `StoreFetches._landable` does not look at promises.
    """
    shop = Shop(depot=stocked(), batch=8)
    fetching(shop)
    shop.submit("other", PROMPT[: 6 * PAGE] + toks(2, 3 * PAGE), 2, reads_cache=False)
    shop.plan()
    shop.land("fetch")
    shop.fail()
    shop.see_to("ann", "other")
    shop.close()


# ---- T05


@each_layout
def test_t05_pages_under_a_backup_stay_on_host(layout):
    """While a backup is under way its host pages stay, and host pressure evicts others, or nobody. The backup arrives
    with what it was to bring.

    Mutation: `StoreFetches._begin_backup` holds nothing, or only groups that are not closed.
    """
    shop = Shop(layout, pages=12, host=12, batch=8)
    shop.serve("ann", PROMPT, but=("backup",))
    (backup,) = shop.ops("backup")
    _, operation, _ = shop.executor.double.exchanges[backup]
    assert operation.hashes == shop.cache.page_hashes(BASE, PROMPT)
    for n in range(6):
        shop.serve(f"crowd{n}", toks(50 + n, 9 * PAGE + 1), reads_cache=False, but=("backup",))
    for name, pages in operation.pages.items():
        owners = shop.cache._tree.tiers[1].pools[shop.cache._index[name]].owner
        assert all(owners[page] == 2 for page in pages.tolist() if page), "it was given to somebody else"
    shop.land()
    assert all(shop.depot.there(name, operation.hashes)[operation.pages[name] != 0].all() for name in operation.pages)
    shop.close()


@each_layout
def test_t05_a_backup_outlives_its_namespace(layout):
    """The namespace goes while its backup is under way: the pages are counted as unhooked, and free after it.

    Mutation: `PinHolder.detach` reads nothing.
    """
    shop = Shop(layout)
    shop.serve("ann", PROMPT, but=("backup",))
    assert shop.ops("backup")
    shop.scheduler.flush()
    shop.cache.check()
    assert any(shop.host("unhooked").values())
    shop.land()
    shop.cache.check()
    assert not any(shop.host("unhooked").values())
    shop.close()


def test_t05_a_row_that_decodes_goes_on_under_a_backup():
    """A backup of pages that a decoding row has just filled: the row goes on, its later pages are saved and backed up
    too, and all of it can be fetched.

    Mutation: `Publisher.can_grow` lets a node grow that a backup holds on host.
    """
    shop = Shop(pages=60, host=60, batch=2)
    shop.cache._publisher.save_pages = 2
    shop.submit("ann", PROMPT, 60)
    backups = 0
    while shop.live:
        backups += len(shop.turn().backups)
        shop.land("lookup", "fetch", "save")
    assert backups > 3
    for n in range(3):
        shop.serve(f"crowd{n}", toks(50 + n, 50 * PAGE), reads_cache=False, writes_cache=False, but=("backup",))
    shop.settle()
    other = Shop(depot=shop.depot, pages=60, host=60)
    said = shop.known("ann")
    other.serve("bob", said)
    assert other.ended["bob"].cached >= len(said) // PAGE * PAGE - PAGE
    shop.close()
    other.close()


@pytest.mark.parametrize("layout", ["full", "full+window", "full+state"])
def test_t05_what_a_backup_holds_does_not_grow_and_is_not_cut_off(layout):
    """A row goes on behind pages that are being backed up; what it makes there cannot be saved, and is crowded out of
    the device. The backup keeps its pages.

    Mutation: `Publisher.publish_rows` lets a leaf grow that a backup holds on host; or `StoreFetches._begin_backup`
    holds a leaf that is on host in part.
    """
    shop = Shop(layout, pages=24, host=24, batch=2)
    shop.cache._publisher.save_pages = 2
    shop.submit("ann", PROMPT[: 3 * PAGE + 1], 40)
    backups = 0
    while shop.live:
        backups += len(shop.turn().backups)
        shop.land("lookup", "fetch")
        shop.land("save", ok=not backups)
    shop.land("save", ok=False)
    assert backups
    for n in range(3):
        shop.serve(f"crowd{n}", toks(50 + n, 20 * PAGE), reads_cache=False, writes_cache=False, but=("backup",))
    shop.land()
    shop.close()


@pytest.mark.attack
def test_t16_spans_that_wait_for_pages_above_them_cost_little(monkeypatch):
    """Saves arrive in the wrong order, so that many spans wait for the pages above them: at each save a few of them are
    looked at, and those that it concerns, not all. In the end everything is backed up.

    Mutation: `StoreFetches.begin_backups` tries every span that waits; or `_fills` is never true.
    """
    tries = 0
    begin = StoreFetches._begin_backup

    def counted(self, span):
        nonlocal tries
        tries += 1
        return begin(self, span)

    monkeypatch.setattr(StoreFetches, "_begin_backup", counted)
    shop = Shop(pages=400, host=400, batch=64)
    shop.cache._publisher.save_pages = 1
    for n in range(30):
        shop.submit(f"r{n}", toks(n, 2 * PAGE + 1), 4 * PAGE, reads_cache=False)
    while shop.live:
        shop.turn()
    shop.turn()
    saves = shop.ops("save")
    assert len(saves) > 100
    for op in reversed(saves):
        shop.tell(shop.executor.land(op, True))
    assert tries <= 6 * len(saves), f"{tries} for {len(saves)} saves"
    shop.settle()
    for n in range(30):
        assert shop.depot.there("full", shop.cache.page_hashes(BASE, shop.known(f"r{n}")[:-1])).all()
    shop.close()


# ---- T06, T07, T08


@each_layout
@pytest.mark.parametrize("lost", [0, 3, 5])
def test_t06_a_fetch_that_brings_a_part(layout, lost):
    """A page is lost between the store's answer and the fetch: the unbroken run before it lands, the rest is freed, and
    the request goes on.

    Mutation: `StoreFetches.fetch_done` lands all it asked for, or nothing.
    """
    shop = Shop(layout, depot=stocked(layout))
    fetch = fetching(shop)
    for group in fetch.pages:
        shop.depot.values.pop((group, fetch.hashes[lost]), None)
    shop.land("fetch")
    assert not any(shop.host("flight").values())
    if layout == "full":
        assert shop.host("tree") == {"full": lost}
    shop.see_to("ann")
    assert shop.ended["ann"].cached == (lost * PAGE if layout == "full" else shop.ended["ann"].cached)
    shop.close()


@each_layout
@pytest.mark.parametrize("ok", [True, False])
def test_t07_abort_while_fetching(layout, ok):
    """The request ends at once. Its fetch goes on, and its pages are freed when it ends: nobody is left to find them.

    Mutation: `Prefetch.forget` ends the operation too; or `StoreFetches.fetch_done` lands under a root that is
    forgotten.
    """
    shop = Shop(layout, depot=stocked(layout))
    fetching(shop)
    assert shop.abort("ann").reason == "abort"
    assert any(shop.host("flight").values()), "the store may still write there"
    shop.land("fetch", ok=ok)
    assert not any(shop.host("flight").values())
    shop.close()


def test_t07_a_whole_fetch_lands_for_those_who_come_later():
    """Whoever asked is gone, but the prefix it extends is still here: a complete fetch lands, a part of one does not.

    Mutation: `Prefetch.fetch_done` lands whatever came.
    """
    for lost in (False, True):
        shop = Shop(depot=stocked())
        shop.serve("before", PROMPT[: 2 * PAGE + 1], reads_cache=False)
        fetch = fetching(shop)
        shop.abort("ann")
        if lost:
            shop.depot.values.pop(("full", fetch.hashes[2]))
        before = shop.host("tree")["full"]
        shop.land("fetch")
        assert shop.host("tree")["full"] == before + (0 if lost else 4)
        shop.close()


def test_t07_abort_while_looking():
    """Nothing is fetched for nobody.

    Mutation: `Prefetch.lookup_done` does not look whether anybody waits.
    """
    shop = Shop(depot=stocked())
    looking(shop)
    shop.abort("ann")
    shop.land("lookup")
    assert shop.turn().empty
    shop.close()


def test_t08_of_a_store_that_is_down_nothing_is_asked():
    """Told that the store does not answer, the scheduler looks up nothing and backs up nothing, and requests compute at
    once; told that it does, it asks again, and what was saved meanwhile is backed up.

    Mutation: `Prefetch._look_for` or `Prefetch.back_up` does not look at `up`.
    """
    shop = Shop("full", depot=stocked())
    shop.tell(StoreUp(False))
    known = len(shop.depot.values)
    other = toks(9, 6 * PAGE + 1)
    for id, prompt in (("ann", PROMPT), ("ben", other)):
        shop.submit(id, prompt, 3)
        plan = shop.turn()
        assert not plan.lookups and plan.batch.ids == [id]
        shop.see_to(id)
    assert len(shop.depot.values) == known and shop.scheduler.stats()["store"]["owed"] == 2
    shop.tell(StoreUp(True))
    assert len(shop.turn().backups) == 2 and not shop.scheduler.stats()["store"]["owed"]
    shop.land("backup")
    known = len(shop.depot.values)
    assert shop.depot.there("full", shop.cache.page_hashes(BASE, other)).all()
    assert looking(shop, "eve", toks(7, 6 * PAGE + 1)).start_page == 0
    shop.see_to("eve")
    assert len(shop.depot.values) > known
    with pytest.raises(ProtocolError, match="StoreUp: up must be True or False, got 1"):
        shop.tell(StoreUp(1))  # type: ignore[arg-type]
    shop.close()


@each_layout
@pytest.mark.parametrize("trouble", ["dead", "lying", "empty handed", "slow lookup", "slow fetch"])
def test_t08_a_bad_store_costs_time_and_nothing_else(layout, trouble):
    """Lookups that fail or lie, fetches that fail, answers after the deadline: the request computes, and is right.

    Mutation: `Prefetch.fetch_done` believes a failed fetch; or `Prefetch.tick` forgets who waits.
    """
    shop = Shop(layout, depot=stocked(layout), lookup_ticks=10, fetch_ticks=20)
    if trouble == "dead":
        looking(shop)
        shop.land("lookup", ok=False)
    elif trouble == "lying":
        shop.depot.values.clear()
        lookup = looking(shop)
        shop.executor.moving.pop(lookup.op)
        shop.tell(LookupDone(lookup.op, 6))
        assert shop.turn().fetches
        shop.land("fetch")
    elif trouble == "empty handed":
        fetching(shop)
        shop.land("fetch", ok=False)
    elif trouble == "slow lookup":
        looking(shop)
        shop.tick(9)
        assert not shop.turn().batch.ids
        shop.tick(1)
    else:
        fetching(shop)
        shop.tick(20 + 5)
        assert not shop.turn().batch.ids
        shop.tick(1)
    assert shop.turn().batch.ids == ["ann"]
    shop.see_to("ann", but=("lookup", "fetch"))
    assert shop.ended["ann"].cached == 0
    shop.close()


# ---- T13, T15, T18, T19


@each_layout
def test_t13_two_engines_share_a_store(layout):
    """What one has computed the other is served, in its own namespace only; the first may forget all it has meanwhile,
    and the store may lose things under both.

    Mutation: the hashes of a backup leave out the namespace, or begin at page 0.
    """
    depot = Depot()
    one, two = Shop(layout, depot=depot), Shop(layout, depot=depot)
    one.serve("a", PROMPT)
    one.scheduler.flush()
    assert two.serve("b", PROMPT).cached == 24
    assert two.serve("other", PROMPT, namespace=Namespace(salt="x")).cached == 0
    longer = PROMPT + two.said("b") + toks(2, 3 * PAGE)
    two.serve("c", longer)
    assert one.serve("d", longer).cached == (len(longer) - 1) // PAGE * PAGE
    one.scheduler.flush()
    depot.values.clear()
    one.serve("e", longer)
    one.close()
    two.close()


def test_t15_a_request_keeps_its_place():
    """While one waits for the store, those behind it run; when it is back it comes in before later ones.

    Mutation: `Prefetch._over` puts it at the end of the queue.
    """
    shop = Shop(depot=stocked(), batch=1)
    shop.submit("ann", PROMPT, 1)
    shop.submit("bob", toks(7, PAGE), 3)
    plan = shop.turn()
    assert plan.lookups and plan.batch.ids == ["bob"]
    shop.land("lookup")
    assert shop.turn().fetches
    shop.submit("cid", toks(8, PAGE), 1)
    shop.land("fetch")
    while "bob" in shop.live:
        shop.turn()
    shop.see_to("ann", "cid")
    assert shop.first_rows() == ["bob", "ann", "cid"]
    assert shop.ended["ann"].cached == 24
    shop.close()


@each_layout
def test_t18_two_requests_one_fetch(layout):
    """Two requests lack the same pages, one of them comes while the fetch is under way: one lookup, one fetch.

    Mutation: `Prefetch._look_for` does not look at `by_hash`.
    """
    shop = Shop(layout, depot=stocked(layout))
    shop.submit_all([RequestSpec("ann", PROMPT, 1), RequestSpec("bob", PROMPT, 1)])
    assert len(shop.turn().lookups) == 1
    shop.land("lookup")
    shop.submit("cid", PROMPT, 1)
    plan = shop.turn()
    assert len(plan.fetches) == 1 and not plan.lookups
    shop.see_to("ann", "bob", "cid")
    assert {id: end.cached for id, end in shop.ended.items()} == {"ann": 24, "bob": 24, "cid": 24}
    assert shop.scheduler.stats()["store"]["lookups"] == 1 and shop.cache.stats()["transfers"]["fetches"] == 1
    shop.close()


@each_layout
def test_t18_who_joined_looks_for_the_rest(layout):
    """A longer prompt joins the fetch of a shorter one, and then asks for what is its own; the one who asked first ends
    meanwhile, and the other is served all the same.

    Mutation: `Prefetch._over` lets nobody look again; or `Prefetch.forget` drops the fetch.
    """
    longer = PROMPT[: 6 * PAGE] + toks(2, 5 * PAGE + 1)
    depot = stocked(layout)
    maker = Shop(layout, depot=depot)
    maker.serve("maker", longer)
    shop = Shop(layout, depot=depot)
    fetching(shop)
    shop.submit("bob", longer, 1)
    assert not shop.turn().lookups
    shop.abort("ann")
    shop.land("fetch")
    (lookup,) = shop.turn().lookups
    assert lookup.start_page == 6
    shop.see_to("bob")
    assert shop.ended["bob"].cached == 11 * PAGE
    shop.close()


def test_t18_nobody_joins_a_fetch_that_will_not_land():
    """The namespace was evicted while its pages are on their way: who comes now asks again.

    Mutation: `Prefetch._look_for` joins whatever has the same hash.
    """
    shop = Shop(depot=stocked())
    fetching(shop)
    shop.scheduler.flush()
    shop.submit("bob", PROMPT, 1)
    assert len(shop.turn().lookups) == 1
    shop.see_to("bob")
    assert shop.ended["bob"].cached == 24
    shop.see_to("ann")
    shop.close()


@each_layout
def test_t19_pages_of_a_late_fetch_are_given_to_nobody(layout):
    """After its deadline a fetch keeps its host pages until its event, however much others need; then they are free or
    land.

    Mutation: `Prefetch.tick` ends the operation in the cache.
    """
    shop = Shop(layout, depot=stocked(layout), pages=12, host=12, batch=8, fetch_ticks=5)
    fetching(shop)
    flight = shop.host("flight")
    shop.tick(5 + 6)
    shop.see_to("ann", but=("fetch",))
    for n in range(5):
        shop.serve(f"crowd{n}", toks(50 + n, 9 * PAGE), reads_cache=False, but=("fetch",))
    assert all(shop.host("flight")[name] >= n for name, n in flight.items())
    shop.land("fetch")
    assert not any(shop.host("flight").values())
    shop.close()


# ---- S11


@pytest.mark.parametrize("hangs", ["lookup", "fetch"])
def test_s11_a_deadline_fires_while_nothing_runs(hangs):
    """Nothing runs but an operation that hangs: empty plans say after how many ticks to ask again, and then the request
    computes. A plan that has rows says nothing.

    Mutation: `Planner.transfers_only` leaves out `wake_in`; or `Prefetch.wake_in` counts from 0.
    """
    shop = Shop(depot=stocked(), lookup_ticks=7, fetch_ticks=10)
    shop.tick(1000)
    shop.submit("ann", PROMPT, 3)
    plan = shop.turn()
    assert plan.lookups and plan.wake_in == 7
    left = 7
    if hangs == "fetch":
        shop.land("lookup")
        left = 10 + 6
        plan = shop.turn()
        assert plan.fetches and plan.wake_in == left
    shop.tick(2)
    plan = shop.turn()
    assert plan.empty and plan.wake_in == left - 2
    shop.tick(left - 2)
    plan = shop.turn()
    assert plan.batch.ids == ["ann"] and plan.wake_in is None
    shop.see_to("ann", but=(hangs,))
    assert shop.turn().wake_in is None, "nobody waits for it"
    shop.close()


# ---- mistakes


def test_events_of_the_store_that_cannot_happen():
    """Unknown, repeated and early operations, and numbers that cannot be, raise ProtocolError and change nothing.

    Mutation: `Prefetch.fetch_done` takes any number of pages; or `lookup_done` takes an operation twice.
    """
    shop = Shop(depot=stocked())
    lookup = looking(shop)

    def wrong(*events) -> None:
        for event in events:
            before = shop.scheduler.stats()
            with pytest.raises(ProtocolError):
                shop.scheduler.advance([event])
            assert shop.scheduler.stats() == before
            shop.cache.check()

    op = lookup.op
    wrong(LookupDone(op + 1, 0), LookupDone(op, 7), LookupDone(op, -1), LookupDone(op, True), FetchDone(op, True, 0))
    wrong(LoadDone(op, True), BackupDone(op, True))
    shop.land("lookup")
    wrong(LookupDone(op, 6), FetchDone(op + 1, True, 6))  # it has not been handed out
    (fetch,) = shop.turn().fetches
    wrong(FetchDone(fetch.op, True, 7), FetchDone(fetch.op, 1, 6), LookupDone(fetch.op, 6))
    shop.land("fetch")
    wrong(FetchDone(fetch.op, True, 6))
    shop.see_to("ann", but=("backup",))
    shop.serve("bob", toks(9, 3 * PAGE), but=("backup",))
    (backup,) = shop.ops("backup")
    wrong(BackupDone(backup, "yes"), BackupDone(backup + 99, True))
    shop.land("backup")
    wrong(BackupDone(backup, True))
    shop.close()
