"""Stories of the KV events: what a router hears, and that it is exactly what the tree holds (cases E, DESIGN 7)."""

from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path

import pytest

from sapwood.cache import AllBlocksCleared, BlockRemoved, BlockStored, HybridPrefixCache, Namespace
from sapwood.cache.events import MEDIUM, block_hash

from .chaos import LAYOUTS, real_blocks
from .driver import BASE, Engine, full, state, toks, window
from .stories import PAGE, compute, crowd, empty_device, engine_of, hit, save, sit, step, write_back

SPACES = {
    "default": BASE,
    "adapter": Namespace(adapter=b"a" * 32),
    "salt": Namespace(salt="tenant"),
    "version": Namespace(version=3),
}


class Router:
    """A neighbour that knows of the engine only what events say, and is strict about how they say it."""

    def __init__(self, closed: bool = True) -> None:
        self.closed = closed  # whether the group events speak of needs all pages back to the root
        self.held: dict[str, dict[int, int | None]] = {medium: {} for medium in MEDIUM}  # block -> parent
        self.heard: list[object] = []

    def listen(self, engine: Engine) -> list[object]:
        """Take in what was said since the last time, and return it."""
        said = [*engine.events, *engine.cache.drain_events()]
        engine.events.clear()
        for event in said:
            self.hear(event)
        self.heard += said
        return said

    def hear(self, event: object) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held = {medium: {} for medium in MEDIUM}
        elif isinstance(event, BlockStored):
            self.stored(event)
        else:
            self.removed(event)

    def stored(self, event: BlockStored) -> None:
        held = self.held[event.medium]
        parent = event.parent_block_hash
        assert event.block_hashes and event.block_size == PAGE
        assert len(event.token_ids) == PAGE * len(event.block_hashes)
        known = held if event.medium == "GPU" else held | self.held["GPU"]
        assert parent is None or parent in known or not self.closed, f"{event.medium}: stored before its parent"
        for block in event.block_hashes:
            assert block not in held, f"{event.medium}: stored twice"
            held[block] = parent
            parent = block

    def removed(self, event: BlockRemoved) -> None:
        held = self.held[event.medium]
        assert event.block_hashes
        for block in event.block_hashes:
            assert block in held, f"{event.medium}: removed, was not there"
            assert not self.closed or block not in held.values(), f"{event.medium}: removed before its children"
            del held[block]

    def agrees_with(self, engine: Engine) -> None:
        self.listen(engine)
        for medium, blocks in real_blocks(engine).items():
            assert set(self.held[medium]) == blocks, f"{medium}: the router and the tree disagree"


def telling(*groups, **options) -> Engine:
    return engine_of(*groups, events=True, **options)


def hashes_of(engine: Engine, tokens, ns: Namespace = BASE) -> list[int]:
    return [block_hash(digest) for digest in engine.cache.page_hashes(ns, tokens)]


def summary(events: list[object]) -> list[tuple]:
    """What was said, short: (stored or removed, medium, blocks)."""
    names = {BlockStored: "stored", BlockRemoved: "removed"}
    return [(names[type(event)], event.medium, event.block_hashes) for event in events]


# ---- the hashes


def test_e01_the_hash_vector_of_the_contract():
    """Page 16, tokens 1 to 32: the two published hashes, as digests, as signed numbers and as they are announced.

    Mutation: `chain` hashes tokens in another byte order; the default namespace has a digest; `_block_hashes` takes
    other bytes of the digests.
    """
    engine = Engine(16, full(8), events=True)
    tokens = list(range(1, 33))
    digests = engine.cache.page_hashes(BASE, tokens)
    assert [digest.hex()[:16] for digest in digests] == ["77d735ce838418aa", "1170426cf2449ceb"]
    engine.run("request", [*tokens, 33])
    (event,) = engine.events
    assert event.block_hashes == [8635429971592222890, 1256577331724852459]
    assert (event.parent_block_hash, event.token_ids, event.block_size) == (None, tokens, 16)


