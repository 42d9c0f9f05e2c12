"""The step loop: scheduler, executor and tiers joined. Whoever serves calls `step` and `rest` in turn, from one thread.

    submit, tell,
    tiers.poll -----> scheduler --plan--> tiers.begin ---> executor.execute ---> tiers.poll
                          ^                                        |                 |
                          +---------- advance(events) -------------+-----------------+ ---> Step: tokens, ends

Transfers are started before the batch, so that they run beside it where they can. That is safe: a save takes pages
that are real, which no batch writes, and what a load brings is read by later plans only. Copies belong to the executor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sapwood.scheduler import Abort, Ended, Event, Plan, RequestSpec, Scheduler, StepDone, StepFailed

from .tiers import Tiers

log = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs the batch of a plan, and the copies around it."""

    def execute(self, plan: Plan) -> Sequence[Event]:
        """One StepDone or StepFailed for a plan with rows, nothing for one without."""


class Step(NamedTuple):
    """What one step did: its plan, what became known, and the requests that are over."""

    plan: Plan
    events: list[Event]
    ended: list[Ended]

    @property
    def idle(self) -> bool:
        """Nothing was planned and nothing has happened: there is nothing to do until something does."""
        return self.plan.empty and not self.events and not self.ended

    def tokens(self) -> dict[str, int]:
        """The tokens that were sampled, by request."""
        batch = self.plan.batch
        for event in self.events:
            if isinstance(event, StepDone):
                if isinstance(event.tokens, np.ndarray):
                    sampling = [id for id, samples in zip(batch.ids, batch.samples.tolist(), strict=True) if samples]
                    return dict(zip(sampling, event.tokens.tolist(), strict=True))
                return dict(event.tokens)
        return {}


class EngineLoop:
    """One engine: requests go in by `submit`, tokens and ends come out of `step`.

    loop = EngineLoop(scheduler, executor, Tiers(scheduler, mover, store))
    loop.submit(specs)
    while loop.live:
        step = loop.step()
        loop.rest()

    All of it is called by one thread, but for `wake`.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, tiers: Tiers | None = None) -> None:
        if tiers is not None and tiers.scheduler is not scheduler:
            raise ValueError("tiers must be those of this scheduler, got those of another")
        self.scheduler = scheduler
        self.executor = executor
        self.tiers = Tiers(scheduler) if tiers is None else tiers
        self.live: set[str] = set()  # requests that have not ended
        self._last: Step | None = None
        self._closed = False

    def submit(self, specs: Sequence[RequestSpec]) -> None:
        """Take these requests, or none of them (`Refused`)."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        self.scheduler.submit(specs)
        self.live.update(spec.id for spec in specs)
        self._last = None

    def tell(self, events: Sequence[Event]) -> list[Ended]:
        """What happened to requests outside: Abort, Finish. Returns those that are over."""
        self._last = None
        return self._over(self.scheduler.advance(events))

    def step(self) -> Step:
        """One plan, carried out, and what has become known. Waits for the executor, and for nothing else.

        An executor that raises has failed its step: those in it are tried again, apart from each other. Only an
        AssertionError comes out of here: then nothing can be trusted any more."""
        events = self.tiers.poll()  # first the time: what is asked for now waits from now on
        ended = self.scheduler.advance(events) if events else []
        plan = self.scheduler.next_plan()
        ended += plan.ended
        later: list[Event] = []
        if not plan.empty:
            self.tiers.begin(plan)
            later += self._execute(plan)
            later += self.tiers.poll()
        if later:
            ended += self.scheduler.advance(later)
        self._last = Step(plan, events + later, self._over(ended))
        return self._last

    def _execute(self, plan: Plan) -> Sequence[Event]:
        try:
            return self.executor.execute(plan)
        except AssertionError:
            raise
        except Exception as error:
            if not plan.batch.ids or plan.step is None:
                raise
            log.exception("step %s failed", plan.step)
            return [StepFailed(plan.step, f"{type(error).__name__}: {error}"[:1000])]

    def rest(self, timeout: float | None = None) -> None:
        """Wait while there is nothing to do: until a tier has news, a deadline of the scheduler comes, `wake` is
        called, or for `timeout` seconds. Returns at once if the last step did anything."""
        if self._last is None or not self._last.idle:
            return
        ticks = self._last.plan.wake_in
        waits = [
            seconds
            for seconds in (timeout, None if ticks is None else self.tiers.seconds_to(ticks))
            if seconds is not None
        ]
        self.tiers.wait(min(waits) if waits else None)

    def wake(self) -> None:
        """There is something new: end a `rest`. Any thread may call it."""
        self.tiers.wake()

    def close(self, timeout: float = 5.0) -> list[Ended]:
        """Abort who is still here, write back what was to be written, and close the tiers; in `timeout` seconds, or
        with less written. Returns those who were aborted."""
        until = time.monotonic() + timeout
        self._closed = True
        ended = self.tell([Abort(id) for id in sorted(self.live)])
        while (left := until - time.monotonic()) > 0:
            step = self.step()
            ended += step.ended
            if step.plan.empty and not self.tiers.busy:
                break
            if step.idle:
                self.tiers.wait(left)
        self.tiers.close(max(0.1, until - time.monotonic()))
        ended += self._over(self.scheduler.advance(self.tiers.poll()))
        return ended

    def _over(self, ended: list[Ended]) -> list[Ended]:
        self.live.difference_update([end.id for end in ended])
        return ended
