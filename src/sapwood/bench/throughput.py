"""`sapwood bench throughput`: how much is done when all requests are there at once; also by transformers itself."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from sapwood.engine.flags import EngineConfig

from .arguments import MOST_TOKENS, number
from .peers import PEERS, Done, measure_peers
from .run import Prompt, Prompts, opened, progress, run
from .tables import Report

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


def measure(asked: argparse.Namespace, config: EngineConfig) -> Report:
    if asked.shared_prefix_len >= asked.input_len:
        raise ValueError(
            f"--shared-prefix-len must be less than --input-len, which is {asked.input_len}, "
            f"got {asked.shared_prefix_len}"
        )
    with opened(config) as engine, progress(asked.num_prompts, "throughput", config.progress) as bar:
        prompts = Prompts(engine, config.seed)
        warm, texts = prompts.one(asked.input_len), _prompts(prompts, asked)
        run(engine, [warm], [min(2, asked.output_len)])
        ours = run(engine, texts, [asked.output_len] * asked.num_prompts, bar=bar)
        files, budget = engine.files, engine.scheduler.config.max_batch_tokens
    cached = sum(request.cached for request in ours.requests)
    done = {"sapwood": Done(ours.seconds, sum(len(request.times) for request in ours.requests))}
    if asked.peer is not None:
        done |= measure_peers(files, config, warm, texts, asked.output_len, budget)
    figures = {name: _figures(each, texts) for name, each in done.items()}
    figures["sapwood"]["cached"] = cached / (asked.num_prompts * asked.input_len)
    for name, each in figures.items():
        if name != "sapwood":
            each["sapwood does"] = figures["sapwood"]["output tokens/s"] / each["output tokens/s"]
    forms = (
        _FORMS if asked.peer is not None else {name: form for name, form in _FORMS.items() if name != "sapwood does"}
    )
    return Report("throughput", forms, figures)


def _prompts(prompts: Prompts, asked: argparse.Namespace) -> list[Prompt]:
    prefix = prompts.one(asked.shared_prefix_len)
    rest = prompts.some(asked.num_prompts, asked.input_len - asked.shared_prefix_len)
    return [np.concatenate([prefix, each]) for each in rest]


def _figures(done: Done, prompts: list[Prompt]) -> dict[str, Any]:
    read = sum(len(prompt) for prompt in prompts)
    return {
        "requests/s": len(prompts) / done.seconds,
        "output tokens/s": done.tokens / done.seconds,
        "total tokens/s": (read + done.tokens) / done.seconds,
    }