@pytest.mark.parametrize("space", SPACES)
def test_e01_hashes_are_the_chain_that_anybody_can_compute(space):
    """A page's hash is sha256 of its parent's digest and its tokens as u32; other namespaces begin with their digest.

    Mutation: `chain` drops the parent; `ensure_hashes` begins without the digest of the namespace.
    """
    ns = SPACES[space]
    tokens = [2**31 - 1, 0, 256, 65536, *toks(1, 9)]
    parent, right = ns.digest(), []
    for at in (0, 4, 8):
        parent = hashlib.sha256(parent + struct.pack("<4I", *tokens[at : at + 4])).digest()
        right.append(parent)
    engine = telling(full(8))
    assert engine.cache.page_hashes(ns, tokens) == right, "part-filled pages have none"
    assert (ns.digest() == b"") == (space == "default")
    engine.run("request", tokens, ns=ns)
    (event,) = engine.events
    assert event.digests == b"".join(right) and event.namespace == ns
    assert event.parent_block_hash is None, "the namespace is part of the hash, not a block of its own"


def test_e01_the_digest_of_a_namespace_is_as_documented():
    """The bytes with which the chain of any other namespace begins, spelled out: a router or another engine can compute
    them. docs/store.md has the vector.

    Mutation: `Namespace.digest` writes a length in big-endian or counts characters, or leaves out version 0.
    """
    sha256 = hashlib.sha256
    assert Namespace().digest() == b""
    salted = sha256(b"sapwood.namespace.1S\x04\0\0\0\xc3\xa9\xc3\xa8V\0\0\0\0\0\0\0\0").digest()
    assert Namespace(salt="\u00e9\u00e8").digest() == salted
    one = sha256(b"sapwood.namespace.1V" + struct.pack("<Q", 2**40 + 1)).digest()
    assert Namespace(version=2**40 + 1).digest() == one
    parts = b"A", struct.pack("<I", 32), bytes(32), b"S", struct.pack("<I", 8), b"tenant-7", b"V", struct.pack("<Q", 1)
    ns = Namespace(adapter=bytes(32), salt="tenant-7", version=1)
    assert ns.digest() == sha256(b"sapwood.namespace.1" + b"".join(parts)).digest()
    vector = "3077127c3bfeba97a1f4c43828aef23221f2f20f3cbf0f17cf8f3556d3ef7b96"
    assert ns.digest().hex() == vector and vector in (Path(__file__).parents[2] / "docs/store.md").read_text()


def test_e01_no_two_namespaces_share_a_hash():
    """Equal tokens under different namespaces have different hashes.

    Mutation: `Namespace.digest` leaves out a field, or its tags or lengths.
    """
    cache = HybridPrefixCache(PAGE, [full(8)])
    spaces = [
        *SPACES.values(),
        Namespace(salt="a" * 32),
        Namespace(adapter=b"tenant"),
        Namespace(adapter=b"ab", salt="c"),
        Namespace(adapter=b"a", salt="bc"),
        Namespace(adapter=b"aSb", salt="c"),
        Namespace(adapter=b"a", salt="bSc"),
        Namespace(salt="tenant", version=3),
    ]
    digests = {digest for ns in spaces for digest in cache.page_hashes(ns, toks(1, 8))}
    assert len(digests) == 2 * len(spaces)


@pytest.mark.parametrize(
    ("head", "number"),
    [
        ("0000000000000000", 0),
        ("7fffffffffffffff", 2**63 - 1),
        ("8000000000000000", -(2**63)),
        ("ffffffffffffffff", -1),
        ("fffffffffffffffe", -2),
        ("0102030405060708", 0x0102030405060708),
    ],
)
def test_e01_block_hashes_are_signed_and_big_endian(head, number):
    """The wire form is the first 8 bytes as a signed int64, big-endian, one by one and in lists and as a parent.

    Mutation: `block_hash` is not signed; `_block_hashes` reads "<i8" or ">u8".
    """
    digest = bytes.fromhex(head) + b"\x55" * 24
    assert block_hash(digest) == number
    stored = BlockStored(digest * 2, digest, b"\1\0\0\0" * 8, 4, "GPU", BASE)
    assert stored.block_hashes == [number, number] and stored.parent_block_hash == number
    assert stored.token_ids == [1] * 8
    assert BlockRemoved(b"\0" * 32 + digest, "GPU", BASE).block_hashes == [0, number]


# ---- E01: stored and removed


