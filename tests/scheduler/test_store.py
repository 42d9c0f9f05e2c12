"""Stories of a store behind the scheduler: lookups, fetches, backups and their deadlines (cases T02-T08, T13, T15, T18,
T19, S11, F20)."""

from __future__ import annotations

import pytest

from sapwood.cache import Namespace
from sapwood.cache.stored import StoreFetches
from sapwood.scheduler import BackupDone, FetchDone, LoadDone, LookupDone, ProtocolError, RequestSpec, StoreUp
from sapwood.sim.depot import Depot

from .driver import BASE, each_layout, toks
from .store_run import PAGE, StoreRun

PROMPT = toks(1, 6 * PAGE + 1)  # six pages and a token


def stocked(layout: str = "full", prompt=PROMPT, namespace: Namespace = BASE) -> Depot:
    """A store that has a prompt another engine has computed."""
    run = StoreRun(layout)
    run.serve("maker", prompt, namespace=namespace)
    assert run.depot.values
    run.close()
    return run.depot


def looking(run: StoreRun, id: str = "ann", prompt=PROMPT, **more):
    """Submit a request whose lookup goes out. Returns the lookup."""
    run.submit(id, prompt, 3, **more)
    (lookup,) = run.turn().lookups
    return lookup


def fetching(run: StoreRun, id: str = "ann", prompt=PROMPT, **more):
    """Submit a request whose fetch goes out. Returns the fetch."""
    looking(run, id, prompt, **more)
    run.land("lookup")
    (fetch,) = run.turn().fetches
    return fetch


# ---- T02, T03


@each_layout
def test_t02_what_the_store_has_is_fetched_and_loaded(layout):
    """A prompt whose six pages are in the store: looked up, fetched to host, loaded; only its last token is computed.

    Mutation: `Prefetch.lookup_done` never begins a fetch; or `StoreFetches.fetch_done` frees everything.
    """
    run = StoreRun(layout, depot=stocked(layout))
    lookup = looking(run)
    assert (lookup.start_page, len(lookup.hashes), lookup.namespace) == (0, 6, BASE)
    assert lookup.hashes == run.cache.page_hashes(BASE, PROMPT)
    assert run.scheduler.stats()["fetching"] == 1 and run.scheduler.stats()["waiting"] == 0
    run.land("lookup")
    plan = run.turn()
    (fetch,) = plan.fetches
    assert fetch.hashes == lookup.hashes and not plan.batch.ids
    run.land("fetch")
    plan = run.turn()
    assert len(plan.loads) == 1 and not plan.batch.ids
    run.land("load")
    run.turn()
    (row,) = run.rows_by("ann")
    assert (row.start, row.length, row.cached) == (24, 1, 24)
    run.see_to("ann")
    assert run.ended["ann"].cached == 24 and run.ended["ann"].computed == 1
    run.close()


@each_layout
def test_f20_what_a_small_host_let_through_is_found_in_the_store(layout):
    """Host has a quarter of the pages of a prompt in groups that slide: the store gets it all the same, through one
    host and into another.

    Mutation: `_to_save_of_windows` wants every page, however little it is worth; `StoreFetches._where` fetches all of
    them.
    """
    prompt, small = toks(1, 32 * PAGE + 1), {"pages": 80, "windows": 8}
    run = StoreRun(layout, **small)
    run.serve("maker", prompt)
    assert run.cache.stats()["transfers"]["saves_skipped"] == 0
    run.close()
    run = StoreRun(layout, depot=run.depot, **small)
    assert run.serve("ann", prompt).cached == 32 * PAGE
    assert run.cache.stats()["transfers"]["fetches"] == 1
    run.close()


@pytest.mark.parametrize(("pages", "looks"), [(1, False), (3, False), (4, True)])
def test_t02_too_few_missing_pages_are_not_looked_up(pages, looks):
    """Below `prefetch_threshold` whole pages a prompt just computes.

    Mutation: `HybridPrefixCache.missing` compares with `>`; or counts the pages that are here.
    """
    run = StoreRun(depot=stocked(), prefetch_threshold=4)
    run.submit("ann", PROMPT[: pages * PAGE + 1], 1)
    plan = run.turn()
    assert bool(plan.lookups) is looks and bool(plan.batch.ids) is not looks
    run.close()


