"""Orders of calls a scheduler can make that are easy to forget, and what must be true after them."""

from __future__ import annotations

import pytest

from sapwood.cache import CacheGroup, HybridPrefixCache, Namespace, register_family, token_bytes
from sapwood.cache.families import Family, Full, Window

from .driver import BASE, Engine, full, state, toks, window

ADAPTER = Namespace(adapter=b"x" * 32)


def opened(*groups, tokens: int = 24, upto: int = 8):
    """A cache and a fresh lease with pages for its first tokens."""
    cache = HybridPrefixCache(4, groups or (full(8),))
    prompt = token_bytes(toks(1, tokens))
    binding = cache.bind(BASE)
    lease, _ = cache.admit(cache.match_prefix(binding, prompt), upto)
    cache.opening(lease, 1)
    return cache, lease, prompt


def only_on_host(ns: Namespace) -> tuple[Engine, list[int]]:
    """A prompt of six pages that was written to host and has left the device."""
    engine = Engine(4, full(6, 32), save="through")
    prompt = toks(1, 24)
    engine.run("first", prompt, 1, ns)
    engine.settle()
    engine.run("other", toks(2, 24), 1)
    engine.settle()
    return engine, prompt


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("end", ["finish", "abort between"])
def test_namespace_goes_between_two_loads_that_one_request_waits_for(second: bool, end: str) -> None:
    """What the first load brings is the waiting requests' alone; it is freed with them, whatever the second does.

    Mutation: `_give_privately` leaves `upto` where it was, and the pages are taken for private ones.
    """
    engine, prompt = only_on_host(ADAPTER)
    cache = engine.cache
    leases, ops = [], []
    for pages in (2, 4):
        binding = cache.bind(ADAPTER)
        match = cache.match_prefix(binding, token_bytes([*prompt[: 4 * pages], 7]))
        lease, operation = cache.admit(match, match.start + 1)
        leases.append(lease)
        ops.append(operation.op)
    assert len(leases[1].waits) == 2
    cache.evict_namespace(ADAPTER)
    cache.check()
    cache.load_done(ops[0], True)
    cache.check()
    if end == "abort between":
        cache.finish_request(leases[1], b"", 0, None)
        cache.check()
        cache.load_done(ops[1], second)
    else:
        landed = cache.load_done(ops[1], second)
        assert (leases[1] in landed.ready) == second
        cache.check()
        cache.finish_request(leases[1], b"", 0, None)
    cache.finish_request(leases[0], b"", 0, None)
    cache.check()
    cache.flush()
    assert engine.pages("full")["free"] == 6 and engine.pages("full", "host")["free"] == 32


def test_duplicates_of_ended_requests_are_forgotten_under_steady_overlap() -> None:
    """With a step always in flight, nothing about a request stays behind when it has ended.

    Mutation: `StepCommits.end` leaves the lease in `unsettled`.
    """
    engine = Engine(4, full(64))
    prompt = toks(1, 16)
    engine.run("first", prompt, 1)
    for number in range(60):
        if len(engine.running) + len(engine.waiting) < 3:
            engine.submit(f"r{number}", prompt, 4, reads=False)
        engine.plan()
        if len(engine.flights) > 1:
            engine.done()
        kept = engine.cache._steps.unsettled
        assert not any(lease.ended for lease in kept) and len(kept) <= engine.cache.stats()["leases"]
    assert engine.cache.stats()["steps"]["duplicates_freed"] > 100


WRONG = {
    "publish more than the lease has": lambda c, lease, prompt: c.publish(lease, prompt, 4, 1),
    "publish more than the tokens": lambda c, lease, prompt: c.publish(lease, prompt[:16], 2, 1),
    "publish a row without a page": lambda c, lease, prompt: c.publish_rows([lease], [token_bytes(toks(3, 4))]),
    "publish half a row": lambda c, lease, prompt: c.publish_rows([lease], [prompt[:8]]),
    "fill beyond the lease": lambda c, lease, prompt: c.finish_request(lease, prompt[:64], 24, None),
}


