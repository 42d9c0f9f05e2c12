"""Logits to tokens, for all rows of a step at once; parameters are kept by slot.

    logits --> argmax -------------------------------------------------------------------------> token
                  |                                                                                ^ ^
                  +-> logit_bias, min_tokens, bad words, allowed tokens --> penalties --> argmax --+ |
                                                                               |                     |
                                                         temperature, min_p, top_k, top_p --> draw --+

Every row begins with the argmax, which also shows whether its logits are sound; the other stages run on the rows that
ask for them. What a row gets does not depend on the rows beside it: each stage works row by row, and sums are made of
integers, so that no order of adding changes them. That holds for the random numbers too: one a token, a function of
the seed, the index of the sample and the index of the token alone.

Nothing waits for the device. Tokens that penalties and bad words look back on are kept there by the sampler, so that
a step can be sampled before the tokens of the last one are known to the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..params import MOST_BAD_WORD_TOKENS, SamplingParams
from .choosing import choose, on_rows
from .pinned_copies import PinnedCopies

Ints = Sequence[int] | npt.NDArray[np.integer[Any]]

# What a slot asks for.
_EDITS = 1  # logit_bias, bad words of one token
_WORDS = 2  # bad words of several tokens
_ALLOWED = 4
_PENALTIES = 8
_RANDOM = 16
_LOGPROBS = 32
_RANKED = 64  # logprobs of the likeliest tokens besides
_EARLY = 128  # of a row: it has not reached min_tokens
_SHAPED = _EDITS | _EARLY | _WORDS | _ALLOWED | _PENALTIES
_HISTORY = _WORDS | _PENALTIES

# Columns of what a slot asks for in numbers.
_TEMPERATURE, _MINIMUM, _K, _P, _REPETITION, _FREQUENCY, _PRESENCE = range(7)

_RECENT_TOKENS = 16  # tokens kept by slot: what bad words look back on, and steps in flight that may be sampled again
_NONE = -2  # in place of tokens before the first
_ANY = -1  # in bad words shorter than the longest


class Logprobs(NamedTuple):
    """Log-probabilities of tokens, a row each: `chosen`, its `rank` from 1, and the likeliest tokens, best first, as
    many as anybody may ask for."""

    chosen: Tensor
    rank: Tensor
    ids: Tensor
    values: Tensor


class Sampled(NamedTuple):
    """Tokens by row, on the device. `bad`: rows whose logits have NaN or infinity, or leave nothing to choose: their
    token means nothing. `logprobs` are those of the rows in `asked` (a host array), None if there are none."""

    tokens: Tensor
    bad: Tensor
    asked: npt.NDArray[np.int64]
    logprobs: Logprobs | None


def logprobs_of(logits: Tensor, tokens: Tensor, most: int) -> Logprobs:
    """Of some rows' logits, for the token of each, and of so many of the likeliest."""
    values = _working(logits).log_softmax(-1)
    chosen = values.gather(1, tokens[:, None])
    top = values.topk(min(most, values.shape[1]))
    return Logprobs(chosen[:, 0], (values > chosen).sum(-1) + 1, top.indices, top.values)


