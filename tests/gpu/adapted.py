"""Figures of an engine with adapters: steps of rows that are spread over four, against rows of the base model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from sapwood import LoRARequest

from .kit import Line, Prompts, decoding, greedy, step_seconds
from .shapes import QWEN3_8B, opened, write_adapter

ADAPTERS, RANK, ROWS = 4, 16, 64
FLAGS: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": ROWS, "device_cache": "16GiB"}


def adapted() -> Iterator[Line]:
    prompts = Prompts(10)
    flags = {**FLAGS, "enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": RANK}
    with tempfile.TemporaryDirectory() as folder, opened(QWEN3_8B, **flags) as llm:
        loras = []
        for at in range(ADAPTERS):
            write_adapter(f"{folder}/{at}", QWEN3_8B, RANK, at)
            loras.append(LoRARequest(str(at), at + 1, f"{folder}/{at}"))
        found = {}
        for kind, each in (("base", None), ("adapted", [loras[row % ADAPTERS] for row in range(ROWS)])):
            with decoding(llm, prompts.some(ROWS, 512), greedy(200), each):
                step_seconds(llm, 40)
                found[kind] = step_seconds(llm, 64)
        graphs = getattr(llm.engine.executor, "adapted_graphs", None)
        captured = f"{len(graphs.sizes)} sizes captured" if graphs is not None else "no graphs"
    ratio = found["adapted"] / found["base"]
    more = f"{1e3 * found['adapted']:.2f} ms, base {1e3 * found['base']:.2f} ms; {captured}"
    yield Line(f"decode at {ROWS} with {ADAPTERS} adapters of rank {RANK}, of base", 1.5, ratio, more=more)
