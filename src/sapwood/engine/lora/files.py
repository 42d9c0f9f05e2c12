"""What PEFT LoRA folders say, in adapter_config.json and in the header of adapter_model.safetensors; whether this
engine can do it, and whether it fits a model. They come from strangers: reader.py reads them in a process of its
own, so there is nothing but the standard library here.

What is not supported is refused by name, never left out: an adapter that runs without a part of itself answers wrongly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .name_patterns import Name, Pattern, PatternError

Number = TypeVar("Number", int, float)
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
MOST_CONFIG = 1 << 20  # bytes
MOST_HEADER = 16 << 20
MOST_TENSORS = 1 << 16

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
# Of safetensors: the name that torch has for each type, and its bytes.
FLOATS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
_OTHERS = {"BOOL": ("bool", 1)} | {
    f"{short}{8 * size}": (f"{long}{8 * size}", size)
    for short, long in (("I", "int"), ("U", "uint"))
    for size in (1, 2, 4, 8)
}


class AdapterError(ValueError):
    """An adapter that cannot be served, and why."""


# ---- adapter_config.json


@dataclass(frozen=True)
class LoraConfig:
    """The fields of adapter_config.json that decide what an adapter computes. Names are matched as PEFT does it."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: Sequence[tuple[Pattern, int]] = ()
    alpha_pattern: Sequence[tuple[Pattern, float]] = ()
    target_modules: str | Names | Pattern | None = None  # None: the modules that have tensors
    exclude_modules: Names | Pattern | None = None
    layers_to_transform: frozenset[int] = frozenset()  # none: all
    layers_pattern: Sequence[str] = ()  # what a list of layers is called; none: anything

    def rank(self, module: Name) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: Name, rank: int) -> float:
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def addresses(self, linear: Name) -> bool:
        """Whether an nn.Linear inside the model is one that the adapter says it changes."""
        targets = self.target_modules
        if self.exclude_modules is not None and self.exclude_modules.matches(linear):
            return False
        if targets is None or isinstance(targets, str):  # all-linear
            return True
        if isinstance(targets, Pattern) or linear.text in targets.names:
            return targets.matches(linear)
        return targets.matches(linear) and self._in_layers(linear.text)

    def _in_layers(self, module: str) -> bool:
        """The first number of a layer counts, wherever another stands behind it, such as that of an expert."""
        if not self.layers_to_transform:
            return True
        parts = module.split(".")
        for names in [name.split(".") for name in self.layers_pattern] or [[]]:
            for at in range(1, len(parts) - 1):
                begin = at - (len(names) or 2)  # any list of layers: it is inside something
                if parts[at].isdecimal() and begin >= 0 and names in ([], parts[begin:at]):
                    return int(parts[at]) in self.layers_to_transform
        return False


class Names:
    """Names of modules, or ends of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def matches(self, module: Name) -> bool:
        return any(end in self.names for end in _ends(module.text))


def _ends(module: str) -> Iterator[str]:
    """A name, and what follows each of its dots."""
    yield module
    at = module.find(".")
    while at >= 0:
        yield module[at + 1 :]
        at = module.find(".", at + 1)


def _by_pattern(patterns: Sequence[tuple[Pattern, Number]], module: Name, default: Number) -> Number:
    """The value of the first pattern that matches the end of a name."""
    return next((value for pattern, value in patterns if pattern.matches_end(module)), default)


def config_of(data: bytes) -> LoraConfig:
    """What the bytes of adapter_config.json say."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not JSON: {error}") from None
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

    wanted = {}
    for name in LoraConfig.__dataclass_fields__:
        value = fields.pop(name, None)
        if value is not None:
            words, read = _FIELDS[name]
            try:
                wanted[name] = read(value)
            except PatternError as error:
                raise refuse(name, f"must be {words}: {error}") from None
            except (ValueError, TypeError, OverflowError, AttributeError):
                raise refuse(name, f"must be {words}") from None
    for name, value in fields.items():
        if name not in _IGNORED and (value is True or (value and isinstance(value, dict | list))):
            raise refuse(name, "this field is not known here, and may change what the adapter computes")
    return LoraConfig(**wanted)


def _rank(value: Any) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError
    return value


def _alpha(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError
    return value


def _by_name(read: Callable[[Any], Number]) -> Callable[[Any], list[tuple[Pattern, Number]]]:
    return lambda value: [(Pattern(key), read(one)) for key, one in value.items()]


def _targets(value: Any) -> str | Names | Pattern:
    if not isinstance(value, str):
        return Names(_texts(value))
    return "all-linear" if value.lower() == "all-linear" else Pattern(value)


def _excluded(value: Any) -> Names | Pattern | None:
    if not isinstance(value, str):
        return Names(_texts(value))
    return Pattern(value) if value else None


def _layers(value: Any) -> frozenset[int]:
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int for layer in layers):
        raise ValueError
    return frozenset(layers)


def _lists(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else _texts(value)
    if not all(re.fullmatch(r"[\w.-]*", name) for name in names):
        raise ValueError
    return [name for name in names if name]


_FIELDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "r": ("a whole number above 0", _rank),
    "lora_alpha": ("a number", _alpha),
    "use_rslora": ("true or false", _switch),
    "rank_pattern": ("ranks by regular expression", _by_name(_rank)),
    "alpha_pattern": ("numbers by regular expression", _by_name(_alpha)),
    "target_modules": ("a regular expression or a list of names", _targets),
    "exclude_modules": ("a regular expression or a list of names", _excluded),
    "layers_to_transform": ("a layer or a list of layers", _layers),
    "layers_pattern": ("the name of a list of layers, such as layers, or several of them", _lists),
}


