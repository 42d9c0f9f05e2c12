"""Models of the zoo as they are on a GPU: in bf16, and wide enough for it to be what it is in large ones; and what
transformers itself computes with them. For tests/gpu and gpu_kernels.py. (SAPWOOD_DEVICE=cpu: on a CPU, to try it.)"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import transformers

from sapwood.engine.steps import Greedy

from .zoo import CONFIGS

PAGE = 16
LENGTHS = (700, 333, 64)
WIDER: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
CARD = os.environ.get("SAPWOOD_DEVICE", "cuda")


def wide_config(name: str) -> Any:
    kind, fields = CONFIGS[name]
    base = {} if kind.startswith("Mamba") else {**WIDER, "num_hidden_layers": 6}
    given = {**base, "pad_token_id": 0, "tie_word_embeddings": False, **fields}
    if kind.startswith("Mamba"):
        given |= {"vocab_size": 4096, "num_hidden_layers": 4}
    if "head_dim" in given and not kind.startswith("Mamba"):
        given["head_dim"] = 64
    if "sliding_window" in given:
        given["sliding_window"] = 128
    if name == "qwen3-next":
        given["mlp_only_layers"] = list(range(given["num_hidden_layers"]))  # where experts are chosen, bf16 drowns it
    if name == "bamba":
        given |= {"mamba_n_heads": 16, "mamba_d_head": 64}
    if name == "gemma2":
        given["attn_logit_softcapping"] = 20.0
    if name == "deepseek-v3":
        given |= {"num_key_value_heads": 8, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
        given |= {"v_head_dim": 64, "q_lora_rank": 192}
    return getattr(transformers, kind)(**given)


def wide(name: str) -> Any:
    """The same model each time."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(wide_config(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.9 / parameter.shape[-1] ** 0.5)
    return model.to(torch.bfloat16).to(CARD).eval()


class Every(Greedy):
    """The logits of every position of a prompt are wanted."""

    def __init__(self, prompts: dict[str, np.ndarray]) -> None:
        self.prompts = prompts

    def scored(self, plan: Any) -> dict[int, Any]:
        batch = plan.batch
        found = {}
        for row, id in enumerate(batch.ids):
            start, n = int(batch.starts[row]), int(batch.lengths[row])
            if start < len(self.prompts[id]):
                found[row] = self.prompts[id][start : start + n]
        return found


@torch.inference_mode()
def theirs(model: Any, prompts: list[np.ndarray]) -> list[torch.Tensor]:
    model.set_attn_implementation("eager")  # which has soft-caps and sinks in every version
    return [model(torch.from_numpy(tokens).long()[None].to(CARD)).logits[0].float() for tokens in prompts]


@torch.inference_mode()
def stepped(model: Any, prompts: list[np.ndarray]) -> list[torch.Tensor]:
    """Token by token, as `generate` goes on. Mamba 1 is run so here, since its scan does not go on from a state."""
    found = []
    for tokens in prompts:
        cache, logits = transformers.DynamicCache(config=model.config), []
        for token in torch.from_numpy(tokens).long().to(CARD):
            out = model(token[None, None], cache_params=cache, use_cache=True)
            logits.append(out.logits[0].float())
        found.append(torch.cat(logits))
    return found


def far(one: list[torch.Tensor], other: list[torch.Tensor]) -> tuple[float, float]:
    """How far apart, relative, and how often the likeliest token is the same."""
    a, b = torch.cat(one), torch.cat(other)
    return float((a - b).norm() / b.norm()), float((a.argmax(-1) == b.argmax(-1)).float().mean())
