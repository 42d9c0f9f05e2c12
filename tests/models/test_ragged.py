"""Recurrent layers over all tokens of a step at once, under Triton's interpreter or on a GPU: every mixer of the zoo
can, a chunk computes the same wherever it is cut, nobody touches another's state, and what is wrong is noticed."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest
import torch

from sapwood.cache import CacheGroup
from sapwood.engine.models.model import ServedModel
from sapwood.engine.models.recurrent import Runs, take_all_tokens
from sapwood.engine.transfer.torch_mover import TorchArena

from ..engine import triton_kit
from ..engine.triton_kit import state_kernels
from .zoo import STATEFUL, build

pytestmark = triton_kit.QUIET
DEVICE = torch.device(triton_kit.DEVICE)


def served(name: str) -> ServedModel:
    """A model with memory for eight states, of which the first is nobody's."""
    model = ServedModel(build(name, torch.float32).to(DEVICE), 8)
    groups = [CacheGroup(g.name, g.family, 8, 0, g.window, g.layout.page_bytes) for g in model.groups]
    model.bind(TorchArena.allocate(groups, {g.name: g.layout for g in model.groups}, device=DEVICE))
    return model


def runs(*rows: tuple[int, int, int], tokens: int, more: int = 2) -> Runs:
    """Rows as (first token, how many, slot), and padding of tokens and rows behind them."""
    whose = torch.full((tokens,), -1, dtype=torch.int32)
    for row, (first, count, _) in enumerate(rows):
        whose[first : first + count] = row
    table = torch.tensor([*rows, *[(0, 0, 0)] * more], dtype=torch.int32)
    return Runs(whose.to(DEVICE), table.to(DEVICE))


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("name", STATEFUL)
def test_every_mixer_can(name, caplog):
    """All mixers take all tokens, because they answer as before.

    Mutation: `_conv_kernel` reads the state at `KEPT - 1 + at`; `_scan_kernel` forgets D; `_delta_kernel` forgets beta;
    `InPlace` gives a copy.
    """
    model = served(name)
    assert take_all_tokens(model.mixers, state_kernels) and len(model.mixers.ragged) == len(model.mixers.layers) > 0
    assert not [record for record in caplog.records if record.name.startswith("sapwood")]


def test_what_is_wrong_is_not_used(caplog):
    """A function that computes something else, or that cannot, is noticed: such a mixer runs as before, and that is
    said.

    Mutation: `_why_not` compares nothing but the states.
    """

    def off(run: Runs, x: Any, *rest: Any, **more: Any) -> Any:
        return state_kernels.conv(run, x, *rest, **more) * 1.01

    def cannot(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("not here")

    for wrong in (off, cannot):
        model = served("bamba")
        functions = types.SimpleNamespace(**{name: getattr(state_kernels, name) for name in state_kernels.__all__})
        functions.conv = wrong
        with caplog.at_level(logging.WARNING, "sapwood"):
            assert not take_all_tokens(model.mixers, functions)
        assert not model.mixers.ragged and "BambaMixer" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("name", ["qwen3-next", "bamba", "mamba"])
def test_a_chunk_is_the_same_wherever_it_is_cut(name):
    """A row of six tokens at once, and in steps of two and four beside others. States of others, and nobody's, stay as
    they are.

    Mutation: `_keep_kernel` takes `count` for `KEPT`; a kernel goes on behind the end of its row; `Runs` of no tokens
    are taken for rows of slot 0.
    """
    model = served(name)
    mixers = model.mixers
    assert take_all_tokens(mixers, state_kernels)
    layer, module = next(iter(mixers.layers.items()))
    size = model.model.config.hidden_size
    memory = mixers._memory[layer]
    for part in memory.values():
        part.copy_(0.3 * some(*part.shape, seed=3))
        part[5:] = torch.nan  # others'
    before = {part: kept.clone() for part, kept in memory.items()}
    x, other = some(1, 6, size), some(1, 3, size, seed=1)

    def step(given: torch.Tensor, rows: Runs) -> torch.Tensor:
        with torch.inference_mode(), mixers.running(rows):
            return module.forward(given)

    whole = step(torch.cat([x, x[:, :1]], 1), runs((0, 6, 2), tokens=7))
    left = {part: kept.clone() for part, kept in memory.items()}
    for part, kept in memory.items():
        kept.copy_(before[part])
    first = step(torch.cat([other, x[:, :2]], 1), runs((0, 3, 4), (3, 2, 2), tokens=5))
    second = step(torch.cat([x[:, 2:], x[:, :3]], 1), runs((0, 4, 2), tokens=7))
    torch.testing.assert_close(torch.cat([first[:, 3:], second[:, :4]], 1), whole[:, :6], atol=1e-5, rtol=1e-5)
    for part, kept in memory.items():
        torch.testing.assert_close(kept[2], left[part][2], atol=1e-5, rtol=1e-5)
        assert not torch.equal(kept[2], before[part][2])
        assert torch.equal(left[part][4], before[part][4]) and not torch.equal(kept[4], before[part][4])
        assert torch.equal(kept[[0, 1, 3]], before[part][[0, 1, 3]]) and bool(kept[5:].isnan().all())
