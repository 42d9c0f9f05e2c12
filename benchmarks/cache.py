"""Figures of the cache alone: match, publish, evict, pin, chats, memory. Page 16, tokens as bytes of int32."""

from __future__ import annotations

import gc
import hashlib
import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np

from sapwood.cache import CacheGroup, HybridPrefixCache, Lease, Namespace

from . import peer, sessions
from .timing import Figure, alternate, calls, clock

PAGE = 16
PAGE_BYTES = 4 * PAGE
K = 1024
BASE = Namespace()
DEVICE = 0
SCALED = "scaled us"


def prompt(tokens: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(1, 150_000, tokens, np.int32).tobytes()


class Bench:
    """A cache of one full group, and the life of a request that only prefills, in as few words as possible."""

    def __init__(self, pages: int, hashes: bool = False) -> None:
        self.cache = HybridPrefixCache(PAGE, [CacheGroup("full", "full", pages)], hashes=hashes)
        self.binding = self.cache.bind(BASE)
        self.step = 0

    def admit(self, tokens: bytes) -> Lease:
        match = self.cache.match_prefix(self.binding, tokens)
        admitted = self.cache.admit(match, match.length)
        assert admitted is not None
        self.step += 1
        self.cache.opening(admitted[0], self.step)
        return admitted[0]

    def finish(self, lease: Lease, computed: int) -> None:
        self.cache.finish_request(lease, b"", computed, None)

    def forget(self) -> None:
        """Empty the cache, and begin again."""
        self.cache.unbind(self.binding)
        self.cache.flush()
        self.binding = self.cache.bind(BASE)

    def put(self, tokens: bytes) -> None:
        """A prompt comes, is computed, rests in the tree."""
        lease = self.admit(tokens)
        self.cache.publish(lease, tokens, len(tokens) // PAGE_BYTES, self.step)
        self.cache.step_commit(self.step)
        self.finish(lease, len(tokens) // 4)

    def matching(self, tokens: bytes, n: int) -> Callable[[], float]:
        """A run: one match of a prompt that is cached to its end."""
        match, binding = self.cache.match_prefix, self.binding
        assert match(binding, tokens).boundary == len(tokens) // PAGE_BYTES
        return calls(n, lambda: match(binding, tokens))


def branched(bench: Bench, tokens: bytes, nodes: int) -> None:
    """Cache `tokens` as a chain of `nodes`: other prompts diverge from it where each node ends."""
    bench.put(tokens)
    part = len(tokens) // nodes
    for i in range(1, nodes):
        bench.put(tokens[: i * part] + prompt(PAGE, 1000 + i))
    match = bench.cache.match_prefix(bench.binding, tokens)
    assert len(match.path.nodes) == nodes


# ---- match


def match(repeats: int) -> Iterator[Figure]:
    short, long, nodes = prompt(8 * K, 1), prompt(128 * K, 2), 256
    one, chain = Bench(20 * K), Bench(20 * K)
    one.put(short)
    one.put(long)
    branched(chain, long, nodes)
    same = bytes(bytearray(long))
    runs = {
        "short": one.matching(short, 200),
        "long": one.matching(long, 50),
        "chain": chain.matching(long, 20),
        "bytes": calls(50, lambda: long.startswith(same)),
        "admit": _match_and_admit(one, long),
    }
    beside = peer.MISSING
    if peer.installed():
        plan = _PeerPlan(long)
        runs["peer"] = plan.run
    taken = alternate(repeats, **runs)
    if peer.installed():
        submit = median(plan.submits) * taken["peer"].scaled / taken["peer"].seconds * 1e6
        beside = f"C++ plan of 128K in one node: {taken['peer'].us:.0f} (and {submit:.0f} to submit it)"
    yield Figure("match, 8K tokens in one node", taken["short"].us, SCALED, 10)
    yield Figure("match, 128K tokens in one node", taken["long"].us, SCALED, 60, beside)
    share = taken["bytes"].us
    yield Figure(f"match, 128K tokens in {nodes} nodes", taken["chain"].us, SCALED, 250, beside)
    formula = 0.6 * nodes + 5 + share
    yield Figure(
        "  the same, bar: 0.6 a node + 5 + bytes", taken["chain"].us, SCALED, formula, f"memcmp alone: {share:.0f}"
    )
    if peer.installed():
        for what, name in (("one node", "long"), (f"{nodes} nodes", "chain")):
            ratio = taken[name].over(taken["peer"])
            yield Figure(f"match of 128K in {what} / C++ plan in one node", ratio, "ratio", 1.0)
    yield Figure("match + admit, 128K tokens in one node", taken["admit"].us, SCALED, None, beside)


def _match_and_admit(bench: Bench, tokens: bytes) -> Callable[[], float]:
    """A run: what the peer's plan does for the cache's part of it, for a prompt that is cached to its end."""

    def run() -> float:
        begin = clock()
        lease = bench.admit(tokens)
        taken = clock() - begin
        bench.cache.step_commit(bench.step)
        bench.finish(lease, len(tokens) // 4)
        return taken

    return run


class _PeerPlan:
    """The peer's plan of a prompt that it has cached as one node."""

    def __init__(self, tokens: bytes) -> None:
        self.tokens = np.frombuffer(tokens, np.int32).tolist()
        self.scheduler = peer.scheduler(PAGE, 20 * K, 64, len(self.tokens))
        self.names = (f"r{i}" for i in itertools.count())
        self.submits: list[float] = []
        self.run()

    def run(self) -> float:
        name = next(self.names)
        spec = peer.request(name, self.tokens)
        begin = clock()
        self.scheduler.submit_requests([spec])
        submitted = clock()
        plan = self.scheduler.next_execution_plan()
        planned = clock()
        ids, *_ = peer.read(plan)
        assert ids == [name]
        self.submits.append(submitted - begin)
        self.scheduler.advance(peer.sampled([(name, 1)], []))
        self.scheduler.advance(peer.sampled([], [name]))
        self.scheduler.next_execution_plan()
        return planned - submitted


# ---- publish


def publish(repeats: int) -> Iterator[Figure]:
    tokens = prompt(128 * K, 3)
    plain, hashed = Bench(9 * K), Bench(9 * K, hashes=True)
    commits: list[float] = []

    def cold(bench: Bench, committed: bool) -> float:
        lease = bench.admit(tokens)
        begin = clock()
        bench.cache.publish(lease, tokens, len(tokens) // PAGE_BYTES, bench.step)
        published = clock()
        bench.cache.step_commit(bench.step)
        done = clock()
        bench.finish(lease, len(tokens) // 4)
        bench.forget()
        if committed:
            return done - begin
        commits.append(done - published)
        return published - begin

    def bare() -> float:
        sha256 = hashlib.sha256
        parent = b""
        begin = clock()
        for at in range(0, len(tokens), PAGE_BYTES):
            parent = sha256(parent + tokens[at : at + PAGE_BYTES]).digest()
        return clock() - begin

    taken = alternate(repeats, plain=lambda: cold(plain, False), hashed=lambda: cold(hashed, True), bare=bare)
    commit = median(commits) * taken["plain"].scaled / taken["plain"].seconds * 1e6
    yield Figure("publish, 128K tokens cold", taken["plain"].us, SCALED, 400, f"step_commit after it: {commit:.0f}")
    ratio = taken["hashed"].over(taken["bare"])
    beside = f"{taken['hashed'].us:.0f} / {taken['bare'].us:.0f} scaled us"
    yield Figure("publish + commit with hashes / bare sha256 chain", ratio, "ratio", 1.3, beside)


# ---- evict and pin


def leafy(leaves: int, room: int) -> Bench:
    """A tree of one-page leaves under a common prefix, made by requests that each add one."""
    bench = Bench(leaves + room)
    common = prompt(4 * PAGE, 4)
    bench.put(common)
    pages = np.random.default_rng(5).integers(1, 150_000, (leaves, PAGE), np.int32)
    for i in range(leaves):
        bench.put(common + pages[i].tobytes())
    assert bench.cache.stats()["nodes"] == leaves + 1
    return bench


def evict(repeats: int, most: int) -> Iterator[Figure]:
    few, many = leafy(1000, 64), leafy(most, 64)

    def evicting(bench: Bench, n: int) -> Callable[[], float]:
        tree = bench.cache._tree
        return calls(n, lambda: tree.closed_pages.evict(DEVICE, 1))

    taken = alternate(repeats, few=evicting(few, 40), many=evicting(many, 400))
    assert many.cache.stats()["nodes"] > most // 2
    how = "ClosedPages.evict(DEVICE, 1), one by one"
    yield Figure(f"evict one leaf of {most:,}", taken["many"].us, SCALED, 20, how)
    ratio = taken["many"].over(taken["few"])
    beside = f"{taken['many'].us:.1f} / {taken['few'].us:.1f} scaled us"
    yield Figure(f"evict one leaf, {most:,} leaves / 1,000 leaves", ratio, "ratio", 1.5, beside)


def pin(repeats: int) -> Iterator[Figure]:
    bench = Bench(4 * K)
    tokens = prompt(6 * 256, 6)
    branched(bench, tokens, 6)
    tree = bench.cache._tree
    nodes = bench.cache.match_prefix(bench.binding, tokens).path.nodes
    leaf, held = nodes[-1], nodes[-5]
    tree.pin(held, DEVICE)

    def both() -> None:
        tree.pin(leaf, DEVICE)
        tree.unpin(leaf, DEVICE)

    taken = alternate(repeats, both=calls(2000, both))
    tree.unpin(held, DEVICE)
    yield Figure("pin + unpin a leaf, 4th ancestor held", taken["both"].us, SCALED, 2)


# ---- chats


def chats(repeats: int) -> Iterator[Figure]:
    talk = sessions.conversations()
    rates: dict[str, float] = {}

    def noted(name: str, run: Callable[[], sessions.Ran]) -> Callable[[], float]:
        def timed() -> float:
            ran = run()
            rates[name] = ran.hit_rate
            return ran.seconds

        return timed

    runs = {
        "full": noted("full", lambda: sessions.Driver(talk, sessions.full_group(), False).run()),
        "hybrid": noted("hybrid", lambda: sessions.Driver(talk, sessions.hybrid_groups(), True).run()),
    }
    if peer.installed():
        runs["peer"] = noted("peer", lambda: sessions.run_peer(talk))
    taken = alternate(repeats, **runs)
    beside = f"hit rate {rates['full']:.3f}"
    if peer.installed():
        beside += f"; C++, whole scheduler: {taken['peer'].us:.0f}, hit rate {rates['peer']:.3f}"
    else:
        beside += f"; {peer.MISSING}"
    yield Figure("200 chats x 5 turns, a request, full group", taken["full"].us, SCALED, 90, beside)
    beside = f"hit rate {rates['hybrid']:.3f}"
    yield Figure("  full + window + state, host tier, events", taken["hybrid"].us, SCALED, 300, beside)


# ---- memory


def memory() -> Iterator[Figure]:
    prompts, length = 2000, 2 * K
    for what, hashes, bar in (("without hashes", False, 5), ("with hashes", True, 8)):
        bench = Bench(prompts * length // PAGE + 256, hashes)
        bench.put(prompt(length, 9))  # what is made once is made now: the pools' arrays are not counted
        bench.forget()
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for i in range(prompts):
            bench.put(prompt(length, 10 + i))
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert bench.cache.stats()["nodes"] == prompts
        how = f"tracemalloc, {prompts:,} resting prompts of {length:,}, fixed pool arrays not counted"
        yield Figure(f"memory a cached token, {what}", used / (prompts * length), "bytes", bar, how)


def figures(quick: bool) -> Iterator[Figure]:
    repeats = 5 if quick else 15
    yield from match(repeats)
    yield from publish(repeats)
    yield from evict(repeats, 20_000 if quick else 100_000)
    yield from pin(repeats)
    yield from chats(3 if quick else 15)
    yield from memory()
