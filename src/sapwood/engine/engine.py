"""One model, served: what is loaded, sized and joined at the start, and closed at the end.

EngineConfig --> weights --> ServedModel --> groups --> arena, scheduler, tiers, executor --> EngineLoop --> requests

What serves is `Engine.requests` (request_table.py); what its rows ask of the executor is in executor/rows.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from sapwood.scheduler import Scheduler, SchedulerConfig
from sapwood.store import Fingerprint, GroupLayout, Store, open_store
from sapwood.store.uri import nbytes, parse

from .executor.executor import ModelExecutor
from .executor.rows import RequestRows
from .executor.sampling import Sampler
from .flags import EngineConfig
from .loading.updates import Update
from .loading.weights import find_model, import_transformers, load_model
from .loop import EngineLoop
from .lora.adapters import Adapters
from .lora.process import Reader
from .models.kv_groups import Unsupported, text_config
from .models.model import ServedModel
from .models.patches import patch_for
from .models.recurrent import settle_time_steps
from .models.self_check import check, reference_of
from .models.sizing import in_words, mixed_tokens, size_for, step_tokens
from .progress import Phases
from .request_table import NO_LOGPROBS, RequestTable
from .samples import GrammarMasks, Sample
from .transfer.arena import HostArena, available_bytes
from .transfer.movers import open_mover
from .transfer.tiers import Tiers
from .transfer.torch_mover import PinnedArena, TorchArena

log = logging.getLogger(__name__)
_LORA_SHARE = 0.25  # of the memory that is free, for adapters
_TICK_SECONDS = 0.01  # of the scheduler's clock


class Engine:
    """A model, loaded, and the requests that it serves.

    requests                   submit, step, abort: all that serving calls
    scheduler, loop            as the requests use them
    served, executor, sampler  what computes
    adapters                   None without `enable_lora`
    masks                      of grammars; `masks.fill` may be replaced
    sized                      the groups and limits that memory allows
    """

    def __init__(self, config: EngineConfig, events: bool = False) -> None:
        """`events`: the cache reports what it holds (`scheduler.drain_events`)."""
        self.config = config
        self.device = _device(config.device)
        self.files = find_model(config.model, load_format=config.load_format, revision=config.revision)
        self.start = Phases()
        model = self._load()
        reference = None
        if not config.skip_self_check:
            with self.start.timed("self-check"):
                reference = reference_of(model)
        if not config.compile:
            with self.start.timed("patches"):
                patch_for(model, self.device)
        self.served = ServedModel(model, config.page_size)
        self.adapters = self._open_adapters() if config.enable_lora else None
        if config.compile:
            self._compile_layers()
        self.sized = size_for(config, self.served.groups, text_config(model.config), self.device)
        for line in in_words(self.sized, config.page_size, _size_of_store(config.store)):
            log.info("cache, %s", line)
        for line in self.sized.notes:
            log.warning("cache, %s", line)
        self.tokenizer = _tokenizer(config, self.files)
        self._join(str(model.dtype).removeprefix("torch."), events)
        if reference is not None:
            with self.start.timed("self-check"), self._closed_if_refused():
                name, longest = self.served.model.config.model_type, self.sized.max_model_len
                check(reference, name, self.executor, self.scheduler.config, longest)
        self.start.over()

    # ---- the start

    @contextmanager
    def _closed_if_refused(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _load(self) -> Any:
        config = self.config
        with self.start.timed("imports"):
            import_transformers(self.files)
        with self.start.timed("weights"):
            model = load_model(
                self.files, dtype=config.dtype, device=str(self.device), seed=config.seed, progress=config.progress
            )
        settle_time_steps(model)
        return model

    def _open_adapters(self) -> Adapters:
        config = self.config
        if config.lora_memory != "auto":
            memory = nbytes("lora_memory", str(config.lora_memory))
        else:
            memory = int(_LORA_SHARE * (available_bytes() or 1 << 32))
        reader = Reader(config.lora_seconds)
        adapters = Adapters(self.served.model, config.max_loras, config.max_lora_rank, memory=memory, reader=reader)
        adapters.only_called(self.served.dry)
        return adapters

    def _compile_layers(self) -> None:
        if self.served.gathers:
            log.warning("layers run as they are: torch would compile the attention of a model that attends by itself")
            return
        from .models.compiled import compile_layers

        with self.start.timed("layers"):
            compile_layers(self.served, self.config.progress)

    def _join(self, dtype: str, events: bool) -> None:
        config, groups, cuda = self.config, self.sized.groups, self.device.type == "cuda"
        by_kernels = not self.served.gathers and has_kernels(self.device, dtype)
        if self.served.gathers:
            log.warning("this model attends by itself: steps run without graphs, and slowly where there are many rows")
        layouts = {group.name: group.layout for group in self.served.groups}
        arena = TorchArena.allocate(groups, layouts, device=self.device)
        self.scheduler = Scheduler(
            SchedulerConfig(
                config.page_size,
                groups,
                step_tokens(config, self.device),
                self.sized.max_num_seqs,
                mixed_tokens=mixed_tokens(config, self.device, self.sized.max_num_seqs),
                max_loras=config.max_loras if config.enable_lora else 0,
                overlap=int(by_kernels) if config.overlap is None else config.overlap,
                events=events,
                store=config.store is not None,
                lookup_ticks=round(config.store_patience / _TICK_SECONDS),
                fetch_ticks=round(10 * config.store_patience / _TICK_SECONDS),
                policy=config.cache_policy,
                prefix_caching=config.enable_prefix_caching,
                max_columns=-(-self.sized.max_model_len // config.page_size),
            )
        )
        samples: dict[str, Sample] = {}
        vocabulary, seeds = self.served.vocabulary, random.Random(config.seed)
        self.masks = GrammarMasks(vocabulary)
        self.sampler = Sampler(self.sized.max_num_seqs, vocabulary, self.device, seeds, config.max_logprobs)
        rows = RequestRows(samples, self.sampler, self.masks, self.adapters, self.served.mixers)
        self.executor = self._gpu_executor(arena, rows) if by_kernels else self._executor(arena, rows)
        self._mover = None
        if any(group.host_pages for group in groups):
            self._mover = open_mover(arena, PinnedArena(groups) if cuda else HostArena(groups))
        self.store = self._open_store(dtype) if config.store is not None else None
        patience = config.store_patience
        # No request waits for a backup, so it may take as long as pages that are fetched.
        tiers = Tiers(self.scheduler, self._mover, self.store, tick_seconds=_TICK_SECONDS, backup_seconds=10 * patience)
        self.loop = EngineLoop(self.scheduler, self.executor, tiers)
        self.requests = RequestTable(
            self.loop,
            samples,
            vocabulary=vocabulary,
            max_model_len=self.sized.max_model_len,
            eos=self.files.eos_token_ids,
            tokenizer=self.tokenizer,
            seeds=seeds,
            max_logprobs=config.max_logprobs,
            adapters=self.adapters,
            logprobs=lambda plan, event: self.executor.logprobs.pop(plan.step or 0, NO_LOGPROBS),
        )
        self.requests.closes_within = max(self.requests.closes_within, 5 * patience)

    def _executor(self, arena: TorchArena, rows: RequestRows) -> ModelExecutor:
        self.sampler.warm()
        return ModelExecutor(self.served, arena, self.sized.max_num_seqs, rows)

    def _gpu_executor(self, arena: TorchArena, rows: RequestRows) -> ModelExecutor:
        from .executor.gpu_executor import GpuExecutor

        config = self.scheduler.config
        executor = GpuExecutor(
            self.served,
            arena,
            config.max_batch_size,
            rows,
            columns=config.max_columns,
            most_tokens=config.max_batch_tokens,
        )
        if self.device.type == "cuda":
            with self.start.timed("kernels"):
                self._compile(executor)
        if not self.config.enforce_eager and self.device.type == "cuda":
            with self.start.timed("graphs"):
                executor.capture(self.config.progress)
        return executor

    def _compile(self, executor: Any) -> None:
        """All kernels of our own, side by side: those of a GpuExecutor and of sampling."""
        from .kernels.launch import compiling

        try:
            with compiling(self.config.progress):
                self.sampler.warm()
                executor.warm()
        except Exception as error:
            log.warning("kernels are compiled when they are first needed: %s", str(error).partition("\n")[0])

    def _open_store(self, dtype: str) -> Store:
        layouts = tuple(
            GroupLayout(group.name, group.family, group.layout.page_bytes, group.window, _in_words(group.layout.parts))
            for group in self.served.groups
        )
        assert self.config.store is not None
        weights = self.files.digest(dtype, self.config.seed)
        fingerprint = Fingerprint(weights, dtype, self.config.page_size, layouts, 0, 1)
        return open_store(self.config.store, fingerprint, process=True)

    def close(self) -> None:
        """Abort the requests that are left, write back what a store is owed, and give all memory back."""
        if self.adapters is not None:
            self.adapters.close()
        self.requests.close()
        if self._mover is not None:
            self._mover.device.close()
            if self.loop.tiers.close(0.0):  # else a transfer may still write there
                self._mover.host.close()
        self.executor.close()
        self.served.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin_update(self, update: Update, abort: bool = False) -> None:
        """Change the weights as soon as no request runs; `abort` ends those that do. Those that have not begun wait."""
        self.requests.begin_change(partial(update.apply, self.served.model), abort)


def _device(asked: str) -> torch.device:
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise ValueError(f'device must be "auto", "cpu" or "cuda", got {asked!r:.60}') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be one that is here: torch sees no GPU, got {asked!r}")
    return device


def has_kernels(device: torch.device, dtype: str) -> bool:
    """Whether kernels of our own attend on this device. If a GPU has none, the log says so."""
    if device.type != "cuda":
        return False
    if dtype not in ("bfloat16", "float16", "float32"):
        log.warning("there are no kernels for %s: attention is that of torch, and steps run without graphs", dtype)
        return False
    if find_spec("triton") is None:
        log.warning("Triton is not installed: attention is that of torch, and steps run without graphs")
        return False
    return True


def _tokenizer(config: EngineConfig, files: Any) -> Any:
    if config.skip_tokenizer_init or (config.tokenizer is None and not files.has_tokenizer):
        return None
    from transformers import AutoTokenizer

    where = config.tokenizer or str(files.folder)
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise Unsupported(f"the tokenizer in {where} cannot be read: {str(error).splitlines()[0]}") from error


def _size_of_store(uri: str | None) -> int:
    """How many bytes a store has, if its URI says so; 0: that is not known."""
    size = parse(uri).options.get("size") if uri is not None else None
    return nbytes("size", size) if size is not None else 0


def _in_words(parts: Sequence[Any]) -> str:
    """What lies where in a page, for a store's fingerprint."""
    import hashlib

    words = ";".join(
        f"{p.layer}.{p.name}:{'x'.join(map(str, p.shape))}:{str(p.dtype).removeprefix('torch.')}" for p in parts
    )
    return words if len(words) < 2000 else f"sha256:{hashlib.sha256(words.encode()).hexdigest()}"
