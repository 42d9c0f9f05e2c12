"""`sapwood bench calibrate`: step times of a model on this machine, as `sapwood.sim.MeasuredCost` reads them.

    prefill   one row of n tokens from the start, and behind a context: what a token costs, and what attention reads
    decode    n rows of one token, with short contexts and with long ones

Then a small workload is run, and predicted by the simulator from these figures: how far they can be trusted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from sapwood.engine.flags import EngineConfig
from sapwood.scheduler import RequestSpec, Scheduler, SchedulerConfig
from sapwood.sim import MeasuredCost, SimulatedExecutor

from .arguments import number
from .run import Prompts, opened, progress, run
from .tables import Report

if TYPE_CHECKING:
    from sapwood.engine.core import Engine

HELP = "step times, with which sapwood.sim predicts how long a workload takes on this machine"
_FORMS = {"step": "{:,.2f} ms", "tokens/s": "{:,.1f}"}
_SHORT = 32  # tokens of a context that hardly counts
_STEPS = 8  # of a decode that is measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number(parser, "--repeats", 3, 1, 1000, "measurements of each size, of which the median is taken")
    number(parser, "--context-len", 1024, 2 * _SHORT, 1 << 20, "tokens of a long context")
    number(parser, "--num-prompts", 16, 1, 10**4, "requests of the workload that is predicted")


def measure(asked: argparse.Namespace, config: EngineConfig) -> Report:
    with opened(replace(config, host_cache="0", store=None, enable_prefix_caching=True)) as engine:
        meter = Meter(engine, asked.repeats, asked.context_len)
        cost = meter.cost()
        inputs, outputs = workload(asked.num_prompts, engine.max_model_len)
        took = median(meter.workload(inputs, outputs) for _ in range(asked.repeats))
        guess = predicted(cost, engine.scheduler.config, inputs, outputs)
    notes = [
        f"a workload of {len(inputs)} requests, {sum(inputs)} prompt tokens and {sum(outputs)} generated: "
        f"predicted {guess:.2f} s, took {took:.2f} s ({guess / took - 1:+.1%})"
    ]
    return Report("calibrate", _FORMS, meter.figures, notes, {"cost": asdict(cost), "predicted": guess, "took": took})


class Meter:
    """Times steps of an engine. `figures` is what was measured, a row for each size."""

    def __init__(self, engine: Engine, repeats: int, context: int) -> None:
        self.engine = engine
        self.repeats = repeats
        self.figures: dict[str, dict[str, float]] = {}
        page, longest = engine.config.page_size, engine.max_model_len - _STEPS - 2
        room = min((group.device_pages for group in engine.sized.groups if group.family == "full"), default=1 << 20)
        self.context = min(context, longest // 2, room * page // 4) // page * page
        most_rows = min(engine.sized.max_num_seqs, room * page // (_SHORT + _STEPS + page))
        most_tokens = min(engine.scheduler.config.max_batch_tokens, longest, room * page // 2)
        if self.context < 2 * _SHORT or most_rows < 1:
            raise ValueError(
                f"max_model_len and device_cache must hold contexts of {2 * _SHORT} tokens several times, got "
                f"{engine.max_model_len} tokens of {room * page}"
            )
        self.rows = _sizes(1, most_rows, 2)
        self.tokens = _sizes(2, most_tokens, 4)
        self.few = max(n for n in self.rows if n == 1 or n <= min(8, room * page // (2 * self.context)))
        self._prompts = Prompts(engine, engine.config.seed)

    def cost(self) -> MeasuredCost:
        """Measure all sizes."""
        chunk = self.tokens[-1] if len(self.tokens) < 3 else self.tokens[-3]
        total = len(self.tokens) + len(self.rows) + 2
        with progress(total, "calibrate", self.engine.config.progress) as self._bar:
            self._warm()
            prefill = {n: self.prefill(n, 0) for n in self.tokens}
            behind = self.prefill(chunk, self.context)
            decode = {n: self.decode(n, _SHORT) for n in self.rows}
            long = self.decode(self.few, self.context)
        pair = max(0.0, (behind - prefill[chunk]) / (chunk * self.context))
        key = max(0.0, (long - decode[self.few]) / (self.few * (self.context - _SHORT)))
        page = self.engine.config.page_size
        return MeasuredCost(
            _rising({n: seconds - pair * n * n / 2 for n, seconds in prefill.items()}),
            _rising({n: seconds - key * n * (_SHORT + _STEPS / 2) for n, seconds in decode.items()}),
            key,
            pair,
            sum(group.page_bytes for group in self.engine.sized.groups if group.family == "full") / page,
        )

    def prefill(self, tokens: int, context: int) -> float:
        """Seconds of a step that computes so many tokens of one prompt, behind a context that is cached."""
        begin = self._prompts.one(context)
        if context:
            run(self.engine, [np.concatenate([begin, self._prompts.one(1)])], [1])
        taken = []
        for _ in range(self.repeats):
            done = run(self.engine, [np.concatenate([begin, self._prompts.one(tokens)])], [1])
            more = done.requests[0].cached - context
            if not 0 <= more < self.engine.config.page_size:  # a few tokens may be those of another prompt by chance
                raise RuntimeError(f"{context + more} tokens were cached where {context} should have been")
            taken.append(done.first)
        return self._note(f"prefill, {tokens} tokens", context, tokens, median(taken))

    def decode(self, rows: int, context: int) -> float:
        """Seconds of a step with so many rows of one token. Their prompts are cached, so that all begin together."""
        prompts = self._prompts.some(rows, context)
        run(self.engine, prompts, [1] * rows)
        taken = []
        for _ in range(self.repeats):
            done = run(self.engine, prompts, [_STEPS + 1] * rows)
            taken.append(done.requests[-1].per_token)
        return self._note(f"decode, {rows} rows", context, rows, median(taken))

    def workload(self, inputs: Sequence[int], outputs: Sequence[int]) -> float:
        """Seconds that requests of these sizes take, all at once, with nothing cached."""
        return run(self.engine, [self._prompts.one(length) for length in inputs], outputs).seconds

    def _warm(self) -> None:
        run(self.engine, self._prompts.some(2, min(_SHORT, self.tokens[-1])), [2, 2])

    def _note(self, what: str, context: int, tokens: int, seconds: float) -> float:
        self.figures[f"{what}, context {context}"] = {"step": 1000 * seconds, "tokens/s": tokens / seconds}
        self._bar.update(1)
        return seconds


def workload(requests: int, longest: int) -> tuple[list[int], list[int]]:
    """Lengths of prompts and answers, the same ones each time."""
    random = np.random.default_rng(0)
    inputs = random.integers(8, min(256, longest // 2), requests, endpoint=True)
    outputs = random.integers(4, min(48, longest // 2), requests, endpoint=True)
    return inputs.tolist(), outputs.tolist()


def predicted(cost: MeasuredCost, config: SchedulerConfig, inputs: Sequence[int], outputs: Sequence[int]) -> float:
    """Seconds that requests of these sizes take by the simulator, under the same scheduler."""
    scheduler, executor = Scheduler(config), SimulatedExecutor(cost)
    prompts = np.random.default_rng(0)
    scheduler.submit(
        [
            RequestSpec(str(at), prompts.integers(0, 1 << 30, length, np.int32), output)
            for at, (length, output) in enumerate(zip(inputs, outputs, strict=True))
        ]
    )
    while not (plan := scheduler.next_plan()).empty:
        scheduler.advance(executor.execute(plan))
    return executor.seconds


def _sizes(low: int, high: int, factor: int) -> list[int]:
    sizes = [low]
    while sizes[-1] * factor < high:
        sizes.append(sizes[-1] * factor)
    return sizes if high <= low else [*sizes, high]


def _rising(seconds: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """More never costs less, and nothing costs nothing: what says so is noise."""
    values = np.maximum.accumulate(np.maximum(list(seconds.values()), 1e-9))
    return tuple(zip(seconds, values.tolist(), strict=True))
