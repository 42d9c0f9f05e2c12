"""The cache under random attack: a hypothesis state machine against a naive model, and seeded random walks.

The short ones are the same for everybody; the long ones draw their seeds. A failure of the walk prints the command that
repeats it; hypothesis prints the shortest story it finds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from .chaos import LAYOUTS, SPACES, Chaos, common, fresh_seeds, walk

pytestmark = pytest.mark.attack
SEEDS = 20  # of each layout, in every run of the tests
SPACE_OF = {ns: i for i, ns in enumerate(SPACES)}
BODIES = ([1] * 30, [2, 2, 1, 2, 1, 1, 2, 1, 2, 2, 2, 1] * 3, [1, 1, 1, 1, 2, 2, 2, 2, 1, 2, 1, 2, 1] * 3)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, run, fail, stop and are told apart by adapter and tenant, while everything late comes late."""

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        page=st.sampled_from([1, 2, 4]),
        device=st.sampled_from([2, 3, 5]),
        host=st.sampled_from([0, 1, 3, 6]),
        save=st.sampled_from(["through", ""]),
    )
    def begin(self, layout: str, page: int, device: int, host: int, save: str) -> None:
        self.chaos = Chaos(layout, page, device, host, save)

    @rule(
        body=st.sampled_from(range(len(BODIES))),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(0, 2), max_size=4),
        max_tokens=st.integers(1, 9),
        space=st.sampled_from([0, 0, 0, 1, 2]),
        reads=st.sampled_from([True, True, True, False]),
    )
    def submit(self, body: int, length: int, tail: list[int], max_tokens: int, space: int, reads: bool) -> None:
        self.chaos.submit(BODIES[body][:length] + tail, max_tokens, space, reads)

    @rule(which=st.integers(0, 20), tail=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def next_turn(self, which: int, tail: list[int]) -> None:
        """A chat goes on: everything that was said, and a little more."""
        known = list(self.chaos.engine.requests.values())
        if known:
            request = known[which % len(known)]
            self.chaos.submit(request.tokens[:40] + tail, 3, SPACE_OF[request.namespace], True)

    @rule(chunk=st.sampled_from([1, 3, 4, 8, 64]))
    def plan(self, chunk: int) -> None:
        self.chaos.plan(chunk)

    @rule()
    def done(self) -> None:
        self.chaos.done()

    @rule()
    def done_again(self) -> None:
        self.chaos.done()

    @rule()
    def fail(self) -> None:
        self.chaos.fail()

    @rule(which=st.integers(0, 9), ok=st.sampled_from([True, True, False]))
    def acknowledge(self, which: int, ok: bool) -> None:
        self.chaos.land(which, ok)

    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        self.chaos.abort(which)

    @rule(which=st.integers(0, 9))
    def retract(self, which: int) -> None:
        self.chaos.retract(which)

    @rule(space=st.integers(0, 2))
    def evict_namespace(self, space: int) -> None:
        self.chaos.evict_namespace(space)

    @rule(sure=st.sampled_from([False, False, False, True]))
    def flush(self, sure: bool) -> None:
        if sure:
            self.chaos.flush()

    @rule(
        body=st.sampled_from(range(len(BODIES))),
        length=st.integers(1, 30),
        space=st.integers(0, 2),
        admin=st.booleans(),
    )
    def explain(self, body: int, length: int, space: int, admin: bool) -> None:
        self.chaos.explain(BODIES[body][:length], space, admin)

    @invariant()
    def check(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.finish()


def _run(examples: int, steps: int, **options: bool) -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            **options,
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def _walks(layout: str, seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            walk(seed, 200, layout)
        except Exception as error:
            error.add_note(f"repeat it: python -m tests.cache.chaos --seed {seed} --steps 200 --layout {layout}")
            raise


def test_state_machine() -> None:
    """Random lives against the naive model, shrunk to the shortest story if one goes wrong."""
    _run(examples=300, steps=50)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_random_walk(layout: str) -> None:
    """Longer random lives of each layout: contents, invariants, events and the naive model agree after every action."""
    _walks(layout, range(SEEDS))


@pytest.mark.parametrize(("seed", "layout"), [(101, "full+window"), (2793882770, "window"), (77591210, "full+window")])
def test_walks_that_once_went_wrong(seed: int, layout: str) -> None:
    """A leaf with pages that had been computed beside a host copy grew, and lost the new page. A save made room on
    host, and the node it was of had nothing else and went with that. A request fell back into its prompt, and adopted
    pages behind the prompt's end.

    Mutation: `Publisher.publish_rows` does not store what it made longer; `begin_save` keeps `span.node`; or
    `_beyond` looks at all tokens.
    """
    walk(seed, 200, layout)


@pytest.mark.long
def test_state_machine_for_long() -> None:
    """The same machine with more and longer stories, other ones every time."""
    _run(examples=1500, steps=80, derandomize=False)


@pytest.mark.long
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_random_walk_for_long(layout: str) -> None:
    """The same walks for minutes."""
    _walks(layout, fresh_seeds(seconds=180))


@pytest.mark.parametrize("layout", ["full", "full+full"])
def test_unlimited_pool_hits_exactly_what_was_computed(layout: str) -> None:
    """With room for everything, a prompt is served exactly the tokens it shares with what was computed before:
    whole pages from the tree, and the part of a page a sibling has by copy on write."""
    rng = random.Random(5)
    chaos = Chaos(layout, page=4, device=400, host=0)
    engine = chaos.engine
    for turn in range(120):
        known = [r.tokens for r in engine.requests.values()]
        head = rng.choice(known)[: rng.randint(0, 30)] if known else []
        tokens = head + [rng.randint(0, 2) for _ in range(rng.randint(1, 12))]
        best = min(
            len(tokens) - 1,
            max((common(tokens, r.tokens[: r.real // 4 * 4]) for r in engine.requests.values()), default=0),
        )
        request = engine.run(f"t{turn}", tokens, rng.randint(1, 6))
        whole = best // 4 * 4
        assert whole <= request.cached <= best, (turn, request.cached, best)
    engine.cache.flush()
    engine.check()
