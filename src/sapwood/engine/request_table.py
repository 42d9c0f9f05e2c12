"""Requests of one engine as they come and go: checked, handed to the scheduler, and told token by token. No torch here:
whatever runs the batches, requests are served alike.

    submit(id, tokens, params) --> Samples --> EngineLoop --> step: the samples that got a token or ended

A request of n samples is n requests to the scheduler, whose prompt is computed once.

While weights are being changed, whoever runs goes on under the old ones, and whoever has not begun waits here; when
nobody runs any more, weights and version change, and those that waited are bound to the new version.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sapwood.cache import Namespace
from sapwood.scheduler import Abort, Ended, Finish, Plan, Refused, RequestSpec, Scheduler, StepDone

from .detokenize import Detokenizer
from .loop import EngineLoop
from .params import SamplingParams
from .samples import Grammar, Likely, Sample
from .stops import TextStream, bad_word_tokens

# Writes what each grammar allows into its row of masks: one after the other, or all at once where grammars can.
Fill = Callable[[Sequence[Any], npt.NDArray[np.int32], Sequence[int]], None]


class Holds(Protocol):
    """Adapters, as far as requests need them: one that is in use stays."""

    def hold(self, digest: bytes) -> None: ...

    def release(self, digest: bytes) -> None: ...


class Requests:
    """All of it is called by one thread, but for `wake`. Whoever inherits sets `scheduler` and `loop`."""

    scheduler: Scheduler
    loop: EngineLoop
    closes_within = 5.0  # seconds for what a store is owed

    def __init__(
        self,
        *,
        vocabulary: int,
        max_model_len: int,
        eos: Sequence[int],
        tokenizer: Any,
        seed: int,
        max_logprobs: int = 20,
    ) -> None:
        self.vocabulary = vocabulary
        self.max_model_len = max_model_len
        self.max_logprobs = max_logprobs
        self.eos = tuple(eos)
        self.tokenizer = tokenizer
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self.version = 0
        self.samples: dict[str, Sample] = {}  # those that the scheduler has
        self.held: list[Sample] = []  # those that wait for new weights
        self.holds: Holds | None = None
        self.seeds = random.Random(seed)
        self.fill: Fill = _one_by_one
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
        if self.holds is not None and adapter is not None:
            for _ in samples:
                self.holds.hold(adapter)
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
        """Nobody wants these any more. Returns those that ended by it."""
        waited = [sample for sample in samples if sample in self.held]
        self.held = [sample for sample in self.held if sample not in waited]
        over = self._end(self.loop.tell([Abort(sample.id) for sample in samples if sample.id in self.samples]))
        for sample in waited:
            self._over(sample, Ended(sample.id, "abort", len(sample.prompt), 0, 0, 0, 0))
        return over + waited

    def finish(self, samples: Sequence[Sample]) -> list[Sample]:
        """What these have said is all that was wanted: a stop string was found elsewhere. Returns those that ended."""
        return self._end(self.loop.tell([Finish(sample.id) for sample in samples if sample.id in self.samples]))

    def step(self) -> list[Sample]:
        """One step. Returns the samples that got a token or ended; `new_text` is what became final of their text."""
        if self._change is not None and not self.samples:
            self._change_now(self._change)
        step = self.loop.step()
        for plan, event in step.done:
            if isinstance(event, StepDone) and len(plan.batch.ids) > plan.batch.decodes:
                self._note_cached(plan)
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

    def _note_cached(self, plan: Plan) -> None:
        """What requests with their first token were served of their prompts."""
        batch = plan.batch
        for row in range(batch.decodes, len(batch.ids)):
            sample = self.samples.get(batch.ids[row])
            if sample is not None and batch.samples[row] and not sample.token_ids:
                loaded, fetched = self.scheduler.brought(sample.id)
                sample.served(int(batch.cached[row]), loaded, fetched, self.scheduler.found(sample.id))

    def _told(self, plan: Plan, event: Any) -> Mapping[str, Likely]:
        """What a plan that is done tells of log-probabilities, by sample."""
        return {}

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
        if sample.spec.namespace.adapter is not None and self.holds is not None:
            self.holds.release(sample.spec.namespace.adapter)

    def close(self) -> None:
        """Abort who is left, and write back what a store is owed."""
        self.abort(self.held)
        self._end(self.loop.close(self.closes_within))

    # ---- other weights

    def begin_change(self, change: Callable[[int], int], abort: bool = False) -> None:
        """Call `change`, which gives the version after the one it is told, as soon as nobody runs; `abort` ends those
        that do. Whoever has not begun waits."""
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
            self.version = self.seeds.getrandbits(62)  # nobody knows what they are: share nothing
            raise
        finally:
            self.scheduler.flush()  # what the old weights have computed matches nothing any more
            held, self.held = self.held, []
            for sample in held:
                namespace = replace(sample.spec.namespace, version=self.version)
                sample.spec = replace(sample.spec, namespace=namespace)
                self._enter([sample])

    # ---- what an executor asks

    def masks(
        self, samples: Sequence[Sample | None], index: npt.NDArray[Any], newest: Callable[[], npt.NDArray[Any]]
    ) -> npt.NDArray[np.int32] | None:
        """What the grammars of these rows allow for the token at `index`. The forward of this step runs meanwhile, and
        the token of the last one may be known to the device alone: `newest` asks it."""
        bound = [
            (row, sample, sample.grammar)
            for row, sample in enumerate(samples)
            if sample is not None and sample.grammar is not None
        ]
        if not bound:
            return None
        masks = np.full((len(samples), -(-self.vocabulary // 32)), -1, np.int32)
        last: npt.NDArray[Any] | None = None
        for row, sample, grammar in bound:
            due = int(index[row])
            if sample.fed > due:  # a step that failed is tried again
                grammar.rollback(sample.fed - due)
                sample.fed = due
            for at in range(sample.fed, due):
                if at >= len(sample.token_ids) and last is None:
                    last = newest()
                grammar.accept(sample.token_ids[at] if at < len(sample.token_ids) else int(last[row]))  # type: ignore[index]
            sample.fed = due
        self.fill([grammar for _, _, grammar in bound], masks, [row for row, _, _ in bound])
        return masks


def _one_by_one(grammars: Sequence[Grammar], masks: npt.NDArray[np.int32], rows: Sequence[int]) -> None:
    for grammar, row in zip(grammars, rows, strict=True):
        bits = grammar.allowed()
        masks[row, : len(bits)], masks[row, len(bits) :] = bits, 0
