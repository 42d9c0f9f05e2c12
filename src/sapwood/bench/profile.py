"""`sapwood bench --profile`: where a step's time goes.

    decode    rows of one token each
    mixed     the same beside a new prompt, whose beginning is cached
    prefill   prompts alone, as many tokens as a step takes

How long steps take is measured without the profiler, which then looks at a few more of them. `host` is what is left of
a step when the device has done its work. Where the next step is planned while one runs, Python works beside the device:
`python` is how long it does in a step, beside the device or not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sapwood.engine.flags import EngineConfig

from .arguments import MOST_TOKENS, number
from .parts import PARTS, Ran, replaced, traced
from .run import Prompt, Prompts, exactly, interrupts, opened, progress, run
from .tables import Report

if TYPE_CHECKING:
    from sapwood.engine.core import Engine
    from sapwood.engine.samples import Sample

HELP = "where a step's time goes: matmuls, attention, sampling, rest, host; also as `sapwood bench --profile`"
_FORMS = dict.fromkeys((*PARTS, "host", "total", "python"), "{:,.2f}")
_TOP_FORMS = {"calls": "{:,.1f}", "ms": "{:,.3f}", "%": "{:.1f}"}
_TOP = 10
_ROWS, _ROWS_CPU = 64, 8
_WARM, _LEAST, _TRACED = 3, 3, 8  # steps that are not counted; that are at least; that the profiler sees at most
_ENOUGH = 10.0  # seconds that the steps of a kind are measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    rows = f"decode rows (default {_ROWS} on a GPU, {_ROWS_CPU} on a CPU)"
    number(parser, "--batch-size", None, 1, 65536, rows)
    number(parser, "--input-len", 576, 2, MOST_TOKENS, "tokens of a prompt: decode rows begin behind them")
    number(parser, "--tail-len", 64, 2, MOST_TOKENS, "tokens of the new prompt in a mixed step that are not cached")
    number(parser, "--num-iters", 64, 1, 10**4, "steps of each kind that are timed; fewer where they take long")


class Rows(NamedTuple):
    """A step's size."""

    decodes: int
    prompts: int
    tokens: int  # of the prompts
    cached: int  # of the last prompt


class Steps(NamedTuple):
    """What a step of a kind is, and its seconds."""

    rows: Rows
    wall: float
    python: float
    ran: dict[str, Ran]


def measure(asked: argparse.Namespace, config: EngineConfig) -> Report:
    config = replace(config, host_cache="0", store=None, enable_prefix_caching=True)
    with opened(config) as engine, progress(9, "profile", config.progress) as bar, interrupts() as stop_if_asked:
        meter = Meter(engine, asked, stop_if_asked)
        found = {}
        for kind, begin in {"decode": meter.decode, "mixed": meter.mixed, "prefill": meter.prefill}.items():
            bar.set_description(kind)
            with meter.running():
                found[kind] = meter.measured(kind, begin, lambda: bar.update(1))
    figures: dict[str, dict[str, float]] = {}
    for kind, steps in found.items():
        spent = split(steps)
        figures[f"{kind}, ms"] = {part: 1e3 * seconds for part, seconds in spent.items()}
        figures[f"{kind}, %"] = {part: 100 * seconds / steps.wall for part, seconds in spent.items()}
    tops = [Report(f"{kind}: what takes longest", _TOP_FORMS, longest(steps)) for kind, steps in found.items()]
    return Report("profile", _FORMS, figures, _notes(found, asked.input_len), then=tops)


