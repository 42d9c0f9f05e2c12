"""Models that are measured: their shapes with random weights, in folders."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sapwood import LLM

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
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        with LLM(folder, load_format="dummy", progress=False, **flags) as llm:
            yield llm