@pytest.mark.parametrize("name", WRONG)
def test_publishing_what_is_not_there_is_refused(name: str) -> None:
    """A caller that publishes pages its lease has not got is told so, and nothing has changed.

    Mutation: `Publisher.check_pages` returns without looking.
    """
    cache, lease, prompt = opened(upto=8)
    if name == "publish a row without a page":
        cache.publish(lease, prompt, 2, 1)
        cache.step_commit(1)
    before = cache.stats()
    with pytest.raises(ValueError, match=r"pages|tokens"):
        WRONG[name](cache, lease, prompt)
    assert cache.stats() == before
    cache.check()


@pytest.mark.parametrize("call", ["grow", "grow_rows", "publish", "opening", "checkpoint"])
def test_a_lease_that_waits_for_a_load_does_nothing_else(call: str) -> None:
    """Pages given to a lease that is loading would be lost: it is refused until load_done.

    Mutation: `_seated` does not look at `waits`.
    """
    engine, prompt = only_on_host(BASE)
    cache = engine.cache
    raw = token_bytes(prompt)
    lease, operation = cache.admit(cache.match_prefix(cache.bind(BASE), raw), len(prompt))
    assert lease.loading
    calls = {
        "grow": lambda: cache.grow(lease, 24),
        "grow_rows": lambda: cache.grow_rows([lease]),
        "publish": lambda: cache.publish(lease, raw, 6, engine.step + 1),
        "opening": lambda: cache.opening(lease, engine.step + 1),
        "checkpoint": lambda: cache.checkpoint(lease, 6, engine.step + 1),
    }
    with pytest.raises(ValueError, match="waits for a load"):
        calls[call]()
    cache.check()
    cache.load_done(operation.op, True)
    cache.check()
    assert cache.table(lease, "full").all()


def test_what_was_only_promised_was_never_evicted() -> None:
    """A prompt whose only step failed was never cached: explain does not say that it had to make room.

    Mutation: `Tree.prune` remembers a ghost of a node that has nothing.
    """
    engine = Engine(4, full(64))
    engine.submit("ann", toks(1, 16), 1)
    engine.plan()
    engine.fail()
    engine.abort("ann")
    assert engine.cache.explain(BASE, toks(1, 16)).reason == "empty"
    assert not engine.cache.stats()["ghosts"]["entries"]


def test_a_request_counts_once() -> None:
    """Coming back after a retraction is not a new request, and its own pages are no hit.

    Mutation: `_count` does not look whether the binding has been counted.
    """
    engine = Engine(4, full(64))
    request = engine.submit("ann", toks(1, 16), 8)
    engine.plan()
    engine.done()
    engine.retract(request)
    engine.idle()
    stats = engine.cache.stats()
    assert (stats["requests"], stats["prompt_tokens"], stats["cached_tokens"], stats["retracted"]) == (1, 16, 0, 1)


def test_a_failed_load_is_no_hit() -> None:
    """What did not come was not served: the request counts with what its second admission found.

    Mutation: `load_done` does not take the count back.
    """
    engine, prompt = only_on_host(BASE)
    before = engine.cache.stats()
    engine.submit("ann", prompt, 1)
    engine.plan()
    engine.land(next(iter(engine.operations)), False)
    engine.idle()
    after = engine.cache.stats()
    assert after["requests"] == before["requests"] + 1
    assert after["prompt_tokens"] == before["prompt_tokens"] + 24
    assert after["cached_tokens"] == before["cached_tokens"]


def test_what_is_adopted_later_counts_too() -> None:
    """A request that takes over a chunk somebody else has published since counts those tokens as cached.

    Mutation: `adopt` does not count.
    """
    engine = Engine(4, full(64))
    prompt = toks(1, 24)
    engine.submit("ann", prompt, 1)
    late = engine.submit("bob", prompt, 1)
    assert engine.admit(late, 4) and late.cached == 0
    engine.waiting.remove(late)
    engine.running.append(late)
    engine.waiting, first = [], engine.waiting[0]
    assert engine.admit(first, 24)
    engine.running.insert(0, first)
    engine.idle()
    assert late.cached == 23
    assert engine.cache.stats()["cached_tokens"] == 23


