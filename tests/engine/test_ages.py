"""Engines that have run for years (case S16): scheduler, tiers and store with every number far beyond 31 bits."""

from __future__ import annotations

import pytest

from sapwood.store.folder import ByteLedger, charge

from ..ages import LIMITS, age
from .machine import BASE, HYBRID, PROMPT, Machine

pytestmark = pytest.mark.server


@pytest.mark.parametrize("process", [False, True], ids=["threads", "process"])
@pytest.mark.parametrize("limit", LIMITS)
def test_S16_jobs_and_operations_pass_their_limits(tmp_path, limit, process):
    """A prompt goes to host and store and comes back from there, with steps, operations and jobs counted past a limit:
    every byte is right, and the answer is that of an engine that has just begun.

    Mutation: `wire._JOB` has an id of 32 bits; `DecodeRows.shown` adds `np.int32(self.planned)`.
    """
    young = Machine(HYBRID, pages=400, host=400)
    young.serve("ann", PROMPT, 9)
    machine = Machine(HYBRID, f"file://{tmp_path}?size=64MiB", pages=12, host=12, process=process)
    age(machine.scheduler, limit - 3)
    store = machine.store
    assert store is not None
    store._jobs = limit - 3
    machine.serve("ann", PROMPT, 9)
    machine.crowd()
    assert machine.cache.explain(BASE, PROMPT).cached == 0
    again = machine.serve("again", PROMPT, 9)
    assert (again.cached, again.computed) == (24, 1)
    assert machine.said["again"] == machine.said["ann"] == young.said["ann"]
    assert store._jobs > limit and machine.cache._ledger.next_op > limit
    machine.close()
    young.close()


@pytest.mark.parametrize("limit", LIMITS)
def test_S16_a_folder_that_has_taken_more_than_its_numbers_once_held(tmp_path, limit):
    """What was ever written to a folder is counted past a limit, and so is what is in it, by all who use it.

    Mutation: `_USAGE` has 32 bits for what was taken.
    """
    one, other = (ByteLedger(str(tmp_path), 4 * limit) for _ in range(2))
    assert one.end_count(one.begin_count(), 0) == 0
    with one._locked():
        one._write(0, limit - 3)
    for ledger in (one, other):
        assert ledger.take(charge(1)) == 0
        ledger.settle(charge(1), charge(1))
        assert ledger.take(limit) == 0
        ledger.settle(limit, 0)
    assert one.taken() == other.taken() == limit - 3 + 2 * (charge(1) + limit)
    assert one.used() == 2 * charge(1)
    for ledger in (one, other):
        ledger.close()