@pytest.mark.parametrize(("there", "fetches"), [(0, False), (3, False), (4, True), (6, True)])
def test_t02_too_few_pages_in_the_store_are_not_fetched(there, fetches):
    """Below `prefetch_threshold` pages in the store the request computes.

    Mutation: `Prefetch.lookup_done` fetches whatever is there.
    """
    run = StoreRun(depot=stocked(prompt=PROMPT[: there * PAGE + 1]), prefetch_threshold=4) if there else StoreRun()
    looking(run)
    run.land("lookup")
    plan = run.turn()
    assert bool(plan.fetches) is fetches and bool(plan.batch.ids) is not fetches
    run.see_to("ann")
    assert run.ended["ann"].cached == (there * PAGE if fetches else 0)
    run.close()


def test_t02_who_reads_nothing_looks_for_nothing():
    """A request with `reads_cache=False` computes every token, whatever the store has.

    Mutation: `Prefetch.arrives` takes everybody.
    """
    run = StoreRun(depot=stocked())
    run.submit("ann", PROMPT, 1, reads_cache=False)
    assert not run.turn().lookups
    run.see_to("ann")
    assert run.ended["ann"].cached == 0
    run.close()


@each_layout
@pytest.mark.parametrize("tier", ["device", "host"])
def test_t03_fetched_pages_land_behind_those_that_are_here(layout, tier):
    """Two pages are here, the next four in the store: these are asked for from page 2 on, and land there.

    Mutation: `StoreFetches.begin_fetch` begins at page 0; or `HybridPrefixCache.missing` hashes without what stands
    before.
    """
    run = StoreRun(layout, depot=stocked(layout), pages=12, batch=8)
    run.serve("before", PROMPT[: 2 * PAGE + 1], but=("lookup", "fetch"), reads_cache=False)
    if tier == "host":
        for n in range(8):
            run.serve(f"crowd{n}", toks(50 + n, 10 * PAGE), reads_cache=False, writes_cache=False)
    lookup = looking(run)
    assert lookup.start_page == 2 and lookup.hashes == run.cache.page_hashes(BASE, PROMPT)[2:]
    run.land("lookup")
    (fetch,) = run.turn().fetches
    assert fetch.start_page == 2
    run.see_to("ann")
    assert run.ended["ann"].cached == 24
    run.close()


# ---- T02, T14: host is too small


def test_t02_a_fetch_is_cut_to_what_host_can_take():
    """Six pages are in the store, host has room for four: these are fetched, and the rest is computed.

    Mutation: `Prefetch.lookup_done` fetches all or nothing; or remembers that it asked for six.
    """
    run = StoreRun(depot=stocked(), host=4)
    fetch = fetching(run)
    assert fetch.hashes == run.cache.page_hashes(BASE, PROMPT)[:4]
    with pytest.raises(ProtocolError, match="from 0 to 4"):
        run.scheduler.advance([FetchDone(fetch.op, True, 5)])
    run.submit("bob", PROMPT, 1)
    assert not run.turn().lookups, "it has joined"
    run.see_to("ann", "bob")
    assert run.ended["ann"].cached == 4 * PAGE and run.ended["bob"].cached >= 4 * PAGE
    assert run.scheduler.stats()["store"]["shortened"] == 1
    assert run.scheduler.stats()["store"]["lookups"] == 1, "a full group can be cut anywhere"
    run.close()


@pytest.mark.parametrize(("host", "fetches"), [(3, False), (4, True)])
def test_t02_too_little_room_is_no_fetch(host, fetches):
    """Host could take fewer pages than `prefetch_threshold`: the request computes, and it is counted.

    Mutation: `Prefetch.lookup_done` fetches whatever fits.
    """
    run = StoreRun(depot=stocked(), host=host, prefetch_threshold=4)
    looking(run)
    run.land("lookup")
    plan = run.turn()
    assert bool(plan.fetches) is fetches and bool(plan.batch.ids) is not fetches
    assert run.cache.stats()["transfers"]["fetches_skipped"] == (not fetches)
    run.see_to("ann")
    run.close()


