"""Requests through the simulator, under an engine's own scheduler: how long they would take by measured step times."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from sapwood.engine.loop import EngineLoop
from sapwood.scheduler import Event, Plan, RequestSpec, Scheduler, SchedulerConfig
from sapwood.sim import MeasuredCost, SimulatedExecutor

from .run import Prompt


class _Ahead:
    """A simulated executor in two halves, so that the next plan can be made while one runs."""

    def __init__(self, executor: SimulatedExecutor) -> None:
        self._executor = executor
        self._events: deque[Sequence[Event]] = deque()

    def begin(self, plan: Plan) -> None:
        self._events.append(self._executor.execute(plan))

    def finish(self, block: bool = True) -> Sequence[Event]:
        return self._events.popleft()


class Predicted:
    """An engine that only spends time. What it has computed stays in its cache."""

    def __init__(self, cost: MeasuredCost, config: SchedulerConfig) -> None:
        """`config`: that of the engine, which has no host memory and no store."""
        self._executor = SimulatedExecutor(cost, page_size=config.page_size)
        self._loop = EngineLoop(Scheduler(config), _Ahead(self._executor))
        self._numbers = itertools.count()

    @property
    def seconds(self) -> float:
        """Of all runs so far."""
        return self._executor.seconds

    def run(self, prompts: Sequence[Prompt], outputs: Sequence[int]) -> list[list[int]]:
        """Answers of so many tokens, to all prompts at once. They are random."""
        specs = [
            RequestSpec(str(next(self._numbers)), prompt, output)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        answers: dict[str, list[int]] = {spec.id: [] for spec in specs}
        self._loop.submit(specs)
        while self._loop.live:
            for id, token in self._loop.step().tokens().items():
                answers[id].append(token)
        return list(answers.values())


def predicted(cost: MeasuredCost, config: SchedulerConfig, inputs: Sequence[int], outputs: Sequence[int]) -> float:
    """Seconds that requests of these sizes take, all at once, with nothing cached."""
    engine, random = Predicted(cost, config), np.random.default_rng(0)
    prompts: list[Any] = [random.integers(0, 1 << 30, length, np.int32) for length in inputs]
    engine.run(prompts, outputs)
    return engine.seconds
