"""Reading PEFT LoRA folders: adapter_config.json and adapter_model.safetensors. What they say, and whether this engine
can do it; whether it fits a model is for adapters.py.

What is not supported is refused by name, never left out: an adapter that runs without a part of itself answers wrongly.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

Number = TypeVar("Number", int, float)
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

_REFUSED = {
    "use_dora": "DoRA is not supported",
    "lora_bias": "a bias beside lora_B is not supported",
    "modules_to_save": "modules trained as a whole are not supported",
    "trainable_token_indices": "trained embeddings are not supported",
    "target_parameters": "LoRA on bare parameters, such as fused MoE experts, is not supported",
    "layer_replication": "replicated layers are not supported",
    "fan_in_fan_out": "it is for Conv1D weights, and only nn.Linear is supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "BD-LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "kasa_config": "KaSA is not supported",
    "megatron_config": "Megatron layers are not supported",
}
# These matter while training only, or say where an adapter comes from.
_IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config"),
    *("lora_dropout", "ensure_weight_tying", "qalora_group_size", "megatron_core", "velora_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
# Other ways to begin, PiSSA for one, take what the adapter begins with out of the base weights.
_KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


class AdapterError(ValueError):
    """An adapter that cannot be served, and why."""


class Pair(NamedTuple):
    """What a file has for one module: lora_A [rank, in] and lora_B [out, rank]."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class LoraConfig:
    """The fields of adapter_config.json that decide what an adapter computes. Names are matched as PEFT does it."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: str | list[str] | None = None  # None: the modules that have tensors
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def addresses(self, linear: str) -> bool:
        """Whether an nn.Linear inside the model is one that the adapter says it changes."""
        if self.exclude_modules and _named(self.exclude_modules, linear):
            return False
        targets = self.target_modules
        if isinstance(targets, str):
            return targets.lower() == "all-linear" or _named(targets, linear)
        return targets is None or linear in targets or (_named(targets, linear) and self._in_layers(linear))

    def _in_layers(self, module: str) -> bool:
        layers = self.layers_to_transform
        if layers is None or layers == []:
            return True
        lists = self.layers_pattern or r"[^.]*"
        for pattern in [lists] if isinstance(lists, str) else lists:
            if found := re.match(rf"(?:.*?\.)?(?:{pattern})\.(?P<idx>\d+)\.", module):
                return int(found["idx"]) in ([layers] if isinstance(layers, int) else layers)
        return False


class LoraFile(NamedTuple):
    """An adapter as it lies in its folder. `digest` is of its content: equal for what computes the same, whatever it is
    called and wherever it lies."""

    path: Path
    config: LoraConfig
    pairs: dict[str, Pair]  # by module, sorted
    digest: bytes


def read(folder: str | Path) -> LoraFile:
    """Read an adapter once: what is checked, digested and served are the same bytes, also if the files change."""
    folder = Path(folder)
    try:
        if not folder.is_dir():
            raise AdapterError("no such folder")
        config = _config(_bytes(folder, CONFIG))
        pairs = _pairs(_bytes(folder, TENSORS))
        return LoraFile(folder, config, pairs, _digest(config, pairs))
    except AdapterError as error:
        raise AdapterError(f"adapter {folder}: {error}") from error.__cause__


def _named(names: str | list[str], module: str) -> bool:
    """By a regular expression of the whole name, or by a list of names and ends of names."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that matches the end of a name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _bytes(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        if name == TENSORS and (pickles := sorted(path.name for path in folder.glob("adapter_model.*"))):
            raise AdapterError(f"{pickles[0]} is refused, since reading a pickle can run code: save {name}") from None
        raise AdapterError(f"{name} is missing") from None
    except OSError as error:
        raise AdapterError(f"{name} cannot be read: {error}") from error


def _config(data: bytes) -> LoraConfig:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise AdapterError(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise AdapterError(f"{CONFIG} must be an object, got {found!r:.60}")
    fields = dict(found)

    def refuse(name: str, why: str) -> AdapterError:
        return AdapterError(f"{CONFIG}: {name}={found.get(name)!r:.80}: {why}")

    if fields.pop("peft_type", None) != "LORA":
        raise refuse("peft_type", "only LORA is supported")
    if fields.pop("task_type", None) not in ("CAUSAL_LM", None):
        raise refuse("task_type", "only CAUSAL_LM is supported")
    if fields.pop("bias", "none") != "none":
        raise refuse("bias", 'trained biases are not supported, only "none"')
    if fields.pop("init_lora_weights", None) not in _KEEPS_BASE:
        raise refuse("init_lora_weights", "it changes the base weights: convert the adapter to plain LoRA")
    for name, why in _REFUSED.items():
        if fields.pop(name, None):
            raise refuse(name, why)

    wanted = {name: fields.pop(name) for name in LoraConfig.__dataclass_fields__ if fields.get(name) is not None}
    for name, value in wanted.items():
        if not (right := _FIELDS[name]).holds(value):
            raise refuse(name, f"must be {right.words}")
    for name, value in fields.items():
        if name not in _IGNORED and (value is True or (value and isinstance(value, dict | list))):
            raise refuse(name, "this field is not known here, and may change what the adapter computes")
    return LoraConfig(**wanted)


class _Field(NamedTuple):
    words: str
    holds: Any


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _are_names(value: Any) -> bool:
    return _is_pattern(value) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _are_patterns(value: Any) -> bool:
    return all(map(_is_pattern, value if isinstance(value, list) else [value]))


def _are_layers(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(layer) is int for layer in value))


def _by_name(holds: Any) -> Any:
    return lambda value: isinstance(value, dict) and all(_is_pattern(key) and holds(one) for key, one in value.items())


_FIELDS = {
    "r": _Field("a whole number above 0", _is_rank),
    "lora_alpha": _Field("a number", _is_alpha),
    "use_rslora": _Field("true or false", lambda value: isinstance(value, bool)),
    "rank_pattern": _Field("ranks by regular expression", _by_name(_is_rank)),
    "alpha_pattern": _Field("numbers by regular expression", _by_name(_is_alpha)),
    "target_modules": _Field("a regular expression or a list of names", _are_names),
    "exclude_modules": _Field("a regular expression or a list of names", _are_names),
    "layers_to_transform": _Field("a layer or a list of layers", _are_layers),
    "layers_pattern": _Field("a regular expression or a list of them", _are_patterns),
}


def _pairs(data: bytes) -> dict[str, Pair]:
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise AdapterError(f"{TENSORS} is broken: {error}") from error
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        if found is None:
            raise AdapterError(f"{TENSORS}: {key}: only lora_A and lora_B of nn.Linear modules are supported")
        module, half = found.groups()
        if tensor.ndim != 2 or not tensor.numel() or not tensor.is_floating_point():
            raise AdapterError(f"{TENSORS}: {key} must be a matrix of floats, got {_shown(tensor)}")
        halves.setdefault(module, {})[half] = tensor
    if not halves:
        raise AdapterError(f"{TENSORS} has no tensors")
    for module, half in halves.items():
        if len(half) != 2:
            raise AdapterError(f"{TENSORS}: {module} has lora_{min(half)} alone")
    return {module: Pair(half["A"], half["B"]) for module, half in halves.items()}


def _digest(config: LoraConfig, pairs: dict[str, Pair]) -> bytes:
    """sha256 over all modules in order: name, scale, types and shapes, framed by length, then the bytes of A and B."""
    digest = hashlib.sha256(b"sapwood lora 1")
    for module, pair in pairs.items():
        head = json.dumps([module, config.scale(module).hex(), _shown(pair.a), _shown(pair.b)]).encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        for tensor in pair:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