@pytest.mark.parametrize("layout", ["full+window", "full+state", "full+2windows+state"])
def test_t02_a_fetch_is_cut_where_every_group_can_be_served(layout):
    """Eight pages are in the store and host has room for seven; but windows and snapshots are there for boundaries 3
    and 8 alone. The store is asked again, for seven, and the three with which every group can begin are fetched.

    Mutation: `Prefetch.lookup_done` cuts a fetch of any layout where host is full.
    """
    prompt = toks(1, 8 * PAGE + 1)
    maker = StoreRun(layout, depot=stocked(layout, prompt=prompt[: 3 * PAGE + 1]))
    maker.serve("maker", prompt)
    hashes = maker.cache.page_hashes(BASE, prompt)
    for group in maker.cache.groups:
        for page in {"full": (), "window": (3, 4), "state": (3, 4, 5, 6)}[group.family]:
            maker.depot.values.pop((group.name, hashes[page]), None)
    run = StoreRun(layout, depot=maker.depot, host=7)
    assert looking(run, prompt=prompt).hashes == hashes
    run.land("lookup")
    (lookup,) = run.turn().lookups
    assert (lookup.start_page, lookup.hashes) == (0, hashes[:7])
    assert run.scheduler.stats()["fetching"] == 1, "it waits on"
    run.land("lookup")
    (fetch,) = run.turn().fetches
    assert fetch.hashes == hashes[:3]
    run.see_to("ann")
    assert run.ended["ann"].cached == 3 * PAGE
    assert run.scheduler.stats()["store"]["shortened"] == 1
    run.close()


def test_t02_a_store_is_asked_for_fewer_pages_once():
    """Host shrinks again before the second answer: the request computes.

    Mutation: `Prefetch.lookup_done` does not look at `cut`: it asks for fewer and fewer.
    """
    run = StoreRun("full+window", depot=stocked("full+window"), host=5)
    looking(run)
    run.land("lookup")
    assert run.turn().lookups
    other = toks(9, 2 * PAGE + 1)
    run.serve("bob", other, reads_cache=False, but=("lookup", "backup"))
    assert run.ops("backup"), "it keeps two pages on host"
    run.land("lookup")
    plan = run.turn()
    assert not plan.lookups and not plan.fetches and plan.batch.ids == ["ann"]
    run.close()


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
    run = StoreRun(layout, depot=stocked(layout), pages=12, host=14, batch=8)
    run.serve("before", PROMPT[: 2 * PAGE + 1], reads_cache=False)
    looking(run)
    if when == "arrival":
        run.land("lookup")
        assert run.turn().fetches
    if meanwhile == "grown":
        run.serve("other", PROMPT, reads_cache=False, but=("lookup", "fetch"))
    elif meanwhile == "evicted":
        for n in range(6):
            run.serve(f"crowd{n}", toks(50 + n, 9 * PAGE), reads_cache=False, but=("lookup", "fetch", "backup"))
    elif meanwhile == "unloaded":
        run.scheduler.evict_namespace(BASE)
    else:
        run.scheduler.flush()
    run.cache.check()
    run.see_to("ann")
    run.close()


def test_t04_fetched_pages_do_not_land_on_what_is_only_promised():
    """Somebody computes the same and more in a step that is in flight when the fetch arrives, and fails: what was
    promised goes, and nothing of the fetch stands below it.

    Mutation: `StoreFetches._landable` does not look at promises.
    """
    run = StoreRun(depot=stocked(), batch=8)
    fetching(run)
    run.submit("other", PROMPT[: 6 * PAGE] + toks(2, 3 * PAGE), 2, reads_cache=False)
    run.plan()
    run.land("fetch")
    run.fail()
    run.see_to("ann", "other")
    run.close()


# ---- T05


