"""`sapwood bench calibrate`: step times of a model on this machine, as `sapwood.sim.MeasuredCost` reads them.

    prefill   one row of n tokens, the same in many short rows, and behind a context: what a token costs, and what
              attention reads
    decode    n rows of one token, with short contexts and with long ones
    workload  some requests, which the simulator then predicts from the rest: how far it can be trusted

All of it is measured in turn, several times over: whoever disturbs the machine disturbs one round of everything, and
not all rounds of one thing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sapwood.engine.flags import EngineConfig
from sapwood.sim import MeasuredCost

from .arguments import number
from .predict import predicted
from .run import Prompts, opened, progress, run
from .tables import BenchReport

if TYPE_CHECKING:
    from sapwood.engine.engine import Engine

HELP = "step times, with which sapwood.sim predicts how long a workload takes on this machine"
_FORMS = {"step": "{:,.2f} ms", "tokens/s": "{:,.1f}"}
_SHORT_TOKENS = 32  # tokens of a context that hardly counts
_STEPS = 8  # of a decode that is measured
_PARTS = 16  # rows that the longest prefill is divided into
_CPU_ROWS, _GPU_ROWS = 8, 64  # with long contexts; on a GPU few do not show what reading costs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number(parser, "--repeats", 3, 1, 1000, "rounds of all measurements, of which medians are taken")
    number(parser, "--context-len", 1024, 2 * _SHORT_TOKENS, 1 << 20, "tokens of a long context")
    number(parser, "--num-prompts", 16, 1, 10**4, "requests of the workload that is predicted")


def measure(asked: argparse.Namespace, config: EngineConfig) -> BenchReport:
    with opened(replace(config, host_cache="0", store=None, enable_prefix_caching=True)) as engine:
        meter = StepTimer(engine, asked.context_len)
        inputs, outputs = workload(asked.num_prompts, engine.requests.max_model_len)
        with progress(asked.repeats, "calibrate", config.progress) as bar:
            meter.warm()
            rounds = []
            for _ in range(asked.repeats):
                meter.round()
                rounds.append(meter.workload(inputs, outputs))
                bar.update(1)
        cost, took = meter.cost(), median(rounds)
        guess = predicted(cost, engine.scheduler.config, inputs, outputs)
    notes = [
        f"a workload of {len(inputs)} requests, {sum(inputs)} prompt tokens and {sum(outputs)} generated: "
        f"predicted {guess:.2f} s, took {took:.2f} s ({guess / took - 1:+.1%})"
    ]
    more = {"cost": asdict(cost), "predicted": guess, "took": took, "rounds": rounds}
    return BenchReport("calibrate", _FORMS, meter.figures(), notes, more)


class StepKind(NamedTuple):
    """A kind of step."""

    kind: str  # "prefill" or "decode"
    rows: int
    tokens: int  # of a row
    context: int
    shared: bool = False  # the context, by all rows

    def __str__(self) -> str:
        rows = f"{self.rows} row{'s' * (self.rows > 1)}"
        return f"{self.kind}, {rows} of {self.tokens}, {'shared ' * self.shared}context {self.context}"


class StepTimer:
    """Times steps of an engine, size by size."""

    def __init__(self, engine: Engine, context: int) -> None:
        self.engine = engine
        page, longest = engine.config.page_size, engine.requests.max_model_len - _STEPS - 2
        pages = min((group.device_pages for group in engine.sized.groups if group.family == "full"), default=1 << 20)
        room = pages * page
        most_rows = min(engine.sized.max_num_seqs, room // (_SHORT_TOKENS + _STEPS + page))
        most_tokens = min(engine.scheduler.config.max_batch_tokens, longest, room // 2)
        gpu, graphs = engine.device.type == "cuda", getattr(engine.executor, "graphs", None)
        self.padded: tuple[int, ...] = () if graphs is None else tuple(graphs.sizes)
        decodes = _sizes(1, max(1, most_rows), 2, self.padded)
        # All rows of the smallest step that has many have it.
        context = min(context, longest // 2, room // (2 * max(2, decodes[0]))) // page * page
        if context < 2 * _SHORT_TOKENS or most_rows < 1 or most_tokens < 2:
            raise ValueError(
                f"max_model_len and device_cache must hold contexts of {2 * _SHORT_TOKENS} tokens several times, and "
                f"steps two tokens; the context is {engine.requests.max_model_len}, and the cache holds {room}"
            )
        self.prefills = [StepKind("prefill", 1, n, 0) for n in _sizes(2, most_tokens, 2 if gpu else 4, self.padded)]
        self.decodes = [StepKind("decode", n, 1, _SHORT_TOKENS) for n in decodes]
        # What attention reads shows in the difference to one of those above.
        whole = self.prefills[-1]
        parts = min(_PARTS, most_rows, max(1, whole.tokens // 2))
        self.apart = StepKind("prefill", parts, whole.tokens // parts, 0)
        self.near = self.apart if gpu else self.prefills[len(self.prefills) // 2]
        self.behind = self.near._replace(context=context)
        rows = min(_GPU_ROWS if gpu else _CPU_ROWS, room // (2 * context))
        self.few = max(size for size in self.decodes if size.rows == self.decodes[0].rows or size.rows <= rows)
        self.long = self.few._replace(context=context)
        self.same = self.long._replace(shared=True)
        self.taken: dict[StepKind, list[float]] = {}
        self._prompts = Prompts(engine, engine.config.seed)

    def warm(self) -> None:
        run(self.engine, self._prompts.some(2, 2), [2, 2])

    def round(self) -> None:
        """Every size once."""
        for size in (*self.prefills, self.apart, self.behind):
            self.taken.setdefault(size, []).append(self.prefill(size))
        for size in (*self.decodes, self.long, self.same):
            self.taken.setdefault(size, []).append(self.decode(size))

    def cost(self) -> MeasuredCost:
        """What was measured, without what attention reads; and that."""
        page, groups = self.engine.config.page_size, self.engine.sized.groups
        seconds = {size: median(taken) for size, taken in self.taken.items()}
        whole, apart = self.prefills[-1], self.apart
        fewer = (whole.tokens**2 - apart.rows * apart.tokens**2) / 2  # pairs
        own = max(0.0, (seconds[whole] - seconds[apart]) / fewer) if apart.rows > 1 else 0.0
        tokens = self.near.rows * self.near.tokens
        pair = max(0.0, (seconds[self.behind] - seconds[self.near]) / (tokens * self.behind.context))
        more = self.few.rows * (self.long.context - _SHORT_TOKENS)
        key = max(0.0, (seconds[self.long] - seconds[self.few]) / more)
        repeated = (self.few.rows - 1) * (self.long.context - page)
        spared = max(0.0, (seconds[self.long] - seconds[self.same]) / repeated) if repeated else 0.0
        read = _SHORT_TOKENS + _STEPS / 2
        prefills = {self._filled(size.tokens): seconds[size] - own * size.tokens**2 / 2 for size in self.prefills}
        decodes = {self._filled(size.rows): seconds[size] - key * size.rows * read for size in self.decodes}
        return MeasuredCost(
            _rising(prefills),
            _rising(decodes),
            key,
            pair,
            own,
            sum(group.page_bytes for group in groups if group.family == "full") / page,
            self.padded,
            max(0.0, key - spared),
        )

    def _filled(self, n: int) -> int:
        """The tokens that a step of `n` has with its padding."""
        return next((size for size in self.padded if n <= size), n)

    def figures(self) -> dict[str, dict[str, float]]:
        """A row for each size."""
        steps = {size: median(taken) for size, taken in self.taken.items()}
        return {
            str(size): {"step": 1000 * step, "tokens/s": size.rows * size.tokens / step} for size, step in steps.items()
        }

    def prefill(self, size: StepKind) -> float:
        """Seconds of a step that computes so many tokens of each prompt, behind a context that is cached."""
        begin = self._prompts.one(size.context)
        if size.context:
            run(self.engine, [np.concatenate([begin, self._prompts.one(1)])], [1])
        prompts = [np.concatenate([begin, rest]) for rest in self._prompts.some(size.rows, size.tokens)]
        done = run(self.engine, prompts, [1] * size.rows)
        for request in done.requests:
            more = request.cached - size.context
            if not 0 <= more < self.engine.config.page_size:  # a few tokens may be those of another prompt by chance
                raise RuntimeError(f"{request.cached} tokens were cached where {size.context} should have been")
        return max(request.times[0] for request in done.requests)

    def decode(self, size: StepKind) -> float:
        """Seconds of a step with so many rows of one token. Their prompts are cached, so that all begin together."""
        begin = self._prompts.one(size.context - self.engine.config.page_size if size.shared else 0)
        prompts = [np.concatenate([begin, rest]) for rest in self._prompts.some(size.rows, size.context - len(begin))]
        run(self.engine, prompts, [1] * size.rows)
        done = run(self.engine, prompts, [_STEPS + 1] * size.rows)
        return done.requests[-1].per_token

    def workload(self, inputs: Sequence[int], outputs: Sequence[int]) -> float:
        """Seconds that requests of these sizes take, all at once, with nothing cached."""
        return run(self.engine, [self._prompts.one(length) for length in inputs], outputs).seconds


def workload(requests: int, longest: int) -> tuple[list[int], list[int]]:
    """Lengths of prompts and answers, the same ones each time."""
    random = np.random.default_rng(0)
    inputs = random.integers(8, min(256, longest // 2), requests, endpoint=True)
    outputs = random.integers(4, min(48, longest // 2), requests, endpoint=True)
    return inputs.tolist(), outputs.tolist()


def _sizes(low: int, high: int, factor: int, padded: Sequence[int]) -> list[int]:
    """Numbers from `low` to `high`: those that steps are filled up to, and some just beyond them and beyond twice as
    many, where steps of another kind begin; elsewhere each `factor` times the one before."""
    sizes = [size for size in padded if low <= size <= high]
    if sizes and sizes[-1] == padded[-1]:
        sizes += [size for size in (sizes[-1] * n // 8 for n in (9, 16, 18)) if size < high]
    sizes = sizes or [low]
    while sizes[-1] * factor < high:
        sizes.append(sizes[-1] * factor)
    return sizes if high <= sizes[-1] else [*sizes, high]


def _rising(seconds: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """More never costs less, and nothing costs nothing: what says so is noise."""
    values = np.maximum.accumulate(np.maximum(list(seconds.values()), 1e-9))
    return tuple(zip(seconds, values.tolist(), strict=True))
