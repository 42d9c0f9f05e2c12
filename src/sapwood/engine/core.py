"""One model, served: what is loaded, sized and joined at the start, and requests as they come and go.

    EngineConfig --> weights --> ServedModel --> groups --> arena, scheduler, tiers, executor --> EngineLoop
                                                                                                     |
    submit(id, tokens, params) ----------------------------------------------------------------------+--> step: Outputs

A request of n samples is n requests to the scheduler, whose prompt is computed once.

While weights are being changed (`begin_update`), whoever runs goes on under the old ones, and whoever has not begun
waits here; when nobody runs any more, weights and version change, and those that waited are bound to the new version.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sapwood.cache import Namespace
from sapwood.scheduler import Abort, Ended, Finish, Plan, Refused, RequestSpec, Scheduler, SchedulerConfig, StepDone
from sapwood.store import Fingerprint, GroupLayout, Store, open_store
from sapwood.store.uri import nbytes

from .adapters import Adapters, Routing, UnknownAdapter
from .arena import HostArena, available_bytes
from .flags import EngineConfig
from .loop import EngineLoop
from .model import ServedModel
from .params import SamplingParams
from .remembers import Unsupported, text_config
from .samples import Grammar, Sample
from .sampling import Sampled, Sampler
from .sizing import Sized, size, told
from .steps import ModelExecutor
from .stops import TextStream, bad_word_tokens
from .tiers import Tiers
from .transfer import open_mover
from .transfer_torch import PinnedArena, TorchArena
from .updates import Update
from .weights import find_model, load_model

log = logging.getLogger(__name__)
_CPU_SHARE = 0.4  # of the memory that is free
_CPU_TOKENS, _GPU_TOKENS = 2048, 8192  # in a step
_LONGEST = 8192  # of a context, where the model does not say


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
        if self.adapters is not None:
            self.adapters.only_called(self.served.dry)
        self.sized = self._size(text_config(model.config))
        for line in told(self.sized, config.page_size):
            log.info("%s", line)
        self.max_model_len = self.sized.max_model_len
        self.vocabulary = self.served.vocabulary
        self._weights = self.files.digest(str(model.dtype).removeprefix("torch."), config.seed)
        self.version = 0
        self.samples: dict[str, Sample] = {}  # those that the scheduler has
        self.held: list[Sample] = []  # those that wait for new weights
        self._update: Update | None = None
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
        self._mover = None
        if any(group.host_pages for group in groups):
            self._mover = open_mover(arena, PinnedArena(groups) if cuda else HostArena(groups))
        self.store = self._open_store(dtype) if config.store is not None else None
        self.loop = EngineLoop(self.scheduler, self.executor, Tiers(self.scheduler, self._mover, self.store))

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
        self,
        id: str,
        tokens: Sequence[int] | npt.NDArray[Any],
        params: SamplingParams,
        adapter: bytes | None = None,
        *,
        reads_cache: bool = True,
        writes_cache: bool = True,
        grammars: Sequence[Grammar] = (),
    ) -> list[Sample]:
        """Take a request: one sample for each of `params.n`. Refused (a ValueError) with the reason if it cannot be
        served. `grammars`: one a sample, or none."""
        ids = self._checked(id, tokens, params)
        if params.seed is None and not params.greedy:  # fixed now, so that a retraction changes nothing
            params = replace(params, seed=self._seeds.getrandbits(62))
        left = self.max_model_len - len(ids)
        most = left if params.max_tokens is None else min(left, params.max_tokens)
        eos = () if params.ignore_eos else self.eos
        stops = tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))
        namespace = Namespace(adapter, params.cache_salt, self.version)
        miss = self.scheduler.cache.explain(namespace, ids)
        words = bad_word_tokens(self.tokenizer, params) if params.bad_words else ()
        least, texts = min(params.min_tokens, most), self.tokenizer is not None and params.detokenize
        samples = []
        for index in range(params.n):
            name = id if params.n == 1 else f"{id}#{index}"
            stream = TextStream(self.tokenizer, params, ids[-16:].tolist()) if texts else None
            grammar = grammars[index] if grammars else None
            spec = RequestSpec(name, ids, most, namespace, params.priority, stops, least, reads_cache, writes_cache)
            sample = Sample(spec, id, index, ids, params, stops, words, stream, miss, grammar)
            if sample.scores_prompt:  # what is cached has no logits
                sample.spec = replace(spec, reads_cache=False)
            samples.append(sample)
        if self._update is not None:
            self.held += samples
        else:
            self._enter(samples)
        if self.adapters is not None and adapter is not None:
            for _ in samples:
                self.adapters.hold(adapter)
        return samples

    def _checked(self, id: str, tokens: Any, params: SamplingParams) -> npt.NDArray[np.int32]:
        prompt = np.asarray(tokens, np.int64)
        if not len(prompt):
            raise Refused(id, "the prompt is empty")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self.vocabulary:
            wrong = int(prompt[(prompt < 0) | (prompt >= self.vocabulary)][0])
            raise Refused(
                id, f"token {wrong} of the prompt is none of this model's, which are 0 to {self.vocabulary - 1}"
            )
        if len(prompt) >= self.max_model_len:
            raise Refused(
                id, f"the prompt has {len(prompt)} tokens, and the context is {self.max_model_len} with its answer"
            )
        params.check_vocabulary(self.vocabulary)
        return prompt.astype(np.int32)

    def _enter(self, samples: Sequence[Sample]) -> None:
        self.samples.update({sample.id: sample for sample in samples})  # before the first plan can seat them
        try:
            self.loop.submit([sample.spec for sample in samples])
        except ValueError:
            for sample in samples:
                del self.samples[sample.id]
            raise

    def abort(self, samples: Sequence[Sample]) -> list[Sample]:
        """Nobody wants these any more. Returns those that ended by it."""
        waited = [sample for sample in samples if sample in self.held]
        self.held = [sample for sample in self.held if sample not in waited]
        over = self._end(self.loop.tell([Abort(sample.id) for sample in samples if sample.id in self.samples]))
        for sample in waited:
            self._over(sample, Ended(sample.id, "abort", len(sample.prompt), 0, 0, 0, 0))
        return over + waited

    def step(self) -> list[Sample]:
        """One step. Returns the samples that got a token or ended; `new_text` is what became final of their text."""
        if self._update is not None and not self.samples:
            self._change(self._update)
        step = self.loop.step()
        told = {id: likely for plan, event in step.done for id, likely in self._told(plan, event).items()}
        changed: dict[str, Sample] = {}
        stopped: list[Sample] = []
        for id, token in step.tokens().items():
            sample = self.samples.get(id)
            if sample is not None:
                changed[id] = sample
                if sample.takes(token, told.get(id), self.tokenizer):
                    stopped.append(sample)
        ended = [*step.ended]
        over = {end.id for end in ended}
        found = [sample for sample in stopped if sample.id not in over]
        if found:
            ended += self.loop.tell([Finish(sample.id) for sample in found])
        for sample in self._end(ended):
            changed[sample.id] = sample
        return list(changed.values())

    def _told(self, plan: Plan, event: Any) -> dict[str, Any]:
        """What a plan that is done tells of log-probabilities: those of new tokens. Those of prompts are noted."""
        tokens, prompts = self.executor.told.pop(plan.step or 0, ({}, {}))
        if isinstance(event, StepDone):
            for id, scores in prompts.items():
                sample = self.samples.get(id)
                if sample is not None:
                    for position, likely in scores:
                        sample.learns(position, likely, self.tokenizer)
        return tokens

    def rest(self, timeout: float | None = None) -> None:
        self.loop.rest(timeout)

    def close(self) -> None:
        """Abort who is left, write back what a store is owed, and give all memory back."""
        self.abort(self.held)
        self._end(self.loop.close())
        if self._mover is not None:
            self._mover.device.close()
            if self.loop.tiers.close(0.0):  # else somebody may still write there
                self._mover.host.close()
        self.executor.arena.close()
        self.served.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _end(self, ended: Sequence[Ended]) -> list[Sample]:
        over = []
        for end in ended:
            sample = self.samples.pop(end.id, None)
            if sample is not None:
                self._over(sample, end)
                over.append(sample)
        return over

    def _over(self, sample: Sample, end: Ended) -> None:
        sample.ends(end, self.eos)
        if sample.spec.namespace.adapter is not None and self.adapters is not None:
            self.adapters.release(sample.spec.namespace.adapter)

    # ---- other weights

    def begin_update(self, update: Update, abort: bool = False) -> None:
        """Change the weights as soon as nobody runs; `abort` ends those that do. Whoever has not begun waits."""
        if self._update is not None:
            raise RuntimeError("weights are being changed already: wait until that is over")
        self._update = update
        waiting = [sample for sample in self.samples.values() if not sample.seated]
        for sample in waiting:
            del self.samples[sample.id]
        self.loop.tell([Abort(sample.id) for sample in waiting])
        self.held = waiting
        if abort:
            self._end(self.loop.tell([Abort(id) for id in list(self.samples)]))

    @property
    def updating(self) -> bool:
        return self._update is not None

    def _change(self, update: Update) -> None:
        self._update = None
        try:
            self.version = update.apply(self.served.model, self.version)
        except BaseException:
            self.version = self._seeds.getrandbits(62)  # nobody knows what they are: share nothing
            raise
        finally:
            self.scheduler.flush()  # what the old weights have computed matches nothing any more
            held, self.held = self.held, []
            for sample in held:
                namespace = replace(sample.spec.namespace, version=self.version)
                sample.spec = replace(sample.spec, namespace=namespace)
                sample.miss = self.scheduler.cache.explain(namespace, sample.prompt)
                self._enter([sample])

    # ---- what the executor asks

    def seat(self, plan: Plan) -> None:
        """Slots with new owners: their parameters, and what is known of what they have generated."""
        for slot, id in plan.seated:
            sample = self.samples.get(id)
            if sample is not None:
                sample.seated = True
                self.sampler.seat(
                    slot, sample.params, sample.prompt, sample.token_ids, sample.eos, sample.index, sample.bad_words
                )

    def draw(self, logits: torch.Tensor, plan: Plan, rows: Sequence[int]) -> Sampled:
        batch = plan.batch
        slots = batch.slots[rows]
        samples = [self.samples.get(batch.ids[row]) for row in rows]  # None: it has ended, its token is nobody's
        prompts = [0 if sample is None else len(sample.prompt) for sample in samples]
        index = (batch.starts + batch.lengths)[rows] - np.array(prompts, np.int64)
        return self.sampler.sample(logits, slots, index, self._masks(samples, slots, index))

    def _masks(self, samples: Sequence[Sample | None], slots: Any, index: Any) -> npt.NDArray[np.int32] | None:
        """What the grammars of these rows allow. The forward of this step runs meanwhile, and the token of the last one
        may be known to the device alone."""
        if not any(sample is not None and sample.grammar is not None for sample in samples):
            return None
        masks = np.full((len(samples), -(-self.vocabulary // 32)), -1, np.int32)
        newest = self.executor.newest(slots)
        for row, sample in enumerate(samples):
            if sample is None or sample.grammar is None:
                continue
            due = int(index[row])
            if sample.fed > due:  # a step that failed is tried again
                sample.grammar.rollback(sample.fed - due)
                sample.fed = due
            for at in range(sample.fed, due):
                sample.grammar.accept(sample.token_ids[at] if at < len(sample.token_ids) else int(newest[row]))
            sample.fed = due
            bits = sample.grammar.allowed()
            masks[row, : len(bits)], masks[row, len(bits) :] = bits, 0
        return masks

    def scored(self, plan: Plan) -> dict[int, npt.NDArray[np.int32]]:
        batch, found = plan.batch, {}
        for row, id in enumerate(batch.ids[batch.decodes :], batch.decodes):
            sample = self.samples.get(id)
            if sample is not None and sample.scores_prompt:
                start = int(batch.starts[row])
                found[row] = sample.prompt[start + 1 : start + 1 + int(batch.lengths[row])]
        return {row: next_tokens for row, next_tokens in found.items() if len(next_tokens)}

    def adapted(self, plan: Plan, tokens: slice) -> AbstractContextManager[Any]:
        adapters, mixers, step = self.adapters, self.served.mixers, plan.step or 0
        if adapters is None:
            return nullcontext()
        if step not in self._routings:
            try:
                self._routings[step] = adapters.begin(plan.batch.adapters, plan.batch.lengths.tolist())
            except UnknownAdapter as error:
                error.culprits = [plan.batch.ids[row] for row in error.rows]
                raise
        whole = self._routings[step]
        routing = whole
        if whole is not None and tokens.stop - tokens.start < len(whole.slots):
            routing = whole.part(tokens)
        mixers.within = lambda some: adapters.applied(None if routing is None else routing.part(some))
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