@each_layout
def test_t05_pages_under_a_backup_stay_on_host(layout):
    """While a backup is under way its host pages stay, and host pressure evicts others, or nobody. The backup arrives
    with what it was to bring.

    Mutation: `StoreFetches._begin_backup` holds nothing, or only groups that are not closed.
    """
    run = StoreRun(layout, pages=12, host=12, batch=8)
    run.serve("ann", PROMPT, but=("backup",))
    (backup,) = run.ops("backup")
    _, operation, _ = run.executor.double.exchanges[backup]
    assert operation.hashes == run.cache.page_hashes(BASE, PROMPT)
    for n in range(6):
        run.serve(f"crowd{n}", toks(50 + n, 9 * PAGE + 1), reads_cache=False, but=("backup",))
    for name, pages in operation.pages.items():
        owners = run.cache._tree.tiers[1].pools[run.cache._index[name]].owner
        assert all(owners[page] == 2 for page in pages.tolist() if page), "it was given to somebody else"
    run.land()
    assert all(run.depot.there(name, operation.hashes)[operation.pages[name] != 0].all() for name in operation.pages)
    run.close()


@each_layout
def test_t05_a_backup_outlives_its_namespace(layout):
    """The namespace goes while its backup is under way: the pages are counted as unhooked, and free after it.

    Mutation: `PinHolder.detach` reads nothing.
    """
    run = StoreRun(layout)
    run.serve("ann", PROMPT, but=("backup",))
    assert run.ops("backup")
    run.scheduler.flush()
    run.cache.check()
    assert any(run.host("unhooked").values())
    run.land()
    run.cache.check()
    assert not any(run.host("unhooked").values())
    run.close()


def test_t05_a_row_that_decodes_goes_on_under_a_backup():
    """A backup of pages that a decoding row has just filled: the row goes on, its later pages are saved and backed up
    too, and all of it can be fetched.

    Mutation: `Publisher.can_grow` lets a node grow that a backup holds on host.
    """
    run = StoreRun(pages=60, host=60, batch=2)
    run.cache._publisher.save_pages = 2
    run.submit("ann", PROMPT, 60)
    backups = 0
    while run.live:
        backups += len(run.turn().backups)
        run.land("lookup", "fetch", "save")
    assert backups > 3
    for n in range(3):
        run.serve(f"crowd{n}", toks(50 + n, 50 * PAGE), reads_cache=False, writes_cache=False, but=("backup",))
    run.settle()
    other = StoreRun(depot=run.depot, pages=60, host=60)
    said = run.known("ann")
    other.serve("bob", said)
    assert other.ended["bob"].cached >= len(said) // PAGE * PAGE - PAGE
    run.close()
    other.close()


@pytest.mark.parametrize("layout", ["full", "full+window", "full+state"])
def test_t05_what_a_backup_holds_does_not_grow_and_is_not_cut_off(layout):
    """A row goes on behind pages that are being backed up; what it makes there cannot be saved, and is crowded out of
    the device. The backup keeps its pages.

    Mutation: `Publisher.publish_rows` lets a leaf grow that a backup holds on host; or `StoreFetches._begin_backup`
    holds a leaf that is on host in part.
    """
    run = StoreRun(layout, pages=24, host=24, batch=2)
    run.cache._publisher.save_pages = 2
    run.submit("ann", PROMPT[: 3 * PAGE + 1], 40)
    backups = 0
    while run.live:
        backups += len(run.turn().backups)
        run.land("lookup", "fetch")
        run.land("save", ok=not backups)
    run.land("save", ok=False)
    assert backups
    for n in range(3):
        run.serve(f"crowd{n}", toks(50 + n, 20 * PAGE), reads_cache=False, writes_cache=False, but=("backup",))
    run.land()
    run.close()


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
    run = StoreRun(pages=400, host=400, batch=64)
    run.cache._publisher.save_pages = 1
    for n in range(30):
        run.submit(f"r{n}", toks(n, 2 * PAGE + 1), 4 * PAGE, reads_cache=False)
    while run.live:
        run.turn()
    run.turn()
    saves = run.ops("save")
    assert len(saves) > 100
    for op in reversed(saves):
        run.tell(run.executor.land(op, True))
    assert tries <= 6 * len(saves), f"{tries} for {len(saves)} saves"
    run.settle()
    for n in range(30):
        assert run.depot.there("full", run.cache.page_hashes(BASE, run.known(f"r{n}")[:-1])).all()
    run.close()