def test_what_is_adopted_counts_beyond_what_was_computed_and_once_it_is_used() -> None:
    """A request has computed two of six pages. Three more that somebody publishes then are cached tokens; if it is
    retracted before it has used them, they are not; and when it comes back, finds nothing and takes over all five, only
    those three are.

    Mutation: `adopt` counts all that it passes, or does not call `_computed`; `retract` does not call
    `Statistics.begins_at`.
    """
    cache, bob, prompt = opened(full(16))

    def cached() -> int:
        cache.check()
        return cache.stats()["cached_tokens"]

    def somebody_publishes_five_pages(step: int) -> None:
        ann, _ = cache.admit(cache.match_nothing(cache.bind(BASE), prompt), 20)
        cache.opening(ann, step)
        cache.publish(ann, prompt, 5, step)
        cache.step_commit(step)
        cache.finish_request(ann, b"", 20, None)

    cache.publish(bob, prompt, 2, 1)
    cache.step_commit(1)
    somebody_publishes_five_pages(2)
    assert cache.adopt(bob, prompt, 8) == 20 and cached() == 12
    cache.retract(bob, b"", 20, None)
    assert cached() == 0

    crowd, _ = cache.admit(cache.match_prefix(cache.bind(BASE), toks(2, 64)), 64)
    cache.finish_request(crowd, b"", 0, None)
    bob, _ = cache.admit(cache.match_prefix(bob.binding, prompt), 4)
    assert bob.start == 0 and cached() == 0
    somebody_publishes_five_pages(3)
    assert cache.adopt(bob, prompt, 0) == 20 and cached() == 12
    cache.retract(bob, b"", 24, None)
    assert cached() == 12


def test_a_doomed_step_counts_as_failed() -> None:
    """Of two steps in flight the first fails: two have failed, whatever the second says.

    Mutation: `commit` counts every step as done.
    """
    engine = Engine(4, full(64))
    engine.submit("ann", toks(1, 16), 8)
    engine.plan()
    engine.plan()
    engine.fail()
    engine.done()
    steps = engine.cache.stats()["steps"]
    assert (steps["steps"], steps["steps_failed"]) == (0, 2)


def test_nobody_waits_for_a_snapshot_that_will_not_come() -> None:
    """A chunk that runs past its cut leaves no snapshot there: who waited for it need not wait on.

    Mutation: `publish` does not pass the cuts.
    """
    cache, lease, prompt = opened(full(32), state(4), tokens=40, upto=40)
    (cut,) = lease.cuts
    neighbour = cache.bind(BASE)
    assert cache.match_prefix(neighbour, prompt).pending == cut
    cache.publish(lease, prompt, cut + 1, 1)
    assert cache.match_prefix(neighbour, prompt).pending == 0
    cache.step_commit(1)
    cache.check()


def test_a_thousand_makers_cost_a_match_little() -> None:
    """Looking for a promised snapshot does not look at every running request.

    Mutation: `Admission._will_snapshot` registers a maker under another page than its cut's last one.
    """
    cache = HybridPrefixCache(4, [full(4000), state(500)])
    head = toks(1, 64)
    for number in range(400):
        prompt = token_bytes(head + toks(2 + number, 9))
        lease, _ = cache.admit(cache.match_nothing(cache.bind(BASE), prompt), 4)
        assert lease.cuts == (18,)
    makers = cache._tree.roots[BASE].makers
    assert list(makers) == [18] and len(makers[18]) == 400
    assert cache.match_prefix(cache.bind(BASE), prompt).pending == 18
    assert cache.match_prefix(cache.bind(BASE), token_bytes(head + toks(900, 9))).pending == 0


def test_the_same_match_can_be_admitted_twice() -> None:
    """N samples of one prompt may share one match: each gets pages of its own beyond what is shared.

    Mutation: `admit` trusts a match however the tree has changed since.
    """
    engine = Engine(4, full(64))
    prompt = toks(1, 18)
    engine.run("first", prompt, 1)
    cache = engine.cache
    match = cache.match_prefix(cache.bind(BASE), token_bytes(prompt[:10] + toks(3, 8)))
    tables = []
    for _ in range(3):
        lease, _ = cache.admit(match, 18)
        cache.check()
        tables.append(cache.table(lease, "full").tolist())
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({page for table in tables for page in table[2:]}) == 9


