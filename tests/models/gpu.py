"""Models of the zoo as they are on a GPU: in bf16, and wide enough for it to be what it is in large ones; and what
transformers itself computes with them. For tests/gpu and gpu_kernels.py. (SAPWOOD_DEVICE=cpu: on a CPU, to try it.)"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import transformers

from sapwood.engine.executor.rows import Greedy, PlanRows
from sapwood.engine.models.recurrent import settle_time_steps

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
_FACTORS = {"short": (1.0, 2.5), "long": (2.0, 8.0)}
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
    if "vocab_size_per_layer_input" in given:
        given["vocab_size_per_layer_input"] = given["vocab_size"]
    if name == "phi3":
        given |= {"original_max_position_embeddings": 1024, "max_position_embeddings": 4096}
        rope, half = given["rope_parameters"], given["hidden_size"] // given["num_attention_heads"] // 2
        rotary = {f"{kind}_factor": np.linspace(*ends, half).tolist() for kind, ends in _FACTORS.items()}
        given["rope_parameters"] = {**rope, **rotary, "original_max_position_embeddings": 1024}
    if name == "gemma3-vision":
        given["text_config"] = {**given["text_config"], **WIDER, "head_dim": 64, "sliding_window": 128}
    if name == "qwen3-next":
        given["mlp_only_layers"] = list(range(given["num_hidden_layers"]))  # where experts are chosen, bf16 drowns it
    if name == "zamba2":
        given |= {"n_mamba_heads": 16, "mamba_headdim": 64, "attention_hidden_size": 1024, "attention_head_dim": 128}
    if name == "bamba":
        given |= {"mamba_n_heads": 16, "mamba_d_head": 64}
    if name == "gemma2":
        given["attn_logit_softcapping"] = 20.0
    if name == "deepseek-v3":
        given |= {"num_key_value_heads": 8, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
        given |= {"v_head_dim": 64, "q_lora_rank": 192}
    return getattr(transformers, kind)(**given)


def wide(name: str, seed: int = 1) -> Any:
    """The same model each time."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(wide_config(name), dtype=torch.float32)
    settle_time_steps(model)  # one rule for prompts and answers (docs/models.md)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.9 / parameter.shape[-1] ** 0.5)
    return model.to(torch.bfloat16).to(CARD).eval()


class Every(Greedy):
    """The logits of every position of a prompt are wanted."""

    def __init__(self, prompts: dict[str, np.ndarray]) -> None:
        self.prompts = prompts

    def rows(self, plan: Any) -> PlanRows:
        batch = plan.batch
        found = {}
        for row, id in enumerate(batch.ids):
            start, n = int(batch.starts[row]), int(batch.lengths[row])
            if start < len(self.prompts[id]):
                found[row] = self.prompts[id][start : start + n]
        return PlanRows(plan, found)


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