# ---- T06, T07, T08


@each_layout
@pytest.mark.parametrize("lost", [0, 3, 5])
def test_t06_a_fetch_that_brings_a_part(layout, lost):
    """A page is lost between the store's answer and the fetch: the unbroken run before it lands, the rest is freed, and
    the request goes on.

    Mutation: `StoreFetches.fetch_done` lands all it asked for, or nothing.
    """
    run = StoreRun(layout, depot=stocked(layout))
    fetch = fetching(run)
    for group in fetch.pages:
        run.depot.values.pop((group, fetch.hashes[lost]), None)
    run.land("fetch")
    assert not any(run.host("flight").values())
    if layout == "full":
        assert run.host("tree") == {"full": lost}
    run.see_to("ann")
    assert run.ended["ann"].cached == (lost * PAGE if layout == "full" else run.ended["ann"].cached)
    run.close()


@each_layout
@pytest.mark.parametrize("ok", [True, False])
def test_t07_abort_while_fetching(layout, ok):
    """The request ends at once. Its fetch goes on, and its pages are freed when it ends: nobody is left to find them.

    Mutation: `Prefetch.forget` ends the operation too; or `StoreFetches.fetch_done` lands under a root that is
    forgotten.
    """
    run = StoreRun(layout, depot=stocked(layout))
    fetching(run)
    assert run.abort("ann").reason == "abort"
    assert any(run.host("flight").values()), "the store may still write there"
    run.land("fetch", ok=ok)
    assert not any(run.host("flight").values())
    run.close()


def test_t07_a_whole_fetch_lands_for_those_who_come_later():
    """Whoever asked is gone, but the prefix it extends is still here: a complete fetch lands, a part of one does not.

    Mutation: `Prefetch.fetch_done` lands whatever came.
    """
    for lost in (False, True):
        run = StoreRun(depot=stocked())
        run.serve("before", PROMPT[: 2 * PAGE + 1], reads_cache=False)
        fetch = fetching(run)
        run.abort("ann")
        if lost:
            run.depot.values.pop(("full", fetch.hashes[2]))
        before = run.host("tree")["full"]
        run.land("fetch")
        assert run.host("tree")["full"] == before + (0 if lost else 4)
        run.close()


def test_t07_abort_while_looking():
    """Nothing is fetched for nobody.

    Mutation: `Prefetch.lookup_done` does not look whether anybody waits.
    """
    run = StoreRun(depot=stocked())
    looking(run)
    run.abort("ann")
    run.land("lookup")
    assert run.turn().empty
    run.close()


def test_t08_of_a_store_that_is_down_nothing_is_asked():
    """Told that the store does not answer, the scheduler looks up nothing and backs up nothing, and requests compute at
    once; told that it does, it asks again, and what was saved meanwhile is backed up.

    Mutation: `Prefetch._look_for` or `Prefetch.back_up` does not look at `up`.
    """
    run = StoreRun("full", depot=stocked())
    run.tell(StoreUp(False))
    known = len(run.depot.values)
    other = toks(9, 6 * PAGE + 1)
    for id, prompt in (("ann", PROMPT), ("ben", other)):
        run.submit(id, prompt, 3)
        plan = run.turn()
        assert not plan.lookups and plan.batch.ids == [id]
        run.see_to(id)
    assert len(run.depot.values) == known and run.scheduler.stats()["store"]["owed"] == 2
    run.tell(StoreUp(True))
    assert len(run.turn().backups) == 2 and not run.scheduler.stats()["store"]["owed"]
    run.land("backup")
    known = len(run.depot.values)
    assert run.depot.there("full", run.cache.page_hashes(BASE, other)).all()
    assert looking(run, "eve", toks(7, 6 * PAGE + 1)).start_page == 0
    run.see_to("eve")
    assert len(run.depot.values) > known
    with pytest.raises(ProtocolError, match="StoreUp: up must be True or False, got 1"):
        run.tell(StoreUp(1))  # type: ignore[arg-type]
    run.close()