class _Seat:
    """Lists of tokens that the request in a slot has to do with, on host."""

    __slots__ = ("allowed", "biases", "ends", "finals", "named", "prefixes")

    def __init__(self, params: SamplingParams, bad_words: Sequence[Sequence[int]], eos: Ints, vocabulary: int) -> None:
        single = [word[0] for word in bad_words if len(word) == 1]
        longer = [word for word in bad_words if len(word) > 1]
        bias = params.logit_bias or {}
        self.named = np.array([*bias, *single], np.int64)
        self.biases = np.array([*bias.values(), *[-np.inf] * len(single)], np.float64)
        self.ends = np.array([*eos, *(params.stop_token_ids or ())], np.int64)
        self.prefixes = np.full((len(longer), MOST_BAD_WORD_TOKENS - 1), _ANY, np.int64)
        for i, word in enumerate(longer):
            self.prefixes[i, 1 - len(word) :] = word[:-1]
        self.finals = np.array([word[-1] for word in longer], np.int64)
        for field, ids in (("bad_words", [token for word in bad_words for token in word]), ("eos", eos)):
            if len(ids) and not 0 <= min(ids) <= max(ids) < vocabulary:
                raise ValueError(f"{field} must be tokens from 0 to {vocabulary - 1}, got {max(ids)}")
        self.allowed: npt.NDArray[np.int32] | None = None
        if params.allowed_token_ids is not None:
            bits = np.zeros(-(-vocabulary // 32) * 32, np.bool_)
            bits[list(params.allowed_token_ids)] = True
            self.allowed = np.packbits(bits, bitorder="little").view(np.int32)


class Sampler:
    """Chooses tokens. `slots`: how many there are; `vocabulary`: how wide logits are; `source`: where seeds come from
    for requests without one; `max_logprobs`: of the likeliest tokens, that anybody may ask for."""

    def __init__(
        self,
        slots: int,
        vocabulary: int,
        device: torch.device | str,
        source: random.Random,
        max_logprobs: int = 20,
    ) -> None:
        self.vocabulary = vocabulary
        self.device = torch.device(device)
        self._source = source
        self.max_logprobs = max_logprobs
        self._kernel = _kernel(self.device)
        self._link = PinnedCopies(self.device)
        self._needs = np.full(slots, _EDITS)  # slots that are not seated are found when their edits are looked for
        self._least = np.zeros(slots, np.int64)
        self._streams = np.zeros(slots, np.uint64)
        self._numbers = np.zeros((slots, 7), np.float64)
        self._seats: list[_Seat | None] = [None] * slots
        # Of the requests that look back. Of a token: 2 for each time it was generated, and 1 if it is in the prompt.
        self._counts = torch.zeros((0, vocabulary), dtype=torch.int32, device=self.device)
        self._two = torch.full((), 2, dtype=torch.int32, device=self.device)
        self._rows = np.full(slots, -1, np.int64)  # the row of a slot there
        self._free: list[int] = []
        self._recent = torch.full(
            (slots, _RECENT_TOKENS), _NONE, dtype=torch.int64, device=self.device
        )  # by index, modulo
        self._counted = np.zeros(slots, np.int64)  # how many of the tokens generated both know
        # What is added to the logits of 8 tokens, by the byte of their bits in a mask.
        bits = np.arange(256)[:, None] >> np.arange(8) & 1
        self._octets = self._put(np.where(bits, np.float32(0), np.float32(-np.inf)))

    def warm(self) -> None:
        """Launch what is launched for requests, so that it is compiled now and not when the first of them wants it."""
        if self._kernel is not None:
            weights = torch.ones(1, self.vocabulary, device=self.device)
            self._kernel(weights, self._put(np.array([[0, self.vocabulary, 1, 0.0]])))

    @torch.no_grad()
    def seat(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Ints,
        generated: Ints,
        eos: Ints,
        sample_index: int,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """A slot begins anew. `generated`: the tokens already known, after a retraction. `bad_words`: the tokens of
        `params.bad_words`, from `bad_word_tokens`."""
        params.check_vocabulary(self.vocabulary)
        seat = _Seat(params, bad_words, eos, self.vocabulary)
        needs = _EDITS * bool(len(seat.named)) | _WORDS * bool(len(seat.finals)) | _ALLOWED * (seat.allowed is not None)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        needs |= _PENALTIES * (penalties != (1, 0, 0))
        needs |= _RANDOM * (not params.greedy)
        if params.logprobs is not None:
            needs |= _LOGPROBS | _RANKED * (params.logprobs > 0)
        if needs & _HISTORY:
            self._remember(slot, generated)
        if needs & _PENALTIES:
            self._count(slot, prompt, generated)
        elif self._rows[slot] >= 0:
            self._free.append(int(self._rows[slot]))
            self._rows[slot] = -1
        seed = self._source.getrandbits(64) if params.seed is None else params.seed
        self._streams[slot] = _mixed(_mixed(np.array([seed % 2**64], np.uint64)) + np.uint64(sample_index))[0]
        k = params.top_k if 0 < params.top_k < self.vocabulary else self.vocabulary
        self._numbers[slot] = (params.temperature, params.min_p, k, params.top_p, *penalties)
        self._least[slot] = params.min_tokens
        self._seats[slot] = seat
        self._needs[slot] = needs

    def _remember(self, slot: int, generated: Ints) -> None:
        """Begin with the last tokens that are known."""
        known = np.asarray(generated, np.int64)
        recent = np.full(_RECENT_TOKENS, _NONE, np.int64)
        last = np.arange(max(0, len(known) - _RECENT_TOKENS), len(known))
        recent[last % _RECENT_TOKENS] = known[last]
        self._recent[slot] = self._put(recent)
        self._counted[slot] = len(known)

    def _count(self, slot: int, prompt: Ints, generated: Ints) -> None:
        """Begin with the counts of the tokens that are known. Room for them is made where there is none yet."""
        counts = 2 * np.bincount(np.asarray(generated, np.int64), minlength=self.vocabulary).astype(np.int32)
        counts[np.asarray(prompt, np.int64)] |= 1
        if self._rows[slot] < 0:
            if not self._free:
                have = len(self._counts)
                more = min(max(4, have), len(self._needs) - have)
                self._counts = torch.cat([self._counts, self._counts.new_zeros((more, self.vocabulary))])
                self._free = list(range(have, have + more))
            self._rows[slot] = self._free.pop()
        self._counts[int(self._rows[slot])] = self._put(counts)

    def plain(self, slots: Ints, index: Ints) -> bool:
        """Whether all of these rows take their likeliest token, and nobody asks for log-probabilities."""
        return not self._needs[slots].any() and not (np.asarray(index) < self._least[slots]).any()

    @torch.no_grad()
    def sample(self, logits: Tensor, slots: Ints, index: Ints, masks: npt.NDArray[np.int32] | None = None) -> Sampled:
        """One token a row. `index`: of the token to be generated, from 0. `masks`: the tokens a row may choose, as bits
        of int32 from the lowest on, a host array; -1 all over: any. Tokens beyond its width may not be chosen."""
        rows = _Rows(self._needs[slots], np.asarray(slots, np.int64), np.asarray(index, np.int64))
        if logits.shape != (len(rows.slots), self.vocabulary):
            raise ValueError(f"logits must be a row a slot, {len(rows.slots)} x {self.vocabulary}, got {logits.shape}")
        rows.needs[rows.index < self._least[rows.slots]] |= _EARLY
        if masks is not None:
            rows.needs[(masks != -1).any(-1)] |= _ALLOWED
        looking = rows.that(_HISTORY)
        if len(looking):
            self._go_back(rows.some(looking))

        tokens, best = _best(logits)
        bad = ~best.isfinite()
        beyond = rows.that(_SHAPED | _RANDOM)
        if len(beyond):
            at = self._at(beyond, len(logits))
            if isinstance(at, slice):
                x = logits.to(_working_dtype(logits), copy=True)
            else:
                x = _working(logits.index_select(0, at))
            tokens[at], best = self._choose(rows.some(beyond), x, tokens[at], None if masks is None else masks[beyond])
            bad[at] = ~best.isfinite()  # also where it was before: to NaN and infinity things are only added
        tokens.masked_fill_(bad, 0)

        asked = rows.that(_LOGPROBS)
        logprobs = None
        if len(asked):
            at = self._put(asked)
            # Always as many: among equals, which come first may depend on how many are asked for.
            most = self.max_logprobs if len(rows.that(_RANKED)) else 0
            logprobs = logprobs_of(logits.index_select(0, at), tokens[at], most)
        if len(looking):
            self._observe(rows.some(looking), tokens[self._put(looking)])
        return Sampled(tokens, bad, asked, logprobs)

    def _choose(
        self, rows: _Rows, logits: Tensor, tokens: Tensor, masks: npt.NDArray[np.int32] | None
    ) -> tuple[Tensor, Tensor]:
        """The tokens of rows that ask for more than the likeliest, and the best logit of each. `logits` are a copy;
        `tokens` are the likeliest before anything was done to them."""
        shaped = rows.that(_SHAPED)
        if len(shaped):
            self._edit(rows, logits)
            self._allow(rows, logits, masks)
            self._penalise(rows, logits)
            at = self._put(shaped)
            tokens[at] = logits.index_select(0, at).argmax(-1)
        best = logits.gather(1, tokens[:, None])
        drawn = rows.that(_RANDOM)
        if len(drawn):
            those = self._at(drawn, len(logits))
            rows = rows.some(drawn)
            # Weights, not probabilities: 1 for the likeliest, and no sum of floats, in which order would matter.
            some = logits if isinstance(those, slice) else logits.index_select(0, those)
            ratios = some.sub_(best[those]).div_(self._column(rows.slots, _TEMPERATURE, logits))
            weights = ratios.exp_().float()
            numbers = np.column_stack([self._numbers[rows.slots][:, (_MINIMUM, _K, _P)], self._uniforms(rows)])
            if self._kernel is not None:
                tokens[those] = self._kernel(weights, self._put(np.ascontiguousarray(numbers)))
            else:
                tokens[those] = choose(weights, numbers, self._put)
        return tokens, best[:, 0]

    def _edit(self, rows: _Rows, logits: Tensor) -> None:
        """Add to single logits: a bias, or minus infinity to what may not be chosen."""
        at, ids, biases = [], [], []
        for i in rows.that(_EDITS | _EARLY).tolist():
            seat = self._seat(rows.slots[i])
            ends = seat.ends if rows.needs[i] & _EARLY else seat.ends[:0]
            at.append(np.full(len(seat.named) + len(ends), i))
            ids += [seat.named, ends]
            biases += [seat.biases, np.full(len(ends), -np.inf)]
        if at:
            places = (self._put(np.concatenate(at)), self._put(np.concatenate(ids)))
            logits.index_put_(places, self._put(np.concatenate(biases)).to(logits.dtype), accumulate=True)

        worded = rows.that(_WORDS)
        if len(worded):
            seats = [self._seat(slot) for slot in rows.slots[worded]]
            prefixes = self._put(np.concatenate([seat.prefixes for seat in seats]))
            finals = self._put(np.concatenate([seat.finals for seat in seats]))
            at_word = np.repeat(worded, [len(seat.finals) for seat in seats])
            before = rows.index[at_word, None] + np.arange(-prefixes.shape[1], 0)
            recent = self._recent[self._put(rows.slots[at_word, None]), self._put(before % _RECENT_TOKENS)]
            begun = ((recent == prefixes) | (prefixes == _ANY)).all(-1)
            bans = torch.zeros_like(begun, dtype=logits.dtype).masked_fill_(begun, -torch.inf)
            logits.index_put_((self._put(at_word), finals), bans, accumulate=True)

    def _allow(self, rows: _Rows, logits: Tensor, masks: npt.NDArray[np.int32] | None) -> None:
        """Leave only the tokens that `allowed_token_ids` and masks allow."""
        which = rows.that(_ALLOWED)
        if not len(which):
            return
        packed = np.full((len(which), -(-self.vocabulary // 32)), -1, np.int32)
        for bits, row in zip(packed, which.tolist(), strict=True):
            allowed = self._seat(rows.slots[row]).allowed
            if allowed is not None:
                bits &= allowed
            if masks is not None and (masks[row] != -1).any():
                width = masks.shape[1]
                bits[:width] &= masks[row, : len(bits)]
                bits[width:] = 0
        octets = self._put(packed).view(torch.uint8).view(-1).int()
        refused = self._octets.index_select(0, octets).view(len(which), -1)[:, : self.vocabulary]
        on_rows(logits, which, lambda x: x.add_(refused), self._put)

    def _penalise(self, rows: _Rows, logits: Tensor) -> None:
        which = rows.that(_PENALTIES)
        if not len(which):
            return
        slots = rows.slots[which]
        counts = self._counts.index_select(0, self._put(self._rows[slots]))
        numbers = self._numbers[slots]
        repetition, frequency, presence = (
            self._column(slots, column, logits) for column in (_REPETITION, _FREQUENCY, _PRESENCE)
        )

        def penalise(x: Tensor) -> None:
            if (numbers[:, _REPETITION] != 1).any():
                factor = _above(counts, 0, x).mul_(repetition - 1).add_(1)
                x.copy_(x.clamp(min=0).div_(factor).add_(x.clamp(max=0).mul_(factor)))
            if numbers[:, (_FREQUENCY, _PRESENCE)].any():
                x.sub_((counts >> 1) * frequency).sub_(_above(counts, 1, x).mul_(presence))

        on_rows(logits, which, penalise, self._put)

    def _uniforms(self, rows: _Rows) -> npt.NDArray[np.float64]:
        """A number from 0 to below 1 for each row, in steps small enough and large enough for 2**63 to be divided."""
        numbers = _mixed(self._streams[rows.slots] + rows.index.astype(np.uint64) * _GOLDEN)
        return (numbers >> np.uint64(24)).astype(np.float64) * 2.0**-40

    def _go_back(self, rows: _Rows) -> None:
        """Forget the tokens of steps that failed and are sampled again."""
        counted = self._counted[rows.slots]
        if (counted == rows.index).all():
            return
        for slot, first, end in zip(rows.slots.tolist(), rows.index.tolist(), counted.tolist(), strict=True):
            if not end - _RECENT_TOKENS + MOST_BAD_WORD_TOKENS <= first <= end:
                raise ValueError(
                    f"index of slot {slot} must be that of the next token, {end}, got {first}: seat it anew"
                )
            for i in range(first, end):
                if self._rows[slot] >= 0:
                    self._counts[int(self._rows[slot]), self._recent[slot, i % _RECENT_TOKENS]] -= 2
            self._counted[slot] = first

    def _observe(self, rows: _Rows, tokens: Tensor) -> None:
        """Keep the tokens just sampled, for those that look back."""
        self._recent[self._put(rows.slots), self._put(rows.index % _RECENT_TOKENS)] = tokens
        self._counted[rows.slots] = rows.index + 1
        which = rows.that(_PENALTIES)
        if len(which):
            places = (self._put(self._rows[rows.slots[which]]), tokens[self._put(which)])
            self._counts.index_put_(places, self._two, accumulate=True)

    def _seat(self, slot: int) -> _Seat:
        seat = self._seats[slot]
        if seat is None:
            raise ValueError(f"slot {slot} must be seated before it is sampled")
        return seat

    def _at(self, which: npt.NDArray[np.int64], rows: int) -> Tensor | slice:
        """An index of some of the rows; one that costs nothing if they are all."""
        return slice(None) if len(which) == rows else self._put(which)

    def _put(self, array: npt.NDArray[Any]) -> Tensor:
        return self._link.put(array)

    def _column(self, slots: npt.NDArray[np.int64], column: int, like: Tensor) -> Tensor:
        return self._put(self._numbers[slots, column, None]).to(like.dtype)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a batch, on host."""

    needs: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]

    def that(self, need: int) -> npt.NDArray[np.int64]:
        """Which of them need it."""
        return np.flatnonzero(self.needs & need)

    def some(self, which: npt.NDArray[np.int64]) -> _Rows:
        return _Rows(self.needs[which], self.slots[which], self.index[which])


def _kernel(device: torch.device) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What filters and draws in one kernel, where there is one: it gives the same tokens as `choosing.choose`."""
    if device.type != "cuda":
        return None
    try:
        from ..kernels import sampling
    except ImportError:
        return None
    return sampling.choose


def _working_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _working(logits: Tensor) -> Tensor:
    return logits.to(_working_dtype(logits))


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, and its logit; NaN if there is one."""
    tokens = logits.argmax(-1)
    return tokens, logits.gather(1, tokens[:, None])[:, 0]


def _above(counts: Tensor, count: int, like: Tensor) -> Tensor:
    """1 where there are more than `count`, else 0."""
    return torch.gt(counts, count, out=torch.empty_like(like))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of the result depends on every bit given (the finaliser of splitmix64)."""
    numbers = (numbers + _GOLDEN).astype(np.uint64)
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)
