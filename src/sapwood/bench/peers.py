"""transformers' own generation on the same model and prompts: continuous batching, and one static batch.

What is timed is generating, as with our engine: not loading the model, nor setting up memory, which takes transformers'
continuous batching longer than a small workload itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sapwood.engine.flags import EngineConfig

from .run import Prompt, free_memory, progress

PEERS = ("transformers",)
_PAGE = 256  # tokens, of transformers' continuous batching


class PeerResult(NamedTuple):
    """What an engine has done: the time it took, and the tokens it has generated."""

    seconds: float
    tokens: int


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
    pages = 4 * len(prompts) * -(-(len(prompts[0]) + output) // _PAGE)
    memory = ContinuousBatchingConfig(page_size=_PAGE, num_blocks=pages + 16, max_batch_tokens=max_batch_tokens)

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