@each_layout
@pytest.mark.parametrize("trouble", ["dead", "lying", "empty handed", "slow lookup", "slow fetch"])
def test_t08_a_bad_store_costs_time_and_nothing_else(layout, trouble):
    """Lookups that fail or lie, fetches that fail, answers after the deadline: the request computes, and is right.

    Mutation: `Prefetch.fetch_done` believes a failed fetch; or `Prefetch.tick` forgets who waits.
    """
    run = StoreRun(layout, depot=stocked(layout), lookup_ticks=10, fetch_ticks=20)
    if trouble == "dead":
        looking(run)
        run.land("lookup", ok=False)
    elif trouble == "lying":
        run.depot.values.clear()
        lookup = looking(run)
        run.executor.moving.pop(lookup.op)
        run.tell(LookupDone(lookup.op, 6))
        assert run.turn().fetches
        run.land("fetch")
    elif trouble == "empty handed":
        fetching(run)
        run.land("fetch", ok=False)
    elif trouble == "slow lookup":
        looking(run)
        run.tick(9)
        assert not run.turn().batch.ids
        run.tick(1)
    else:
        fetching(run)
        run.tick(20 + 5)
        assert not run.turn().batch.ids
        run.tick(1)
    assert run.turn().batch.ids == ["ann"]
    run.see_to("ann", but=("lookup", "fetch"))
    assert run.ended["ann"].cached == 0
    run.close()


# ---- T13, T15, T18, T19


@each_layout
def test_t13_two_engines_share_a_store(layout):
    """What one has computed the other is served, in its own namespace only; the first may forget all it has meanwhile,
    and the store may lose things under both.

    Mutation: the hashes of a backup leave out the namespace, or begin at page 0.
    """
    depot = Depot()
    one, two = StoreRun(layout, depot=depot), StoreRun(layout, depot=depot)
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
    run = StoreRun(depot=stocked(), batch=1)
    run.submit("ann", PROMPT, 1)
    run.submit("bob", toks(7, PAGE), 3)
    plan = run.turn()
    assert plan.lookups and plan.batch.ids == ["bob"]
    run.land("lookup")
    assert run.turn().fetches
    run.submit("cid", toks(8, PAGE), 1)
    run.land("fetch")
    while "bob" in run.live:
        run.turn()
    run.see_to("ann", "cid")
    assert run.first_rows() == ["bob", "ann", "cid"]
    assert run.ended["ann"].cached == 24
    run.close()


@each_layout
def test_t18_two_requests_one_fetch(layout):
    """Two requests lack the same pages, one of them comes while the fetch is under way: one lookup, one fetch.

    Mutation: `Prefetch._look_for` does not look at `by_hash`.
    """
    run = StoreRun(layout, depot=stocked(layout))
    run.submit_all([RequestSpec("ann", PROMPT, 1), RequestSpec("bob", PROMPT, 1)])
    assert len(run.turn().lookups) == 1
    run.land("lookup")
    run.submit("cid", PROMPT, 1)
    plan = run.turn()
    assert len(plan.fetches) == 1 and not plan.lookups
    run.see_to("ann", "bob", "cid")
    assert {id: end.cached for id, end in run.ended.items()} == {"ann": 24, "bob": 24, "cid": 24}
    assert run.scheduler.stats()["store"]["lookups"] == 1 and run.cache.stats()["transfers"]["fetches"] == 1
    run.close()


@each_layout
def test_t18_who_joined_looks_for_the_rest(layout):
    """A longer prompt joins the fetch of a shorter one, and then asks for what is its own; the one who asked first ends
    meanwhile, and the other is served all the same.

    Mutation: `Prefetch._over` lets nobody look again; or `Prefetch.forget` drops the fetch.
    """
    longer = PROMPT[: 6 * PAGE] + toks(2, 5 * PAGE + 1)
    depot = stocked(layout)
    maker = StoreRun(layout, depot=depot)
    maker.serve("maker", longer)
    run = StoreRun(layout, depot=depot)
    fetching(run)
    run.submit("bob", longer, 1)
    assert not run.turn().lookups
    run.abort("ann")
    run.land("fetch")
    (lookup,) = run.turn().lookups
    assert lookup.start_page == 6
    run.see_to("bob")
    assert run.ended["bob"].cached == 11 * PAGE
    run.close()


