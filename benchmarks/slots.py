"""`python -m benchmarks.slots`: what part of the memory state slots should have. Hit rates of two kinds of chats, for
models whose slot costs as much as so many tokens of K and V; the part that engine/models/sizing.py gives is marked.

    long     48 chats of 3 turns of 2,600 tokens, 16 at a time: nothing shared but 64 tokens
    shared   100 chats of 5 turns of 200 tokens behind one system prompt of 2,048, 32 at a time
"""

from __future__ import annotations

import gc
import sys

import numpy as np

from sapwood.cache import CacheGroup
from sapwood.engine.models.sizing import CONTEXT_TOKENS, SLOTS_PER_CONTEXT

from . import ours
from .sessions import PAGE

KINDS = {"long": (64, 2600, 3, 48, 16), "shared": (2048, 200, 5, 100, 32)}
ANSWER = 64
SHARES = (0.05, 0.09, 0.15, 0.25, 0.35, 0.44, 0.5, 0.61, 0.7)


def hit_rate(kind: str, pages: int, slots: int) -> float:
    """The part of all prompt tokens that was cached."""
    system, user, turns, chats, batch = KINDS[kind]
    rng = np.random.default_rng(7)
    head = rng.integers(1, 150_000, system, np.int32)
    talks = [np.concatenate([head, rng.integers(1, 150_000, turns * (user + ANSWER), np.int32)]) for _ in range(chats)]
    groups = [CacheGroup("full", "full", pages), CacheGroup("state", "state", slots)]
    scheduler = ours.scheduler(PAGE, groups, batch, 8192)
    coming, at = [(chat, 0) for chat in range(chats)], {}
    asked = cached = 0
    while coming or at:
        specs = []
        for chat, turn in coming:
            at[f"{chat}.{turn}"] = chat, turn
            prompt = talks[chat][: system + (turn + 1) * user + turn * ANSWER]
            specs.append(ours.request(f"{chat}.{turn}", prompt, ANSWER))
        coming = []
        if specs:
            scheduler.submit(specs)
        plan = scheduler.next_plan()
        batch_ends = (plan.batch.starts + plan.batch.lengths).tolist()
        rows = zip(plan.batch.ids, batch_ends, plan.batch.samples.tolist(), strict=True)
        tokens = np.array([talks[at[id][0]][end] for id, end, samples in rows if samples], np.int32)
        assert plan.step is not None
        for end in scheduler.advance([ours.StepDone(plan.step, tokens)]):
            chat, turn = at.pop(end.id)
            asked, cached = asked + end.prompt, cached + end.cached
            if turn + 1 < KINDS[kind][2]:
                coming.append((chat, turn + 1))
    return cached / asked


def main() -> None:
    gc.disable()
    sys.stdout.write("hit rate, by the part of the memory that slots have\n")
    sys.stdout.write(f"{'slot in tokens':>16}{'':9}" + "".join(f"{share:>8}" for share in SHARES) + "   the rule\n")
    for cost, memory in ((200, 300_000), (3200, 1_000_000)):
        rule = SLOTS_PER_CONTEXT * cost / (CONTEXT_TOKENS + SLOTS_PER_CONTEXT * cost)
        for kind in KINDS:
            found = []
            for share in SHARES:
                slots = max(KINDS[kind][4] + 2, int(memory * share / cost))
                found.append(hit_rate(kind, (memory - slots * cost) // PAGE, slots))
            sys.stdout.write(f"{cost:>16} {kind:8}" + "".join(f"{rate:8.3f}" for rate in found) + f"{rule:>11.2f}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