def test_e01_stored_from_the_root_down_with_parents():
    """New pages are announced once, root side first, each event naming the block it hangs from.

    Mutation: `digest_above` gives None in the middle of a path.
    """
    engine, router = telling(full(32)), Router()
    prompt = toks(1, 17)
    engine.run("first", prompt)
    (event,) = router.listen(engine)
    first = hashes_of(engine, prompt)
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == (first, None, prompt[:16])
    assert (event.medium, event.namespace) == ("GPU", BASE)

    engine.run("again", prompt)
    assert router.listen(engine) == [], "what is known is not said again"

    longer = prompt + toks(2, 12)
    engine.run("longer", longer, chunk=4)
    assert all(event.parent_block_hash is not None for event in router.listen(engine))
    branch = prompt[:8] + toks(3, 9)
    engine.run("branch", branch)
    (event,) = router.listen(engine)
    assert (event.block_hashes, event.parent_block_hash) == (hashes_of(engine, branch)[2:], first[1])
    router.agrees_with(engine)


def test_e01_stored_in_order_though_the_path_was_cut_meanwhile():
    """When a path is cut between its plan and the end of its step, its pages are still announced root side first.

    Mutation: `announce_stored` does not reverse its parts, or `hash_path`.
    """
    engine, router = telling(full(32)), Router()
    prompt, branch = toks(1, 17), toks(1, 8) + toks(2, 9)
    engine.submit("first", prompt)
    engine.submit("branch", branch)
    step(engine)
    said = summary(router.listen(engine))
    assert said == [("stored", "GPU", hashes_of(engine, prompt)), ("stored", "GPU", hashes_of(engine, branch)[2:])]
    router.agrees_with(engine)


def test_e01_generated_pages_are_announced_as_they_fill():
    """Pages that fill while decoding, one step ahead, are announced one by one, each below the one before.

    Mutation: `Publisher.publish_rows` announces nothing.
    """
    engine, router = telling(full(32)), Router()
    request = engine.submit("request", toks(1, 6), max_tokens=12)
    step(engine)
    while not request.ended:
        assert engine.plan() and engine.plan()
        engine.done()
        engine.done()
    said = router.listen(engine)
    assert [block for event in said for block in event.block_hashes] == hashes_of(engine, request.tokens[:17])
    assert [event.token_ids for event in said][1:] == [request.tokens[at : at + 4] for at in (4, 8, 12)]


def test_e01_what_is_only_promised_is_not_announced():
    """A page is announced when its step is done, and never if that failed.

    Mutation: `Publisher.publish` calls `became_real` at plan time.
    """
    engine, router = telling(full(32)), Router()
    engine.submit("request", toks(1, 17), max_tokens=2)
    assert engine.plan()
    assert router.listen(engine) == []
    engine.fail()
    assert router.listen(engine) == []
    step(engine)
    assert summary(router.listen(engine)) == [("stored", "GPU", hashes_of(engine, toks(1, 17)))]
    engine.idle()
    router.agrees_with(engine)


def test_e01_removed_once_and_children_before_parents():
    """Pages that leave are announced once, the deepest first, also when a leaf is trimmed bit by bit.

    Mutation: `announce_removed` does not turn its columns around; `ClosedPages.free_from` does not tell.
    """
    engine, router = telling(full(24)), Router()
    trunk = toks(1, 16)
    for name, seed in (("left", 2), ("right", 3)):
        engine.run(name, trunk + toks(seed, 17))
    router.agrees_with(engine)
    held = len(router.held["GPU"])
    assert held == 12
    for more in (1, 4, 8):
        crowd(engine, 1, 24 - held + more)
        router.agrees_with(engine)
        assert len(router.held["GPU"]) == held - more
    empty_device(engine)
    router.agrees_with(engine)
    assert not router.held["GPU"]
    removed = [block for event in router.heard if isinstance(event, BlockRemoved) for block in event.block_hashes]
    assert len(removed) == len(set(removed)) == held


def test_e01_every_tier_speaks_for_itself():
    """A save is announced as CPU when it is acknowledged, one that fails never, and host eviction removes CPU alone.

    Mutation: `MEDIUM[tier]` is always "GPU"; `save_done` does not announce, or announces what failed.
    """
    engine, router = telling(full(24, 4)), Router()
    one, two = toks(1, 9), toks(2, 17)
    (op,) = save(engine, compute(engine, "one", one))
    router.listen(engine)
    engine.land(op, ok=False)
    assert router.listen(engine) == []
    write_back(engine, compute(engine, "again", one[:8] + toks(3, 5)))
    assert summary(router.listen(engine))[-1][:2] == ("stored", "CPU")
    assert len(router.held["CPU"]) == 1, "the page that was saved, not those above it"
    write_back(engine, compute(engine, "two", two))
    said = summary(router.listen(engine))
    assert [what[:2] for what in said] == [("stored", "GPU"), ("removed", "CPU"), ("stored", "CPU")]
    assert said[-1][2] == hashes_of(engine, two)
    router.agrees_with(engine)
    assert MEDIUM == ("GPU", "CPU", "STORAGE")


