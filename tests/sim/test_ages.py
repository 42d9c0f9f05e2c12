"""Schedulers that have run for years (case S16): every counter passes what 31, 32 and 53 bits hold, under attack."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.sim.executor import batch_bytes
from sapwood.sim.fuzz import Fuzz, FuzzReport
from sapwood.sim.fuzz_report import PlanDigest
from sapwood.sim.layouts import LAYOUTS

from ..ages import LIMITS, age

pytestmark = pytest.mark.attack
STEPS = 30
BEFORE = 3  # counters begin so far below a limit: they pass it in the middle of the attack


class WithoutNumbers(PlanDigest):
    """Of what is computed, not of the numbers that plans and operations have."""

    def add_plan(self, plan: Any) -> None:
        add = self._sha256.update
        add(f"{plan.wake_in} {plan.copies!r} {plan.ended!r}".encode() + batch_bytes(plan.batch))
        for name, table in plan.tables.items():
            add(name.encode() + table[plan.batch.slots].tobytes())


class Old(Fuzz):
    """An attack on a scheduler whose counters begin at `at`."""

    def __init__(self, seed: int, layout: str, at: int, other: Fuzz | None = None) -> None:
        super().__init__(seed, layout, other)
        age(self.scheduler, at)
        self.digest = WithoutNumbers(self.scheduler.config.page_size)


def attacked(layout: str, seed: int, at: int) -> FuzzReport:
    return Old(seed, layout, at).run(STEPS)


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if not layout.pair])
def test_S16_counters_pass_their_limits_under_attack(layout: str) -> None:
    """The same requests, faults and transfers, with every counter at 0 and shortly before a limit: the same plans byte
    for byte, the same ends; contents, invariants and events agree with what is expected at all times.

    Mutation: `DecodeRows.shown` adds `np.int32(self.planned)`.
    """
    for seed in (0, 1):  # an even seed has one plan in flight, an odd one two
        young = attacked(layout, seed, 0)
        for limit in LIMITS:
            old = attacked(layout, seed, limit - BEFORE)
            assert old.digest == young.digest and old.ended == young.ended, f"seed {seed}, counters at {limit}"
