"""Sampling: against one row at a time in float64, in any company, and with what can go wrong."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from sapwood.engine.executor import choosing, sampling
from sapwood.engine.executor.sampling import Sampled, Sampler, logprobs_of
from sapwood.engine.params import SamplingParams

torch.set_num_threads(1)
VOCABULARY = 97  # not a whole number of words of a mask
EOS = (2, 3)
WIDTH = -(-VOCABULARY // 32)


# ---- the yardstick: plain Python and numpy, one row, float64


def mixed(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def uniform(seed: int, sample: int, index: int) -> float:
    stream = mixed((mixed(seed % 2**64) + sample) % 2**64)
    return (mixed((stream + index * 0x9E3779B97F4A7C15) % 2**64) >> 24) / 2**40


@dataclasses.dataclass
class Asked:
    """A request, as sampling sees it."""

    params: SamplingParams
    prompt: list[int]
    words: tuple[tuple[int, ...], ...] = ()
    sample: int = 0
    generated: list[int] = dataclasses.field(default_factory=list)

    def seat(self, sampler: Sampler, slot: int) -> None:
        sampler.seat(slot, self.params, self.prompt, self.generated, EOS, self.sample, self.words)


def shaped(logits: np.ndarray, asked: Asked, mask: np.ndarray | None) -> np.ndarray:
    params, generated = asked.params, asked.generated
    x = logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    allowed = set(range(VOCABULARY))
    if params.allowed_token_ids:
        allowed &= set(params.allowed_token_ids)
    if mask is not None:
        allowed &= {token for token in range(VOCABULARY) if mask[token // 32] >> token % 32 & 1}
    if len(generated) < params.min_tokens:
        allowed -= {*EOS, *(params.stop_token_ids or ())}
    for *before, last in asked.words:
        if generated[len(generated) - len(before) :] == before and len(generated) >= len(before):
            allowed -= {last}
    for token in set(range(VOCABULARY)) - allowed:
        x[token] = -np.inf
    for token in {*asked.prompt, *generated}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(generated):
        x[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    return x


def kept(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after the filters."""
    p = np.exp((x - x.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    if 0 < params.top_k < VOCABULARY:
        p[p < np.sort(p)[-params.top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    least = p[order][before < params.top_p][-1] if params.top_p < 1 else 0
    p[p < least] = 0
    return p / p.sum()


def token_of(logits: np.ndarray, asked: Asked, mask: np.ndarray | None = None) -> int:
    x = shaped(logits, asked, mask)
    if asked.params.temperature < 1e-5:
        return int(x.argmax())
    reached = np.cumsum(kept(x, asked.params))
    return int(np.searchsorted(reached, uniform(asked.params.seed, asked.sample, len(asked.generated)), "right"))


# ---- random requests


def some_request(rng: random.Random) -> Asked:
    def maybe(chance, value, otherwise):
        return value() if rng.random() < chance else otherwise

    tokens = range(VOCABULARY)
    max_tokens = 40
    params = SamplingParams(
        temperature=maybe(0.7, lambda: rng.choice([0.2, 0.7, 1.0, 1.6]), 0.0),
        top_p=maybe(0.4, lambda: rng.uniform(0.1, 0.99), 1.0),
        top_k=maybe(0.4, lambda: rng.randrange(1, 2 * VOCABULARY), rng.choice([0, -1])),
        min_p=maybe(0.3, lambda: rng.uniform(0.01, 0.5), 0.0),
        presence_penalty=maybe(0.3, lambda: rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(0.3, lambda: rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(0.3, lambda: rng.choice([0.7, 1.1, 1.5]), 1.0),
        seed=rng.getrandbits(62),
        stop_token_ids=maybe(0.3, lambda: rng.sample(tokens, 2), None),
        max_tokens=max_tokens,
        min_tokens=maybe(0.3, lambda: rng.randrange(10), 0),
        logprobs=maybe(0.3, lambda: rng.randrange(21), None),
        logit_bias=maybe(0.3, lambda: {token: rng.uniform(-9, 9) for token in rng.sample(tokens, 5)}, None),
        allowed_token_ids=maybe(0.2, lambda: rng.sample(tokens, 40), None),
    )
    words = tuple(
        tuple(rng.choices(tokens[:9], k=rng.choice([1, 2, 2, 3, 8]))) for _ in range(maybe(0.3, lambda: 6, 0))
    )
    return Asked(params, rng.choices(tokens, k=rng.randrange(1, 30)), words, rng.randrange(3))


def some_logits(seed: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 3
    logits[:, :9] += 3  # tokens of bad words, often
    return logits.to(dtype)


def some_masks(rng: random.Random, rows: int) -> np.ndarray:
    masks = np.array([[rng.getrandbits(32) - 2**31 for _ in range(WIDTH)] for _ in range(rows)], np.int32)
    masks[[row for row in range(rows) if rng.random() < 0.6]] = -1
    return masks


def new_sampler(slots: int = 8) -> Sampler:
    return Sampler(slots, VOCABULARY, "cpu", random.Random(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_row_gets_what_it_asked_for(dtype):
    """Random requests in random company, for 30 tokens each: every token is the one that a row by itself, computed in
    plain float64, gets from the same logits and the same random number.

    Mutation: in `_choose`, `_penalise` before `_edit`; `_filter` with top_p of all that top_k left out too; a column of
    another row; `early` tokens not masked; `before % _RECENT_TOKENS` off by one.
    """
    rng = random.Random(str(dtype))
    sampler = new_sampler()
    seen = set()
    for round_ in range(20):
        live = [some_request(rng) for _ in range(8)]
        for slot, asked in enumerate(live):
            asked.seat(sampler, slot)
        for step in range(30):
            rows = rng.sample(range(8), rng.randrange(1, 9))
            logits = some_logits(1000 * round_ + step, len(rows), dtype)
            masks = some_masks(rng, len(rows)) if step % 3 == 0 else None
            for row, slot in enumerate(rows):  # something is allowed by both
                if masks is not None and live[slot].params.allowed_token_ids:
                    masks[row] = -1
            done = sampler.sample(logits, rows, [len(live[slot].generated) for slot in rows], masks)
            assert not done.bad.any() and done.tokens.dtype == torch.int64
            for row, slot in enumerate(rows):
                expected = token_of(logits[row].double().numpy(), live[slot], None if masks is None else masks[row])
                assert done.tokens[row] == expected, (round_, step, live[slot])
                live[slot].generated.append(expected)
                seen.add(expected)
    assert len(seen) > 80


def outcome(done: Sampled, row: int) -> list:
    """Everything one row was given, to the bit."""
    told = [int(done.tokens[row]), bool(done.bad[row])]
    if row in done.asked:
        at = done.asked.tolist().index(row)
        told += [part[at].tolist() for part in done.logprobs]
    return told


def trimmed(told: list, k: int) -> list:
    return told[:4] + [part[:k] for part in told[4:]]


def test_company_changes_nothing():
    """A row gets the same token and the same log-probabilities, bit for bit, alone, in any slot and at any place of any
    batch.

    Mutation: `choose` adds up floats of the whole batch; `logprobs_of` asks for as many as the company does; the random
    number of a row is that of its place.
    """
    rng = random.Random(1)
    rows = [some_request(rng) for _ in range(12)]
    logits = some_logits(5, 12)
    alone = []
    for asked, row in zip(rows, logits, strict=True):
        sampler = new_sampler()
        asked.seat(sampler, 3)
        alone.append(outcome(sampler.sample(row[None], [3], [0]), 0))
    for _ in range(30):
        order = rng.sample(range(12), rng.randrange(1, 13))
        slots = rng.sample(range(16), len(order))
        sampler = new_sampler(16)
        for slot, which in zip(slots, order, strict=True):
            rows[which].seat(sampler, slot)
        done = sampler.sample(logits[order], slots, [0] * len(order))
        for row, which in enumerate(order):
            k = rows[which].params.logprobs or 0
            assert trimmed(outcome(done, row), k) == trimmed(alone[which], k)


def draws(params: SamplingParams, logits: torch.Tensor, count: int, sample: int = 0) -> np.ndarray:
    """What one request would get at its first `count` tokens, were the logits always the same."""
    sampler = new_sampler(1)
    sampler.seat(0, params, [1], [], EOS, sample)
    return sampler.sample(logits.expand(count, -1), [0] * count, range(count)).tokens.numpy()


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_p": 0.8},
        {"top_k": 7},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_are_likely(asked):
    """Tokens of one request over 20,000 steps, and of 4,000 seeds at one step, come with the probabilities the filters
    leave (chi-square, fixed seeds), and never one that is left out.

    Mutation: `choose` takes the square of the random number; or with `top_k` alone, one token less is kept.
    """
    logits = some_logits(3, 1)
    logits[0, 0] = -math.inf
    params = SamplingParams(seed=11, **asked)
    p = kept(logits[0].double().numpy(), params)
    over_steps = draws(params, logits, 20_000)
    sampler = new_sampler(4000)
    for slot in range(4000):
        sampler.seat(slot, dataclasses.replace(params, seed=slot), [1], [], EOS, 0)
    over_seeds = sampler.sample(logits.expand(4000, -1), range(4000), [5] * 4000).tokens.numpy()
    for tokens in (over_steps, over_seeds):
        counts, expected = np.bincount(tokens, minlength=VOCABULARY), p * len(tokens)
        assert not counts[p == 0].any()
        often = expected >= 5
        chi = ((counts - expected)[often] ** 2 / expected[often]).sum()
        degrees = often.sum() - 1
        assert chi < degrees + 4 * math.sqrt(2 * degrees) + 5, (chi, degrees)


def test_the_smallest_and_the_largest_random_number(monkeypatch):
    """Zero means the first token that may be chosen, the largest number the last, and none that may not.

    Mutation: `right=False` in `choose`; random numbers of 53 bits, whose largest rounds up to the total.
    """
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [0, 1, 95, 96]] = -math.inf
    whole = np.uint64(2**64 - 1)
    for number, token in ((np.uint64(0), 2), (whole, 94)):
        monkeypatch.setattr(sampling, "_mixed", lambda numbers, number=number: np.full(len(numbers), number))
        assert draws(SamplingParams(seed=1), logits, 1).tolist() == [token]


def test_random_numbers_belong_to_seed_sample_and_index():
    """Same seed, sample and index: same token. Another of any of them: other tokens. These very ones, for good: what a
    user has seen with a seed does not change with the version.

    Mutation: `sample_index` is not part of the stream; `_mixed` without its second multiplication; `_GOLDEN` is
    another number.
    """
    logits = torch.zeros(1, VOCABULARY)
    params = SamplingParams(seed=7)
    first = draws(params, logits, 64)
    assert (draws(params, logits, 64) == first).all()
    others = [draws(params, logits, 64, sample=1), draws(SamplingParams(seed=8), logits, 64), np.roll(first, 1)]
    for other in others:
        assert (other == first).sum() < 8
    assert draws(params, logits, 8).tolist() == [59, 39, 96, 9, 50, 73, 49, 14]


def test_without_a_seed_the_source_gives_one():
    """Requests without a seed differ from each other, and an engine that begins with the same source repeats them.

    Mutation: `seat` takes 0 where `seed` is None.
    """

    def run(source: int) -> list[list[int]]:
        sampler = Sampler(4, VOCABULARY, "cpu", random.Random(source))
        for slot in range(4):
            sampler.seat(slot, SamplingParams(), [1], [], EOS, 0)
        steps = [sampler.sample(torch.zeros(4, VOCABULARY), range(4), [i] * 4).tokens.tolist() for i in range(16)]
        return [list(row) for row in zip(*steps, strict=True)]

    assert run(1) == run(1) != run(2)
    assert len({tuple(row) for row in run(1)}) == 4


def test_the_likeliest_token_and_ties():
    """Greedy rows take the argmax; top_p and top_k keep all that are as likely as the last they keep, so that the order
    of equals decides nothing.

    Mutation: `_drop` with `torch.gt`; `greedy` for temperatures below 1.
    """
    sampler = new_sampler(1)
    sampler.seat(0, SamplingParams(temperature=0), [1], [], EOS, 0)
    logits = some_logits(1, 1)
    assert sampler.sample(logits, [0], [0]).tokens[0] == logits.argmax()
    flat = torch.full((1, VOCABULARY), -10.0)
    flat[0, [5, 6, 7]] = 1.0
    for asked in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        assert set(draws(SamplingParams(seed=1, **asked), flat, 200)) == {5, 6, 7}


# ---- what looks back


LOOKING_BACK = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "temperature": 0.0},
    {"repetition_penalty": 1.4, "frequency_penalty": -0.3},
    {"temperature": 0.0},
]


def story(asked: Asked, slots: random.Random, retractions: set[int] = frozenset(), again: dict[int, int] | None = None):
    """The tokens of 40 steps, with retractions (a new seat, elsewhere) and steps sampled again from some steps back."""
    sampler = new_sampler()
    stranger = Asked(SamplingParams(presence_penalty=1, seed=1), [5])
    slot = 0
    asked = dataclasses.replace(asked, generated=[])
    asked.seat(sampler, slot)
    again = dict(again or {})
    while len(asked.generated) < 40:
        i = len(asked.generated)
        if i in retractions:
            retractions = retractions - {i}
            stranger.seat(sampler, slot)
            sampler.sample(some_logits(9, 1), [slot], [0])
            slot = slots.randrange(8)
            asked.seat(sampler, slot)
        if i in again:
            del asked.generated[i - again.pop(i) :]
            continue
        asked.generated.append(int(sampler.sample(some_logits(i, 1), [slot], [i]).tokens[0]))
    return asked.generated


@pytest.mark.parametrize("which", range(len(LOOKING_BACK)))
def test_retraction_and_failed_steps_change_nothing(which):
    """Penalties and bad words after a retraction, and after steps that failed and are sampled again (one, or two under
    overlap), are those of a run without either.

    Mutation: `_count` forgets `generated`, or `prompt`; `_remember` forgets `generated`; `_go_back` leaves the
    counts; `_RECENT_TOKENS` is 8.
    """
    words = tuple((a, b) for a in range(9) for b in range(9) if a != b) + ((4, 4, 4, 4, 4, 4, 4, 4), (1,))
    asked = Asked(SamplingParams(seed=5, **LOOKING_BACK[which]), [1, 7, 7, 50], words)
    plain = story(asked, random.Random(1))
    assert len(set(plain)) > 3
    for i in range(40):
        assert plain[i] == token_of(some_logits(i, 1)[0].numpy(), dataclasses.replace(asked, generated=plain[:i]))
    assert story(asked, random.Random(1), retractions={1, 5, 30}) == plain
    assert story(asked, random.Random(1), again={1: 1, 6: 2, 20: 1, 25: 8}) == plain
    assert story(asked, random.Random(1), retractions={7, 21}, again={8: 2, 20: 1}) == plain


def test_tokens_need_not_be_known_to_the_host():
    """Under overlap a step is sampled while the tokens of the last are still on the device only: `sample` is never
    told what it chose.

    Mutation: `_observe` is left out.
    """
    sampler = new_sampler(2)
    sampler.seat(0, SamplingParams(temperature=0, frequency_penalty=2), [1], [], EOS, 0)
    sampler.seat(1, SamplingParams(temperature=0), [1], [], EOS, 0, ((8, 8, 8),))
    logits = torch.full((2, VOCABULARY), -9.0)
    logits[:, 8], logits[:, 9] = 3.0, 2.0
    tokens = torch.stack([sampler.sample(logits, [0, 1], [i, i]).tokens for i in range(6)])
    assert tokens.T.tolist() == [[8, 9, 8, 9, 8, 9], [8, 8, 9, 8, 8, 9]]


def test_many_come_and_go():
    """Counts grow with those that need them, belong to nobody else after them, and never exceed the slots.

    Mutation: `_free` gets a row back that is still used; growing forgets what was counted.
    """
    rng = random.Random(4)
    sampler = new_sampler(16)
    live: dict[int, Asked] = {}
    for step in range(300):
        slot = rng.randrange(16)
        live[slot] = some_request(rng)
        live[slot].generated = rng.choices(range(VOCABULARY), k=rng.randrange(40))
        live[slot].seat(sampler, slot)
        logits = some_logits(step, len(live))
        done = sampler.sample(logits, list(live), [len(asked.generated) for asked in live.values()])
        for row, asked in enumerate(live.values()):
            expected = token_of(logits[row].numpy(), asked)
            assert done.tokens[row] == expected
            asked.generated.append(expected)
    assert len(sampler._counts) <= 16


# ---- masks


def test_masks_of_grammars():
    """Bits say what a row may choose; a row of -1 is free; a mask narrower than the vocabulary allows nothing beyond;
    one that allows nothing makes its row bad, and no other.

    Mutation: bits taken from the highest; `bits[width:]` left as they are; the tail of the last word read as tokens.
    """
    sampler = new_sampler(4)
    for slot in range(4):
        sampler.seat(slot, SamplingParams(temperature=0), [1], [], EOS, 0)
    logits = torch.arange(VOCABULARY).float().expand(4, -1)
    masks = np.array([[1 << 5, 1 << 3, 0, 0], [-1, -1, -1, -1], [0, 0, 0, -2], [3, 0, 0, -(2**31)]], np.int32)
    done = sampler.sample(logits, range(4), [0] * 4, masks)
    assert done.tokens.tolist() == [35, 96, 0, 1]
    assert done.bad.tolist() == [False, False, True, False]
    narrow = np.array([[-1, 7], [-1, -1], [1, 0], [-1, -1]], np.int32)
    assert sampler.sample(logits, range(4), [0] * 4, narrow).tokens.tolist() == [34, 96, 0, 96]


def test_masks_and_allowed_tokens_together():
    """A token must be allowed by both.

    Mutation: in `_allow` the mask is taken instead of `allowed`.
    """
    sampler = new_sampler(1)
    sampler.seat(0, SamplingParams(temperature=0, allowed_token_ids=[4, 6, 90]), [1], [], EOS, 0)
    logits = torch.arange(VOCABULARY).float()[None]
    assert sampler.sample(logits, [0], [0]).tokens.tolist() == [90]
    masks = np.array([[1 << 5 | 1 << 4, 0, 0, 0]], np.int32)
    assert sampler.sample(logits, [0], [0], masks).tokens.tolist() == [4]
    assert sampler.sample(logits, [0], [0], np.array([[1 << 5, 0, 0, 0]], np.int32)).bad.tolist() == [True]


def test_nothing_ends_before_min_tokens():
    """Eos and stop tokens are not chosen before `min_tokens` tokens are there, and are from then on, greedily and
    drawn, even if they are all that is likely.

    Mutation: `_EARLY` up to and with the token after them; `ends` without `eos`.
    """
    logits = torch.full((1, VOCABULARY), -5.0)
    logits[0, [2, 3, 60]] = 9.0
    for temperature in (0.0, 1.0):
        sampler = new_sampler(1)
        params = SamplingParams(temperature=temperature, min_tokens=4, stop_token_ids=[60], seed=1)
        sampler.seat(0, params, [1], [], EOS, 0)
        ends = [int(sampler.sample(logits, [0], [i]).tokens[0]) in (2, 3, 60) for i in range(8)]
        assert ends == [False] * 4 + [True] * 4


# ---- what goes wrong, and log-probabilities


@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 0.0}, {"top_p": 0.5, "top_k": 5}, {"presence_penalty": 1.0}], ids=str
)
@pytest.mark.parametrize("broken", ["nan", "one nan", "-inf", "inf"])
@pytest.mark.parametrize("device", ["cpu", "as on CUDA"])
def test_rows_of_nan_are_told_and_hurt_nobody(asked, broken, device, monkeypatch):
    """NaN anywhere in a row, nothing but -inf, or +inf make it bad, whatever it asks for; the others get their tokens,
    and so does the row when it is sampled again with sound logits.

    Mutation: `_allow` fills with -inf instead of adding it, and a NaN is hidden; `isfinite` asked of NaN alone, in
    `sample`; `clamp_` left out in `_filter`.
    """
    if device != "cpu":  # where NaN as an integer is 0
        monkeypatch.setattr(choosing, "_masses", lambda weights: (weights.nan_to_num(0) * 2**40).long())
    params = SamplingParams(logprobs=2, allowed_token_ids=range(50) if broken == "one nan" else None, **asked)
    logits = some_logits(8, 5)
    sampler, sound = new_sampler(), new_sampler()
    for slot in range(5):
        for each in (sampler, sound):
            each.seat(slot, dataclasses.replace(params, seed=slot), [1], [], EOS, 0)
    hurt = logits.clone()
    if broken == "one nan":
        hurt[2, 70] = math.nan  # among those it may not choose
    else:
        hurt[2] = float(broken)
    right = sound.sample(logits, range(5), [0] * 5)
    done = sampler.sample(hurt, range(5), [0] * 5)
    assert done.bad.tolist() == [False, False, True, False, False]
    assert 0 <= int(done.tokens[2]) < VOCABULARY
    for row in (0, 1, 3, 4):
        assert outcome(done, row) == outcome(right, row)
    assert sampler.sample(logits, range(5), [0] * 5).tokens.tolist() == right.tokens.tolist()


def test_logprobs_are_those_of_the_model():
    """Log-probabilities of the chosen token and of the likeliest, of the logits as they come: before bias, penalties
    and temperature. Only for rows that ask.

    Mutation: `logprobs_of` gets the shaped logits; `rank` without its 1.
    """
    sampler = new_sampler(3)
    sampler.seat(0, SamplingParams(temperature=0, logprobs=3, logit_bias={11: 100}), [1], [], EOS, 0)
    sampler.seat(1, SamplingParams(temperature=0), [1], [], EOS, 0)
    sampler.seat(2, SamplingParams(temperature=0.3, logprobs=0, seed=2), [1], [], EOS, 0)
    logits = some_logits(6, 3)
    done = sampler.sample(logits, range(3), [0] * 3)
    assert done.asked.tolist() == [0, 2] and done.tokens[0] == 11
    x = logits.double().numpy()
    expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
    for at, row in enumerate((0, 2)):
        token = int(done.tokens[row])
        best = np.argsort(-x[row])
        assert done.logprobs.chosen[at].item() == pytest.approx(expected[row, token], abs=1e-5)
        assert best[done.logprobs.rank[at].item() - 1] == token
        assert done.logprobs.ids[at].tolist() == best[:20].tolist()
        assert done.logprobs.values[at].tolist() == pytest.approx(expected[row, best[:20]].tolist(), abs=1e-5)
    prompt = logprobs_of(logits, torch.tensor([4, 5, 6]), 20)
    assert prompt.chosen.tolist() == pytest.approx([expected[i, 4 + i] for i in range(3)], abs=1e-5)
    assert logprobs_of(logits, torch.tensor([4, 5, 6]), 0).ids.shape == (3, 0)


def test_mistakes_of_the_caller_are_named():
    """Wrong shapes, slots nobody sits in, an index that cannot be, tokens that are none.

    Mutation: any of these checks is left out.
    """
    sampler = new_sampler()
    with pytest.raises(ValueError, match="slot 3 must be seated"):
        sampler.sample(torch.zeros(1, VOCABULARY), [3], [0])
    sampler.seat(3, SamplingParams(presence_penalty=1), [1], [], EOS, 0)
    with pytest.raises(ValueError, match="logits must be a row a slot, 1 x 97"):
        sampler.sample(torch.zeros(1, VOCABULARY + 1), [3], [0])
    with pytest.raises(ValueError, match="index of slot 3 must be that of the next token, 0, got 1"):
        sampler.sample(torch.zeros(1, VOCABULARY), [3], [1])
    with pytest.raises(ValueError, match="logit_bias must name tokens from 0 to 96"):
        sampler.seat(3, SamplingParams(logit_bias={97: 1}), [1], [], EOS, 0)
    with pytest.raises(ValueError, match="eos must be tokens from 0 to 96, got 97"):
        sampler.seat(3, SamplingParams(), [1], [], (2, 97), 0)
    with pytest.raises(ValueError, match="bad_words must be tokens from 0 to 96, got 99"):
        sampler.seat(3, SamplingParams(), [1], [], EOS, 0, ((4, 99),))
