"""How an engine is set up: the flags of the command line and of `LLM(...)`, by vLLM's names; frozen, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sapwood.cache import whole_number
from sapwood.store.uri import nbytes

_MOST = 2**31 - 1
# What others have and we have not: refused by name, unless it says what is the case anyway.
NOT_HERE: Mapping[str, tuple[Any, str]] = {
    "tensor_parallel_size": (1, "one GPU serves a model here"),
    "pipeline_parallel_size": (1, "one GPU serves a model here"),
    "data_parallel_size": (1, "start several servers, and a router before them"),
    "kv_cache_dtype": ("auto", "K and V are kept as the model computes them"),
    "trust_remote_code": (False, "no code that comes with a model is run"),
    "quantization": (None, "quantised weights are not served yet"),
    "speculative_config": (None, "there is no speculative decoding yet"),
}
ALIASES = {"block_size": "page_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to serve, and with how much. The command line shows what is said of a field here as its help.

    model                   a folder, a .gguf file or a hub's id; None: the default model
    tokenizer               another one than the model's
    dtype, device           "auto": float32 on a CPU, the checkpoint's own on a GPU; a GPU if there is one
    seed                    of what is random: weights of load_format="dummy", samples without a seed of their own
    load_format             "auto", or "dummy": seeded random weights, for which a config.json is enough
    revision                of a model on the hub
    max_model_len           the longest context; None: the model's own
    max_num_seqs            requests that run at a time
    max_num_batched_tokens  tokens computed in one step; None: 2048 on a CPU, 8192 on a GPU
    max_mixed_tokens        tokens computed in one step in which somebody streams, so that new prompts do not hold up
                            those who do; 0: as many as in any other; None: 0 on a CPU, 512 on a GPU
    page_size               tokens of a page (alias: block_size)
    device_cache            bytes with a unit for K, V and states; "auto": what gpu_memory_utilization leaves, or 40 %
                            of what a CPU's memory has free
    host_cache              bytes with a unit behind it in host memory; "0": none; "auto": a tenth of what is free,
                            beside a GPU a third
    store                   the URI of a store behind that
    cache_policy            who comes in next: "fcfs" or "prefix"
    enable_prefix_caching   what a prompt shares with an earlier one is not computed again
    enable_lora             serve adapters
    max_loras               adapters in one step
    max_lora_rank           the highest rank of an adapter
    gpu_memory_utilization  the share of a GPU's memory that weights, cache and steps may take
    enforce_eager           no graphs of steps
    compile                 layers are compiled by torch at the start, in place of kernels of our own for the families
                            that have some: for architectures that have none
    skip_tokenizer_init     no tokenizer: prompts are token ids
    progress                show bars where something takes long
    overlap                 1: the next step is planned while one runs; None: 0 on a CPU, 1 on a GPU
    """

    model: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    load_format: str = "auto"
    revision: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_mixed_tokens: int | None = None
    page_size: int = 16
    device_cache: str = "auto"
    host_cache: str = "0"
    store: str | None = None
    cache_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    compile: bool = False
    skip_tokenizer_init: bool = False
    overlap: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "page_size", "max_loras", "max_lora_rank"):
            whole_number(name, getattr(self, name), 1, 1 << 20)
        for name in ("max_model_len", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1, _MOST)
        whole_number("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_mixed_tokens is not None:
            whole_number("max_mixed_tokens", self.max_mixed_tokens, 0, _MOST)
        if self.overlap is not None:
            whole_number("overlap", self.overlap, 0, 1)
        if not isinstance(self.gpu_memory_utilization, int | float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}"
            )
        switches = (
            "enable_prefix_caching",
            "enable_lora",
            "enforce_eager",
            "compile",
            "skip_tokenizer_init",
            "progress",
        )
        for name in switches:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.60}")
        if self.device_cache != "auto":
            nbytes("device_cache", str(self.device_cache))
        if self.host_cache != "auto":
            nbytes("host_cache", str(self.host_cache))
        if self.store is not None and self.host_cache != "auto" and not nbytes("host_cache", str(self.host_cache)):
            raise ValueError("store needs host_cache, through which its pages come and go, got host_cache=0")


def from_flags(model: str | None, flags: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from flags as on the command line, with underscores. ValueError that names one we do not have."""
    known = {field.name for field in fields(EngineConfig)}
    taken: dict[str, Any] = {"model": model}
    for name, value in flags.items():
        if name in NOT_HERE:
            default, why = NOT_HERE[name]
            if value != default:
                raise ValueError(f"{name} must be {default!r}: {why}, got {value!r:.60}")
            continue
        name = ALIASES.get(name, name)
        if name not in known:
            raise ValueError(f"there is no flag {name!r:.60}; there are {', '.join(sorted(known))}")
        taken[name] = value
    return EngineConfig(**taken)
