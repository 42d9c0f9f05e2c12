"""The model that an engine process serves, made from flags. No other module of the server imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from sapwood.engine.request_table import RequestTable
from sapwood.engine.samples import GrammarMasks


class ServedEngine(Protocol):
    """What a factory opens: `sapwood.engine.engine.Engine`, or one without a model."""

    requests: RequestTable
    masks: GrammarMasks

    def close(self) -> None: ...


class LoadedModel(NamedTuple):
    engine: ServedEngine
    folder: str  # where the model's files are, for the API's tokenizer
    tokenizer: str | None  # the path of tokenizer.json
    facts: dict[str, Any]


def model(flags: Mapping[str, Any], progress: Callable[[str], None], events: bool) -> LoadedModel:
    """A model of transformers. `flags` are fields of EngineConfig."""
    from sapwood.engine.engine import Engine
    from sapwood.engine.flags import EngineConfig
    from sapwood.engine.loading.default_model import DEFAULT_NAME
    from sapwood.engine.loading.weights import find_model

    from ..text.tokens import tokenizer_file

    config = EngineConfig(**{**flags, "skip_tokenizer_init": True})
    progress("finding the model")
    files = find_model(config.model, load_format=config.load_format, revision=config.revision)
    skip = bool(flags.get("skip_tokenizer_init"))
    tokenizer = None if skip else tokenizer_file(config.tokenizer or str(files.folder))
    progress("loading weights")
    engine = Engine(config, events=events)
    progress("almost ready")
    groups = engine.sized.groups
    facts = {
        "name": config.model or DEFAULT_NAME,
        "device": str(engine.device),
        "dtype": str(engine.served.model.dtype).removeprefix("torch."),
        "max_num_seqs": engine.sized.max_num_seqs,
        "max_num_batched_tokens": engine.scheduler.config.max_batch_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "max_logprobs": config.max_logprobs,
        "max_loras": config.max_loras if config.enable_lora else 0,
        "lora_seconds": config.lora_seconds,
        "page_size": config.page_size,
        "device_pages": {group.name: group.device_pages for group in groups},
        "host_pages": {group.name: group.host_pages for group in groups},
        "page_bytes": {group.name: group.page_bytes for group in groups},
        "families": {group.name: group.family for group in groups},
        "tokenizer": tokenizer,
    }
    return LoadedModel(engine, str(files.folder), tokenizer, facts)