class Meter:
    """Steps of one kind at a time, timed and seen by the profiler."""

    def __init__(self, engine: Engine, asked: argparse.Namespace, stop_if_asked: Callable[[], None]) -> None:
        self.engine, self._asked, self._stop_if_asked = engine, asked, stop_if_asked
        self._prompts = Prompts(engine, engine.config.seed)
        self._seen: list[Rows] = []  # of every step since the kind began
        self._submitted: list[Sample] = []
        most, ahead = engine.sized.max_num_seqs, 1 + engine.scheduler.config.overlap
        self._answer = 2 * _WARM + asked.num_iters + _TRACED  # tokens, one a step
        self._rows = asked.batch_size or min(most, _ROWS if engine.device.type == "cuda" else _ROWS_CPU)
        self._beside = min(self._rows, most - ahead)  # the prompt of the last step may still have its slot
        if self._rows > most or self._beside < 1:
            raise ValueError(f"max_num_seqs must be {max(self._rows, 1 + ahead)} or more for these steps, got {most}")
        if asked.input_len + max(self._answer, asked.tail_len + 1) > engine.max_model_len:
            raise ValueError(
                f"--input-len with {self._answer} generated tokens, or with --tail-len, must fit into the context, "
                f"which is {engine.max_model_len} tokens, got {asked.input_len}"
            )

    # ---- kinds of steps: each begins what it needs, and gives what is to be done before every step

    def decode(self) -> Callable[[], object]:
        self._decoding(self._rows)
        return lambda: None

    def mixed(self) -> Callable[[], object]:
        page = self.engine.config.page_size
        begin = self._prompts.one(self._asked.input_len // page * page)
        run(self.engine, [np.concatenate([begin, self._prompts.one(1)])], [1])
        self._decoding(self._beside)
        return lambda: self._submit(np.concatenate([begin, self._prompts.one(self._asked.tail_len)]), 1)

    def prefill(self) -> Callable[[], object]:
        count = self.engine.scheduler.config.max_batch_tokens // self._asked.input_len + 1

        def feed() -> None:
            for prompt in self._prompts.some(count, self._asked.input_len):
                self._submit(prompt, 1)

        feed()
        return feed

    def _decoding(self, rows: int) -> None:
        samples = [self._submit(prompt, self._answer) for prompt in self._prompts.some(rows, self._asked.input_len)]
        while not all(sample.token_ids for sample in samples):
            self._step()

    # ---- steps

    def measured(self, kind: str, begin: Callable[[], Callable[[], object]], tick: Callable[[], object]) -> Steps:
        """Steps of a kind; `tick` is called when they have begun, when they are timed, and when they are traced."""
        feed = begin()
        for _ in range(_WARM):
            feed()
            self._step()
        tick()
        first = len(self._seen)
        times: list[float] = []
        worked: list[float] = []
        until = time.perf_counter() + _ENOUGH
        while len(times) < self._asked.num_iters and (len(times) < _LEAST or time.perf_counter() < until):
            now, waited = time.perf_counter(), self.engine.executor.waited
            feed()
            self._step()
            times.append(time.perf_counter() - now)
            worked.append(times[-1] - (self.engine.executor.waited - waited))
        tick()
        wall = median(times)
        count = max(1, min(_TRACED, int(_ENOUGH / 2 / wall)))
        with traced(self.engine) as ran:
            now = time.perf_counter()
            for _ in range(count):
                feed()
                self._step()
            spent = time.perf_counter() - now
        tick()
        if self.engine.device.type == "cuda":  # a kernel takes as long as it takes, whatever Python does meanwhile
            scale, python = min(1 / count, wall / sum(each.seconds for each in ran.values())), median(worked)
        else:  # steps that are profiled take longer: shares of those are shares of the others
            scale = wall / spent
            python = wall - scale * sum(each.seconds for each in ran.values())
        each = {name: Ran(ran.part, ran.calls / count, ran.seconds * scale) for name, ran in ran.items()}
        return Steps(self._alike(kind, self._seen[first:]), wall, python, each)

    def _alike(self, kind: str, seen: list[Rows]) -> Rows:
        """What a step of this kind was. An error if one was something else: then figures would not be what they say."""
        decodes = {"decode": self._rows, "mixed": self._beside, "prefill": 0}[kind]
        for rows in seen:
            if rows.decodes != decodes or bool(rows.prompts) != (kind != "decode"):
                raise RuntimeError(
                    f"a {kind} step had {rows.decodes} decode rows and {rows.prompts} prompts where {decodes} rows "
                    "should have been: give it more --device-cache, or ask for a smaller --batch-size or --tail-len"
                )
        return sorted(seen, key=lambda rows: rows.tokens)[len(seen) // 2]

    def _step(self) -> None:
        for sample in self.engine.step():
            if sample.finish_reason == "error":
                raise RuntimeError(f"a request failed: {sample.error}")
        self._stop_if_asked()
        self.engine.rest(1.0)

    def _submit(self, prompt: Prompt, tokens: int) -> Sample:
        (sample,) = self.engine.submit(f"p{len(self._submitted)}", prompt, exactly(tokens, None))
        self._submitted.append(sample)
        return sample

    @contextmanager
    def running(self) -> Iterator[None]:
        """Steps are noted as they begin; at the end nobody runs any more."""

        def noting(begin: Any) -> Any:
            def noted(plan: Any) -> None:
                batch = plan.batch
                prompts = len(batch.ids) - batch.decodes
                cached = int(batch.cached[-1]) if prompts else 0
                self._seen.append(Rows(batch.decodes, prompts, int(batch.lengths.sum()) - batch.decodes, cached))
                begin(plan)

            return noted

        self._seen.clear()
        with replaced(self.engine.executor, "begin", noting):
            yield
        self.engine.abort([sample for sample in self._submitted if sample.finish_reason is None])
        while self.engine.loop.step().in_flight:
            pass


# ---- figures


def split(steps: Steps) -> dict[str, float]:
    """Seconds of a step, by part. Together they are the total, but for `python`."""
    spent = {part: sum(ran.seconds for ran in steps.ran.values() if ran.part == part) for part in PARTS}
    return {**spent, "host": steps.wall - sum(spent.values()), "total": steps.wall, "python": steps.python}


def longest(steps: Steps) -> dict[str, dict[str, float]]:
    """What takes most of a step: kernels or operations."""
    top = sorted(steps.ran.items(), key=lambda each: -each[1].seconds)[:_TOP]
    return {
        name: {"calls": ran.calls, "ms": 1e3 * ran.seconds, "%": 100 * ran.seconds / steps.wall} for name, ran in top
    }


def _notes(found: Mapping[str, Steps], context: int) -> list[str]:
    mixed, prefill = found["mixed"].rows, found["prefill"].rows
    return [
        f"decode: {found['decode'].rows.decodes} rows, contexts from {context} on",
        f"mixed: {mixed.decodes} rows, and a prompt's last {mixed.tokens} tokens behind {mixed.cached} that are cached",
        f"prefill: {prefill.tokens} tokens of {prefill.prompts} prompts",
        "host: the device does nothing; python: how long Python works in a step, beside the device or not",
    ]
