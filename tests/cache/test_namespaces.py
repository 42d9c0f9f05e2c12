"""Stories of adapters and tenants: who may share, in which tiers, and what is left when one of them goes (cases L)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.cache import BlockRemoved, BlockStored, HybridPrefixCache, Namespace

from .driver import BASE, Engine, Request, full, state, toks, window
from .stories import all_free, empty_device, engine_of, hit, leave, newcomer, owned, step

ADAPTER_A = Namespace(adapter=b"a" * 32)
ADAPTER_B = Namespace(adapter=b"b" * 32)
TENANT_1 = Namespace(salt="one")
TENANT_2 = Namespace(salt="two")
ADAPTERS = (BASE, ADAPTER_A, ADAPTER_B)
TENANTS = (BASE, TENANT_1, TENANT_2)

LAYOUTS = {
    "full": lambda: (full(24, 24),),
    "window": lambda: (window(6, 24, 24),),
    "state": lambda: (state(12, 12),),
    "full+window+state": lambda: (full(24, 24), window(6, 24, 24), state(12, 12)),
    "state+window": lambda: (state(12, 12), window(6, 24, 24)),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def page_sets(engine: Engine, request: Request) -> set[tuple[str, int]]:
    """Every device page and slot a running request reads or writes."""
    return {
        (group.name, page)
        for group in engine.cache.groups
        for page in engine.cache.table(request.lease, group.name).tolist()
        if page
    }


def never_share(layout: str, spaces: tuple[Namespace, ...]) -> None:
    """The same tokens in several namespaces, on the device together, then on host together, then back."""
    engine = engine_of(*LAYOUTS[layout](), save="through")
    prompt = toks(1, 13)
    who = [engine.submit(f"r{i}", prompt, 2, ns) for i, ns in enumerate(spaces)]
    while any(request.real < 13 for request in who):
        engine.plan()
        for one, other in itertools.combinations(who, 2):
            shared = page_sets(engine, one) & page_sets(engine, other)
            assert not shared, f"{one.namespace} and {other.namespace} share {shared}"
        engine.settle()
    engine.idle()
    assert [request.cached for request in who] == [0, 0, 0], "each computed its own"
    host = owned(engine, "tree", "host")
    empty_device(engine)
    assert owned(engine, "tree", "host") == host

    back = [engine.submit(f"s{i}", prompt, 2, ns) for i, ns in enumerate(spaces)]
    assert not engine.plan(), "all wait for their own pages from host"
    loads = {op: engine.double.transfers[op][1] for op in engine.operations}
    assert [operation.namespace for operation in loads.values()] == list(spaces), "one load a namespace"
    sources = [
        {(name, page) for name, (pages, _) in operation.pages.items() for page in pages.tolist() if page}
        for operation in loads.values()
    ]
    for one, other in itertools.combinations(sources, 2):
        assert not one & other, "a host page was read for two namespaces"
    engine.idle()  # the content double knows the namespace of every token it reads
    assert [request.cached for request in back] == [12, 12, 12]
    all_free(engine)


# ---- L01


@each_layout
def test_l01_adapters_and_base_never_share_a_page(layout):
    """The same tokens under adapter A, adapter B and the base model never share a page, on the device or on host.

    Mutation: `Tree.root_of` takes the root of `Namespace()` whatever it is asked for.
    """
    never_share(layout, ADAPTERS)


def test_l01_versions_of_the_base_weights_never_share_a_page():
    """Two versions of the base weights never share a page, with an adapter or without.

    Mutation: `version` is left out of the comparison of namespaces (`field(compare=False)`).
    """
    never_share("full", (BASE, Namespace(version=1), Namespace(adapter=b"a" * 32, version=1)))


# ---- L02


@each_layout
def test_l02_every_path_uses_the_requests_own_namespace(layout):
    """First chunk, later chunks, decode, finish, retraction and resumption, write-back and load-back: in all of them a
    request reads, publishes, saves and loads under its own namespace, while others do the same with the same tokens.

    Mutation: `Follower.adopt` (later chunks) walks the first root it finds; or `PendingTransfers.begin` names the
    default namespace in its operation; or `announce_stored` does in its event.
    """
    engine = engine_of(*LAYOUTS[layout](), save="through", events=True, every=1)
    prompt = toks(1, 13)
    who = [engine.submit(f"r{i}", prompt, 5, ns) for i, ns in enumerate(ADAPTERS)]

    def goes_on(times: int) -> None:
        for _ in range(times):
            engine.plan(4)
            for operation in operations(engine):
                assert operation.namespace in ADAPTERS
            engine.settle()

    goes_on(3)  # the first chunk, and later ones, which may adopt
    for request in who:
        engine.retract(request)
    goes_on(3)
    while len(who[0].generated) < 4:
        goes_on(1)
    engine.retract(who[1])
    engine.idle()
    assert [len(request.generated) for request in who] == [5, 5, 5]
    for ns, request in zip(ADAPTERS, who, strict=True):
        told = [event for event in engine.events if isinstance(event, BlockStored) and event.namespace == ns]
        right = set(engine.cache.page_hashes(ns, request.tokens))
        for event in told:
            assert {event.digests[at : at + 32] for at in range(0, len(event.digests), 32)} <= right, "another's hash"
        assert {event.medium for event in told} == {"GPU", "CPU"}, "written back under its own name"

    empty_device(engine)
    engine.events.clear()
    for ns, request in zip(ADAPTERS, who, strict=True):
        again = engine.submit(f"again {request.id}", request.tokens, 1, ns)
        engine.plan()
        assert [operation.namespace for operation in operations(engine)] == [ns], "its prefix comes from host"
        engine.idle()
        assert again.cached >= 12
    assert {event.namespace for event in engine.events if isinstance(event, BlockStored)} == set(ADAPTERS)
    all_free(engine)


def operations(engine: Engine):
    return [operation for _, operation, _ in engine.double.transfers.values()]


@each_layout
def test_l02_a_resumed_request_finds_its_own_pages_again(layout):
    """A retracted request resumes on what it has computed itself, under its own namespace, and on nobody else's.

    Mutation: `finish_request` (and so `retract`) hooks what it publishes below another root (`lease.root` of BASE).
    """
    engine = engine_of(*LAYOUTS[layout](), every=1)
    prompt = toks(1, 13)
    ann = engine.submit("ann", prompt, 6, ADAPTER_A)
    while ann.real < 14:
        step(engine, 4)
    engine.retract(ann)
    assert hit(engine, ann.tokens, BASE).depth == 0
    engine.plan()
    assert ann.cached >= 12, "what it computed before is still there"
    engine.idle()
    assert len(ann.generated) == 6
    all_free(engine)


# ---- L03


@each_layout
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17])
def test_l03_a_cold_namespace_matches_depth_0(layout, length):
    """A namespace that has nothing matches depth 0, never less, also beside one that has everything.

    Mutation: `Family.deepest` ends with -1 when no boundary is left; or `Matcher.match` gives `boundary - 1`.
    """
    engine = engine_of(*LAYOUTS[layout]())
    prompt = toks(1, 17)
    cold = hit(engine, prompt[:length], ADAPTER_A)
    assert (cold.boundary, cold.start, cold.cached, cold.depth) == (0, 0, 0, 0)
    engine.run("ann", prompt)
    beside = hit(engine, prompt[:length], ADAPTER_A)
    assert (beside.boundary, beside.start, beside.cached, beside.depth, beside.load) == (0, 0, 0, 0, False)
    assert engine.cache.explain(ADAPTER_A, prompt[:length]).cached == 0
    assert engine.run("bob", prompt[:length], 2, ADAPTER_A).cached == 0


@pytest.mark.parametrize("layout", ["window", "full+window+state", "state+window"])
def test_l03_a_namespace_that_has_lost_all_but_its_tokens_matches_depth_0(layout):
    """Tokens that are known while every window page or snapshot is gone match depth 0, never less.

    Mutation: `Family.deepest` ends with -1 when no boundary is left.
    """
    groups = {
        "window": (window(6, 24),),
        "full+window+state": (full(64), window(6, 24), state(4)),
        "state+window": (state(4), window(6, 24)),
    }[layout]
    engine = engine_of(*groups)
    prompt = toks(1, 17)
    engine.run("ann", prompt, ns=ADAPTER_A)
    guests = [newcomer(engine, seed, 24 // 4) for seed in range(4)]
    match = hit(engine, prompt, ADAPTER_A)
    assert (match.boundary, match.start, match.cached) == (0, 0, 0)
    leave(engine, *guests)
    assert engine.run("bob", prompt, ns=ADAPTER_A).cached == 0


# ---- L05


@each_layout
def test_l05_unloading_frees_device_and_host_at_once(layout):
    """Unloading an adapter nobody uses frees all its pages on device and host at once, and touches nobody else's.

    Mutation: `detach_namespace` releases the pages of the device tier only.
    """
    engine = engine_of(*LAYOUTS[layout](), save="through")
    prompt = toks(1, 13)
    engine.run("base", prompt)
    base = {tier: owned(engine, "tree", tier) for tier in ("device", "host")}
    engine.run("ann", prompt, ns=ADAPTER_A)
    assert owned(engine, "tree", "host") != base["host"]
    assert engine.cache.evict_namespace(ADAPTER_A) is True
    engine.check()
    for tier in ("device", "host"):
        assert owned(engine, "tree", tier) == base[tier]
        assert set(owned(engine, "unhooked", tier).values()) == {0}
    assert hit(engine, prompt, ADAPTER_A).depth == 0 and hit(engine, prompt + [1]).boundary == 3
    assert engine.cache.evict_namespace(ADAPTER_A) is False, "doing it again changes nothing"
    all_free(engine)


@each_layout
def test_l05_what_a_request_holds_goes_when_it_ends(layout):
    """Unloading an adapter in use frees at once what no request holds (its host copies, its other prompts), and the
    rest with the last request, which ends with right output and is found by nobody new.

    Mutation: `detach_namespace` keeps host pages nobody reads; or `Lease.detach` takes no readers for the closed pages
    it holds.
    """
    engine = engine_of(*LAYOUTS[layout](), save="through")
    engine.run("old", toks(2, 9), ns=ADAPTER_A)
    ann = engine.submit("ann", toks(1, 13), 9, ADAPTER_A)
    step(engine, times=2)
    for op in list(engine.operations):
        engine.land(op)
    engine.cache.evict_namespace(ADAPTER_A)
    engine.check()
    for group in engine.cache.groups:
        assert engine.pages(group.name, "host")["free"] == group.host_pages, "nobody reads its host copies"
        held = engine.pages(group.name)
        mine = {page for page in engine.cache.table(ann.lease, group.name).tolist() if page}
        assert held["tree"] == 0 and held["unhooked"] + held["leases"] == len(mine), "what it reads, and no more"
    assert hit(engine, ann.tokens, ADAPTER_A).depth == 0
    engine.idle()
    assert len(ann.generated) == 9, "and the content double has checked every read"
    for group in engine.cache.groups:
        assert engine.pages(group.name)["free"] == group.device_pages
    assert engine.cache.stats()["unhooked"] == 0 and not engine.cache.stats()["namespaces"]


# ---- L06


def announced(events: list) -> dict[str, list[bytes]]:
    """What a listener believes is there, by medium, after these events."""
    held: dict[str, list[bytes]] = {"GPU": [], "CPU": []}
    for event in events:
        digests = [event.digests[at : at + 32] for at in range(0, len(event.digests), 32)]
        if isinstance(event, BlockStored):
            held[event.medium] += digests
        else:
            assert isinstance(event, BlockRemoved)
            for digest in digests:
                held[event.medium].remove(digest)
    return held


@each_layout
@pytest.mark.parametrize("running", [False, True], ids=["idle", "running"])
def test_l06_unloading_takes_back_every_announcement(layout, running):
    """Unloading emits BlockRemoved for all that was announced, children first, in both tiers; loading the adapter again
    announces it afresh.

    Mutation: `evict_namespace` unhooks silently; or `detach_namespace` tells parents before children.
    """
    engine = engine_of(*LAYOUTS[layout](), save="through", events=True)
    prompt = toks(1, 13)
    engine.run("ann", prompt, ns=ADAPTER_A)
    if running:
        engine.submit("bob", prompt + toks(2, 8), 9, ADAPTER_A)
        while engine.requests["bob"].real < 21:
            engine.plan(4)
            engine.settle()
        engine.plan()
    held = announced(engine.events)
    assert held["GPU"] and held["CPU"]
    stored = {medium: list(digests) for medium, digests in held.items()}

    engine.events.clear()
    engine.cache.evict_namespace(ADAPTER_A)
    engine.check()
    removed: dict[str, list[bytes]] = {"GPU": [], "CPU": []}
    for event in engine.events:
        assert isinstance(event, BlockRemoved) and event.namespace == ADAPTER_A
        removed[event.medium] += [event.digests[at : at + 32] for at in range(0, len(event.digests), 32)]
    order = engine.cache.page_hashes(ADAPTER_A, prompt + toks(2, 8))
    for medium in ("GPU", "CPU"):
        assert sorted(removed[medium]) == sorted(stored[medium]), "each taken back once"
        depths = [order.index(digest) for digest in removed[medium]]
        assert depths == sorted(depths, reverse=True), "children before parents"

    engine.events.clear()
    engine.idle()
    assert not engine.events, "who ends under the old root announces nothing"
    again = engine.run("cyd", prompt, ns=ADAPTER_A)
    assert again.cached == 0
    fresh = announced(engine.events)
    assert fresh["GPU"] and set(fresh["GPU"]) <= set(order[:3])
    all_free(engine)


# ---- L07


spaces = st.builds(
    Namespace,
    adapter=st.none() | st.binary(min_size=1, max_size=6),
    salt=st.none() | st.text(st.characters(min_codepoint=0, max_codepoint=255), min_size=1, max_size=6),
    version=st.integers(0, 3) | st.integers(0, 2**63 - 1),
)


@settings(max_examples=400, deadline=None)
@given(one=spaces, other=spaces)
def test_l07_equal_tokens_hash_alike_in_equal_namespaces_only(one, other):
    """The hashes (and so the store keys) of equal tokens are equal if and only if their namespaces are.

    Mutation: `Namespace.digest` leaves out the version, or the tags that tell adapter from salt.
    """
    cache = HybridPrefixCache(4, [full(4)])
    ours, theirs = cache.page_hashes(one, range(8)), cache.page_hashes(other, range(8))
    if one == other:
        assert ours == theirs
    else:
        assert not set(ours) & set(theirs)


def test_l07_keys_are_framed_by_length():
    """Namespaces that spell the same bytes when their parts are put together have different keys.

    Mutation: `Namespace.digest` joins tags and values without their lengths.
    """
    cache = HybridPrefixCache(4, [full(4)])
    alike = [
        Namespace(adapter=b"ab", salt="c"),
        Namespace(adapter=b"a", salt="bc"),
        Namespace(adapter=b"aSb"),
        Namespace(adapter=b"a", salt="b"),
        Namespace(adapter=b"x"),
        Namespace(salt="x"),
        Namespace(salt="xV" + "\0" * 8),
        Namespace(adapter=b"x", version=1),
        Namespace(version=1),
        BASE,
    ]
    keys = [tuple(cache.page_hashes(ns, range(8))) for ns in alike]
    assert len(set(keys)) == len(alike)
    assert len({key[0] for key in keys}) == len(alike) and len({key[1] for key in keys}) == len(alike)


def test_l07_no_event_of_one_namespace_has_a_hash_of_another():
    """What is announced of equal tokens in different namespaces has no hash in common, in any tier.

    Mutation: `Root.digest` is empty for every namespace (as for the default one).
    """
    engine = engine_of(*LAYOUTS["full"](), save="through", events=True)
    for i, ns in enumerate((*ADAPTERS, TENANT_1, TENANT_2)):
        engine.run(f"r{i}", toks(1, 13), ns=ns)
    seen: dict[int, Namespace] = {}
    for event in engine.events:
        for block in event.block_hashes:
            assert seen.setdefault(block, event.namespace) == event.namespace
    assert len(seen) == 5 * 3


# ---- L12


def test_l12_thousands_of_salts_leave_nothing_behind():
    """A namespace with nothing in it costs nothing: thousands that come, ask and go are forgotten.

    Mutation: `Tree.forget_if_empty` keeps the root.
    """
    cache = HybridPrefixCache(4, [full(8), window(6, 8), state(4)])
    empty = cache.stats()
    for i in range(5000):
        binding = cache.bind(Namespace(salt=f"tenant {i}"))
        assert cache.match_prefix(binding, [1, 2, 3, 4, 5]).cached == 0
        cache.unbind(binding)
    assert cache.stats() == empty and cache.stats()["namespaces"] == []
    cache.check()


def longest_queue(engine: Engine) -> int:
    """The most entries an eviction queue has, those of nodes that are gone included."""
    tree = engine.cache._tree
    heaps = [tier.leaves.heap for tier in tree.tiers]
    heaps += [heap for tier in tree.tiers for queue in tier.queues.values() for heap in queue.heaps]
    return max(len(heap) for heap in heaps)


@pytest.mark.attack
@each_layout
def test_l12_what_thousands_have_computed_is_bounded_by_the_pool(layout):
    """Tenants whose pages were evicted to make room are forgotten with their last page, their ghosts in time.

    Mutation: `Tree.prune` does not forget a root that has lost its last child.
    """
    engine = engine_of(*LAYOUTS[layout](), ghost_bytes=4000)
    engine.checks = False
    for i in range(400):
        engine.run(f"r{i}", toks(1, 9), ns=Namespace(salt=f"tenant {i}"))
        del engine.requests[f"r{i}"]
    engine.cache.check()
    stats = engine.cache.stats()
    most = max(group.device_pages for group in engine.cache.groups)
    assert len(stats["namespaces"]) <= most and stats["nodes"] <= 2 * most
    assert stats["ghosts"]["bytes"] <= 4000
    assert longest_queue(engine) <= 150
    engine.cache.flush()
    after = engine.cache.stats()
    assert after["namespaces"] == [] and after["nodes"] == 0 and after["ghosts"]["entries"] == 0
    all_free(engine)


@pytest.mark.attack
@each_layout
def test_l12_hundreds_of_adapters_loaded_and_unloaded_leave_nothing_behind(layout):
    """Adapters that were used and unloaded leave no root, no page, no ghost, no unhooked namespace and no long queues.

    Mutation: `detach_namespace` keeps the root in `detached_roots` although nobody holds it; or `Tree.leave_queues` and
    `PageQueue.lost` never throw out the entries of nodes that are gone.
    """
    engine = engine_of(*LAYOUTS[layout](), save="through")
    engine.checks = False
    empty = {key: engine.cache.stats()[key] for key in ("pages", "nodes", "leases", "ghosts", "namespaces", "unhooked")}
    for i in range(500):
        ns = Namespace(adapter=i.to_bytes(4, "big"))
        engine.run(f"r{i}", toks(1, 9), ns=ns)
        engine.cache.evict_namespace(ns)
        del engine.requests[f"r{i}"]
    engine.cache.check()
    assert {key: engine.cache.stats()[key] for key in empty} == empty
    assert longest_queue(engine) <= 150


# ---- L13


@each_layout
def test_l13_an_adapter_that_is_only_on_host_is_loaded_from_its_root_down(layout):
    """An adapter whose whole prefix sits in host memory is served from there, from its first page on.

    Mutation: `Loads._closed_above` wants a device copy of the root itself (`above.device.count > 0` for `n == 0`);
    for windows, `Path._last_hole` does not look at host.
    """
    engine = engine_of(*LAYOUTS[layout](), save="through")
    prompt = toks(1, 17)
    engine.run("base", toks(2, 9))
    engine.run("ann", prompt, ns=ADAPTER_A)
    empty_device(engine)
    assert hit(engine, prompt, ADAPTER_A, host=False).boundary == 0
    match = hit(engine, prompt, ADAPTER_A)
    assert match.boundary == 4 and match.load

    bob = engine.submit("bob", prompt, 3, ADAPTER_A)
    engine.plan()
    (operation,) = operations(engine)
    assert operation.namespace == ADAPTER_A
    if "full" in layout:
        assert operation.start_page == 0 and operation.pages["full"][0].all(), "from the root down"
    engine.idle()
    assert bob.cached == 16 and bob.computed == 3
    assert engine.cache.stats()["transfers"]["loads_failed"] == 0
    all_free(engine)


@each_layout
def test_l13_an_adapter_unloaded_under_its_load_gives_its_waiters_their_pages(layout):
    """Unloading an adapter while its prefix is on its way: who waits for it gets it privately, nobody else finds it.

    Mutation: `Loads._give_privately` is skipped (the targets are freed under the waiting lease).
    """
    engine = engine_of(*LAYOUTS[layout](), save="through")
    prompt = toks(1, 17)
    engine.run("ann", prompt, ns=ADAPTER_A)
    empty_device(engine)
    bob = engine.submit("bob", prompt, 3, ADAPTER_A)
    engine.plan()
    assert bob.lease.loading
    engine.cache.evict_namespace(ADAPTER_A)
    engine.check()
    engine.idle()
    assert len(bob.generated) == 3 and bob.computed == 3, "it reads what came, and computes none of it again"
    assert not engine.cache.stats()["namespaces"]
    for group in engine.cache.groups:
        for tier, pages in (("device", group.device_pages), ("host", group.host_pages)):
            assert engine.pages(group.name, tier)["free"] == pages


@each_layout
@pytest.mark.parametrize("shared", [2, 3])
@pytest.mark.parametrize("first", ["ann", "bob"])
def test_l13_an_adapter_unloaded_under_two_loads_gives_each_waiter_pages_of_its_own_prompt(layout, shared, first):
    """Two prompts begin alike and then part. Ann's load brings all of hers; Bob joins it for what they share, and has
    the rest loaded himself. The adapter goes while both are under way: Bob is given nothing of Ann's own pages, though
    they come for the columns that he waits for.

    Mutation: `Loads._give_privately` gives a lease whatever came for its columns.
    """
    engine = engine_of(*LAYOUTS[layout](), save="through")
    prompts = {name: toks(1, 4 * shared) + toks(seed, 17 - 4 * shared) for seed, name in ((2, "ann"), (3, "bob"))}
    for name, prompt in prompts.items():
        engine.run(f"{name} before", prompt, ns=ADAPTER_A)
    empty_device(engine)
    ann, bob = (engine.submit(name, prompt, 3, ADAPTER_A) for name, prompt in prompts.items())
    engine.plan()
    ops = dict(zip(("ann", "bob"), engine.operations, strict=True))
    assert ann.lease.loading and bob.lease.loading
    engine.cache.evict_namespace(ADAPTER_A)
    engine.check()
    engine.land(ops.pop(first))
    engine.land(*ops.values())
    engine.idle()  # the content double knows the tokens of every page it reads
    assert (ann.computed, bob.computed) == (3, 3), "they read what came, and compute none of it again"
    all_free(engine)


# ---- L14


@each_layout
def test_l14_a_salt_isolates_tenants_in_all_tiers(layout):
    """Tenants with different salts, and those without one, never share a page on device or host.

    Mutation: `salt` is left out of the comparison of namespaces (`field(compare=False)`).
    """
    never_share(layout, TENANTS)


def test_l14_a_salt_isolates_tenants_in_the_store():
    """The keys under which a store would keep equal tokens of two tenants have nothing in common, with an adapter too.

    Mutation: `Namespace.digest` leaves out the salt.
    """
    cache = HybridPrefixCache(4, [full(4)])
    for adapter in (None, b"a" * 32):
        keys = [set(cache.page_hashes(Namespace(adapter, salt), range(32))) for salt in (None, "one", "two", "One")]
        for one, other in itertools.combinations(keys, 2):
            assert not one & other


def test_l14_a_tenant_learns_nothing_of_another():
    """What a tenant is told of its own prompt is the same whether or not another tenant has it cached.

    Mutation: `explain` looks at other namespaces without `admin`.
    """
    engine = engine_of(*LAYOUTS["full"](), save="through")
    prompt = toks(1, 13)

    def told() -> tuple[object, ...]:
        match = hit(engine, prompt, TENANT_1)
        return engine.cache.explain(TENANT_1, prompt), match.cached, match.depth, match.reason, match.load

    before = told()
    engine.run("other", prompt, ns=TENANT_2)
    assert told() == before


@each_layout
def test_what_each_namespace_has_adds_up(layout):
    """Three tenants with prompts of different lengths: what each has by tier and group is counted in one call, a longer
    prompt has no less, and together they have what the pools say is in the tree.

    Mutation: `Root.pages` looks at one tier only, or counts holes.
    """
    engine = engine_of(*LAYOUTS[layout](), save="through")
    for length, space in zip((5, 9, 13), TENANTS, strict=True):
        engine.run(f"of {space}", toks(1, length), 2, space)
    engine.idle()
    tree = engine.cache._tree
    each = [tree.roots[space].pages(tree) for space in TENANTS]
    for t, tier in enumerate(("device", "host")):
        for g, group in enumerate(engine.cache.groups):
            counts = [pages[t][g] for pages in each]
            assert sum(counts) == engine.pages(group.name, tier)["tree"] > 0, f"{group.name} on {tier}: {counts}"
            assert group.family != "full" or counts == sorted(counts)
