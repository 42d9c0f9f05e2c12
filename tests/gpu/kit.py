"""What the commands for a GPU share: lines with the time, prompts, requests that all decode, figures and their bars."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from sapwood import LLM, SamplingParams
from sapwood.bench.run import free_memory

from .shapes import QWEN3_8B

_BEGAN = time.perf_counter()


def say(text: str) -> None:
    sys.stdout.write(f"[{time.perf_counter() - _BEGAN:5.0f} s] {text}\n")
    sys.stdout.flush()


WRONG: list[str] = []  # what must not be


def must(holds: bool, what: str) -> None:
    if not holds:
        WRONG.append(what)
        say(f"WRONG {what}")


@contextmanager
def one_of_many(what: str) -> Iterator[None]:
    """An error is wrong, and the others are looked at all the same."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        must(False, f"{what}: {type(error).__name__}: {error}")
    free_memory()


class Line(NamedTuple):
    """A figure, and what it should be at the most; or, with `at_least`, at the least. Without a bar it is only told."""

    work: str
    bar: float | None
    figure: float
    form: str = "{:.2f}"  # how both are written
    at_least: bool = False
    more: str = ""

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        return "ok" if (self.figure >= self.bar if self.at_least else self.figure <= self.bar) else "MISSED"

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        bar = "" if self.bar is None else self.form.format(self.bar)
        return self.work, bar, self.form.format(self.figure), self.verdict, self.more


class Prompts:
    """Random tokens, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def tokens(self, length: int) -> list[int]:
        return self._rng.integers(1, QWEN3_8B["vocab_size"] - 1, length).tolist()

    def some(self, count: int, length: int) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": self.tokens(length)} for _ in range(count)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], Any]) -> float:
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - begin


def median(run: Callable[[], float], times: int = 3) -> float:
    return sorted(run() for _ in range(times))[times // 2]


def step_seconds(llm: LLM, steps: int) -> float:
    """What a step takes, in the mean."""
    return timed(lambda: [llm.engine.requests.step() for _ in range(steps)]) / steps


@contextmanager
def decoding(llm: LLM, prompts: list[Any], params: SamplingParams, loras: Any = None) -> Iterator[list[Any]]:
    """These requests, all of which decode. In the end they are aborted."""
    jobs = llm._submit(prompts, params, loras)
    while not all(len(job.samples[0].token_ids) > 2 for job in jobs):
        llm.engine.requests.step()
    ended = [job.id for job in jobs if job.over]
    assert not ended, f"{len(ended)} were over before all had begun: ask for longer answers"
    yield jobs
    for job in jobs:
        llm.engine.requests.abort(job.samples)
    rest(llm)


def rest(llm: LLM) -> None:
    """Until nobody is here and nothing is under way."""
    engine = llm.engine
    while engine.requests.samples or engine.loop._flights or engine.loop.tiers.busy:
        engine.requests.step()
