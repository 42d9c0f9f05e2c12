"""`sapwood bench latency`: how long requests of one size take, some at a time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from sapwood.engine.flags import EngineConfig

from .arguments import MOST_TOKENS, number
from .run import Prompts, Timed, opened, progress, run
from .tables import BenchReport

HELP = "time of whole requests, to their first token and between tokens"
_FORMS = dict.fromkeys(("median", "mean", "p99"), "{:,.1f} ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number(parser, "--input-len", 32, 1, MOST_TOKENS, "tokens of a prompt")
    number(parser, "--output-len", 128, 1, MOST_TOKENS, "tokens of an answer")
    number(parser, "--batch-size", 8, 1, 65536, "requests at a time")
    number(parser, "--num-iters-warmup", 2, 0, 10**6, "batches that are not counted")
    number(parser, "--num-iters", 10, 1, 10**6, "batches that are")


def measure(asked: argparse.Namespace, config: EngineConfig) -> BenchReport:
    """Every batch has new prompts, so that nothing is cached."""
    requests: list[Timed] = []
    warm = asked.num_iters_warmup
    with opened(config) as engine, progress(warm + asked.num_iters, "latency", config.progress) as bar:
        prompts = Prompts(engine, config.seed)
        for turn in range(warm + asked.num_iters):
            batch = prompts.some(asked.batch_size, asked.input_len)
            done = run(engine, batch, [asked.output_len] * asked.batch_size)
            requests += done.requests if turn >= warm else []
            bar.update(1)
    figures = {
        "whole request": _spread([request.times[-1] for request in requests]),
        "first token": _spread([request.times[0] for request in requests]),
    }
    if asked.output_len > 1:
        figures["per output token"] = _spread([request.per_token for request in requests])
    cached = sum(request.cached for request in requests)
    return BenchReport("latency", _FORMS, figures, [f"{len(requests)} requests, {cached} prompt tokens cached"])


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    values = 1000 * np.array(seconds)
    return {
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "p99": float(np.percentile(values, 99)),
    }