# ---- adapter_model.safetensors


class Half(NamedTuple):
    """A tensor in the file: its type as torch calls it, its shape, and where its bytes are."""

    dtype: str
    shape: tuple[int, int]
    begin: int
    end: int

    def __str__(self) -> str:
        return _shown(self.dtype, self.shape)


class FilePair(NamedTuple):
    """What a file has for one module: lora_A [rank, in] and lora_B [out, rank]."""

    a: Half
    b: Half


def _shown(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def pairs_of(header: bytes, size: int) -> dict[str, FilePair]:
    """The pairs that a header tells of, by module, in the order of their keys. `size`: the bytes behind it."""
    halves: dict[str, dict[str, Half]] = {}
    for key, half in sorted(_tensors(header, size).items()):
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        if found is None:
            raise AdapterError(f"{TENSORS}: {key:.200}: only lora_A and lora_B of nn.Linear modules are supported")
        module, which = found.groups()
        floats = half.dtype in {name for name, _ in FLOATS.values()}
        if len(half.shape) != 2 or not all(half.shape) or not floats:
            raise AdapterError(f"{TENSORS}: {key:.200} must be a matrix of floats, got {half!s:.100}")
        halves.setdefault(module, {})[which] = half
    if not halves:
        raise AdapterError(f"{TENSORS} has no tensors")
    for module, both in halves.items():
        if len(both) != 2:
            raise AdapterError(f"{TENSORS}: {module:.200} has lora_{min(both)} alone")
    return {module: FilePair(both["A"], both["B"]) for module, both in halves.items()}


def _tensors(header: bytes, size: int) -> dict[str, Half]:
    """All tensors, whose bytes must be all that the file has, none of them twice."""

    def broken(why: str) -> AdapterError:
        return AdapterError(f"{TENSORS} is broken: {why}")

    try:
        content = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise broken(f"its header is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise broken(f"its header must be an object, got {content!r:.60}")
    content.pop("__metadata__", None)
    if len(content) > MOST_TENSORS:
        raise AdapterError(f"{TENSORS} has {len(content)} tensors, and at most {MOST_TENSORS} are served")
    found = {}
    for key, entry in content.items():
        try:
            (name, each), shape, (begin, end) = _type(entry["dtype"]), entry["shape"], entry["data_offsets"]
            right = len(shape) <= 8 and all(type(one) is int and 0 <= one < 2**48 for one in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            right = False
        if not right or end - begin != math.prod(shape) * each:
            raise broken(f"{key:.200} cannot be {entry!r:.200}")
        found[key] = Half(name, tuple(shape), begin, end)
    at = 0
    for half in sorted(found.values(), key=lambda half: (half.begin, half.end)):
        if half.begin != at:
            raise broken(f"there are bytes of no tensor, or of two, at {min(at, half.begin)}")
        at = half.end
    if at != size:
        raise broken(f"its tensors have {at} bytes, and {size} are there")
    return found


def _type(name: str) -> tuple[str, int]:
    return FLOATS[name] if name in FLOATS else _OTHERS[name]


# ---- against a model


class ModelShape(NamedTuple):
    """What an adapter can change. `linears`: [out, in] of each nn.Linear that takes adapters; `others`: of what else is
    there, why it takes none."""

    linears: dict[str, tuple[int, int]]
    others: dict[str, str]
    max_rank: int


class Fitted(NamedTuple):
    """What an adapter adds to a module: A, and B times `scale`."""

    scale: float
    pair: FilePair


def in_expert(module: str) -> bool:
    """Routed experts see the tokens that were sent to them, in an order of their own."""
    return "experts" in module.split(".")


def fitted(config: LoraConfig, pairs: Mapping[str, FilePair], model: ModelShape) -> dict[str, Fitted]:
    """Each pair with its scale; AdapterError if it is for another model, or config and tensors do not agree."""
    found = {}
    for module, (a, b) in pairs.items():
        if module not in model.linears:
            raise AdapterError(f"{module:.200} {_why_not(module, model)}")
        name = Name(module)
        if not config.addresses(name):
            raise AdapterError(f"{module} has tensors, but is no target of {CONFIG}")
        rank, (n_out, n_in) = config.rank(name), model.linears[module]
        if (a.shape, b.shape) != ((rank, n_in), (n_out, rank)):
            raise AdapterError(
                f"{module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, where [{rank}, {n_in}] and "
                f"[{n_out}, {rank}] fit: the files do not agree, or are for another model"
            )
        if rank > model.max_rank:
            raise AdapterError(f"{module} has rank {rank}, above max_lora_rank {model.max_rank}")
        found[module] = Fitted(config.scale(name, rank), FilePair(a, b))
    if config.target_modules is not None:
        for module in model.linears:
            if module not in found and config.addresses(Name(module)):
                raise AdapterError(
                    f"{module} is a target of {CONFIG} and has no tensors: the file is incomplete, or for another model"
                )
    return found


def _why_not(module: str, model: ModelShape) -> str:
    if module in model.others:
        return model.others[module]
    if in_expert(module):
        return "is an expert of its own in the adapter, and not in this model: its experts are fused"
    return "is not in this model: the adapter is for another one"


def digest_heads(modules: Mapping[str, Fitted]) -> Iterator[tuple[bytes, FilePair]]:
    """What identifies an adapter besides the bytes of its tensors, module by module: name, scale, types and shapes,
    framed by length. Equal for what computes the same, whatever it is called and wherever it lies."""
    for module, (scale, pair) in modules.items():
        head = json.dumps([module, scale.hex(), str(pair.a), str(pair.b)]).encode()
        yield len(head).to_bytes(8, "little") + head, pair
