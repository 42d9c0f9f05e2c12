"""What the wind tunnel blows with: traffic from a seed, layouts, and the replay of events."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from sapwood.cache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheGroup,
    HybridPrefixCache,
    Namespace,
    token_bytes,
)
from sapwood.scheduler import Refused, RequestSpec, Scheduler
from sapwood.sim.event_replay import Replay
from sapwood.sim.layouts import LAYOUTS
from sapwood.sim.traffic import Traffic

PAGE, LONGEST = 8, 96


def listed(spec: RequestSpec) -> list[int]:
    return np.frombuffer(token_bytes(spec.tokens), np.int32).tolist()


def traffic(seed: int, growing: bool = False) -> Traffic:
    return Traffic(seed, PAGE, LONGEST, 97, growing)


def day(seed: int, rounds: int = 200) -> list[RequestSpec]:
    """All requests of a while, each answered with one token before the next come."""
    it = traffic(seed)
    specs = []
    for _ in range(rounds):
        arrived = it.arrivals()
        for spec in arrived:
            it.ended(spec, [*listed(spec), 5], wanted=True)
        specs += arrived
    return specs


def test_the_same_seed_is_the_same_traffic() -> None:
    """Mutation: the global random generator is used."""
    assert [(s.id, listed(s), s.namespace, s.max_tokens) for s in day(3)] == [
        (s.id, listed(s), s.namespace, s.max_tokens) for s in day(3)
    ]
    assert [listed(s) for s in day(3)] != [listed(s) for s in day(4)]


def test_every_request_can_fit() -> None:
    for seed in range(20):
        for spec in day(seed, 60):
            assert len(listed(spec)) >= 1 and len(listed(spec)) + spec.max_tokens - 1 <= LONGEST
            assert 0 <= spec.min_tokens <= spec.max_tokens


def test_all_kinds_of_requests_come() -> None:
    """Equal prompts, longer ones of a chat, all namespaces, all forms of tokens, ids used again, and page ends."""
    days = [day(seed) for seed in range(12)]
    specs = [spec for each in days for spec in each]
    prompts = [tuple(listed(spec)) for spec in specs]
    assert len(set(prompts)) < len(prompts)
    assert any(b[: len(a)] == a != b for a, b in itertools.pairwise(prompts))
    assert {type(spec.tokens) for spec in specs} == {list, np.ndarray, bytes}
    spaces = {spec.namespace for spec in specs}
    assert len({space.adapter for space in spaces}) > 2 and len({space.salt for space in spaces}) == 2
    assert {space.version for space in spaces} == {0, 1} and {spec.priority for spec in specs} == {0, 1, 2}
    assert any(len({spec.id for spec in each}) < len(each) for each in days)
    assert {len(prompt) % PAGE for prompt in prompts} == set(range(PAGE))
    by_chance = len(prompts) / PAGE
    assert sum(len(prompt) % PAGE == 0 for prompt in prompts) > 1.3 * by_chance
    assert any(not spec.reads_cache for spec in specs) and any(not spec.writes_cache for spec in specs)


def test_what_must_be_refused_is() -> None:
    """Every kind of bad request is refused by its id, with a reason."""
    scheduler = Scheduler(LAYOUTS["full"].config(random.Random(0)))
    full = scheduler.config.groups[0]
    scheduler.submit([RequestSpec("live", [1, 2, 3], 2)])
    it = traffic(0)
    reasons = set()
    for _ in range(200):
        fields = it.refusable(["live"], full.device_pages * scheduler.config.page_size + 1)
        with pytest.raises(Refused) as refusal:
            scheduler.submit([RequestSpec("good", [1], 1), RequestSpec(**fields)])
        assert refusal.value.id == fields["id"]
        reasons.add(refusal.value.reason.split(",")[0][:24])
    assert len(reasons) >= 8
    assert scheduler.stats()["waiting"] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_what_its_name_says(layout: str) -> None:
    """Any seed makes a configuration that is accepted, with the named families and page size, and seeds differ."""
    configs = [LAYOUTS[layout].config(random.Random(seed)) for seed in range(120)]
    families = [group.family for group in configs[0].groups]
    for family in ("full", "window", "state"):
        assert (family in layout) == (family in families)
    name, _, tier = layout.partition("@")
    assert name.endswith(f"/{configs[0].page_size}") or "/" not in layout
    assert bool(tier) == any(group.host_pages for group in configs[0].groups)
    assert all(config.store is (tier in ("store", "store-evict", "pair")) for config in configs)
    for field in ("policy", "events", "max_loras", "max_tries", "headroom", "prefix_caching"):
        assert len({getattr(config, field) for config in configs}) > 1, field


# ---- the replay of events


def stored(tokens: list[int], parent: BlockStored | None = None, namespace: Namespace | None = None) -> BlockStored:
    """One page of 2 tokens, as the cache announces it."""
    space = Namespace() if namespace is None else namespace
    cache = HybridPrefixCache(2, [CacheGroup("full", "full", 4)])
    before = [] if parent is None else parent_tokens[parent.digests]
    digest = cache.page_hashes(space, before + tokens)[-1]
    parent_tokens[digest] = before + tokens
    return BlockStored(digest, None if parent is None else parent.digests, token_bytes(tokens), 2, "GPU", space)


parent_tokens: dict[bytes, list[int]] = {}


def removed(event: BlockStored) -> BlockRemoved:
    return BlockRemoved(event.digests, "GPU", event.namespace)


def replay() -> Replay:
    return Replay(HybridPrefixCache(2, [CacheGroup("full", "full", 4)], events=True))


def test_a_story_told_right_ends_with_nothing() -> None:
    one = stored([1, 2])
    two, other = stored([3, 4], one), stored([1, 2], namespace=Namespace(salt="x"))
    it = replay()
    it.hear([one, two, other])
    assert len(it.held) == 3
    it.hear([removed(two), removed(one), removed(other)])
    it.compare()
    it.hear([one, two, AllBlocksCleared(), one])
    assert len(it.held) == 1


@pytest.mark.parametrize(
    ("story", "complaint"),
    [
        (lambda a, b: [a, a], "stored twice"),
        (lambda a, b: [b], "before its parent"),
        (lambda a, b: [removed(a)], "was not there"),
        (lambda a, b: [a, b, removed(a)], "before its children"),
        (lambda a, b: [a, removed(b)], "was not there"),
        (lambda a, b: [BlockStored(a.digests, None, token_bytes([9, 9]), 2, "GPU", a.namespace)], "wrong hash"),
        (lambda a, b: [BlockStored(a.digests, None, a.tokens, 2, "GPU", Namespace(salt="x"))], "wrong hash"),
    ],
)
def test_a_story_told_wrong_is_noticed(story, complaint: str) -> None:
    one = stored([1, 2])
    with pytest.raises(AssertionError, match=complaint):
        replay().hear(story(one, stored([3, 4], one)))


def test_what_the_tree_has_and_nobody_told_is_noticed() -> None:
    """Mutation: `compare` looks only for what is too much."""
    it = replay()
    cache = it.cache
    tokens = token_bytes([1, 2, 3])
    lease, _ = cache.admit(cache.match_prefix(cache.bind(Namespace()), tokens), 3)
    cache.publish(lease, tokens, 1, 1)
    cache.step_commit(1)
    with pytest.raises(AssertionError, match="the tree has 1 blocks that no event told of, and lacks 0"):
        it.compare()
    it.hear(cache.drain_events())
    it.compare()
    cache.flush()
    with pytest.raises(AssertionError, match="has 0 blocks that no event told of, and lacks 1"):
        it.compare()
