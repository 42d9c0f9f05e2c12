"""`sapwood bench throughput`: how much is done when all requests are there at once; also by transformers itself."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from sapwood.engine.flags import EngineConfig

from .arguments import MOST_TOKENS, number
from .peers import PEERS, PeerResult, measure_peers
from .run import Prompt, Prompts, TimedRun, opened, progress, run
from .tables import BenchReport

HELP = "requests and tokens a second, all requests at once"
_FORMS = {
    "requests/s": "{:,.2f}",
    "output tokens/s": "{:,.1f}",
    "total tokens/s": "{:,.1f}",
    "cached": "{:.1%}",
    "sapwood does": "{:.2f} x",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number(parser, "--num-prompts", 32, 1, 10**6, "requests")
    number(parser, "--input-len", 128, 1, MOST_TOKENS, "tokens of a prompt")
    number(parser, "--output-len", 64, 1, MOST_TOKENS, "tokens of an answer")
    number(parser, "--shared-prefix-len", 0, 0, MOST_TOKENS, "so many tokens of each prompt are the same in all")
    parser.add_argument(
        "--peer", choices=PEERS, help="measure another engine on the same prompts too, and show ratios beside"
    )


def measure(asked: argparse.Namespace, config: EngineConfig) -> BenchReport:
    if asked.shared_prefix_len >= asked.input_len:
        raise ValueError(
            f"--shared-prefix-len must be less than --input-len, which is {asked.input_len}, "
            f"got {asked.shared_prefix_len}"
        )
    ours = _ours(asked, config)
    done = {"sapwood": PeerResult(ours.run.seconds, sum(len(request.times) for request in ours.run.requests))}
    forms = dict(_FORMS)
    if asked.peer is not None:
        done |= measure_peers(ours.files, config, ours.warm, ours.prompts, asked.output_len, ours.max_batch_tokens)
    else:
        del forms["sapwood does"]
    figures = {name: _figures(each, ours.prompts) for name, each in done.items()}
    cached = sum(request.cached for request in ours.run.requests)
    figures["sapwood"]["cached"] = cached / (asked.num_prompts * asked.input_len)
    for name in [*done][1:]:
        figures[name]["sapwood does"] = figures["sapwood"]["output tokens/s"] / figures[name]["output tokens/s"]
    return BenchReport("throughput", forms, figures)


class _Ours(NamedTuple):
    """What our engine has done, and what another needs to do the same."""

    run: TimedRun
    warm: Prompt
    prompts: list[Prompt]
    files: Any  # of the model
    max_batch_tokens: int


def _ours(asked: argparse.Namespace, config: EngineConfig) -> _Ours:
    """In a function of its own, so that nothing of the engine is left when another begins."""
    with opened(config) as engine, progress(asked.num_prompts, "throughput", config.progress) as bar:
        random = Prompts(engine, config.seed)
        warm, prompts = random.one(asked.input_len), _prompts(random, asked)
        run(engine, [warm], [min(2, asked.output_len)])
        done = run(engine, prompts, [asked.output_len] * asked.num_prompts, bar=bar)
        return _Ours(done, warm, prompts, engine.files, engine.scheduler.config.max_batch_tokens)


def _prompts(random: Prompts, asked: argparse.Namespace) -> list[Prompt]:
    prefix = random.one(asked.shared_prefix_len)
    rest = random.some(asked.num_prompts, asked.input_len - asked.shared_prefix_len)
    return [np.concatenate([prefix, each]) for each in rest]


def _figures(done: PeerResult, prompts: list[Prompt]) -> dict[str, float]:
    read = sum(len(prompt) for prompt in prompts)
    return {
        "requests/s": len(prompts) / done.seconds,
        "output tokens/s": done.tokens / done.seconds,
        "total tokens/s": (read + done.tokens) / done.seconds,
    }