def test_t18_nobody_joins_a_fetch_that_will_not_land():
    """The namespace was evicted while its pages are on their way: who comes now asks again.

    Mutation: `Prefetch._look_for` joins whatever has the same hash.
    """
    run = StoreRun(depot=stocked())
    fetching(run)
    run.scheduler.flush()
    run.submit("bob", PROMPT, 1)
    assert len(run.turn().lookups) == 1
    run.see_to("bob")
    assert run.ended["bob"].cached == 24
    run.see_to("ann")
    run.close()


@each_layout
def test_t19_pages_of_a_late_fetch_are_given_to_nobody(layout):
    """After its deadline a fetch keeps its host pages until its event, however much others need; then they are free or
    land.

    Mutation: `Prefetch.tick` ends the operation in the cache.
    """
    run = StoreRun(layout, depot=stocked(layout), pages=12, host=12, batch=8, fetch_ticks=5)
    fetching(run)
    flight = run.host("flight")
    run.tick(5 + 6)
    run.see_to("ann", but=("fetch",))
    for n in range(5):
        run.serve(f"crowd{n}", toks(50 + n, 9 * PAGE), reads_cache=False, but=("fetch",))
    assert all(run.host("flight")[name] >= n for name, n in flight.items())
    run.land("fetch")
    assert not any(run.host("flight").values())
    run.close()


# ---- S11


@pytest.mark.parametrize("hangs", ["lookup", "fetch"])
def test_s11_a_deadline_fires_while_nothing_runs(hangs):
    """Nothing runs but an operation that hangs: empty plans say after how many ticks to ask again, and then the request
    computes. A plan that has rows says nothing.

    Mutation: `Planner.transfers_only` leaves out `wake_in`; or `Prefetch.wake_in` counts from 0.
    """
    run = StoreRun(depot=stocked(), lookup_ticks=7, fetch_ticks=10)
    run.tick(1000)
    run.submit("ann", PROMPT, 3)
    plan = run.turn()
    assert plan.lookups and plan.wake_in == 7
    left = 7
    if hangs == "fetch":
        run.land("lookup")
        left = 10 + 6
        plan = run.turn()
        assert plan.fetches and plan.wake_in == left
    run.tick(2)
    plan = run.turn()
    assert plan.empty and plan.wake_in == left - 2
    run.tick(left - 2)
    plan = run.turn()
    assert plan.batch.ids == ["ann"] and plan.wake_in is None
    run.see_to("ann", but=(hangs,))
    assert run.turn().wake_in is None, "nobody waits for it"
    run.close()


# ---- mistakes


def test_events_of_the_store_that_cannot_happen():
    """Unknown, repeated and early operations, and numbers that cannot be, raise ProtocolError and change nothing.

    Mutation: `Prefetch.fetch_done` takes any number of pages; or `lookup_done` takes an operation twice.
    """
    run = StoreRun(depot=stocked())
    lookup = looking(run)

    def wrong(*events) -> None:
        for event in events:
            before = run.scheduler.stats()
            with pytest.raises(ProtocolError):
                run.scheduler.advance([event])
            assert run.scheduler.stats() == before
            run.cache.check()

    op = lookup.op
    wrong(LookupDone(op + 1, 0), LookupDone(op, 7), LookupDone(op, -1), LookupDone(op, True), FetchDone(op, True, 0))
    wrong(LoadDone(op, True), BackupDone(op, True))
    run.land("lookup")
    wrong(LookupDone(op, 6), FetchDone(op + 1, True, 6))  # it has not been handed out
    (fetch,) = run.turn().fetches
    wrong(FetchDone(fetch.op, True, 7), FetchDone(fetch.op, 1, 6), LookupDone(fetch.op, 6))
    run.land("fetch")
    wrong(FetchDone(fetch.op, True, 6))
    run.see_to("ann", but=("backup",))
    run.serve("bob", toks(9, 3 * PAGE), but=("backup",))
    (backup,) = run.ops("backup")
    wrong(BackupDone(backup, "yes"), BackupDone(backup + 99, True))
    run.land("backup")
    wrong(BackupDone(backup, True))
    run.close()
