"""Same input, same plans, byte for byte (case S06): in two processes, with different hash seeds, however submitted."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sapwood.cache import Namespace
from sapwood.scheduler import Abort, RequestSpec
from sapwood.sim.executor import batch_bytes

from .driver import Run, adapter, groups_of, toks

ROOT = Path(__file__).parent.parent.parent
SPACES = [Namespace(), adapter("a"), Namespace(salt="tenant"), adapter("b")]


def story(layout: str, together: bool) -> str:
    """A crowd in little memory, with adapters, priorities, aborts, failures and an adapter that is unloaded: the digest
    of everything that was planned and told."""
    policy = "fcfs" if layout == "full" else "prefix"
    groups = groups_of(layout, 4, pages=40, slots=5, windows=24)
    run = Run(*groups, page=4, budget=21, batch=6, max_loras=1, headroom=4, policy=policy, events=True, every=9)
    said = hashlib.sha256()
    for wave in range(4):
        specs = [
            RequestSpec(
                f"{wave}.{n}",
                toks(n % 3, 9 + 2 * wave) + toks(10 + n, n % 4 + 1),
                5 + n,
                namespace=SPACES[(n + wave) % 4],
                priority=n % 2,
                eos=(3, 5, 7),
                reads_cache=n != 5,
            )
            for n in range(7)
        ]
        if together:
            run.submit_all(specs)
        else:
            for spec in specs:
                run.submit_all([spec])
        if wave == 2:
            run.scheduler.evict_namespace(SPACES[1])
        for k in range(9 if wave < 3 else 1000):
            plan = run.plan()
            if plan.empty:
                break
            said.update(batch_bytes(plan.batch) + repr((plan.step, plan.copies, plan.ended)).encode())
            for name in sorted(plan.tables):
                said.update(name.encode() + plan.tables[name].tobytes())
            told = [Abort(plan.batch.ids[0])] if (wave, k) in ((1, 3), (2, 5)) else []
            ended = run.tell(*told, *(run.executor.fail("bad luck") if k == 4 else run.executor.done()))
            said.update(repr([tuple(getattr(end, f) for f in FIELDS) for end in ended]).encode())
            said.update(repr(run.scheduler.drain_events()).encode())
    assert not run.live
    return said.hexdigest()


FIELDS = ("id", "reason", "prompt", "cached", "computed", "recomputed", "generated", "detail")


def begin(layout: str, together: bool, hash_seed: int) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    code = f"from tests.scheduler.test_determinism import story; print(story({layout!r}, {together}))"
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)


@pytest.mark.server
@pytest.mark.parametrize("layout", ["full", "full+2windows+state"])
def test_s06_same_plans_in_two_processes(layout):
    """Two processes with different PYTHONHASHSEED, one given its requests in one call and one one by one, make the same
    plans, byte for byte, and tell the same ends and events.

    Mutation: somewhere a hash decides: `Planner._fill` sorts those that wait by `hash(request.id)`.
    """
    processes = [begin(layout, True, 1), begin(layout, False, 2)]
    one, other = (process.communicate()[0].strip() for process in processes)
    assert len(one) == 64 and one == other


@pytest.mark.parametrize("layout", ["window", "full+window", "full+state"])
def test_s06_in_one_call_or_in_many(layout):
    """Requests submitted in one call or in many, in one order, are the same requests.

    Mutation: `Scheduler.submit` gives all of a call the same arrival.
    """
    assert story(layout, True) == story(layout, False)
