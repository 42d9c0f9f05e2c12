"""One model, served: what is loaded, sized and joined at the start, and requests as they come and go.

    EngineConfig --> weights --> ServedModel --> groups --> arena, scheduler, tiers, executor --> EngineLoop
                                                                                                     |
    submit(id, tokens, params) ----------------------------------------------------------------------+--> step: Outputs

A request of n samples is n requests to the scheduler, whose prompt is computed once. Tokens become text here, where
stop strings are found.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sapwood.cache import Explanation, Namespace
from sapwood.scheduler import Abort, Ended, Finish, Plan, Refused, RequestSpec, Scheduler, SchedulerConfig
from sapwood.store import Fingerprint, GroupLayout, Store, open_store
from sapwood.store.uri import nbytes

from .adapters import Adapters, Routing
from .arena import HostArena, available_bytes
from .flags import EngineConfig
from .loop import EngineLoop
from .model import ServedModel
from .params import SamplingParams
from .remembers import Unsupported, text_config
from .sampling import Sampled, Sampler
from .sizing import Sized, size, told
from .steps import ModelExecutor
from .stops import TextStream, bad_word_tokens
from .tiers import Tiers
from .transfer import open_mover
from .transfer_torch import PinnedArena, TorchArena
from .weights import find_model, load_model

log = logging.getLogger(__name__)
_CPU_SHARE = 0.4  # of the memory that is free
_CPU_TOKENS, _GPU_TOKENS = 2048, 8192  # in a step
_LONGEST = 8192  # of a context, where the model does not say


class Logprob(NamedTuple):
    """The log-probability of a token, its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class Sample:
    """One sample of a request, as far as it has come."""

    id: str  # as the scheduler knows it
    request: str
    index: int
    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    namespace: Namespace
    eos: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    stream: TextStream | None
    miss: Explanation
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative: float = 0.0
    cached: int = 0
    new_text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str = ""

    @property
    def text(self) -> str:
        return self.stream.text if self.stream is not None else ""


