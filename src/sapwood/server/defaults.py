"""Defaults of sampling that come with a model: its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sapwood.engine.loading.model_files import read_json
from sapwood.engine.params import SamplingParams

MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(folder: str, asked: str) -> dict[str, Any]:
    """`asked`: "auto" for the model's own, "none" (or "vllm"), or another folder."""
    if asked in ("none", "vllm"):
        return {}
    path = Path(folder if asked == "auto" else asked) / "generation_config.json"
    if not path.is_file():
        return {}
    read = read_json(path)
    found = {name: read[name] for name in MODEL_DEFAULTS if isinstance(read.get(name), int | float)}
    if read.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    SamplingParams(**found)  # a ValueError names what is wrong
    return found
