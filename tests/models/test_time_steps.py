"""Mamba 2 with limits on its time steps: one rule for every token, whoever computes it and when."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.engine.models.recurrent import settle_time_steps, time_step_limits

from . import zoo
from .test_parity import PROMPTS, Bed
from .zoo import torch

LIMITS = (0.6, 0.9)
NEW = 6


def limited(name: str, limits: tuple[float, float] = LIMITS) -> Any:
    return zoo.build(name, time_step_limit=limits)


def said_without_a_cache(model: Any, tokens: list[int]) -> list[int]:
    """What transformers says in one forward for each token: there the limits hold for all of them."""
    settle_time_steps(model)
    ids = list(tokens)
    with torch.no_grad():
        for _ in range(NEW):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(tokens) :]


@pytest.mark.parametrize("name", ["mamba2", "nemotron-h", "zamba2"])
def test_time_step_limits_hold_for_every_token(name, monkeypatch):
    """Prompts whole, in chunks, token by token, cached, and the tokens of the answer: the same tokens as transformers
    says without a cache, where limits hold for all of them.

    Mutation: `_own_forward` gives the mixer's own forward; `settle_time_steps` does nothing.
    """
    prompts = PROMPTS[:3]
    right = [said_without_a_cache(limited(name), tokens) for tokens in prompts]
    free = [said_without_a_cache(limited(name, (0.0, float("inf"))), tokens) for tokens in prompts]
    assert right != free, "limits that change nothing prove nothing"
    monkeypatch.setattr("tests.models.test_parity.build", limited)
    for chunk in (2, 7, 64):
        bed = Bed(name, max_batch_tokens=max(chunk, 2), batch=2 if chunk == 2 else 6)
        assert bed.said(prompts, NEW) == right, f"cold, in steps of {chunk}"
        assert bed.said(prompts, NEW) == right, f"warm, in steps of {chunk}"
    assert bed.cached() > 0
    assert not any(bed.served.mixers._loops.values()), "taken for scans that begin from zeros"


@pytest.mark.parametrize("name", ["nemotron-h", "zamba2"])
def test_limits_are_those_of_the_config(name):
    """transformers makes limits of `time_step_min`, with which the weights of these models begin: they are none.

    Mutation: `settle_time_steps` does nothing.
    """
    model = zoo.build(name)
    mixers = [module for module in model.modules() if hasattr(module, "time_step_limit")]
    settle_time_steps(model)
    assert mixers and all(time_step_limits(mixer) is None for mixer in mixers)
