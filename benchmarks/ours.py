"""Our whole scheduler as the bench drives it: made, asked, read and answered like the peer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.cache import CacheGroup
from sapwood.scheduler import Plan, RequestSpec, Scheduler, SchedulerConfig, StepDone

Ints = npt.NDArray[np.int32]


def full(pages: int) -> list[CacheGroup]:
    return [CacheGroup("full", "full", pages)]


def scheduler(page: int, groups: Sequence[CacheGroup], batch: int, chunk: int, **more: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(page, groups, chunk, batch, **more))


def request(name: str, tokens: Ints, new: int) -> RequestSpec:
    return RequestSpec(name, tokens, new)


def read(plan: Plan) -> None:
    """Take in hand what a runner must have. (`changes` is another form of what `tables` show.)"""
    batch = plan.batch
    _ = batch.ids, batch.slots, batch.starts, batch.lengths, batch.tokens, batch.cached, batch.samples
    _ = batch.write_from, batch.adapters, plan.tables, plan.copies, plan.ended, plan.seated


def sampled(plan: Plan, token: int) -> list[StepDone]:
    """What a step is answered with when every row that yields a token yields this one."""
    assert plan.step is not None
    return [StepDone(plan.step, np.full(int(plan.batch.samples.sum()), token, np.int32))]