def test_a_table_of_no_group_is_refused() -> None:
    """A misspelt group is named, with what would be right. Mutation: `table` looks the name up unchecked."""
    cache, lease, _ = opened(full(8), state(4))
    with pytest.raises(ValueError, match="group must be one of full, state, got 'attention'"):
        cache.table(lease, "attention")


class PatientFull(Full):
    reads_promised = False


class PatientWindow(Window):
    reads_promised = False


register_family("patient full", PatientFull)
register_family("patient window", PatientWindow)


@pytest.mark.parametrize(
    ("group", "waits_for_real"),
    [
        (full(64), False),
        (CacheGroup("full", "patient full", 64), True),
        (window(8), False),
        (CacheGroup("window", "patient window", 64, window=8), True),
    ],
    ids=["full", "patient full", "window", "patient window"],
)
def test_a_family_says_whether_promised_pages_can_be_read(group: CacheGroup, waits_for_real: bool) -> None:
    """While a prompt is being computed, its pages are offered to others only if the family can read them early; once
    they are real they are offered by every family, and contents are right either way.

    Mutation: `Path` does not ask `reads_promised`.
    """
    engine = Engine(4, group)
    prompt = toks(1, 18)
    engine.submit("ann", prompt, 4)
    engine.plan()
    match = engine.cache.match_prefix(engine.cache.bind(BASE), token_bytes(prompt))
    assert match.start == (0 if waits_for_real else 16)
    bob = engine.submit("bob", prompt, 4)
    engine.plan()
    engine.done()
    assert engine.cache.match_prefix(engine.cache.bind(BASE), token_bytes(prompt)).start == 16
    engine.idle()
    assert bob.generated == engine.requests["ann"].generated


class Sink(Window):
    """A window that keeps its first page for ever."""

    def reads(self, start: int) -> tuple[tuple[int, int], ...]:
        low = max(0, start - self.window + 1)
        return ((0, min(4, low)), (low, start)) if low else ((0, start),)

    def pages_read(self, start: int) -> list[tuple[int, int]]:
        return Family.pages_read(self, start)

    def slid(self, low: int, now: int) -> tuple[list[tuple[int, int]], int]:
        return Family.slid(self, low, now)


register_family("sink", Sink)


def test_a_family_that_slides_in_its_own_way_is_asked_row_by_row() -> None:
    """A subclass of the window says itself what a row needs no more: one row or many, the answer is the same.

    Mutation: `slide_rows` asks the window's `slid_ends` of a family that has a `slid` of its own.
    """
    gone = []
    for many in (False, True):
        cache, lease, prompt = opened(full(50), CacheGroup("sink", "sink", 50, window=5), tokens=40, upto=40)
        cache.publish(lease, prompt, 10, 1)
        cache.step_commit(1)
        if many:
            who, columns = cache.slide_rows([lease], [40])["sink"]
            assert who == [0] * len(columns)
        else:
            columns = [c for _, low, high in cache.slide(lease, 40) for c in range(low, high)]
        gone.append((columns, cache.table(lease, "sink").tolist()))
        cache.check()
    assert gone[0] == gone[1]
    assert gone[0][0] == list(range(1, 9)) and gone[0][1][0] != 0


def test_slide_rows_wants_a_position_a_lease() -> None:
    """Mutation: `slide_rows` finds out half-way, with pages given up that somebody still counts as read."""
    cache, lease, prompt = opened(full(50), window(5, 50), tokens=40, upto=40)
    cache.publish(lease, prompt, 10, 1)
    cache.step_commit(1)
    with pytest.raises(ValueError, match="positions must be one a lease, got 1 for 2 leases"):
        cache.slide_rows([lease, lease], [40])
    assert all(cache.table(lease, "window"))
    cache.check()
