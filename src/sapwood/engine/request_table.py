"""Requests of one engine as they come and go: checked, handed to the scheduler, and given their tokens step by step. No
torch here: whatever runs the batches, requests are served alike.

    submit(id, tokens, params) --> Samples --> EngineLoop --> step: the samples that got a token or ended

A request of n samples is n requests to the scheduler, whose prompt is computed once.

While weights are being changed, samples that run go on under the old ones, and samples that have not begun wait here.
When none runs any more, weights and version change, and those that waited are bound to the new version.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sapwood.cache import Namespace
from sapwood.scheduler import Abort, Ended, Finish, Plan, Refused, RequestSpec, StepDone, StepFailed

from .detokenize import Detokenizer
from .loop import EngineLoop
from .params import Likely, SamplingParams
from .samples import Grammar, Sample, StepLogprobs
from .stops import TextStream, bad_word_tokens

NO_LOGPROBS = StepLogprobs({}, {})
LogprobsOf = Callable[[Plan, StepDone | StepFailed], StepLogprobs]


class LoadedAdapters(Protocol):
    """Adapters, as far as requests need them: by name, and one that is in use stays."""

    def names(self) -> dict[str, bytes]: ...

    def hold(self, digest: bytes) -> None: ...

    def release(self, digest: bytes) -> None: ...


class RequestTable:
    """All of it is called by one thread, but for `wake`."""

    closes_within = 5.0  # seconds for what a store is owed

    def __init__(
        self,
        loop: EngineLoop,
        samples: dict[str, Sample],
        *,
        vocabulary: int,
        max_model_len: int,
        eos: Sequence[int],
        tokenizer: Any,
        seeds: random.Random,
        max_logprobs: int,
        adapters: LoadedAdapters | None = None,
        logprobs: LogprobsOf = lambda plan, event: NO_LOGPROBS,
    ) -> None:
        """`samples`: those that the scheduler has, by id; what runs its batches looks there too. `logprobs`: what a
        plan that is over found of log-probabilities."""
        self.loop = loop
        self.scheduler = loop.scheduler
        self.samples = samples
        self.vocabulary = vocabulary
        self.max_model_len = max_model_len
        self.max_logprobs = max_logprobs
        self.eos = tuple(eos)
        self.tokenizer = tokenizer
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self.version = 0
        self.held: list[Sample] = []  # those that wait for new weights
        self.adapters = adapters
        self.seeds = seeds
        self._logprobs = logprobs
        self._change: Callable[[int], int] | None = None

    # ---- in

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
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> list[Sample]:
        """Take a request: one sample for each of `params.n`. Refused (a ValueError) with the reason if it cannot be
        served. `grammars`: one a sample, or none. `bad_words`: tokens of words, besides those of `params`."""
        ids = self._checked(id, tokens, params)
        if params.seed is None and not params.greedy:  # fixed now, so that a retraction changes nothing
            params = replace(params, seed=self.seeds.getrandbits(62))
        left = self.max_model_len - len(ids)
        most = left if params.max_tokens is None else min(left, params.max_tokens)
        eos = () if params.ignore_eos else self.eos
        stops = tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))
        namespace = Namespace(adapter, params.cache_salt, self.version)
        words = (*bad_words, *(bad_word_tokens(self.tokenizer, params) if params.bad_words else ()))
        least, texts = min(params.min_tokens, most), self.detokenizer if params.detokenize else None
        samples = []
        for index in range(params.n):
            name = id if params.n == 1 else f"{id}#{index}"
            stream = None if texts is None else TextStream(texts, params, ids[-16:].tolist())
            grammar = grammars[index] if grammars else None
            spec = RequestSpec(name, ids, most, namespace, params.priority, stops, least, reads_cache, writes_cache)
            sample = Sample(spec, id, index, ids, params, stops, words, stream, grammar)
            if sample.scores_prompt:  # what is cached has no logits
                sample.spec = replace(spec, reads_cache=False)
                sample.prompt_logprobs = [None] * len(ids)  # nothing is known of the first
            samples.append(sample)
        if self._change is not None:
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
        for field in ("logprobs", "prompt_logprobs"):
            if (getattr(params, field) or 0) > self.max_logprobs:
                got = getattr(params, field)
                raise Refused(id, f"{field} may be {self.max_logprobs} here (max_logprobs), got {got}")
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

    # ---- out

    def abort(self, samples: Sequence[Sample]) -> list[Sample]:
        """These samples are not wanted any more. Returns those that ended by it."""
        waited = [sample for sample in samples if sample in self.held]
        self.held = [sample for sample in self.held if sample not in waited]
        over = self._end(self.loop.tell([Abort(sample.id) for sample in samples if sample.id in self.samples]))
        for sample in waited:
            self._over(sample, Ended(sample.id, "abort", len(sample.prompt), 0, 0, 0, 0))
        return over + waited

    def finish(self, samples: Sequence[Sample]) -> list[Sample]:
        """These samples have all that was wanted: a stop string was found elsewhere. Returns those that ended."""
        return self._end(self.loop.tell([Finish(sample.id) for sample in samples if sample.id in self.samples]))

    def step(self) -> list[Sample]:
        """One step. Returns the samples that got a token or ended; `new_text` is what became final of their text."""
        if self._change is not None and not self.samples:
            self._change_now(self._change)
        step = self.loop.step()
        for plan, event in step.done:
            if isinstance(event, StepDone) and len(plan.batch.ids) > plan.batch.decodes:
                self._note_cached(plan)
        likely = {id: each for plan, event in step.done for id, each in self._note_logprobs(plan, event).items()}
        changed: dict[str, Sample] = {}
        stopped: list[Sample] = []
        for id, token in step.tokens().items():
            sample = self.samples.get(id)
            if sample is not None:
                changed[id] = sample
                if sample.takes(token, likely.get(id), self.tokenizer):
                    stopped.append(sample)
        ended = [*step.ended]
        over = {end.id for end in ended}
        found = [sample for sample in stopped if sample.id not in over]
        if found:
            ended += self.loop.tell([Finish(sample.id) for sample in found])
        for sample in self._end(ended):
            changed[sample.id] = sample
        return list(changed.values())

    def _note_cached(self, plan: Plan) -> None:
        """What requests with their first token were served of their prompts."""
        batch = plan.batch
        for row in range(batch.decodes, len(batch.ids)):
            sample = self.samples.get(batch.ids[row])
            if sample is not None and batch.samples[row] and not sample.token_ids:
                loaded, fetched = self.scheduler.brought(sample.id)
                sample.served(int(batch.cached[row]), loaded, fetched, self.scheduler.found(sample.id))

    def _note_logprobs(self, plan: Plan, event: StepDone | StepFailed) -> Mapping[str, Likely]:
        """Those of new tokens, by sample. Those of prompts are noted."""
        found = self._logprobs(plan, event)
        if isinstance(event, StepDone):
            for id, scores in found.prompts.items():
                sample = self.samples.get(id)
                if sample is not None:
                    for position, likely in scores:
                        sample.learns(position, likely, self.tokenizer)
        return found.tokens

    def rest(self, timeout: float | None = None) -> None:
        self.loop.rest(timeout)

    def wake(self) -> None:
        """There is something new: end a `rest`. Any thread may call it."""
        self.loop.wake()

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

    def close(self) -> None:
        """Abort the samples that are left, and write back what a store is owed."""
        self.abort(self.held)
        self._end(self.loop.close(self.closes_within))

    # ---- other weights

    def begin_change(self, change: Callable[[int], int], abort: bool = False) -> None:
        """Call `change`, which gets the version and returns the next one, as soon as no sample runs; `abort` ends those
        that do. Samples that have not begun wait."""
        if self._change is not None:
            raise RuntimeError("weights are being changed already: wait until that is over")
        self._change = change
        waiting = [sample for sample in self.samples.values() if not sample.seated]
        for sample in waiting:
            del self.samples[sample.id]
        self.loop.tell([Abort(sample.id) for sample in waiting])
        self.held = waiting
        if abort:
            self._end(self.loop.tell([Abort(id) for id in list(self.samples)]))

    @property
    def updating(self) -> bool:
        return self._change is not None

    def _change_now(self, change: Callable[[int], int]) -> None:
        self._change = None
        try:
            self.version = change(self.version)
        except BaseException:
            self.version = self.seeds.getrandbits(62)  # they may be anything: share nothing
            raise
        finally:
            self.scheduler.flush()  # what the old weights have computed matches nothing any more
            held, self.held = self.held, []
            for sample in held:
                namespace = replace(sample.spec.namespace, version=self.version)
                sample.spec = replace(sample.spec, namespace=namespace)
                self._enter([sample])
