"""The cost model's arithmetic, and the executor that spends its time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sapwood.cache import CacheGroup
from sapwood.scheduler import RequestSpec, Scheduler, SchedulerConfig
from sapwood.sim.cost import CostModel, SimulatedExecutor

MODEL = CostModel(overhead=0)


def rows(*parts: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) by row, as arrays."""
    return np.array([start for start, _ in parts], np.int32), np.array([length for _, length in parts], np.int32)


def scheduler(**options) -> Scheduler:
    options = {"max_batch_tokens": 256, "max_batch_size": 16, **options}
    return Scheduler(SchedulerConfig(16, [CacheGroup("full", "full", 200)], **options))


def spec(name: str, tokens, max_tokens: int = 8) -> RequestSpec:
    return RequestSpec(name, list(tokens), max_tokens)


def run(it: Scheduler, executor: SimulatedExecutor) -> dict[str, list[int]]:
    """Everything to its end. What each request generated."""
    generated: dict[str, list[int]] = {}
    for _ in range(10_000):
        plan = it.next_plan()
        if plan.empty:
            return generated
        (done,) = executor.execute(plan)
        sampling = [name for name, samples in zip(plan.batch.ids, plan.batch.samples, strict=True) if samples]
        for name, token in zip(sampling, done.tokens.tolist(), strict=True):
            generated.setdefault(name, []).append(token)
        it.advance([done])
    raise AssertionError("does not end")


def test_the_limits_of_an_h200() -> None:
    """DESIGN 8: a decode step of 64 rows is not under about 5 ms, prefill not above about 48K tokens a second.

    Mutation: the weights are counted in bytes where they are parameters.
    """
    decode = MODEL.seconds(*rows(*[(500, 1)] * 64))
    assert 0.0045 < decode < 0.0055
    prefill = 8192 / MODEL.seconds(*rows((0, 8192)))
    assert 47_000 < prefill < 49_000


def test_a_longer_context_costs_bandwidth() -> None:
    """Each row reads the K/V of all it has seen.

    Mutation: `starts` is left out of the memory traffic.
    """
    short, long = MODEL.seconds(*rows((0, 1))), MODEL.seconds(*rows((100_000, 1)))
    assert long - short == pytest.approx(100_000 * 147e3 / 4.2e12)


def test_sums_do_not_overflow_int32() -> None:
    assert MODEL.seconds(*rows(*[(2**30, 1)] * 8)) == pytest.approx((16.4e9 + 8 * 2**30 * 147e3) / 4.2e12, rel=1e-3)


def test_an_empty_batch_costs_nothing_and_every_other_the_overhead() -> None:
    model = CostModel(overhead=1.0)
    assert model.seconds(*rows()) == 0
    assert 1.0 < model.seconds(*rows((0, 1))) < 1.1


@pytest.mark.parametrize("field", ["flops", "bandwidth", "weights_bytes", "bytes_per_weight"])
def test_a_machine_that_cannot_be_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        CostModel(**{field: 0})
    with pytest.raises(ValueError, match="overhead"):
        CostModel(overhead=-1)
    with pytest.raises(ValueError, match="vocabulary"):
        SimulatedExecutor(vocabulary=0)


def test_it_counts_what_it_was_given() -> None:
    """Steps, tokens of prompts and of decodes, and the time of all steps together."""
    it, executor = scheduler(), SimulatedExecutor(MODEL)
    it.submit([spec("a", range(100), 5)])
    run(it, executor)
    assert (executor.steps, executor.prefill_tokens, executor.decode_tokens) == (5, 100, 4)
    steps = [rows((0, 100)), *(rows((100 + i, 1)) for i in range(4))]
    assert executor.seconds == pytest.approx(sum(MODEL.seconds(*step) for step in steps))


def test_a_cost_model_is_told_what_rows_share() -> None:
    """Of the whole pages that decode rows read: three rows behind one prompt read it three times, and it is there once.

    Mutation: `_shared` counts pages beyond what a row has; rows of several tokens count.
    """
    told: list[float] = []

    class Told(CostModel):
        def seconds(self, starts: np.ndarray, lengths: np.ndarray, shared: float = 0.0) -> float:
            told.append(shared)
            return 1.0

    it, executor = scheduler(), SimulatedExecutor(Told(), page_size=16)
    it.submit([spec("first", range(64), 1)])
    run(it, executor)
    assert told == [0.0]
    it.submit([spec(f"r{n}", [*range(64), *[500 + n] * 20], 3) for n in range(3)])
    run(it, executor)
    assert told[1:] == [0.0, pytest.approx(1 - (4 + 3) / 15), pytest.approx(1 - (4 + 3) / 15)]


def test_nothing_to_do_takes_no_time() -> None:
    executor = SimulatedExecutor()
    assert executor.execute(scheduler().next_plan()) == []
    assert executor.seconds == executor.steps == 0


def test_what_is_generated_does_not_depend_on_the_schedule() -> None:
    """The same prompts give the same tokens together, one by one, and in small chunks; another seed gives others.

    Mutation: tokens are drawn by slot or by step.
    """
    prompts = {f"r{i}": [i, *range(30 + i)] for i in range(8)}
    together, tight, alone = scheduler(), scheduler(max_batch_tokens=7, max_batch_size=2), {}
    for it in (together, tight):
        it.submit([spec(name, tokens) for name, tokens in prompts.items()])
    expected = run(together, SimulatedExecutor())
    for name, tokens in prompts.items():
        it = scheduler()
        it.submit([spec(name, tokens)])
        alone |= run(it, SimulatedExecutor())
    assert run(tight, SimulatedExecutor()) == expected == alone
    assert all(len(tokens) == 8 for tokens in expected.values())
    it = scheduler()
    it.submit([spec(name, tokens) for name, tokens in prompts.items()])
    assert run(it, SimulatedExecutor(seed=1)) != expected


def test_a_token_not_known_yet_is_the_one_this_slot_sampled_last() -> None:
    """A plan made while the one before it runs says -1 for the token that one samples."""

    def plan(step: int, start: int, token: int) -> SimpleNamespace:
        ints = {name: np.array([value], np.int32) for name, value in (("slots", 3), ("starts", start), ("lengths", 1))}
        batch = SimpleNamespace(ids=["a"], tokens=np.array([token], np.int32), samples=np.array([True]), **ints)
        return SimpleNamespace(empty=False, step=step, batch=batch)

    known, unknown = SimulatedExecutor(), SimulatedExecutor()
    first = int(known.execute(plan(1, 4, 77))[0].tokens[0])
    unknown.execute(plan(1, 4, 77))
    assert known.execute(plan(2, 5, first))[0].tokens == unknown.execute(plan(2, 5, -1))[0].tokens