class Engine:
    """A model that serves requests. One thread calls all of it, but for `wake`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = _device(config.device)
        self.files = find_model(config.model, load_format=config.load_format, revision=config.revision)
        model = load_model(
            self.files, dtype=config.dtype, device=str(self.device), seed=config.seed, progress=config.progress
        )
        self.tokenizer = _tokenizer(config, self.files)
        self.eos = self.files.eos_token_ids
        self.served = ServedModel(model, config.page_size)
        self.adapters = Adapters(model, config.max_loras, config.max_lora_rank) if config.enable_lora else None
        self.sized = self._size(text_config(model.config))
        for line in told(self.sized, config.page_size):
            log.info("%s", line)
        self.max_model_len = self.sized.max_model_len
        self.vocabulary = self.served.vocabulary
        self._weights = self.files.digest(str(model.dtype).removeprefix("torch."), config.seed)
        self.version = 0
        self.samples: dict[str, Sample] = {}
        self._seeds = random.Random(config.seed)
        self._routings: dict[int, Routing | None] = {}  # by step
        self._join(str(model.dtype).removeprefix("torch."))

    # ---- the start

    def _size(self, text: Any) -> Sized:
        config = self.config
        longest = config.max_model_len or getattr(text, "max_position_embeddings", None) or _LONGEST
        if config.device_cache != "auto":
            room = nbytes("device_cache", str(config.device_cache))
        elif self.device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(self.device)
            room = int(free - (1 - config.gpu_memory_utilization) * whole)
        else:
            room = int(_CPU_SHARE * (available_bytes() or 1 << 32))
        host = nbytes("host_cache", str(config.host_cache))
        tokens = config.max_num_batched_tokens or (_GPU_TOKENS if self.device.type == "cuda" else _CPU_TOKENS)
        return size(self.served.groups, room, config.page_size, config.max_num_seqs, longest, host, tokens)

    def _join(self, dtype: str) -> None:
        config, groups, cuda = self.config, self.sized.groups, self.device.type == "cuda"
        layouts = {group.name: group.layout for group in self.served.groups}
        arena = TorchArena.allocate(groups, layouts, device=self.device)
        self.scheduler = Scheduler(
            SchedulerConfig(
                config.page_size,
                groups,
                config.max_num_batched_tokens or (_GPU_TOKENS if cuda else _CPU_TOKENS),
                self.sized.max_num_seqs,
                max_loras=config.max_loras if config.enable_lora else 0,
                overlap=config.overlap,
                store=config.store is not None,
                policy=config.cache_policy,
                prefix_caching=config.enable_prefix_caching,
                max_columns=-(-self.max_model_len // config.page_size),
            )
        )
        self.sampler = Sampler(self.sized.max_num_seqs, self.vocabulary, self.device, self._seeds)
        self.executor = ModelExecutor(self.served, arena, self.sized.max_num_seqs, self)
        mover = None
        if any(group.host_pages for group in groups):
            mover = open_mover(arena, PinnedArena(groups) if cuda else HostArena(groups))
        self.store = self._open_store(dtype) if config.store is not None else None
        self.loop = EngineLoop(self.scheduler, self.executor, Tiers(self.scheduler, mover, self.store))

    def _open_store(self, dtype: str) -> Store:
        layouts = tuple(
            GroupLayout(group.name, group.family, group.layout.page_bytes, group.window, _in_words(group.layout.parts))
            for group in self.served.groups
        )
        assert self.config.store is not None
        fingerprint = Fingerprint(self._weights, dtype, self.config.page_size, layouts, 0, 1)
        return open_store(self.config.store, fingerprint, process=True)

    # ---- requests

    def submit(
        self, id: str, tokens: Sequence[int] | npt.NDArray[Any], params: SamplingParams, adapter: bytes | None = None
    ) -> list[Sample]:
        """Take a request. Refused (a ValueError) with the reason if it cannot be served."""
        prompt = np.asarray(tokens, np.int64)
        if not len(prompt):
            raise Refused(id, "the prompt is empty")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self.vocabulary:
            wrong = int(prompt[(prompt < 0) | (prompt >= self.vocabulary)][0])
            raise Refused(
                id, f"token {wrong} of the prompt is none of this model's, which are 0 to {self.vocabulary - 1}"
            )
        left = self.max_model_len - len(prompt)
        if left < 1:
            raise Refused(
                id, f"the prompt has {len(prompt)} tokens, and the context is {self.max_model_len} with its answer"
            )
        params.check_vocabulary(self.vocabulary)
        if params.seed is None and not params.greedy:  # fixed now, so that a retraction changes nothing
            params = replace(params, seed=self._seeds.getrandbits(62))
        most = left if params.max_tokens is None else min(left, params.max_tokens)
        eos = () if params.ignore_eos else self.eos
        stops = tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))
        namespace = Namespace(adapter, params.cache_salt, self.version)
        ids = prompt.astype(np.int32)
        miss = self.scheduler.cache.explain(namespace, ids)
        words = bad_word_tokens(self.tokenizer, params) if params.bad_words else ()
        samples = [
            Sample(
                id if params.n == 1 else f"{id}#{index}",
                id,
                index,
                ids,
                params,
                namespace,
                stops,
                words,
                TextStream(self.tokenizer, params, prompt[-16:].tolist()) if self._makes_text(params) else None,
                miss,
            )
            for index in range(params.n)
        ]
        least = min(params.min_tokens, most)
        specs = [RequestSpec(s.id, ids, most, namespace, params.priority, stops, least) for s in samples]
        self.samples.update({sample.id: sample for sample in samples})  # before the first plan can seat them
        try:
            self.loop.submit(specs)
        except ValueError:
            for sample in samples:
                del self.samples[sample.id]
            raise
        if self.adapters is not None and adapter is not None:
            for _ in samples:
                self.adapters.hold(adapter)
        return samples

    def _makes_text(self, params: SamplingParams) -> bool:
        return self.tokenizer is not None and params.detokenize

    def abort(self, samples: Sequence[Sample]) -> list[Sample]:
        """Nobody wants these any more. Returns those that ended by it."""
        return self._end(self.loop.tell([Abort(sample.id) for sample in samples if sample.finish_reason is None]))

    def step(self) -> list[Sample]:
        """One step. Returns the samples that got a token or ended; `new_text` is what became final of their text."""
        step = self.loop.step()
        changed: dict[str, Sample] = {}
        stopped: list[Sample] = []
        for id, token in step.tokens().items():
            sample = self.samples.get(id)
            if sample is None:
                continue
            changed[id] = sample
            sample.token_ids.append(token)
            sample.new_text = ""
            if sample.params.logprobs is not None:
                self._note(sample, self.executor.logprobs.get(id), token)
            if sample.stream is not None and not (token in sample.eos and self._may_stop(sample)):
                sample.new_text = sample.stream.push(token)
                if sample.stream.stopped is not None:
                    stopped.append(sample)
        ended = [*step.ended]
        over = {end.id for end in ended}
        found = [sample for sample in stopped if sample.id not in over]
        if found:
            ended += self.loop.tell([Finish(sample.id) for sample in found])
        for sample in self._end(ended):
            changed[sample.id] = sample
        return list(changed.values())

    def rest(self, timeout: float | None = None) -> None:
        self.loop.rest(timeout)

    def close(self) -> None:
        self._end(self.loop.close())

    def _may_stop(self, sample: Sample) -> bool:
        return len(sample.token_ids) >= sample.params.min_tokens

    def _end(self, ended: Sequence[Ended]) -> list[Sample]:
        over = []
        for end in ended:
            sample = self.samples.pop(end.id, None)
            if sample is None:
                continue
            over.append(sample)
            sample.cached = end.cached
            if sample.namespace.adapter is not None and self.adapters is not None:
                self.adapters.release(sample.namespace.adapter)
            last = sample.token_ids[-1] if sample.token_ids else None
            if sample.stream is not None and sample.stream.stopped is not None:
                sample.finish_reason, sample.stop_reason = "stop", sample.stream.stopped
                del sample.token_ids[sample.stream.tokens :], sample.logprobs[sample.stream.tokens :]
                continue
            if sample.stream is not None:
                sample.new_text += sample.stream.finish(last if end.reason == "stop" else None)
            if end.reason == "stop":
                sample.finish_reason = "stop"
                sample.stop_reason = last if last is not None and last not in self.eos else None
            else:
                sample.finish_reason = {"length": "length", "abort": "abort", "failed": "error"}.get(end.reason, "stop")
                sample.error = end.detail if end.reason == "failed" else ""
        return over

    def _note(self, sample: Sample, found: dict[int, tuple[float, int]] | None, token: int) -> None:
        if found is None:
            return
        sample.cumulative += found[token][0]
        most = max(1, sample.params.logprobs or 0)
        kept = {id: told for at, (id, told) in enumerate(found.items()) if id == token or told[1] <= most}
        sample.logprobs.append({id: Logprob(value, rank, self._piece(id)) for id, (value, rank) in kept.items()})

    def _piece(self, token: int) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode([token]))

    # ---- what the executor asks

    def seat(self, plan: Plan) -> None:
        """Slots with new owners: their parameters, and what is known of what they have generated."""
        for slot, id in plan.seated:
            sample = self.samples.get(id)
            if sample is not None:
                self.sampler.seat(
                    slot, sample.params, sample.prompt, sample.token_ids, sample.eos, sample.index, sample.bad_words
                )

    def draw(self, logits: torch.Tensor, plan: Plan, rows: Sequence[int]) -> Sampled:
        batch = plan.batch
        ends = (batch.starts + batch.lengths)[rows]
        prompts = np.array([self._prompt_length(batch.ids[row]) for row in rows], np.int64)
        return self.sampler.sample(logits, batch.slots[rows], ends - prompts)

    def _prompt_length(self, id: str) -> int:
        sample = self.samples.get(id)
        return 0 if sample is None else len(sample.prompt)  # it has ended: its token is nobody's

    def adapted(self, plan: Plan) -> AbstractContextManager[Any]:
        adapters, mixers = self.adapters, self.served.mixers
        if adapters is None:
            return nullcontext()
        routing = adapters.begin(plan.batch.adapters, plan.batch.lengths.tolist())
        self._routings[plan.step or 0] = routing
        mixers.within = lambda tokens: adapters.applied(None if routing is None else routing.part(tokens))
        return adapters.applied(routing)

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


def _tokenizer(config: EngineConfig, files: Any) -> Any:
    if config.skip_tokenizer_init or (config.tokenizer is None and not files.has_tokenizer):
        return None
    from transformers import AutoTokenizer

    where = config.tokenizer or str(files.folder)
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise Unsupported(f"the tokenizer in {where} cannot be read: {str(error).splitlines()[0]}") from error


def _in_words(parts: Sequence[Any]) -> str:
    """What lies where in a page, as a store's fingerprint tells it."""
    import hashlib

    said = ";".join(
        f"{p.layer}.{p.name}:{'x'.join(map(str, p.shape))}:{str(p.dtype).removeprefix('torch.')}" for p in parts
    )
    return said if len(said) < 2000 else f"sha256:{hashlib.sha256(said.encode()).hexdigest()}"
