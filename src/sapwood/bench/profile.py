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
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sapwood.engine.flags import EngineConfig

from .arguments import MOST_TOKENS, number
from .parts import PARTS, Ran, replaced, traced
from .run import Prompt, Prompts, exactly, interrupts, opened, progress, run
from .tables import BenchReport

if TYPE_CHECKING:
    from sapwood.engine.engine import Engine
    from sapwood.engine.samples import Sample

HELP = "where a step's time goes: matmuls, attention, sampling, rest, host; also as `sapwood bench --profile`"
KINDS = ("decode", "mixed", "prefill")
_FORMS = dict.fromkeys((*PARTS, "host", "total", "python"), "{:,.2f}")
_TOP_FORMS = {"calls": "{:,.1f}", "ms": "{:,.3f}", "%": "{:.1f}"}
_TOP_KERNELS = 10
_ROWS, _ROWS_CPU = 64, 8
_WARM, _LEAST, _TRACED = 3, 3, 8  # steps that are not counted; that are at least; that the profiler sees at most
_MAX_SECONDS = 10.0  # seconds that steps of a kind are timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    rows = f"decode rows (default {_ROWS} on a GPU, {_ROWS_CPU} on a CPU)"
    number(parser, "--batch-size", None, 1, 65536, rows)
    number(parser, "--input-len", 576, 2, MOST_TOKENS, "tokens of a prompt: decode rows begin behind them")
    number(parser, "--tail-len", 64, 2, MOST_TOKENS, "tokens of the new prompt in a mixed step that are not cached")
    number(parser, "--num-iters", 64, 1, 10**4, "steps of each kind that are timed; fewer where they take long")


def measure(asked: argparse.Namespace, config: EngineConfig) -> BenchReport:
    config = replace(config, host_cache="0", store=None, enable_prefix_caching=True)
    with opened(config) as engine, progress(3 * len(KINDS), "profile", config.progress) as bar:
        meter = ProfiledSteps(engine, asked)
        with interrupts() as meter.stop_if_asked, replaced(engine.executor, "begin", meter.noting):
            found = {kind: meter.measured(kind, bar) for kind in KINDS}
    figures: dict[str, dict[str, float]] = {}
    for kind, steps in found.items():
        spent = steps.split()
        figures[f"{kind}, ms"] = {part: 1e3 * seconds for part, seconds in spent.items()}
        figures[f"{kind}, %"] = {part: 100 * seconds / steps.wall for part, seconds in spent.items()}
    sizes = {kind: steps.size for kind, steps in found.items()}
    notes = [
        f"decode: {sizes['decode'].decodes} rows, contexts from {asked.input_len} on",
        f"mixed: {sizes['mixed'].decodes} rows and {sizes['mixed']}, behind {sizes['mixed'].cached} that are cached",
        f"prefill: {sizes['prefill']}",
        "host: the device does nothing; python: how long Python works in a step, beside the device or not",
    ]
    tops = [BenchReport(f"{kind}: what takes longest", _TOP_FORMS, steps.longest()) for kind, steps in found.items()]
    return BenchReport("profile", _FORMS, figures, notes, then=tops)


class ProfiledSize(NamedTuple):
    """Of a step."""

    decodes: int
    prompts: int
    tokens: int  # of the prompts, in this step
    cached: int  # of the last prompt

    def __str__(self) -> str:
        return f"{self.tokens} tokens of {self.prompts} prompt{'s' * (self.prompts > 1)}"


class StepProfile(NamedTuple):
    """What a step of a kind is, and its seconds."""

    size: ProfiledSize
    wall: float
    python: float
    ran: dict[str, Ran]

    def split(self) -> dict[str, float]:
        """By part. Together they are the total, but for `python`."""
        spent = {part: sum(ran.seconds for ran in self.ran.values() if ran.part == part) for part in PARTS}
        return {**spent, "host": self.wall - sum(spent.values()), "total": self.wall, "python": self.python}

    def longest(self) -> dict[str, dict[str, float]]:
        """The kernels or operations that take most of it."""
        top = sorted(self.ran.items(), key=lambda each: -each[1].seconds)[:_TOP_KERNELS]
        return {
            name: {"calls": ran.calls, "ms": 1e3 * ran.seconds, "%": 100 * ran.seconds / self.wall} for name, ran in top
        }


