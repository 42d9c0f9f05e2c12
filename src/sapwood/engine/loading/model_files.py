"""A model as it lies in a folder: config.json, safetensors, tokenizer. What cannot be served is refused here, by name.

Nothing is executed: no pickle, no code that comes with a model. No torch here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fingerprint import dummy_digest, weights_digest

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelError(ValueError):
    """A model that cannot be found, read or served; the message names the file and says what would be right."""


@dataclass(frozen=True)
class ModelFiles:
    """What there is of a model on disk. Without `weights`, they are seeded random numbers."""

    name: str  # as the user wrote it; for messages alone
    folder: Path
    config: Mapping[str, Any]  # config.json as it is
    weights: tuple[Path, ...]

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text: those of generation_config.json, or else of config.json."""
        path = self.folder / "generation_config.json"
        found = read_json(path).get("eos_token_id") if path.is_file() else None
        if found is None:
            found = (self.config.get("text_config") or {}).get("eos_token_id", self.config.get("eos_token_id"))
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise ModelError(f"{self.folder}: eos_token_id must be token ids, got {found!r:.60}")
        return tuple(ids)

    def digest(self, dtype: str, seed: int) -> bytes:
        """What these weights are when computed in `dtype`; `seed` counts where they are random."""
        if self.weights:
            return weights_digest(self.weights, self.config, dtype)
        return dummy_digest(seed, self.config, dtype)


def files_in(folder: Path, name: str) -> ModelFiles:
    """The model in a folder, checked as far as that goes without loading it."""
    config = config_in(folder)
    weights = weights_in(folder)
    return ModelFiles(name, folder, config, tuple(weights))


def config_in(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} holds an adapter (adapter_config.json): give the base model's folder as the model")
    if not path.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    config = read_json(path)
    for part in (config, config.get("text_config") or {}):
        quantised = part.get("quantization_config") or part.get("compression_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else None
            raise ModelError(
                f"{path}: quantised checkpoints are not served (quantization_config: {method or 'unnamed'})"
            )
    if "transformers_weights" in config:
        raise ModelError(f"{path}: transformers_weights is not supported; name the weights {WHOLE}")
    return config


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"{path}: not readable as JSON ({problem})") from None
    if not isinstance(read, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {read!r:.60}")
    return read


def tensors_in(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file; an error if the file is not one, or not all of one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as problem:
        raise ModelError(f"{path}: not a safetensors file, or only a part of one ({problem})") from None


def weights_in(folder: Path) -> list[Path]:
    """In the order in which transformers looks for them; what it would take instead is refused."""
    if by_rank := sorted(folder.glob("shard-*-model-*.safetensors")):
        raise ModelError(f"{by_rank[0]}: weights divided by rank are not loaded; name the weights {WHOLE}")
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = folder / INDEX
    if index.is_file():
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not named or not all(isinstance(shard, str) for shard in named.values()):
            raise ModelError(f"{index}: weight_map must say which file holds each tensor")
        shards = sorted(set(named.values()))
        for shard in shards:
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ModelError(f"{index}: {shard!r:.80} is not the name of a safetensors file beside it")
            if not (folder / shard).is_file():
                raise ModelError(f"{index} names {shard}, and {folder / shard} is not there")
        return [folder / shard for shard in shards]
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise ModelError(
            f"{folder / pickles[0]}: weights as pickle are not loaded, because loading them runs code of whoever made "
            f"them. Convert the model to safetensors ({WHOLE})"
        )
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    raise ModelError(f"{folder} has no weights: neither {WHOLE} nor {INDEX}" + (f", only {others}" if others else ""))


class StreamedTensor(NamedTuple):
    """A tensor to be written: what it is, and how to get its values when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], NDArray[Any]]


def write_safetensors(path: Path, tensors: Iterable[StreamedTensor]) -> None:
    """Writes tensors one after the other, so that no more than one of them is in memory."""
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + _size(tensor)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # values begin at a multiple of 64 bytes, less the 8 of the length
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            values = tensor.values()
            if values.nbytes != _size(tensor):
                raise ModelError(f"{path}: tensor {tensor.name} has {values.nbytes} bytes, not {_size(tensor)}")
            file.write(np.ascontiguousarray(values).data)


def _size(tensor: StreamedTensor) -> int:
    size = {"F32": 4, "F16": 2, "BF16": 2}[tensor.dtype]
    for length in tensor.shape:
        size *= length
    return size
