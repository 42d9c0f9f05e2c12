"""The step loop: scheduler, executor and tiers joined. One thread calls `step` and `rest` in turn.

    submit, tell,
    tiers.poll -----> scheduler --plan--> tiers.begin ---> executor.begin ... executor.finish ---> tiers.poll
                          ^                                                         |                  |
                          +---------- advance(events) ------------------------------+------------------+ ---> Step

With `overlap=1` the next plan is begun before the last one is finished:

    step 1    begin 1
    step 2    begin 2, finish 1
    step 3    begin 3, finish 2      ... and where there is no plan to begin, only finish

Transfers are started before the batch, so that they run beside it where they can. That is safe: a save takes pages
that are real, which no batch writes, and what a load brings is read by later plans only. Copies belong to the executor.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sapwood.scheduler import Abort, Ended, Event, Plan, RequestSpec, Scheduler, StepDone, StepFailed

from .transfer.tiers import Tiers

log = logging.getLogger(__name__)
STEP_SIZES = 16
_MAX_TRACEBACKS = 64  # different errors of which a traceback is logged
_MAX_FINAL_OFFERS = 3  # to a store that keeps nothing, at the end
_OFFER_PAUSE_SECONDS = 0.1  # seconds between them


class Executor(Protocol):
    """Runs the batch of a plan, and the copies around it."""

    def execute(self, plan: Plan) -> Sequence[Event]:
        """One StepDone or StepFailed for a plan with rows, nothing for one without."""


class OverlappingExecutor(Protocol):
    """The same in two halves, so that the next plan is made while this one runs."""

    def begin(self, plan: Plan) -> None:
        """Start a plan with rows. All that is needed of its tables is taken before this returns."""

    def finish(self, block: bool = True) -> Sequence[Event]:
        """One StepDone or StepFailed for the oldest plan begun and not finished; with `block=False`, nothing if it is
        still running."""


class FinishedPlan(NamedTuple):
    """A plan with rows, and what became of it."""

    plan: Plan
    event: StepDone | StepFailed


class _BegunPlan:
    """A plan that has begun."""

    __slots__ = ("error", "over", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.error: Exception | None = None  # it could not begin; reported when it is its turn
        self.over: set[str] = set()  # rows whose requests have ended since, or whose plan counts as failed


class Step(NamedTuple):
    """What one step did: the plan it began, what became known, the requests that are over, and the plans that are
    done."""

    plan: Plan
    events: list[Event]
    ended: list[Ended]
    done: list[FinishedPlan]
    over: list[set[str]]  # for each of `done`: rows whose requests are over
    in_flight: int

    @property
    def idle(self) -> bool:
        """Nothing was planned, nothing runs and nothing has happened: there is nothing to do until something does."""
        return self.plan.empty and not self.in_flight and not self.events and not self.ended

    def tokens(self) -> dict[str, int]:
        """The tokens that were sampled, by request. Rows whose request had ended before are left out."""
        tokens: dict[str, int] = {}
        for (plan, event), over in zip(self.done, self.over, strict=True):
            if not isinstance(event, StepDone):
                continue
            if isinstance(event.tokens, np.ndarray):
                batch = plan.batch
                sampling = [id for id, samples in zip(batch.ids, batch.samples.tolist(), strict=True) if samples]
                tokens.update(zip(sampling, event.tokens.tolist(), strict=True))
            else:
                tokens.update(event.tokens)
            for id in over:
                tokens.pop(id, None)
        return tokens


class EngineLoop:
    """One engine: requests go in by `submit`, tokens and ends come out of `step`.

    loop = EngineLoop(scheduler, executor, Tiers(scheduler, mover, store))
    loop.submit(specs)
    while loop.live:
        step = loop.step()
        loop.rest()

    All of it is called by one thread, but for `wake`.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor | OverlappingExecutor, tiers: Tiers | None = None
    ) -> None:
        if tiers is not None and tiers.scheduler is not scheduler:
            raise ValueError("tiers must be those of this scheduler, got those of another")
        self.scheduler = scheduler
        self.executor = executor
        self.tiers = Tiers(scheduler) if tiers is None else tiers
        self.live: set[str] = set()  # requests that have not ended
        self.step_sizes = [0] * STEP_SIZES  # steps done, by their tokens: up to 1, 2, 4, 8 ... and any more
        self.step_tokens = 0  # of all of them
        halves = hasattr(executor, "begin") and hasattr(executor, "finish")
        self._halves: Any = executor if halves else _AtOnce(executor)
        self._max_beside = scheduler.config.overlap if halves else 0  # plans that may run while the next is begun
        self._in_flight: deque[_BegunPlan] = deque()
        self._last: Step | None = None
        self._closed = False
        self._logged: set[str] = set()  # errors of which a traceback was logged

    def submit(self, specs: Sequence[RequestSpec]) -> None:
        """Take these requests, or none of them (`Refused`)."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        self.scheduler.submit(specs)
        self.live.update(spec.id for spec in specs)
        self._last = None

    def tell(self, events: Sequence[Event]) -> list[Ended]:
        """Events from outside: Abort, Finish. Returns the requests that are over."""
        self._last = None
        return self._over(self.scheduler.advance(events))

    def step(self) -> Step:
        """Begin one plan, and finish the oldest one unless it may run beside the next. Waits for the executor, and for
        nothing else.

        An executor that raises has failed its step: those in it are tried again, apart from each other. Only an
        AssertionError comes out of here: then nothing can be trusted any more."""
        events = self.tiers.poll()  # first the time: what is asked for now waits from now on
        ended = self._over(self.scheduler.advance(events)) if events else []
        plan = self.scheduler.next_plan()
        ended += self._over(plan.ended)
        rows = bool(plan.batch.ids)
        if not plan.empty:
            self.tiers.begin(plan)
            self._begin(plan, rows)
        done: list[FinishedPlan] = []
        over: list[set[str]] = []
        # One plan is finished; one that could not begin is reported when it is its turn, before anything is planned.
        while self._in_flight and (self._in_flight[0].error or (not done and self._must_finish(rows))):
            begun = self._in_flight.popleft()
            finished, ends = self._finish(begun)
            done.append(finished)
            over.append(begun.over)
            ended += ends
        later = self.tiers.poll() if not plan.empty or done else []
        if later:
            ended += self._over(self.scheduler.advance(later))
        events += [each.event for each in done]
        self._last = Step(plan, events + later, ended, done, over, len(self._in_flight))
        return self._last

    def _must_finish(self, begun: bool) -> bool:
        return not begun or len(self._in_flight) > self._max_beside

    def _begin(self, plan: Plan, rows: bool) -> None:
        if not rows:
            if isinstance(self._halves, _AtOnce):
                self._halves.execute(plan)
            return
        begun = _BegunPlan(plan)
        self._in_flight.append(begun)
        try:
            self._halves.begin(plan)
        except AssertionError:
            raise
        except Exception as error:
            begun.error = error
        except BaseException as error:  # Ctrl-C: the next call, if only to close, finds a failed step
            begun.error = RuntimeError(f"interrupted ({type(error).__name__})")
            raise

    def _finish(self, begun: _BegunPlan) -> tuple[FinishedPlan, list[Ended]]:
        """Wait for a plan and report it to the scheduler. If it failed, those begun behind it count as failed too."""
        step = begun.plan.step
        assert step is not None
        event: StepDone | StepFailed
        try:
            if begun.error is not None:
                raise begun.error
            (event,) = self._halves.finish()
            ended = self._over(self.scheduler.advance([event]))  # what it cannot take has changed nothing
            if isinstance(event, StepDone):
                tokens = len(begun.plan.batch.tokens)
                self.step_sizes[min((tokens - 1).bit_length(), STEP_SIZES - 1)] += 1
                self.step_tokens += tokens
        except AssertionError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:1000]
            event = StepFailed(step, reason, tuple(getattr(error, "culprits", ())))
            log.warning("step %s failed, %d rows: %s", step, len(begun.plan.batch.ids), reason.split("\n")[0])
            if reason not in self._logged and len(self._logged) < _MAX_TRACEBACKS:
                self._logged.add(reason)
                log.error("the error of step %s (told once):", step, exc_info=error)
            ended = self._over(self.scheduler.advance([event]))
        if isinstance(event, StepFailed):
            for later in self._in_flight:
                later.over.update(later.plan.batch.ids)
        return FinishedPlan(begun.plan, event), ended

    def rest(self, timeout: float | None = None) -> None:
        """Wait while there is nothing to do: until a tier has news, a deadline of the scheduler comes, `wake` is
        called, or for `timeout` seconds. Returns at once if the last step did anything, if a plan is in flight, or if
        no request is live and there is nothing to wait for: a server that rests between requests gives a timeout."""
        if self._last is None or not self._last.idle:
            return
        ticks = self._last.plan.wake_in
        waits = [
            seconds
            for seconds in (timeout, None if ticks is None else self.tiers.seconds_to(ticks))
            if seconds is not None
        ]
        if waits or self.live or self.tiers.busy:
            self.tiers.wait(min(waits) if waits else None)

    def wake(self) -> None:
        """There is something new: end a `rest`. Any thread may call it."""
        self.tiers.wake()

    def close(self, timeout: float = 5.0) -> list[Ended]:
        """Abort the requests that are left, write back what was to be written, and close the tiers; in `timeout`
        seconds, or with less written, which is logged. What the store could not keep before is offered to it again.
        Returns those requests that were aborted."""
        until = time.monotonic() + timeout
        self._closed = True
        ended = self.tell([Abort(id) for id in sorted(self.live)])
        offers, kept = 0, self.tiers.backed_up  # in a row of which the store kept nothing
        while (left := until - time.monotonic()) > 0:
            step = self.step()
            ended += step.ended
            if step.plan.empty and not step.in_flight and not self.tiers.busy:
                before, kept = kept, self.tiers.backed_up
                offers = 0 if kept > before else offers
                if offers == _MAX_FINAL_OFFERS or not self.scheduler.offer_owed():
                    break
                if offers:
                    self.tiers.wait(min(left, _OFFER_PAUSE_SECONDS))
                offers += 1
            elif step.idle:
                self.tiers.wait(left)
        while self._in_flight:  # no time is left: but what has begun is not left running
            ended += self._finish(self._in_flight.popleft())[1]
        self.tiers.close(max(0.1, until - time.monotonic()))
        ended += self._over(self.scheduler.advance(self.tiers.poll()))
        self.tiers.say_unwritten()
        return ended

    def _over(self, ended: list[Ended]) -> list[Ended]:
        if ended:
            ids = [end.id for end in ended]
            self.live.difference_update(ids)
            for begun in self._in_flight:
                begun.over.update(ids)
        return ended


class _AtOnce:
    """An executor that runs a plan in one go, seen as two halves: all of it in the second."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._plan = Plan()

    def execute(self, plan: Plan) -> Sequence[Event]:
        events: Sequence[Event] = self._executor.execute(plan)
        return events

    def begin(self, plan: Plan) -> None:
        self._plan = plan

    def finish(self) -> Sequence[Event]:
        return self.execute(self._plan)