class ProfiledSteps:
    """Steps of one kind at a time, timed and seen by the profiler."""

    def __init__(self, engine: Engine, asked: argparse.Namespace) -> None:
        self.engine, self._asked, self._cuda = engine, asked, engine.device.type == "cuda"
        self.stop_if_asked: Callable[[], None] = lambda: None
        self._prompts = Prompts(engine, engine.config.seed)
        self._submitted: list[Sample] = []
        self._seen: list[ProfiledSize] = []
        most, ahead = engine.sized.max_num_seqs, 1 + engine.scheduler.config.overlap
        rows = asked.batch_size or min(most, _ROWS if self._cuda else _ROWS_CPU)
        # A prompt of the last step may still have its slot.
        self._decodes = {"decode": rows, "mixed": min(rows, most - ahead), "prefill": 0}
        if rows > most or most <= ahead:
            raise ValueError(f"max_num_seqs must be {max(rows, 1 + ahead)} or more for these steps, got {most}")
        limit = engine.scheduler.config.mixed_tokens or engine.scheduler.config.max_batch_tokens
        if rows + asked.tail_len > limit:
            raise ValueError(
                f"--batch-size with --tail-len must fit into a mixed step, which has {limit} tokens "
                f"(--max-mixed-tokens), got {rows} and {asked.tail_len}"
            )
        begun = rows + -(-rows * asked.input_len // (limit - rows))  # steps in which some decode and others do not yet
        self._answer = begun + 2 * _WARM + asked.num_iters + _TRACED  # tokens, one a step
        if asked.input_len + max(self._answer, asked.tail_len + 1) > engine.requests.max_model_len:
            raise ValueError(
                f"--input-len with {self._answer} generated tokens, or with --tail-len, must fit into the context, "
                f"which is {engine.requests.max_model_len} tokens, got {asked.input_len}"
            )

    def noting(self, begin: Callable[[Any], None]) -> Callable[[Any], None]:
        """Instead of what begins a plan: the sizes of steps are known."""

        def noted(plan: Any) -> None:
            batch = plan.batch
            prompts, tokens = len(batch.ids) - batch.decodes, int(batch.lengths.sum()) - batch.decodes
            self._seen.append(ProfiledSize(batch.decodes, prompts, tokens, int(batch.cached[-1]) if prompts else 0))
            begin(plan)

        return noted

    def measured(self, kind: str, bar: Any) -> StepProfile:
        """Steps of a kind; `bar` is told when they have begun, when they are timed and when they are traced."""
        bar.set_description(kind)
        feed = self._begun(kind)
        for _ in range(_WARM):
            self._step(feed)
        bar.update(1)
        self._seen.clear()
        times: list[float] = []
        worked: list[float] = []
        while len(times) < self._asked.num_iters and (len(times) < _LEAST or sum(times) < _MAX_SECONDS):
            now, waited = time.perf_counter(), self.engine.executor.waited
            self._step(feed)
            times.append(time.perf_counter() - now)
            worked.append(times[-1] - (self.engine.executor.waited - waited))
        bar.update(1)
        wall = median(times)
        count = max(1, min(_TRACED, int(_MAX_SECONDS / 2 / wall)))
        with traced(self.engine) as ran:
            now = time.perf_counter()
            for _ in range(count):
                self._step(feed)
            spent = time.perf_counter() - now
        bar.update(1)
        busy = sum(each.seconds for each in ran.values())
        # A kernel takes as long as it takes, whatever Python does meanwhile. On a CPU one thread does all, and takes
        # longer when it is profiled: shares of such steps are shares of the others.
        scale = min(1 / count, wall / busy) if self._cuda else wall / spent
        python = median(worked) if self._cuda else wall - scale * busy
        ran = {name: Ran(each.part, each.calls / count, scale * each.seconds) for name, each in ran.items()}
        size = self._alike(kind)
        self.engine.requests.abort([sample for sample in self._submitted if sample.finish_reason is None])
        while self.engine.loop.step().in_flight:
            pass
        return StepProfile(size, wall, python, ran)

    def _begun(self, kind: str) -> Callable[[], object]:
        """Begin what a kind of step needs. Returns what is to be done before every step."""
        page, length = self.engine.config.page_size, self._asked.input_len
        begin = self._prompts.one(length // page * page)
        if kind == "mixed":
            run(self.engine, [np.concatenate([begin, self._prompts.one(1)])], [1])
        decoding = [self._submit(each, self._answer) for each in self._prompts.some(self._decodes[kind], length)]
        while not all(sample.token_ids for sample in decoding):
            self._step(lambda: None)
        if kind == "decode":
            return lambda: None
        if kind == "mixed":
            return lambda: self._submit(np.concatenate([begin, self._prompts.one(self._asked.tail_len)]), 1)
        count = self.engine.scheduler.config.max_batch_tokens // length + 1
        return lambda: [self._submit(prompt, 1) for prompt in self._prompts.some(count, length)]

    def _submit(self, prompt: Prompt, tokens: int) -> Sample:
        (sample,) = self.engine.requests.submit(f"p{len(self._submitted)}", prompt, exactly(tokens, None))
        self._submitted.append(sample)
        return sample

    def _step(self, feed: Callable[[], object]) -> None:
        feed()
        for sample in self.engine.requests.step():
            if sample.finish_reason == "error":
                raise RuntimeError(f"a request failed: {sample.error}")
        self.stop_if_asked()
        self.engine.requests.rest(1.0)

    def _alike(self, kind: str) -> ProfiledSize:
        """What the steps were. An error if one was of another kind: then figures would not be what they say."""
        for size in self._seen:
            if size.decodes != self._decodes[kind] or bool(size.prompts) != (kind != "decode"):
                raise RuntimeError(
                    f"a {kind} step had {size.decodes} decode rows and {size.prompts} prompts, where "
                    f"{self._decodes[kind]} rows should have been: more --device-cache or a smaller --batch-size helps"
                )
        return sorted(self._seen, key=lambda size: size.tokens)[len(self._seen) // 2]
