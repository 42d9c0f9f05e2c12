"""What can happen to a cache, as actions on the driver, with a naive model beside it: a set of token tuples.

Both the hypothesis state machine and the plain random walk (`python -m tests.cache.chaos --seed 7`) are made of these.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Iterator

from sapwood.cache import AllBlocksCleared, BlockRemoved, BlockStored, CacheGroup, Namespace

from .driver import BASE, Engine, Request, full, state, window

SPACES = (BASE, Namespace(adapter=b"a" * 32), Namespace(salt="tenant"))

LAYOUTS = {
    "full": lambda d, h: (full(6 * d, 5 * h),),
    "window": lambda d, h: (window(7, 5 * d, 4 * h),),
    "full+window": lambda d, h: (full(6 * d, 5 * h), window(7, 5 * d, 4 * h)),
    "full+state": lambda d, h: (full(6 * d, 5 * h), state(2 * d, 2 * h)),
    "state": lambda d, h: (state(2 * d, 2 * h),),
    "window+state": lambda d, h: (window(5, 5 * d, 4 * h), state(2 * d, 2 * h)),
    "full+full": lambda d, h: (full(6 * d, 5 * h), full(7 * d, 6 * h, "more")),
    "all": lambda d, h: (
        full(6 * d, 5 * h),
        window(7, 5 * d, 4 * h),
        window(1, 4 * d, 4 * h, "narrow"),
        state(2 * d, 2 * h),
    ),
    "no host state": lambda d, h: (full(6 * d, 5 * h), state(2 * d)),
    "some on host": lambda d, h: (full(6 * d, 5 * h), window(7, 5 * d), state(2 * d, 2 * h), state(3 * d, 0, "more")),
    "window+2 states": lambda d, h: (window(5, 5 * d, 4 * h), state(2 * d, 2 * h), state(3 * d, h, "more")),
    "backwards": lambda d, h: (state(2 * d, 2 * h), window(9, 6 * d, 4 * h), full(6 * d, 5 * h)),
}


class Chaos:
    """One engine under attack. Every action leaves the invariants checked and the naive model in agreement."""

    def __init__(
        self,
        layout: str,
        page: int = 4,
        device: int = 3,
        host: int = 3,
        save: str = "through",
        seed: int = 0,
        groups: tuple[CacheGroup, ...] | None = None,
    ) -> None:
        self.groups = groups or LAYOUTS[layout](device, host)
        self.engine = Engine(
            page, *self.groups, events=True, save=save if host else "", seed=seed, every=2, save_pages=1 + seed % 3
        )
        self.page = page
        self.count = 0
        self.stuck = 0
        self.bodies: list[list[int]] = []
        # The naive model: every computed prefix of each namespace since it was last evicted, token by token.
        self.computed: dict[Namespace, set[tuple[int, ...]]] = {}
        self.epoch: dict[Namespace, int] = {}
        self.live: dict[str, tuple[Namespace, int]] = {}
        self.announced: dict[str, dict[int, None]] = {"GPU": {}, "CPU": {}}

    # ---- actions

    def submit(self, tokens: list[int], max_tokens: int, space: int, reads: bool) -> None:
        if len(self.engine.waiting) + len(self.engine.running) >= 6:
            return
        ns = SPACES[space % len(SPACES)]
        self.count += 1
        name = f"r{self.count}"
        self.engine.submit(name, tokens, max_tokens, ns, reads)
        self.live[name] = (ns, self.epoch.get(ns, 0))
        self.after()

    def plan(self, chunk: int) -> None:
        if len(self.engine.flights) >= 2:
            return
        waiting = list(self.engine.waiting)
        if not self.engine.plan(chunk):
            self.unblock()
        for request in waiting:
            if request.lease is not None:
                self.believe(request)
        self.after()

    def unblock(self) -> None:
        """Nothing can run: if nothing is under way either, somebody must give way."""
        engine = self.engine
        if engine.flights or engine.operations:
            return
        self.stuck += 1
        if len(engine.running) > 1 and self.stuck % 4:
            engine.retract(engine.running[-1])
        elif engine.waiting and engine.running:
            engine.abort(engine.running[0].id)
        elif engine.waiting:
            engine.abort(engine.waiting[0].id)
        elif engine.running:
            engine.abort(engine.running[0].id)

    def done(self) -> None:
        if self.engine.flights:
            step = min(self.engine.flights)
            parts = self.engine.flights[step]
            doing = [] if step in self.engine.doomed else [(r, s + n) for r, s, n in parts]
            self.engine.done()
            for request, end in doing:
                self.learn(request, end)
            self.after()

    def fail(self) -> None:
        if self.engine.flights:
            self.engine.fail()
            self.after()

    def abort(self, which: int) -> None:
        live = self.engine.waiting + self.engine.running
        if live:
            self.engine.abort(live[which % len(live)].id)
            self.after()

    def retract(self, which: int) -> None:
        if self.engine.running:
            self.engine.retract(self.engine.running[which % len(self.engine.running)])
            self.after()

    def land(self, which: int, ok: bool) -> None:
        ops = list(self.engine.operations)
        if ops:
            self.engine.land(ops[which % len(ops)], ok)
            self.after()

    def evict_namespace(self, space: int) -> None:
        ns = SPACES[space % len(SPACES)]
        self.engine.cache.evict_namespace(ns)
        self.forget(ns)
        self.engine.check()
        self.after()

    def flush(self) -> None:
        self.engine.cache.flush()
        for ns in SPACES:
            self.forget(ns)
        self.engine.check()
        self.after()

    def explain(self, tokens: list[int], space: int, admin: bool) -> None:
        before = self.engine.cache.stats()
        ns = SPACES[space % len(SPACES)]
        found = self.engine.cache.explain(ns, tokens, admin=admin)
        assert found.cached <= self.known(ns, tokens), f"explain promises {found.cached} tokens nobody has computed"
        assert admin or found.reason != "other_namespace"
        assert self.engine.cache.stats() == before, "explain changed something"
        self.engine.check()

    def finish(self) -> None:
        """Everything comes to an end, and then everything is free."""
        engine = self.engine
        for _ in range(10_000):
            if not (engine.waiting or engine.running or engine.flights or engine.operations):
                break
            if not engine.plan():
                self.unblock()
            engine.settle()
        else:
            raise AssertionError("does not come to rest")
        self.after()
        self.flush()
        for group in self.groups:
            for tier in ("device", "host"):
                pages = engine.pages(group.name, tier)
                assert pages["free"] == pages["capacity"], f"{group.name} on {tier} leaks: {pages}"
        assert not engine.cache.stats()["unhooked"] and not engine.cache.stats()["namespaces"]
        assert not self.announced["GPU"] and not self.announced["CPU"]

    # ---- the naive model

    def learn(self, request: Request, end: int) -> None:
        ns, epoch = self.live[request.id]
        if epoch == self.epoch.get(ns, 0):
            known = self.computed.setdefault(ns, set())
            known.add(tuple(self.engine.double.tokens(request.id)[:end]))

    def forget(self, ns: Namespace) -> None:
        self.computed.pop(ns, None)
        self.epoch[ns] = self.epoch.get(ns, 0) + 1

    def known(self, ns: Namespace, tokens: list[int]) -> int:
        """The longest prefix of `tokens` that somebody has computed."""
        best = 0
        for sequence in self.computed.get(ns, ()):
            best = max(best, common(tokens, sequence))
        return best

    def believe(self, request: Request) -> None:
        """A hit beyond what was ever computed, or promised by a running request of the same namespace, is a lie."""
        ns, epoch = self.live[request.id]
        best = self.known(ns, request.tokens) if epoch == self.epoch.get(ns, 0) else 0
        for step, parts in self.engine.flights.items():
            for other, start, length in parts:
                if step not in self.engine.doomed and self.live[other.id] == (ns, epoch):
                    best = max(best, common(request.tokens, other.tokens[: start + length]))
        assert request.cached <= best, f"{request.id}: {request.cached} tokens cached, {best} were ever computed"
        assert request.cached < len(request.tokens), f"{request.id}: nothing left to compute"

    # ---- the events

    def after(self) -> None:
        """Replaying the events rebuilds what the tree really holds, per tier."""
        for event in self.engine.events:
            if isinstance(event, AllBlocksCleared):
                self.announced = {"GPU": {}, "CPU": {}}
            elif isinstance(event, BlockStored):
                held = self.announced[event.medium]
                parent = event.parent_block_hash
                for block in event.block_hashes:
                    assert block not in held, f"{event.medium}: stored twice"
                    held[block] = None
                    parent = block
                assert parent is not None
            else:
                assert isinstance(event, BlockRemoved)
                for block in event.block_hashes:
                    assert block in self.announced[event.medium], f"{event.medium}: removed, was not there"
                    del self.announced[event.medium][block]
        self.engine.events.clear()
        held = real_blocks(self.engine)
        for medium, blocks in held.items():
            assert blocks == set(self.announced[medium]), f"{medium}: events and tree disagree"


def common(ours, theirs) -> int:
    """How many tokens two sequences share from the start."""
    same = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        same += 1
    return same


def real_blocks(engine: Engine) -> dict[str, set[int]]:
    """The hashes of what the tree really holds of the group events speak of, from the tree itself."""
    from sapwood.cache.events import announced, block_hash
    from sapwood.cache.hashes import digests_of, ensure_hashes

    tree = engine.cache._tree
    held: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
    for root in tree.roots.values():
        stack = list(root.top.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            for t in range(len(tree.tiers)):
                columns = announced(tree, node, t)
                if len(columns):
                    hashes = ensure_hashes(node, int(columns[-1]) + 1, tree.page_bytes)
                    held["GPU" if t == 0 else "CPU"] |= {
                        block_hash(digests_of(hashes, c, c + 1)) for c in columns.tolist()
                    }
    return held


def random_prompt(rng: random.Random, chaos: Chaos) -> list[int]:
    """A prompt that often shares a prefix with an earlier one, or with what was generated for it."""
    known = [r.tokens for r in chaos.engine.requests.values()]
    head: list[int] = []
    if known and rng.random() < 0.8:
        head = rng.choice(known[-8:])
        head = head[: rng.randint(0, len(head))] if rng.random() < 0.6 else head
    return (head + [rng.randint(0, 2) for _ in range(rng.randint(0 if head else 1, 14))])[:40]


def walk(seed: int, steps: int, layout: str | None = None) -> Chaos:
    """A random walk. Everything follows from the seed."""
    rng = random.Random(seed)
    layout = layout or rng.choice(sorted(LAYOUTS))
    chaos = Chaos(
        layout,
        page=rng.choice([1, 2, 4, 4]),
        device=rng.choice([2, 3, 5]),
        host=rng.choice([0, 1, 3, 6]),
        save=rng.choice(["through", ""]),
        seed=seed,
    )
    for _ in range(steps):
        act(rng, chaos)
    chaos.finish()
    return chaos


def act(rng: random.Random, chaos: Chaos) -> None:
    """One random action, the usual ones most often."""
    pick = rng.random()
    if pick < 0.22:
        chaos.submit(random_prompt(rng, chaos), rng.randint(1, 9), rng.choice([0, 0, 0, 1, 2]), rng.random() < 0.9)
    elif pick < 0.52:
        chaos.plan(rng.choice([1, 3, 4, 8, 64]))
    elif pick < 0.78:
        chaos.done()
    elif pick < 0.81:
        chaos.fail()
    elif pick < 0.92:
        chaos.land(rng.randint(0, 9), rng.random() < 0.85)
    elif pick < 0.94:
        chaos.abort(rng.randint(0, 9))
    elif pick < 0.96:
        chaos.retract(rng.randint(0, 9))
    elif pick < 0.97:
        chaos.evict_namespace(rng.randint(0, 2))
    elif pick < 0.975:
        chaos.flush()
    else:
        chaos.explain(random_prompt(rng, chaos) or [1], rng.randint(0, 2), rng.random() < 0.5)


def fresh_seeds(seconds: float) -> Iterator[int]:
    """Seeds for a while, from one that is drawn on. Set SAPWOOD_SEED to begin elsewhere."""
    first = int(os.environ.get("SAPWOOD_SEED", random.randrange(1_000_000, 2**32)))
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first))


def main() -> None:
    parser = argparse.ArgumentParser(description="Attack the cache with random traffic from one seed.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from --seed on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layout", choices=sorted(LAYOUTS))
    args = parser.parse_args()
    for seed in range(args.seed, args.seed + args.count):
        try:
            walk(seed, args.steps, args.layout)
        except BaseException:
            again = f" --layout {args.layout}" if args.layout else ""
            print(f"FAILED: python -m tests.cache.chaos --seed {seed} --steps {args.steps}{again}")  # noqa: T201
            raise


if __name__ == "__main__":
    main()
