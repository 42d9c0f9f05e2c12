"""One model, served: what is loaded, sized and joined at the start, and what the executor asks of requests.

EngineConfig --> weights --> ServedModel --> groups --> arena, scheduler, tiers, executor --> EngineLoop
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sapwood.scheduler import Plan, Scheduler, SchedulerConfig, StepDone
from sapwood.store import Fingerprint, GroupLayout, Store, open_store
from sapwood.store.uri import nbytes, parse

from .executor.executor import ModelExecutor
from .executor.sampling import Sampled, Sampler
from .flags import EngineConfig
from .loading.updates import Update
from .loading.weights import find_model, import_transformers, load_model
from .loop import EngineLoop
from .lora.adapters import Adapters, ReadRouting, Routing, UnknownAdapter
from .lora.process import Reader
from .models.kv_groups import Unsupported, longest_context, text_config
from .models.model import ServedModel
from .models.patches import patch_for
from .models.recurrent import settle_time_steps
from .models.self_check import check, reference_of
from .models.sizing import Sized, TooLittleHost, size, told
from .progress import Phases
from .request_table import Requests
from .samples import Likely, Sample
from .transfer.arena import HostArena, available_bytes
from .transfer.movers import open_mover
from .transfer.tiers import Tiers
from .transfer.torch_mover import PinnedArena, TorchArena

log = logging.getLogger(__name__)
_CPU_SHARE = 0.4  # of the memory that is free
_HOST_SHARE, _HOST_SHARE_CPU = 0.33, 0.1
_HOST_MAX_BYTES = 64 << 30
_LORA_SHARE = 0.25
_CPU_TOKENS, _GPU_TOKENS = 2048, 8192  # in a step
_GPU_MIXED_TOKENS = 512  # in a step in which somebody streams
_TICK_SECONDS = 0.01  # seconds of the scheduler's clock
_DEFAULT_CONTEXT_TOKENS = 8192  # of a context, where the model does not say


class Engine(Requests):
    """A model that serves requests."""

    def __init__(self, config: EngineConfig, events: bool = False) -> None:
        """`events`: the cache tells what it holds (`scheduler.drain_events`)."""
        self.config = config
        self._tells = events
        self.device = _device(config.device)
        self.files = find_model(config.model, load_format=config.load_format, revision=config.revision)
        self.start = Phases()
        with self.start.timed("imports"):
            import_transformers(self.files)
        with self.start.timed("weights"):
            model = load_model(
                self.files, dtype=config.dtype, device=str(self.device), seed=config.seed, progress=config.progress
            )
        settle_time_steps(model)
        reference = None
        if not config.skip_self_check:
            with self.start.timed("self-check"):
                reference = reference_of(model)
        if not config.compile:
            with self.start.timed("patches"):
                patch_for(model, self.device)
        self.served = ServedModel(model, config.page_size)
        self.adapters = self._adapters(model) if config.enable_lora else None
        if self.adapters is not None:
            self.adapters.only_called(self.served.dry)
        if config.compile and self.served.gathers:
            log.warning("layers run as they are: torch would compile the attention of a model that attends by itself")
        elif config.compile:
            from .models.compiled import compile_layers

            with self.start.timed("layers"):
                compile_layers(self.served, config.progress)
        self.sized = self._size(text_config(model.config))
        for line in told(self.sized, config.page_size, _size_of_store(config.store)):
            log.info("cache, %s", line)
        for line in self.sized.notes:
            log.warning("cache, %s", line)
        super().__init__(
            vocabulary=self.served.vocabulary,
            max_model_len=self.sized.max_model_len,
            eos=self.files.eos_token_ids,
            tokenizer=_tokenizer(config, self.files),
            seed=config.seed,
            max_logprobs=config.max_logprobs,
        )
        self.holds = self.adapters
        self._weights = self.files.digest(str(model.dtype).removeprefix("torch."), config.seed)
        self._routings: dict[int, Routing | None] = {}  # by step
        self._join(str(model.dtype).removeprefix("torch."))
        if reference is not None:
            with self.start.timed("self-check"), self._closed_if_refused():
                name = self.served.model.config.model_type
                check(reference, name, self.executor, self.scheduler.config, self.max_model_len)
        self.start.over()

    # ---- the start

    @contextmanager
    def _closed_if_refused(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _adapters(self, model: Any) -> Adapters:
        config = self.config
        if config.lora_memory != "auto":
            memory = nbytes("lora_memory", str(config.lora_memory))
        else:
            memory = int(_LORA_SHARE * (available_bytes() or 1 << 32))
        reader = Reader(config.lora_seconds)
        return Adapters(model, config.max_loras, config.max_lora_rank, memory=memory, reader=reader)

    def _size(self, text: Any) -> Sized:
        config = self.config
        longest = config.max_model_len or getattr(text, "max_position_embeddings", None) or _DEFAULT_CONTEXT_TOKENS
        limit = longest_context(text)
        if limit is not None and limit[0] < longest:
            log.warning("max_model_len lowered from %d to %d: %s", longest, *limit)
            longest = limit[0]
        if config.device_cache != "auto":
            room = nbytes("device_cache", str(config.device_cache))
        elif self.device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(self.device)
            room = int(free - (1 - config.gpu_memory_utilization) * whole)
        else:
            room = int(_CPU_SHARE * (available_bytes() or 1 << 32))
        if config.host_cache != "auto":
            host = nbytes("host_cache", str(config.host_cache))
        else:
            share = _HOST_SHARE if self.device.type == "cuda" else _HOST_SHARE_CPU
            host = min(_HOST_MAX_BYTES, int(share * (available_bytes() or 1 << 32)))
        wanted = (self.served.groups, room, config.page_size, config.max_num_seqs, longest)
        try:
            return size(*wanted, host, self._tokens)
        except TooLittleHost as problem:
            if config.host_cache != "auto" or config.store is not None:
                raise
            log.warning("no host cache: %s", problem)
            return size(*wanted, 0, self._tokens)

    @property
    def _tokens(self) -> int:
        """The most of a step."""
        return self.config.max_num_batched_tokens or (_GPU_TOKENS if self.device.type == "cuda" else _CPU_TOKENS)

    def _mixed_tokens(self) -> int:
        """The most of a step in which somebody streams; 0: as many as of any other."""
        asked, rows = self.config.max_mixed_tokens, self.sized.max_num_seqs
        if asked is None:
            asked = max(_GPU_MIXED_TOKENS, 2 * rows) if self.device.type == "cuda" else 0
        return asked if asked < self._tokens else 0

    def _join(self, dtype: str) -> None:
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
                self._tokens,
                self.sized.max_num_seqs,
                mixed_tokens=self._mixed_tokens(),
                max_loras=config.max_loras if config.enable_lora else 0,
                overlap=int(by_kernels) if config.overlap is None else config.overlap,
                events=self._tells,
                store=config.store is not None,
                lookup_ticks=round(config.store_patience / _TICK_SECONDS),
                fetch_ticks=round(10 * config.store_patience / _TICK_SECONDS),
                policy=config.cache_policy,
                host_policy=config.host_policy,
                max_overtaken=config.max_overtaken,
                headroom=config.headroom,
                checkpoint_interval=config.checkpoint_interval,
                prefix_caching=config.enable_prefix_caching,
                max_columns=-(-self.max_model_len // config.page_size),
            )
        )
        self.sampler = Sampler(self.sized.max_num_seqs, self.vocabulary, self.device, self.seeds, config.max_logprobs)
        self.executor = self._gpu_executor(arena) if by_kernels else self._executor(arena)
        self._mover = None
        if any(group.host_pages for group in groups):
            self._mover = open_mover(arena, PinnedArena(groups) if cuda else HostArena(groups))
        self.store = self._open_store(dtype) if config.store is not None else None
        patience = config.store_patience
        # No request waits for a backup, so it may take as long as pages that are fetched.
        tiers = Tiers(self.scheduler, self._mover, self.store, tick_seconds=_TICK_SECONDS, backup_seconds=10 * patience)
        self.closes_within = max(self.closes_within, 5 * patience)
        self.loop = EngineLoop(self.scheduler, self.executor, tiers)

    def _executor(self, arena: TorchArena) -> ModelExecutor:
        self.sampler.warm()
        return ModelExecutor(self.served, arena, self.sized.max_num_seqs, self)

    def _gpu_executor(self, arena: TorchArena) -> ModelExecutor:
        from .executor.gpu_executor import GpuExecutor

        columns = -(-self.max_model_len // self.config.page_size)
        slots = self.sized.max_num_seqs
        executor = GpuExecutor(self.served, arena, slots, self, columns=columns, most_tokens=self._tokens)
        if self.device.type == "cuda":
            with self.start.timed("kernels"):
                self._compile(executor)
        if not self.config.enforce_eager and self.device.type == "cuda":
            with self.start.timed("graphs"):
                executor.capture(self.config.progress)
        return executor

    def _compile(self, executor: Any) -> None:
        """All kernels of our own, side by side, those of a GpuExecutor and of sampling."""
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
        fingerprint = Fingerprint(self._weights, dtype, self.config.page_size, layouts, 0, 1)
        return open_store(self.config.store, fingerprint, process=True)

    def close(self) -> None:
        """Abort who is left, write back what a store is owed, and give all memory back."""
        if self.adapters is not None:
            self.adapters.close()
        super().close()
        if self._mover is not None:
            self._mover.device.close()
            if self.loop.tiers.close(0.0):  # else somebody may still write there
                self._mover.host.close()
        self.executor.close()
        self.served.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin_update(self, update: Update, abort: bool = False) -> None:
        """Change the weights as soon as nobody runs; `abort` ends those that do. Whoever has not begun waits."""
        self.begin_change(partial(update.apply, self.served.model), abort)

    def _told(self, plan: Plan, event: Any) -> Mapping[str, Likely]:
        """Those of new tokens. Those of prompts are noted."""
        tokens, prompts = self.executor.told.pop(plan.step or 0, ({}, {}))
        if isinstance(event, StepDone):
            for id, scores in prompts.items():
                sample = self.samples.get(id)
                if sample is not None:
                    for position, likely in scores:
                        sample.learns(position, likely, self.tokenizer)
        return tokens

    # ---- what the executor asks

    def seat(self, plan: Plan) -> None:
        """Slots with new owners: their parameters, and what is known of what they have generated."""
        for slot, id in plan.seated:
            sample = self.samples.get(id)
            if sample is not None:
                sample.seated = sample.seated or time.monotonic()
                self.sampler.seat(
                    slot, sample.params, sample.prompt, sample.token_ids, sample.eos, sample.index, sample.bad_words
                )

    def plain(self, plan: Plan, rows: Sequence[int]) -> bool:
        samples, index = self._asked(plan, rows)
        if any(sample is not None and sample.grammar is not None for sample in samples):
            return False
        return self.sampler.plain(plan.batch.slots[rows], index)

    def draw(self, logits: torch.Tensor, plan: Plan, rows: Sequence[int]) -> Sampled:
        slots = plan.batch.slots[rows]
        samples, index = self._asked(plan, rows)
        masks = self.masks(samples, index, partial(self.executor.newest, slots))
        return self.sampler.sample(logits, slots, index, masks)

    def _asked(self, plan: Plan, rows: Sequence[int]) -> tuple[list[Sample | None], npt.NDArray[np.int64]]:
        """Whose these rows are, and the index of the token each gets. None: it has ended, its token is nobody's."""
        batch = plan.batch
        samples = [self.samples.get(batch.ids[row]) for row in rows]
        prompts = [0 if sample is None else len(sample.prompt) for sample in samples]
        return samples, (batch.starts + batch.lengths)[rows] - np.array(prompts, np.int64)

    def scored(self, plan: Plan) -> dict[int, npt.NDArray[np.int32]]:
        batch, found = plan.batch, {}
        for row, id in enumerate(batch.ids[batch.decodes :], batch.decodes):
            sample = self.samples.get(id)
            if sample is not None and sample.scores_prompt:
                start = int(batch.starts[row])
                found[row] = sample.prompt[start + 1 : start + 1 + int(batch.lengths[row])]
        return {row: next_tokens for row, next_tokens in found.items() if len(next_tokens)}

    def adapted(self, plan: Plan, tokens: slice) -> AbstractContextManager[Any]:
        adapters, mixers = self.adapters, self.served.mixers
        if adapters is None:
            return nullcontext()
        whole = self._routing(plan, adapters)
        routing = whole
        if whole is not None and tokens.stop - tokens.start < len(whole.slots):
            routing = whole.part(tokens)
        mixers.within = lambda some: adapters.applied(None if routing is None else routing.part(some))
        return adapters.applied(routing)

    def adapter_slots(self, plan: Plan) -> npt.NDArray[np.int32] | None:
        whole = None if self.adapters is None else self._routing(plan, self.adapters)
        return None if whole is None else whole.slots

    def adapting(self, slots: torch.Tensor) -> AbstractContextManager[Any] | None:
        if self.adapters is None or not self.adapters.capturable:
            return None
        return self._reading(self.adapters, slots)

    @contextmanager
    def _reading(self, adapters: Adapters, slots: torch.Tensor) -> Iterator[None]:
        self.served.mixers.within = lambda some: nullcontext()  # they are given all tokens
        with adapters.applied(ReadRouting(slots)):
            yield

    def _routing(self, plan: Plan, adapters: Adapters) -> Routing | None:
        step = plan.step or 0
        if step not in self._routings:
            try:
                self._routings[step] = adapters.begin(plan.batch.adapters, plan.batch.lengths.tolist())
            except UnknownAdapter as error:
                error.culprits = [plan.batch.ids[row] for row in error.rows]
                raise
        return self._routings[step]

    def over(self, plan: Plan) -> None:
        if self.adapters is not None:
            self.adapters.end(self._routings.pop(plan.step or 0, None))


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
    """Whether kernels of our own attend on this device. If a GPU has none, that is said."""
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
    """How many bytes a store was given, if its URI says so; 0: it is not known."""
    size = parse(uri).options.get("size") if uri is not None else None
    return nbytes("size", size) if size is not None else 0


def _in_words(parts: Sequence[Any]) -> str:
    """What lies where in a page, as a store's fingerprint tells it."""
    import hashlib

    said = ";".join(
        f"{p.layer}.{p.name}:{'x'.join(map(str, p.shape))}:{str(p.dtype).removeprefix('torch.')}" for p in parts
    )
    return said if len(said) < 2000 else f"sha256:{hashlib.sha256(said.encode()).hexdigest()}"
