"""Models that are measured, and adapters for them: their shapes with random weights, in folders."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sapwood import LLM
from sapwood.bench.run import free_memory

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 0,
}

# In float32, so that tokens can be promised: the company a row is in moves its logits by less than they differ.
EXACT = {
    **QWEN3_8B,
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "dtype": "float32",
}


@contextmanager
def opened(config: dict[str, Any], **flags: Any) -> Iterator[LLM]:
    """An LLM of this shape."""
    free_memory()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        with LLM(folder, load_format="dummy", progress=False, **flags) as llm:
            yield llm


def write_adapter(folder: str, config: dict[str, Any], rank: int, seed: int, std: float = 0.02) -> None:
    """An adapter on all projections of a model of this shape, as PEFT writes them."""
    heads, kv_heads = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {f"self_attn.{name}_proj": (n, hidden) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    shapes |= {"self_attn.o_proj": (hidden, heads), "mlp.down_proj": (hidden, inner)}
    shapes |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    generator, dtype, tensors = torch.Generator().manual_seed(seed), getattr(torch, config["dtype"]), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                tensors[f"{module}.{part}.weight"] = (std * torch.randn(shape, generator=generator)).to(dtype)
    Path(folder).mkdir(parents=True)
    save_file(tensors, f"{folder}/adapter_model.safetensors")
    targets = [name.split(".")[-1] for name in shapes]
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    Path(folder, "adapter_config.json").write_text(json.dumps(fields))
