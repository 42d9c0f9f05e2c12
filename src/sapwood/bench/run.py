"""Requests through an engine, and when each of their tokens came."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.engine.flags import EngineConfig
from sapwood.engine.params import SamplingParams

if TYPE_CHECKING:
    from sapwood.engine.engine import Engine

Prompt = npt.NDArray[np.int32]


class Timed(NamedTuple):
    """One request."""

    times: list[float]  # of each token, in seconds after the requests were submitted
    cached: int  # tokens of its prompt

    @property
    def per_token(self) -> float:
        """Seconds between two tokens, in the mean. There are two or more."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


class TimedRun(NamedTuple):
    """Requests that were submitted together."""

    seconds: float
    requests: list[Timed]

    @property
    def first(self) -> float:
        """When the first token of the first request came."""
        return self.requests[0].times[0]


@contextmanager
def opened(config: EngineConfig) -> Iterator[Engine]:
    """An engine, for as long as it is needed."""
    from sapwood.engine.engine import Engine

    free_memory()
    engine = Engine(replace(config, skip_tokenizer_init=True))
    try:
        yield engine
    finally:
        engine.close()


def free_memory() -> None:
    """Give back what engines have taken that nobody has any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(
    engine: Engine, prompts: Sequence[Prompt], outputs: Sequence[int], salt: str | None = None, bar: Any = None
) -> TimedRun:
    """All prompts at once, each with exactly so many tokens for an answer. `salt` keeps them apart from other runs;
    `bar` is told of every request that ends."""
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(prompt) + output > engine.requests.max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and an answer of {output} must fit into the context, which is "
                f"{engine.requests.max_model_len} tokens"
            )
    begin = time.perf_counter()
    samples = [
        engine.requests.submit(str(at), prompt, exactly(output, salt))[0]
        for at, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    times: dict[str, list[float]] = {sample.id: [] for sample in samples}
    left = len(samples)
    with interrupts() as stop_if_asked:
        while left:
            changed = engine.requests.step()
            now = time.perf_counter() - begin
            for sample in changed:
                if sample.finish_reason == "error":
                    raise RuntimeError(f"a request failed: {sample.error}")
                if len(sample.token_ids) > len(times[sample.id]):
                    times[sample.id].append(now)
                if sample.finish_reason is not None:
                    left -= 1
                    if bar is not None:
                        bar.update(1)
            stop_if_asked()
            engine.requests.rest(1.0)
    seconds = time.perf_counter() - begin
    return TimedRun(seconds, [Timed(times[sample.id], sample.cache.cached) for sample in samples])


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits for the end of a step, where what this yields is called: a step that is torn apart cannot be
    finished, and the engine would complain of it. Pressed again, it does not wait."""
    pressed: list[int] = []

    def press(number: int, _: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    def stop_if_asked() -> None:
        if pressed:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    ours = getattr(before, "__module__", None) == "sapwood.cli"  # that ends the program at once, while it loads
    if not main or not (ours or before is signal.default_int_handler):  # others decide
        yield stop_if_asked
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield stop_if_asked
    finally:
        signal.signal(signal.SIGINT, before)


def exactly(tokens: int, salt: str | None) -> SamplingParams:
    """What asks for so many of the likeliest tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, cache_salt=salt)


class Prompts:
    """Prompts of random tokens that share nothing, the same ones for the same seed."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = engine.requests.vocabulary

    def some(self, count: int, length: int) -> list[Prompt]:
        return list(self._random.integers(0, self._vocabulary, (count, length), np.int32))

    def one(self, length: int) -> Prompt:
        return self.some(1, length)[0]


def settle(engine: Engine) -> None:
    """Until everything that is to be saved or backed up has been."""
    while True:
        engine.requests.step()
        store = engine.scheduler.stats()["store"]
        if not engine.loop.tiers.busy and not any(store[name] for name in ("looking", "fetching", "backing", "owed")):
            return
        engine.requests.rest(1.0)


def progress(total: int, what: str, wanted: bool) -> Any:
    """A bar for somebody who waits."""
    from tqdm.auto import tqdm

    return tqdm(total=total, desc=what, disable=not wanted, dynamic_ncols=True, leave=False)
