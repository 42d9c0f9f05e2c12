"""Models for tests: tiny ones of transformers in folders, and GGUF files written by hand."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

torch.set_num_threads(1)
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def tiny(kind: str = "llama", **changes: Any) -> Any:
    """A model with random weights of some size, also in its norms: one that is mixed up says something else."""
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, tensor in model.named_parameters():
            torch.nn.init.normal_(tensor, float("norm" in name), 0.3)
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None] * 7 % 96).logits


# ---- GGUF

_TYPES = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        items = [_value(item) for item in value]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    number, form = _TYPES[type(value)]
    return struct.pack(f"<I{form}", number, value)


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, tuple[int, Any]] | None = None,
) -> Path:
    """`kinds`: for tensors that are raw bytes, their type and the shape they stand for (columns first)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, values in tensors.items():
        kind, shape = (kinds or {}).get(name, (0, values.shape[::-1]))
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += values.tobytes() + b"\0" * (-values.nbytes % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def byte_level_vocabulary(size: int = 96) -> dict[str, Any]:
    """Tokens of a byte-level tokenizer: a special one, a space, two merged pairs, and ASCII from "!" on."""
    tokens = ["<end>", "Ġ", "ab", "12", *map(chr, range(33, 33 + size - 4))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (size - 1),
        "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
