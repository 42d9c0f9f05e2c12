"""`sapwood bench throughput`: how much is done when all requests are there at once; also by transformers itself.

What is timed is generating, with either: not loading the model, nor setting up memory, which takes transformers'
continuous batching longer than a small workload itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sapwood.engine.flags import EngineConfig

from .arguments import MOST_TOKENS, number
from .run import Prompt, Prompts, TimedRun, free_memory, opened, progress, run
from .tables import BenchReport

PEERS = ("transformers",)
HELP = "requests and tokens a second, all requests at once"
_PEER_PAGE = 256  # tokens, of transformers' continuous batching
_FORMS = {
    "requests/s": "{:,.2f}",
    "output tokens/s": "{:,.1f}",
    "total tokens/s": "{:,.1f}",
    "cached": "{:.1%}",
    "sapwood does": "{:.2f} x",
}


class PeerResult(NamedTuple):
    """What an engine has done: the time it took, and the tokens it has generated."""

    seconds: float
    tokens: int


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


# ---- transformers' own generation: continuous batching, and one static batch


def measure_peers(
    files: Any, config: EngineConfig, warm: Prompt, prompts: list[Prompt], output: int, max_batch_tokens: int
) -> dict[str, PeerResult]:
    """Continuous batching (what `generate_batch` does once it is set up) and `generate`, each after a first request
    that is not counted."""
    import torch
    from transformers import utils

    from sapwood.engine.loading.weights import load_model

    logging: Any = utils.logging
    logging.set_verbosity_error()  # it warns of answers without an end, which are what we ask for
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    done = {}
    with progress(2, "transformers", config.progress) as bar:
        for name, ready in (("generate_batch", _continuous), ("generate", _static)):
            free_memory()
            model = load_model(files, dtype=config.dtype, device=device, seed=config.seed)
            with ready(model, prompts, output, max_batch_tokens) as generate:
                generate([warm])
                begin = time.perf_counter()
                tokens = generate(prompts)
                done[name] = PeerResult(time.perf_counter() - begin, tokens)
            del model, generate
            bar.update(1)
            if tokens != output * len(prompts):
                raise RuntimeError(f"{name} has generated {tokens} tokens, not {len(prompts)} times {output}")
    return done


@contextmanager
def _continuous(model: Any, prompts: list[Prompt], output: int, max_batch_tokens: int) -> Iterator[Any]:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # Memory for all prompts at once, and more. By itself it would take most of what the machine has.
    pages = 4 * len(prompts) * -(-(len(prompts[0]) + output) // _PEER_PAGE)
    memory = ContinuousBatchingConfig(page_size=_PEER_PAGE, num_blocks=pages + 16, max_batch_tokens=max_batch_tokens)

    def generate(some: list[Prompt]) -> int:
        manager.add_requests([prompt.tolist() for prompt in some], max_new_tokens=output)
        tokens, left = 0, len(some)
        while left:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching has stopped")
            if result is not None and result.is_finished():
                left -= 1
                tokens += len(result.generated_tokens)
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching: {result.error}")
        return tokens

    with model.continuous_batching_context_manager(
        generation_config=_asked(output), continuous_batching_config=memory
    ) as manager:
        yield generate


@contextmanager
def _static(model: Any, prompts: list[Prompt], output: int, max_batch_tokens: int) -> Iterator[Any]:
    import torch

    def generate(some: list[Prompt]) -> int:
        ids = torch.from_numpy(np.stack(some).astype(np.int64)).to(model.device)
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=_asked(output))
        return int(whole.shape[0] * (whole.shape[1] - ids.shape[1]))

    yield generate


def _asked(output: int) -> Any:
    import transformers

    config: Any = transformers.GenerationConfig  # not typed
    return config(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
