"""How an engine is set up: the flags of the command line and of `LLM(...)`, by vLLM's names; frozen, and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from sapwood.cache import whole_number
from sapwood.scheduler.config import HOST_POLICIES
from sapwood.scheduler.policy import POLICIES
from sapwood.store import StoreError, check_uri, store_folder
from sapwood.store.uri import nbytes

from .foreign import FOREIGN, take_foreign
from .params import MOST_LOGPROBS

_MOST = 2**31 - 1
ALIASES = {"block_size": "page_size"}
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
LOAD_FORMATS = ("auto", "dummy")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names


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
    store_patience          seconds that a request waits for the store to answer before it is computed; ten times as
                            long for the pages themselves, also for those being written; and five times, five seconds
                            at least, to write at the end
    cache_policy            who comes in next: "fcfs" or "prefix"
    host_policy             when pages go to host memory: "through", when they are computed, or "evict", shortly before
                            the device loses them: fewer transfers, but a burst loses some
    max_overtaken           later requests that may start before one that is ready and does not fit
    headroom                tokens that every running request can still write before a new one starts; more of it: fewer
                            requests are computed twice where answers are long
    checkpoint_interval     pages between the snapshots of a streaming answer, in models with recurrent states
    enable_prefix_caching   what a prompt shares with an earlier one is not computed again
    enable_lora             serve adapters
    max_logprobs            log-probabilities that a request may ask for of each token
    max_loras               adapters in one step
    max_lora_rank           the highest rank of an adapter
    lora_memory             bytes with a unit that all loaded adapters may take in host memory; "auto": a quarter of
                            what is free
    lora_seconds            how long reading an adapter may take, whatever its file system does
    gpu_memory_utilization  the share of a GPU's memory that weights, cache and steps may take
    enforce_eager           no graphs of steps
    compile                 layers are compiled by torch at the start, in place of kernels of our own for the families
                            that have some: for architectures that have none
    skip_tokenizer_init     no tokenizer: prompts are token ids
    skip_self_check         do not compare a few answers with those of transformers at the start
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
    store_patience: float = 1.0
    cache_policy: str = "fcfs"
    host_policy: str = "through"
    max_overtaken: int = 128
    headroom: int = 64
    checkpoint_interval: int = 8
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    lora_memory: str = "auto"
    lora_seconds: float = 60.0
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    compile: bool = False
    skip_tokenizer_init: bool = False
    skip_self_check: bool = False
    overlap: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("load_format", self.load_format, LOAD_FORMATS)
        one_of("cache_policy", self.cache_policy, tuple(sorted(POLICIES)))
        one_of("host_policy", self.host_policy, HOST_POLICIES)
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f'device must be "auto", "cpu" or "cuda", got {self.device!r:.60}')
        for name in ("max_num_seqs", "page_size", "max_loras", "max_lora_rank"):
            whole_number(name, getattr(self, name), 1, 1 << 20)
        for name in ("max_model_len", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1, _MOST)
        if self.max_logprobs == -1:
            raise ValueError(
                "max_logprobs must be a number here, got -1: the whole vocabulary is not told of each token"
            )
        whole_number("max_logprobs", self.max_logprobs, 0, MOST_LOGPROBS)
        whole_number("max_overtaken", self.max_overtaken, 0, _MOST)
        whole_number("headroom", self.headroom, 0, _MOST)
        whole_number("checkpoint_interval", self.checkpoint_interval, 1, _MOST)
        whole_number("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_mixed_tokens is not None:
            whole_number("max_mixed_tokens", self.max_mixed_tokens, 0, _MOST)
        if self.overlap is not None:
            whole_number("overlap", self.overlap, 0, 1)
        if not isinstance(self.gpu_memory_utilization, int | float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}"
            )
        for name in ("store_patience", "lora_seconds"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int | float) or not 0.01 <= given <= 86400:
                raise ValueError(f"{name} must be from 0.01 to 86400 seconds, got {given!r:.60}")
        switches = (
            "enable_prefix_caching",
            "enable_lora",
            "enforce_eager",
            "compile",
            "skip_tokenizer_init",
            "skip_self_check",
            "progress",
        )
        for name in switches:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.60}")
        if self.device_cache != "auto":
            nbytes("device_cache", str(self.device_cache))
        for name in ("host_cache", "lora_memory"):
            if getattr(self, name) != "auto":
                nbytes(name, str(getattr(self, name)))
        if self.store is not None and self.host_cache != "auto" and not nbytes("host_cache", str(self.host_cache)):
            raise ValueError("store needs host_cache, through which its pages come and go, got host_cache=0")
        if self.store is not None:
            check_store(self.store)


def check_store(uri: str) -> None:
    """ValueError for a URI that is wrong, and for a folder that cannot be trusted."""
    try:
        check_uri(uri)
    except StoreError as problem:
        raise ValueError(str(problem)) from None


def folder_of_store(uri: str) -> str | None:
    """Where a store of files lies; None for any other store."""
    return store_folder(uri)


def from_flags(model: str | None, flags: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from flags as on the command line, with underscores. ValueError names what cannot be."""
    known = {field.name for field in fields(EngineConfig)}
    taken: dict[str, Any] = {"model": model}
    for name, value in flags.items():
        if name in FOREIGN:
            take_foreign(name, value, FOREIGN)
            continue
        name = ALIASES.get(name, name)
        if name not in known:
            raise ValueError(f"there is no flag {name!r:.60}{like(name, known)}; there are {', '.join(sorted(known))}")
        taken[name] = _DTYPES.get(value, value) if name == "dtype" else value
    return EngineConfig(**taken)


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r:.60}")


def like(name: str, known: Iterable[str]) -> str:
    """Words that ask whether the nearest of these names was meant; "" if there is none."""
    near = get_close_matches(name, list(known), 1, 0.75)
    return f" (did you mean {near[0]}?)" if near else ""
