"""The step loop with an executor in two halves: the next plan is begun before the last one is finished."""

from __future__ import annotations

import logging

import pytest

from sapwood.engine import EngineLoop
from sapwood.scheduler import Abort, RequestSpec, Scheduler, SchedulerConfig, StepDone, StepFailed
from sapwood.sim.executor import ContentExecutor

from ..scheduler.driver import BASE, answer, full, toks


class Halves:
    """The content-checking executor in two halves. Says in which order it was called."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.content = ContentExecutor(scheduler)
        self.said: list[str] = []
        self.bad_begin: set[int] = set()
        self.bad_finish: set[int] = set()
        self.begun: list[int] = []

    def begin(self, plan) -> None:
        self.said.append(f"begin {plan.step}")
        if plan.step in self.bad_begin:  # the content executor hears that there was one, and that it failed
            self.content.step, self.content.failures = plan.step, self.content.failures + 1
            raise RuntimeError("cannot begin")
        self.content.begin(plan)
        self.begun.append(plan.step)

    def finish(self, block: bool = True):
        step = self.begun.pop(0)
        self.said.append(f"finish {step}")
        if step in self.bad_finish:
            self.content.fail("out of memory")
            raise RuntimeError("out of memory")
        return self.content.done()


def engine(overlap: int = 1, **config) -> tuple[EngineLoop, Halves]:
    scheduler = Scheduler(SchedulerConfig(16, [full(100)], 256, 8, overlap=overlap, **config))
    halves = Halves(scheduler)
    return EngineLoop(scheduler, halves), halves


def submit(loop: EngineLoop, halves: Halves, *specs: RequestSpec) -> None:
    for spec in specs:
        halves.content.submit(spec)
    loop.submit(specs)


def run(loop: EngineLoop) -> dict[str, list[int]]:
    """To the end. Returns the tokens of each request."""
    said: dict[str, list[int]] = {}
    for _ in range(500):
        step = loop.step()
        for id, token in step.tokens().items():
            said.setdefault(id, []).append(token)
        if not loop.live and not step.in_flight:
            return said
        loop.rest()
    raise AssertionError(f"{loop.live} do not end")


def test_s14_the_next_plan_begins_before_the_last_is_finished():
    """With `overlap=1` plan N+1 begins before N is finished; with 0 it does not. Both yield the same.

    Mutation: `EngineLoop.step` finishes a plan in the step that began it.
    """
    for overlap in (0, 1):
        loop, halves = engine(overlap)
        submit(loop, halves, RequestSpec("ann", toks(1, 20), 4), RequestSpec("bob", toks(2, 20), 3))
        said = run(loop)
        assert said == {"ann": answer(BASE, toks(1, 20), 4), "bob": answer(BASE, toks(2, 20), 3)}
        order = halves.said[:4]
        assert order == (
            ["begin 1", "begin 2", "finish 1", "begin 3"] if overlap else ["begin 1", "finish 1", "begin 2", "finish 2"]
        )


def test_s14_tokens_of_rows_whose_request_has_ended_are_left_out():
    """A request ends by eos in N and has a row in N+1: its token there is nobody's. Each event comes with its plan. The
    id may be used again at once.

    Mutation: `Step.tokens` tells all rows; `_over` forgets the plans in flight.
    """
    loop, halves = engine()
    right = answer(BASE, toks(1, 20), 9)
    last = next(at for at in range(2, 8) if right[at] not in right[:at])
    submit(loop, halves, RequestSpec("ann", toks(1, 20), 9, eos=[right[last]]), RequestSpec("bob", toks(2, 20), 19))
    said: list[int] = []
    again = False
    for _ in range(40):
        step = loop.step()
        for plan, event in step.done:
            assert plan.step == event.step and isinstance(event, StepDone)
        for end in step.ended:
            if end.id == "ann" and not again:
                assert step.in_flight == 1
                assert [*said, step.tokens()["ann"]] == right[: last + 1]
                submit(loop, halves, RequestSpec("ann", toks(7, 10), 2))
                said, again = [], True
                break
        else:
            said += [token for id, token in step.tokens().items() if id == "ann"]
        if not loop.live:
            break
    assert again and said == answer(BASE, toks(7, 10), 2)


def test_s14_an_error_in_begin_is_told_after_the_event_before_it(caplog):
    """Plan 3 cannot begin while 2 runs: 2 is finished first, then 3 has failed; those behind it count as failed. A
    failed step is one line of the log; its traceback comes once.

    Mutation: `_begin` tells the error at once; `_finish` logs every traceback.
    """
    loop, halves = engine(max_tries=9)
    halves.bad_begin, halves.bad_finish = {3}, {6, 8}
    submit(loop, halves, RequestSpec("ann", toks(1, 20), 9), RequestSpec("bob", toks(2, 20), 9))
    with caplog.at_level(logging.WARNING, "sapwood"):
        events: list[type] = []
        said: dict[str, list[int]] = {}
        for _ in range(200):
            step = loop.step()
            events += [type(event) for _, event in step.done]
            for id, token in step.tokens().items():
                said.setdefault(id, []).append(token)
            if not loop.live and not step.in_flight:
                break
    assert events[:3] == [StepDone, StepDone, StepFailed]
    assert halves.said[:7] == ["begin 1", "begin 2", "finish 1", "begin 3", "finish 2", "begin 4", "finish 4"], (
        "nothing is planned on top of a plan that could not begin"
    )
    assert said == {"ann": answer(BASE, toks(1, 20), 9), "bob": answer(BASE, toks(2, 20), 9)}
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    traces = [record for record in caplog.records if record.exc_info]
    assert len(lines) >= 2 and len(traces) == len({record.getMessage().split(": ", 1)[1] for record in lines})


def test_an_event_that_cannot_be_has_failed_its_step():
    """An executor that answers with tokens nobody asked for: the step has failed, and the engine goes on.

    Mutation: `_finish` lets a ProtocolError out, and nobody ever tells of the plan.
    """
    for overlap in (0, 1):
        loop, halves = engine(overlap)
        right, wrong = halves.finish, [True]

        def finish(block: bool = True, right=right, wrong=wrong, halves=halves):
            if not wrong:
                return right()
            wrong.clear()
            step = halves.begun.pop(0)
            halves.content.fail("nonsense")
            return [StepDone(step, {"nobody": 1})]

        halves.finish = finish
        submit(loop, halves, RequestSpec("ann", toks(1, 20), 5), RequestSpec("bob", toks(2, 20), 5))
        assert run(loop) == {"ann": answer(BASE, toks(1, 20), 5), "bob": answer(BASE, toks(2, 20), 5)}
        assert loop.scheduler.stats()["steps_failed"] == 1 + overlap


def test_owners_are_told_again_after_a_plan_that_could_not_begin():
    """An executor that raises before it has looked at `seated` is told again who has which slot.

    Mutation: `Outcome.failed` does not seat them again.
    """
    loop, halves = engine(0)
    halves.bad_begin = {1}
    submit(loop, halves, RequestSpec("ann", toks(1, 20), 5))
    assert loop.step().plan.seated == [(0, "ann")]
    assert loop.step().plan.seated == [(0, "ann")]
    assert loop.step().plan.seated == []


def test_s08_nothing_rests_while_a_plan_is_in_flight():
    """An empty plan beside one in flight is no reason to sleep; and with nobody live and nothing to wait for, `rest`
    returns although it was given no timeout.

    Mutation: `Step.idle` does not look at the plans in flight; `rest` waits for ever.
    """
    loop, halves = engine()
    submit(loop, halves, RequestSpec("ann", toks(1, 20), 1))
    first = loop.step()
    assert first.in_flight == 1 and not first.idle and not first.done
    loop.rest()
    second = loop.step()
    assert second.plan.empty and not second.idle and second.ended[0].id == "ann"
    assert loop.step().idle
    loop.rest()
    assert loop.step().idle


def test_close_with_plans_in_flight():
    """Whoever is left is aborted, what is in flight is finished, and nothing is held.

    Mutation: `close` stops at the first empty plan.
    """
    loop, halves = engine()
    submit(loop, halves, RequestSpec("ann", toks(1, 20), 90), RequestSpec("bob", toks(2, 20), 90))
    for _ in range(5):
        loop.step()
    assert {end.id for end in loop.close(0)} == {"ann", "bob"}
    assert not halves.content.flights and not loop.scheduler._book.flights
    assert loop.scheduler._book.live == 0


def test_an_executor_in_one_half_runs_plan_by_plan():
    """With `overlap=1` and an executor that has only `execute`, every plan knows its tokens.

    Mutation: `EngineLoop` plans ahead of an executor that cannot.
    """
    scheduler = Scheduler(SchedulerConfig(16, [full(100)], 256, 8, overlap=1))
    content = ContentExecutor(scheduler)
    loop = EngineLoop(scheduler, content)
    spec = RequestSpec("ann", toks(1, 20), 5)
    content.submit(spec)
    loop.submit([spec])
    while loop.live:
        step = loop.step()
        assert not (step.plan.batch.tokens < 0).any() and not step.in_flight
    loop.tell([Abort("nobody")])


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_assertion_comes_out(overlap):
    """Then nothing can be trusted any more.

    Mutation: `_finish` takes an AssertionError for a failed step.
    """
    loop, halves = engine(overlap)
    submit(loop, halves, RequestSpec("ann", toks(1, 20), 5))

    def broken(block: bool = True):
        raise AssertionError("a wrong page")

    halves.finish = broken
    with pytest.raises(AssertionError, match="a wrong page"):
        for _ in range(3):
            loop.step()


@pytest.mark.parametrize("overlap", [0, 1])
def test_ctrl_c_in_a_step_is_a_failed_step_for_whoever_goes_on(overlap):
    """Interrupted while a plan begins: that comes out, and afterwards the loop goes on, or closes, as after any step
    that failed.

    Mutation: `EngineLoop._begin` leaves the flight as if it ran.
    """
    for goes_on in (True, False):
        loop, halves = engine(overlap)
        spec = RequestSpec("ann", toks(1, 40), 6)
        submit(loop, halves, spec)
        loop.step()
        begin = halves.begin

        def interrupted(plan, halves=halves, begin=begin):
            halves.begin = begin
            halves.bad_begin.add(plan.step)
            try:
                begin(plan)
            except RuntimeError:
                raise KeyboardInterrupt from None

        halves.begin = interrupted
        with pytest.raises(KeyboardInterrupt):
            loop.step()
        if goes_on:
            run(loop)
            assert not loop.live
        else:
            assert [end.reason for end in loop.close()] == ["abort"]