@pytest.mark.parametrize(
    ("groups", "blocks"),
    [
        ((window(8, 24), full(24)), 6),
        ((state(4), window(8, 24), full(24, name="second")), 6),
        ((window(8, 24), state(4)), 6),
        ((state(4), window(8, 24)), 1),
    ],
    ids=["first full", "full, though last", "the window", "the snapshot"],
)
def test_e01_events_speak_of_one_group(groups, blocks):
    """Events tell of the first full group; where there is none, of the first group, a snapshot being its last block.

    Mutation: `Tree.announced_group` is always 0.
    """
    engine, router = telling(*groups), Router(closed=blocks > 1)
    prompt = toks(1, 26)
    engine.run("request", prompt)
    said = summary(router.listen(engine))
    assert said == [("stored", "GPU", hashes_of(engine, prompt)[6 - blocks :])]
    router.agrees_with(engine)


def test_e01_a_forgotten_namespace_is_removed_block_by_block():
    """Evicting a namespace removes all it had announced in both tiers, children first, and nothing of others.

    Mutation: `detach_namespace` does not tell, or walks parents before children.
    """
    tenant = SPACES["salt"]
    engine, router = telling(full(24, 24)), Router()
    for number, ns in enumerate((BASE, tenant)):
        for seed in (2, 3):
            tokens = toks(1, 8) + toks(seed, 9)
            write_back(engine, compute(engine, f"{number} {seed}", tokens, ns))
    router.agrees_with(engine)
    assert [len(router.held[medium]) for medium in ("GPU", "CPU")] == [12, 12]
    engine.cache.evict_namespace(tenant)
    said = router.listen(engine)
    assert all(isinstance(event, BlockRemoved) and event.namespace == tenant for event in said)
    assert [len(router.held[medium]) for medium in ("GPU", "CPU")] == [6, 6]
    router.agrees_with(engine)
    engine.run("back", toks(1, 9), ns=tenant)
    assert summary(router.listen(engine)) == [("stored", "GPU", hashes_of(engine, toks(1, 9), tenant))]


def test_e01_a_flush_is_one_event():
    """Forgetting everything is said in one word, and a request that still runs announces nothing afterwards.

    Mutation: `flush` unhooks aloud, or does not say AllBlocksCleared.
    """
    engine, router = telling(full(24, 24), save="through"), Router()
    engine.run("over", toks(1, 17))
    engine.submit("runs", toks(2, 17), max_tokens=9)
    step(engine)
    router.agrees_with(engine)
    engine.cache.flush()
    assert router.listen(engine) == [AllBlocksCleared()]
    engine.idle()
    assert router.listen(engine) == [], "it ends under a root that nobody can find"
    router.agrees_with(engine)


def test_e01_without_events_nothing_is_kept():
    """An engine that was not asked for events has none.

    Mutation: `PendingTransfers._announce` does not ask whether anybody listens.
    """
    engine = engine_of(full(24, 24), save="through")
    engine.run("request", toks(1, 17))
    empty_device(engine)
    engine.cache.flush()
    assert engine.events == [] and engine.cache.drain_events() == []


# ---- E02: splits


def test_e02_a_split_says_nothing_and_keeps_all_hashes():
    """A reader that stops inside a node cuts it: no event, the same blocks, and later each is removed once.

    Mutation: `Tree.split` does not share out `node.hashes`, or cuts them at another place than the edge.
    """
    engine, router = telling(full(24)), Router()
    prompt = toks(1, 25)
    engine.run("first", prompt)
    router.listen(engine)
    nodes = engine.cache.stats()["nodes"]
    for number, at in enumerate((8, 20, 4)):
        sit(engine, engine.submit(f"reader {number}", prompt[:at] + toks(9 + number, 1)))
    assert engine.cache.stats()["nodes"] == nodes + 3
    assert router.listen(engine) == []
    router.agrees_with(engine)
    for number in range(3):
        engine.abort(f"reader {number}")

    branch = prompt[:12] + toks(2, 5)
    engine.run("branch", branch)
    (event,) = router.listen(engine)
    known = hashes_of(engine, prompt)
    assert (event.parent_block_hash, event.block_hashes) == (known[2], hashes_of(engine, branch)[3:])
    empty_device(engine)
    router.agrees_with(engine)
    removed = [block for event in router.heard if isinstance(event, BlockRemoved) for block in event.block_hashes]
    assert sorted(removed) == sorted({*known, *event.block_hashes})


