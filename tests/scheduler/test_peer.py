"""Beside tokenspeed-scheduler 0.1.0, a scheduler in C++ written by others: what both do alike must come out alike."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
from benchmarks import peer

from sapwood.cache import CacheGroup
from sapwood.scheduler import RequestSpec, Scheduler, SchedulerConfig, StepDone

from .driver import toks

needs_peer = pytest.mark.skipif(not peer.installed(), reason="tokenspeed-scheduler==0.1.0 is not installed here")
PAGES = 20_000
VOCABULARY = 97


class Seen(NamedTuple):
    """One prompt, from its submission to its end."""

    prefix: int  # tokens found in the cache
    chunks: tuple[int, ...]  # tokens computed in each step of its prefill
    decodes: int  # steps after it
    pages: int  # that hold anything when it has ended


def token(prompt: list[int], n: int) -> int:
    """The n-th token of an answer: both schedulers are told the same."""
    return (sum(prompt[-9:]) + 31 * n) % VOCABULARY


class Ours:
    def __init__(self, page: int, budget: int) -> None:
        self.page = page
        self.scheduler = Scheduler(SchedulerConfig(page, [CacheGroup("full", "full", PAGES)], budget, 8))

    def run(self, name: str, prompt: list[int], new: int) -> Seen:
        self.scheduler.submit([RequestSpec(name, prompt, new)])
        chunks: list[int] = []
        said = decodes = prefix = 0
        over = False
        while not over:
            batch = (plan := self.scheduler.next_plan()).batch
            assert batch.ids == [name]
            start, length = int(batch.starts[0]), int(batch.lengths[0])
            if start >= len(prompt):
                decodes += 1
            else:
                prefix = prefix if chunks else start
                chunks.append(length)
            tokens = [token(prompt, said)] if batch.samples[0] else []
            said += len(tokens)
            over = bool(self.scheduler.advance([StepDone(plan.step, np.array(tokens, np.int32))]))
        pages = self.scheduler.cache.stats()["pages"]["full"]["device"]
        return Seen(prefix, tuple(chunks), decodes, PAGES - pages["free"])


class Theirs:
    def __init__(self, page: int, budget: int) -> None:
        self.page = page
        self.scheduler = peer.scheduler(page, PAGES + 1, 8, budget)

    def run(self, name: str, prompt: list[int], new: int) -> Seen:
        self.scheduler.submit_requests([peer.request(name, prompt)])
        chunks: list[int] = []
        said = decodes = prefix = 0
        while said < new:
            ids, lengths, prefixes, extends = peer.read(self.scheduler.next_execution_plan())
            assert ids == [name]
            if extends:
                prefix = prefix if chunks else prefixes[0]
                chunks.append(lengths[0])
            else:
                decodes += 1
            samples = not extends or prefixes[0] + lengths[0] == len(prompt)
            result = [(name, token(prompt, said))] if samples else []
            said += samples
            self.scheduler.advance(peer.sampled(result, [name] if said == new else []))
        return Seen(prefix, tuple(chunks), decodes, PAGES - self.scheduler.available_kv_pages())


def prompts(rng: random.Random, page: int, n: int):
    """Fresh prompts, next turns of chats, and prompts that part from others where a page ends: there both share alike.
    (Inside a page ours copies, and of a prompt that is cached to its very end ours computes one token; the other takes
    whole pages and leaves one to compute.)"""
    bodies: list[list[int]] = []
    chats: list[list[int]] = []  # each goes on once: two that go on from the middle of a page would part inside it
    for at in range(n):
        fresh = toks(at, rng.randrange(1, 5 * page))
        kind = rng.random()
        if not bodies or kind < 0.2:
            prompt = fresh
        elif kind < 0.6 and chats:
            prompt = chats.pop(rng.randrange(len(chats))) + fresh
        else:
            body = rng.choice(bodies)
            prompt = body[: rng.randrange(len(body) // page + 1) * page] + fresh
        prompt = prompt[-40 * page :] if len(prompt) > 40 * page else prompt
        new = rng.choice([1, 2, page, rng.randrange(1, 3 * page)])
        yield f"r{at}", prompt, new
        bodies.append(prompt + [token(prompt, k) for k in range(new)])
        chats.append(bodies[-1])


@pytest.mark.attack
@needs_peer
@pytest.mark.parametrize(("page", "budget"), [(16, 64), (16, 1 << 14), (4, 21), (64, 256)])
def test_like_the_peer_over_sequential_prompts(page, budget):
    """250 random prompts, one after the other: the tokens found in the cache, the lengths of all chunks, the number of
    decode steps, and the pages that are in use after each, are those of tokenspeed-scheduler.

    Mutation: `Outcome._publish` hands nothing to the tree; or `Planner._begin` gives a budget one short.
    """
    rng = random.Random(page + budget)
    ours, theirs = Ours(page, budget), Theirs(page, budget)
    hits = 0
    for name, prompt, new in prompts(rng, page, 250):
        mine, other = ours.run(name, prompt, new), theirs.run(name, prompt, new)
        assert mine == other, f"{name}: {len(prompt)} tokens, {new} new"
        hits += mine.prefix > 0
    assert hits > 100
