"""The rows of a plan as an executor sees them: what each asks for beside the model's forward.

    plan --RowSource.rows--> PlanRows    the token each row gets, from which logits
                                         whose prompts are scored
                                         which adapters are applied to which tokens

Made once a plan, when it begins, so that an executor is a function of a plan and its rows. `Greedy` is for executors
that serve no requests; `RequestRows` knows the samples of the engine's requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.scheduler import Plan

from ..lora.adapters import Adapters, ReadRouting, Routing, UnknownAdapter
from ..models.recurrent import Mixers
from ..samples import GrammarMasks, Sample
from .sampling import Sampled, Sampler

Newest = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]  # the tokens that were sampled last for these slots


class RowSource(Protocol):
    """Where an executor gets the rows of each plan from."""

    max_logprobs: int  # of the likeliest tokens, that a request may ask for

    def rows(self, plan: Plan) -> PlanRows:
        """The rows of a plan that begins. Slots with new owners (`plan.seated`) are theirs from now on."""

    def adapting(self, slots: Tensor) -> AbstractContextManager[Any] | None:
        """Around a forward that reads from memory which token has which adapter's slot, so that it can be captured.
        None: this model's adapters cannot be applied so, or it has none."""


class PlanRows:
    """By default each row gets its likeliest token, and there are no adapters.

    sampling   the rows of the batch that sample
    scored     rows whose prompt's log-probabilities are wanted: for the first of their tokens, which tokens come next
    """

    def __init__(self, plan: Plan, scored: Mapping[int, npt.NDArray[np.int32]] | None = None) -> None:
        self.plan = plan
        self.sampling: list[int] = plan.batch.samples.nonzero()[0].tolist()
        self.scored = scored or {}

    def plain(self) -> bool:
        """Whether each row that samples gets its likeliest token, and nothing else is asked of it."""
        return True

    def draw(self, logits: Tensor, newest: Newest) -> Sampled:
        """A token for each row that samples."""
        return Sampled(logits.argmax(-1), ~torch.isfinite(logits).all(-1), np.zeros(0, np.int64), None)

    def adapted(self, tokens: slice) -> AbstractContextManager[Any]:
        """Around the model's forward for some of the batch's tokens: the adapters of their rows."""
        return nullcontext()

    def adapter_slots(self) -> npt.NDArray[np.int32] | None:
        """The slot of the adapter of each of the batch's tokens, 0 for none; None: no row has one. The adapters are on
        the device then."""
        return None

    def close(self) -> None:
        """The plan is over, done or failed."""


class Greedy:
    """The likeliest token, always, and no adapters."""

    max_logprobs = 0

    def rows(self, plan: Plan) -> PlanRows:
        return PlanRows(plan)

    def adapting(self, slots: Tensor) -> AbstractContextManager[Any] | None:
        return None


class RequestRows:
    """The rows of requests. `samples`: those that the scheduler has, by id."""

    def __init__(
        self,
        samples: Mapping[str, Sample],
        sampler: Sampler,
        masks: GrammarMasks,
        adapters: Adapters | None,
        mixers: Mixers,
    ) -> None:
        self.samples = samples
        self.sampler = sampler
        self.masks = masks
        self.adapters = adapters
        self.mixers = mixers
        self.max_logprobs = sampler.max_logprobs

    def rows(self, plan: Plan) -> PlanRows:
        for slot, id in plan.seated:
            sample = self.samples.get(id)
            if sample is not None:
                sample.seated = sample.seated or time.monotonic()
                self.sampler.seat(
                    slot, sample.params, sample.prompt, sample.token_ids, sample.eos, sample.index, sample.bad_words
                )
        return _RequestRows(plan, self)

    def adapting(self, slots: Tensor) -> AbstractContextManager[Any] | None:
        if self.adapters is None or not self.adapters.capturable:
            return None
        return self._reading(self.adapters, slots)

    @contextmanager
    def _reading(self, adapters: Adapters, slots: Tensor) -> Iterator[None]:
        self.mixers.within = lambda some: nullcontext()  # they are given all tokens
        with adapters.applied(ReadRouting(slots)):
            yield


class _RequestRows(PlanRows):
    def __init__(self, plan: Plan, source: RequestRows) -> None:
        super().__init__(plan, _scored(plan, source.samples))
        self._source = source
        self._routing: Routing | None = None
        self._routed = False

    @cached_property
    def _samples(self) -> Sequence[Sample | None]:
        """By row that samples. None: the request has ended, and the row's token is dropped."""
        ids, samples = self.plan.batch.ids, self._source.samples
        return [samples.get(ids[row]) for row in self.sampling]

    @cached_property
    def _index(self) -> npt.NDArray[np.int64]:
        """By row that samples: the index of the token that it gets, among those of its answer."""
        batch = self.plan.batch
        prompts = [0 if sample is None else len(sample.prompt) for sample in self._samples]
        return (batch.starts + batch.lengths)[self.sampling] - np.array(prompts, np.int64)

    def plain(self) -> bool:
        if any(sample is not None and sample.grammar is not None for sample in self._samples):
            return False
        return self._source.sampler.plain(self.plan.batch.slots[self.sampling], self._index)

    def draw(self, logits: Tensor, newest: Newest) -> Sampled:
        slots = self.plan.batch.slots[self.sampling]
        masks = self._source.masks.of(self._samples, self._index, partial(newest, slots))
        return self._source.sampler.sample(logits, slots, self._index, masks)

    def adapted(self, tokens: slice) -> AbstractContextManager[Any]:
        adapters = self._source.adapters
        if adapters is None:
            return nullcontext()
        whole = self._whole_routing(adapters)
        routing = whole
        if whole is not None and tokens.stop - tokens.start < len(whole.slots):
            routing = whole.part(tokens)
        self._source.mixers.within = lambda some: adapters.applied(None if routing is None else routing.part(some))
        return adapters.applied(routing)

    def adapter_slots(self) -> npt.NDArray[np.int32] | None:
        adapters = self._source.adapters
        whole = None if adapters is None else self._whole_routing(adapters)
        return None if whole is None else whole.slots

    def _whole_routing(self, adapters: Adapters) -> Routing | None:
        """The adapters of all tokens of the batch. They come to the device when they are first asked for, and stay
        until `close`."""
        if not self._routed:
            batch = self.plan.batch
            try:
                self._routing = adapters.begin(batch.adapters, batch.lengths.tolist())
            except UnknownAdapter as error:
                error.culprits = [batch.ids[row] for row in error.rows]
                raise
            self._routed = True
        return self._routing

    def close(self) -> None:
        if self._routing is not None and self._source.adapters is not None:
            self._source.adapters.end(self._routing)
            self._routing = None


def _scored(plan: Plan, samples: Mapping[str, Sample]) -> dict[int, npt.NDArray[np.int32]]:
    batch, found = plan.batch, {}
    for row, id in enumerate(batch.ids[batch.decodes :], batch.decodes):
        sample = samples.get(id)
        if sample is not None and sample.scores_prompt:
            start = int(batch.starts[row])
            found[row] = sample.prompt[start + 1 : start + 1 + int(batch.lengths[row])]
    return {row: next_tokens for row, next_tokens in found.items() if len(next_tokens)}