# ---- E03: load-back


@pytest.mark.parametrize(
    ("groups", "loaded"),
    [((full(24, 24),), slice(None)), ((window(8, 24, 24),), slice(4, 6)), ((state(4, 4),), slice(5, 6))],
    ids=["full", "window", "state"],
)
def test_e03_a_device_copy_comes_and_goes_while_host_keeps_its_own(groups, loaded):
    """Device eviction of what host has removes the GPU blocks alone; loading back announces those that came again.

    Mutation: `_land_on_device` does not announce; `ClosedPages.free_from`, `SlidingPages.drop` or `Snapshots.drop`
    tells of both tiers.
    """
    engine, router = telling(*groups, save="through"), Router(closed=groups[0].family == "full")
    prompt = toks(1, 26)
    engine.run("first", prompt)
    router.agrees_with(engine)
    on_host = set(router.held["CPU"])
    assert on_host and on_host == set(router.held["GPU"])

    empty_device(engine)
    said = router.listen(engine)
    assert {event.medium for event in said} == {"GPU"} and all(isinstance(event, BlockRemoved) for event in said)
    assert not router.held["GPU"] and set(router.held["CPU"]) == on_host
    router.agrees_with(engine)

    assert hit(engine, prompt).load
    engine.run("again", prompt)
    said = summary(router.listen(engine))
    assert said == [("stored", "GPU", hashes_of(engine, prompt)[loaded])]
    assert set(router.held["CPU"]) == on_host
    router.agrees_with(engine)


def test_e03_a_load_that_fails_announces_nothing():
    """Only what really arrived on the device is announced.

    Mutation: `_land` announces when not ok.
    """
    engine, router = telling(full(24, 24), save="through"), Router()
    prompt = toks(1, 26)
    engine.run("first", prompt)
    empty_device(engine)
    router.listen(engine)
    engine.submit("again", prompt)
    engine.plan()
    (op,) = engine.operations
    engine.land(op, ok=False)
    assert router.listen(engine) == []
    engine.idle()
    router.agrees_with(engine)


# ---- replay


@pytest.mark.attack
@pytest.mark.parametrize("layout", ["full", "full+window", "full+state", "window", "state", "window+state", "all"])
def test_e01_replaying_random_traffic_rebuilds_the_tree(layout):
    """After any traffic, what a strict router has put together from events is what the tree holds, tier by tier.

    Mutation: `Tree.truncate` keeps the hashes of what it cut; `Snapshots.drop` or `SlidingPages.drop` tells nothing.
    """
    rng = random.Random(layout)
    groups = LAYOUTS[layout](3, 3)
    engine = telling(*groups, save="through")
    closed = any(group.family == "full" for group in groups)
    router = Router(closed)
    prompts: list[list[int]] = []
    for number in range(40):
        head = rng.choice(prompts)[: rng.randint(0, 24)] if prompts else []
        prompts.append((head + [rng.randint(0, 2) for _ in range(rng.randint(1, 12))])[:30])
        ns = rng.choice([BASE, BASE, *SPACES.values()])
        request = engine.submit(f"r{number}", prompts[-1], rng.randint(1, 6), ns)
        while not request.ended:
            if engine.plan(rng.choice([4, 8, 64])):
                if rng.random() < 0.1:
                    engine.fail()
                else:
                    engine.done()
            for op in sorted(engine.operations):
                if rng.random() < 0.6 or not engine.flights:
                    engine.land(op, ok=rng.random() < 0.8)
            router.agrees_with(engine)
        if rng.random() < 0.05:
            engine.cache.evict_namespace(ns)
            router.agrees_with(engine)
    assert router.heard and router.held["GPU"] and router.held["CPU"]
