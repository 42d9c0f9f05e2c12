"""Requests of all kinds, what a quiet engine answers to them, and whether another answer may be a right one too.

In float32 the company a row is in moves its logits a little: kernels of other sizes add in another order. So an answer
may part from the quiet one where the choice was as good as a tie, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sapwood import LLM, SamplingParams
from sapwood.engine.executor.sampling import _GOLDEN, _mixed

TIE = 1e-3  # between log-probabilities, or of a random number and where the next token's share begins
POISON = 8191  # a token whose embedding is NaN: whoever has it in a prompt gets no numbers
_TOP_K = 8
_RECORDED = 10  # of the likeliest tokens: all that may be drawn, and the next ones


class Ask(NamedTuple):
    prompt: list[int]
    params: SamplingParams

    @property
    def poisoned(self) -> bool:
        return POISON in self.prompt


class Right(NamedTuple):
    """An answer of quiet times, and the likeliest tokens with their log-probabilities where each of its tokens was
    chosen."""

    tokens: list[int]
    likely: list[dict[int, float]]


def asks(seed: int, count: int, longest: int) -> list[Ask]:
    """Prompts of 1 token to the whole context, most of them with a beginning that others have too; short and long
    answers, likeliest tokens and drawn ones, several answers at once, and log-probabilities."""
    rng = np.random.default_rng(seed)
    roots = [rng.integers(1, 8000, int(n)).tolist() for n in rng.integers(longest // 16, longest // 2, 6)]
    edges = (1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, longest - 1, longest - 2, longest - 90)
    found = []
    for n in range(count):
        if n % 5 == 4:
            prompt = rng.integers(1, 8000, min(edges[n // 5 % len(edges)], longest - 1)).tolist()
        else:
            root = roots[int(rng.integers(0, len(roots)))]
            tail = rng.integers(1, 8000, int(rng.integers(1, longest // 8))).tolist()
            prompt = root[: int(rng.integers(1, len(root) + 1))] + tail
        if n % 20 == 19:
            prompt[int(rng.integers(0, len(prompt)))] = POISON
        most = int(rng.integers(1, 20) if n % 4 == 1 else rng.integers(longest // 8, longest // 3))
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        if n % 4 == 3:
            params = replace(params, temperature=0.8, top_k=_TOP_K, seed=n)
        if n % 6 == 5:
            params = replace(params, n=2 + n % 2)
        if n % 7 == 2:
            params = replace(params, logprobs=3)
        if n % 16 == 6:
            params = replace(params, prompt_logprobs=1)
        found.append(Ask(prompt, params))
    return found


def poison(llm: LLM) -> None:
    """Make a token one that has no numbers, and that nobody says."""
    model: Any = llm.engine.served.model
    with torch.inference_mode():
        model.get_input_embeddings().weight[POISON] = torch.nan
        model.get_output_embeddings().weight[POISON] = 0


def quiet(llm: LLM, some: Sequence[Ask]) -> list[list[Right]]:
    """The answers to each that has any, by sample."""
    sound = [ask for ask in some if not ask.poisoned]
    params = [replace(ask.params, logprobs=_RECORDED, prompt_logprobs=None) for ask in sound]
    prompts: list[Any] = [{"prompt_token_ids": ask.prompt} for ask in sound]
    outputs = iter(llm.generate(prompts, params, use_tqdm=False))
    return [[] if ask.poisoned else [_right(each) for each in next(outputs).outputs] for ask in some]


def _right(output: Any) -> Right:
    likely = [{token: each.logprob for token, each in at.items()} for at in output.logprobs]
    return Right(list(output.token_ids), likely)


def parting(right: Right, tokens: Sequence[int]) -> int | None:
    """The first token that is another than in quiet times; None: all are the same, as far as they go."""
    pairs = zip(right.tokens, tokens, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    return len(right.tokens) if at is None and len(tokens) > len(right.tokens) else at


def tie(right: Right, at: int, token: int, params: SamplingParams, index: int) -> float:
    """How far from a tie the choice at `at` was, between the token of quiet times and this one: of likeliest tokens by
    their log-probabilities; of drawn ones by where the random number fell, or by who is the last that may be drawn."""
    if at >= len(right.likely):
        return np.inf
    likely = right.likely[at]
    ranked = sorted(likely.values(), reverse=True)
    if params.greedy:
        return ranked[0] - likely.get(token, -np.inf)
    kept = sorted(likely, key=lambda each: -likely[each])[: params.top_k]
    last = ranked[params.top_k - 1] - ranked[params.top_k]
    weights = np.exp([(likely[each] - ranked[0]) / params.temperature for each in sorted(kept)])
    begins = np.cumsum(weights) / weights.sum()
    return min(last, float(np.abs(begins - _uniform(params.seed or 0, index, at)).min()))


def _uniform(seed: int, index: int, at: int) -> float:
    """The random number of a token, as sampling draws it."""
    stream = _mixed(_mixed(np.array([seed % 2**64], np.uint64)) + np.uint64(index))
    return float((_mixed(stream + np.uint64(at) * _GOLDEN) >> np.uint64(24))[0]) * 2.0**-40
