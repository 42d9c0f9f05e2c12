"""transformers' own generation on the same model and prompts: continuous batching, and one static batch."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from sapwood.engine.flags import EngineConfig

from .run import Prompt, progress

PEERS = ("transformers",)


class Done(NamedTuple):
    """What an engine has done: the time it took, and the tokens it has generated."""

    seconds: float
    tokens: int


def measure_peers(
    files: Any, config: EngineConfig, warm: Prompt, prompts: list[Prompt], output: int
) -> dict[str, Done]:
    """`generate_batch` and `generate` of transformers, each after a first call that is not counted."""
    import torch

    from sapwood.engine.weights import load_model

    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    done = {}
    with progress(2, "transformers", config.progress) as bar:
        for name, generate in (("generate_batch", _continuous), ("generate", _static)):
            model = load_model(files, dtype=config.dtype, device=device, seed=config.seed)
            generate(model, [warm], min(2, output))
            begin = time.perf_counter()
            tokens = generate(model, prompts, output)
            done[name] = Done(time.perf_counter() - begin, tokens)
            bar.update(1)
            if tokens != output * len(prompts):
                raise RuntimeError(f"{name} has generated {tokens} tokens, not {len(prompts)} times {output}")
    return done


def _asked(output: int) -> Any:
    import transformers

    config: Any = transformers.GenerationConfig  # not typed
    return config(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)


def _continuous(model: Any, prompts: list[Prompt], output: int) -> int:
    results = model.generate_batch([prompt.tolist() for prompt in prompts], generation_config=_asked(output))
    return sum(len(result.generated_tokens) for result in results.values())


def _static(model: Any, prompts: list[Prompt], output: int) -> int:
    import numpy as np
    import torch

    ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(model.device)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=_asked(output))
    return int(whole.shape[0] * (whole.shape[1] - ids.shape[1]))
