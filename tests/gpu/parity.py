"""Logits of many architectures on a GPU in bf16, held against transformers' own noise.

bf16 logits of two right implementations differ. How much they may, transformers tells itself: how far its own in bf16
are from its own in float32. Ours in bf16 must be no further from those, and attention that leaves out the last key or
the last page must be seen to be wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sapwood.cache import CacheGroup
from sapwood.engine import EngineLoop, Tiers
from sapwood.engine.executor.executor import ModelExecutor
from sapwood.engine.executor.gpu_executor import GpuExecutor
from sapwood.engine.executor.work_list import WorkList, work_list
from sapwood.engine.models.model import ServedModel
from sapwood.engine.models.patches import patch_for
from sapwood.engine.transfer.torch_mover import TorchArena
from sapwood.scheduler import RequestSpec, Scheduler, SchedulerConfig

from ..models.gpu import CARD, LENGTHS, PAGE, Every, far, stepped, theirs, wide
from .kit import must, one_of_many, say

BY_THEMSELVES = ("falcon", "gptj")  # no kernel of ours attends for them


class Noting:
    """Keeps the logits of prompts."""

    found: dict[int, list[torch.Tensor]]

    def _score(self, row: int, first: int, tokens: Any, logits: Any) -> Any:
        self.found.setdefault(row, []).append(logits.float().clone())
        return iter(())


class NotingKernels(Noting, GpuExecutor):
    pass


class NotingPlain(Noting, ModelExecutor):
    """For models that attend by themselves."""


def ours(name: str, prompts: list[Any], tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The logits of every prompt's positions, computed on pages in steps of so many tokens."""
    model = wide(name).to(dtype)
    patch_for(model, torch.device(CARD))
    served = ServedModel(model, PAGE)
    pages = {"state": 16}
    groups = [
        CacheGroup(g.name, g.family, pages.get(g.family, 400), 0, g.window, g.layout.page_bytes) for g in served.groups
    ]
    layouts = {group.name: group.layout for group in served.groups}
    arena = TorchArena.allocate(groups, layouts, device=torch.device(CARD))
    for rows in arena.rows.values():
        rows.fill_(0xFF)  # NaN
    found = []
    for prompt in prompts:
        scheduler = Scheduler(SchedulerConfig(PAGE, groups, tokens, 8, prefix_caching=False, max_columns=64))
        source = Every({"r": prompt})
        executor: Any = (
            NotingPlain(served, arena, 8, source)
            if served.gathers
            else NotingKernels(served, arena, 8, source, columns=64, most_tokens=tokens)
        )
        executor.found = {}
        loop = EngineLoop(scheduler, executor, Tiers(scheduler))
        loop.submit([RequestSpec("r", prompt, 1)])
        while loop.live:
            loop.step()
        found.append(torch.cat(executor.found[0]))
    return found


@contextmanager
def blind(keys: int) -> Iterator[None]:
    """Every query leaves out its last keys."""

    def less(*given: Any) -> WorkList:
        items, merges, parts = work_list(*given)
        items = items.copy()
        can = items[:, 3] >= keys
        items[can, 3] -= keys
        items[:, 5] = np.maximum(items[:, 4] + 1, np.where(can, items[:, 5] - keys, items[:, 5]))
        return WorkList(items, merges, parts)

    named = map(sys.modules.get, ("sapwood.engine.executor.packing", "sapwood.engine.executor.gpu_executor"))
    places = [module for module in named if hasattr(module, "work_list")]
    assert places, "nobody has work_list any more"
    for module in places:
        module.work_list = less  # type: ignore[union-attr]
    try:
        yield
    finally:
        for module in places:
            module.work_list = work_list  # type: ignore[union-attr]


def parity(names: list[str]) -> None:
    """`names`: of architectures."""
    generator = np.random.default_rng(1)
    say(f"{'':14}{'theirs bf16':>16}{'ours, steps of 1024':>20}{'of 48':>16}{'last key out':>16}{'last page out':>16}")
    for name in names:
        prompts = [generator.integers(0, 4096, n, np.int32) for n in LENGTHS]
        with one_of_many(f"parity, {name}"):
            _parity_of(name, prompts)


def _parity_of(name: str, prompts: list[Any]) -> None:
    model = wide(name)
    right = theirs(model.float(), prompts)
    model = model.to(torch.bfloat16)
    noise = far((stepped if name == "mamba" else theirs)(model, prompts), right)
    told = [noise, far(ours(name, prompts, 1024), right), far(ours(name, prompts, 48), right)]
    if name not in BY_THEMSELVES and any(
        hasattr(module, "q_proj") or hasattr(module, "q_b_proj") for module in model.modules()
    ):
        for keys in (1, PAGE):
            with blind(keys):
                told.append(far(ours(name, prompts, 1024), right))
    say(f"{name:14}" + "".join(f"{f'{d:.4f} ({same:.3f})':>18}" for d, same in told))
    for got in told[1:3]:
        must(got[0] <= 1.05 * noise[0], f"{name}: {got[0]:.4f} off, and transformers itself {noise[0]:.4f}")
    floor, seen = noise[0], [each[0] for each in told[3:]]
    if floor > 0.1 and seen:  # bf16 alone is so far off that nothing else is seen
        floor, _ = far(ours(name, prompts, 1024, torch.float32), right)
        seen = []
        for keys in (1, PAGE):
            with blind(keys):
                seen.append(far(ours(name, prompts, 1024, torch.float32), right)[0])
        say(f"{name:14} in float32: {floor:.5f}, last key out {seen[0]:.5f}, last page out {seen[1]:.5f}")
        must(floor < 0.01, f"{name}: {floor:.4f} off in float32")
    wrong = f"{name}: what is wrong on purpose is not seen: {seen} against {floor}"
    must(min(seen, default=1.0) > 1.1 * floor, wrong)
