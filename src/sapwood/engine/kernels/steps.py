"""What a step does before the model and after it, as Triton kernels. Needs Triton; import it late.

move      a step's numbers come from the host, and what was found goes there (link.py)
begin     page tables take their changes; tokens that only the device knows are filled in
end       the tokens that were chosen: to be read back, and as the last ones of their slots
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..executor.step_buffer import MAX_TABLE_CHANGES, Packed
from .launch import launch

_BLOCK, _WORDS = 256, 1024


class StepInputs(NamedTuple):
    """A step's numbers as the model takes them."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    wanted: Tensor  # [R]
    states: Tensor  # [T]


class DeviceTables:
    """What the device knows from step to step: page tables, and the last token of each slot; one slot more than there
    are, which padding writes to."""

    def __init__(self, tables: dict[str, int], slots: int, device: torch.device) -> None:
        """`tables`: how many columns each has."""
        self.slots = slots
        sizes = {name: (slots + 1) * columns for name, columns in tables.items()}
        self._tables = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        self.last = torch.zeros(slots + 1, dtype=torch.long, device=device)
        self.first: dict[str, int] = {}  # where each table begins in all of them
        self.tables: dict[str, Tensor] = {}
        for name, columns in tables.items():
            first = self.first[name] = sum(sizes[other] for other in self.first)
            self.tables[name] = self._tables[first : first + sizes[name]].view(slots + 1, columns)

    def forget(self) -> None:
        """As when it was made."""
        self._tables.zero_()
        self.last.zero_()

    def begin(self, step: Packed, tokens: int, rows: int) -> StepInputs:
        """Apply what a step changes, and give the numbers of its first `tokens` and `rows`."""
        changes = (self._tables, step.changed, step.count)
        launch(_change, (MAX_TABLE_CHANGES // _BLOCK,), *changes, MOST=MAX_TABLE_CHANGES, BLOCK=_BLOCK)
        begun = StepInputs(*(self.last.new_empty(n) for n in (tokens, tokens, rows, tokens)))
        grid = (triton.cdiv(max(tokens, rows), _BLOCK),)
        numbers = (step.tokens, step.positions, step.wanted, step.states, self.last)
        if not launch(_widen, grid, *numbers, *begun, tokens, rows, BLOCK=_BLOCK):
            for each in begun:
                each.zero_()  # what torch looks up with them must be there
        return begun

    def end(self, tokens: Tensor, best: Tensor, targets: Tensor, out: Tensor) -> None:
        """`tokens` [n] were chosen, whose logits are `best`: no number, and they mean nothing. `out` [2, n or more]
        int32: the tokens, and whether they are bad."""
        n = len(tokens)
        grid = (triton.cdiv(n, _BLOCK),)
        launch(_end, grid, tokens, best, targets, self.last, out, n, out.stride(0), BLOCK=_BLOCK)


def move(source: Tensor, target: Tensor) -> bool:
    """Copy words, of which one or the other may be in pinned memory of the host; False if it was only compiled."""
    n = len(source)
    return launch(_move, (triton.cdiv(n, _WORDS),), source, target, n, BLOCK=_WORDS)


@triton.jit(do_not_specialize=["n"])
def _move(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n, other=0), mask=at < n)


@triton.jit
def _change(tables, changed, count, MOST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < tl.load(count)
    place = tl.load(changed + at, mask=there, other=0)
    page = tl.load(changed + MOST + at, mask=there, other=0)
    tl.store(tables + place, page, mask=there)


@triton.jit(do_not_specialize=["n", "rows"])
def _widen(
    tokens, positions, wanted, states, last, to_tokens, to_positions, to_wanted, to_states, n, rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    token = tl.load(tokens + at, mask=there, other=0).to(tl.int64)
    unknown = there & (token < 0)
    newest = tl.load(last + tl.where(unknown, -token - 1, 0), mask=unknown, other=0)
    tl.store(to_tokens + at, tl.where(unknown, newest, token), mask=there)
    tl.store(to_positions + at, tl.load(positions + at, mask=there, other=0).to(tl.int64), mask=there)
    tl.store(to_states + at, tl.load(states + at, mask=there, other=0).to(tl.int64), mask=there)
    there = at < rows
    tl.store(to_wanted + at, tl.load(wanted + at, mask=there, other=0).to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["n"])
def _end(tokens, best, targets, last, out, n, line, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    value = tl.load(best + at, mask=there, other=0.0).to(tl.float32)
    good = (value == value) & (tl.abs(value) != float("inf"))
    token = tl.where(good, tl.load(tokens + at, mask=there, other=0), 0)
    tl.store(last + tl.load(targets + at, mask=there, other=0), token, mask=there)
    tl.store(out + at, token.to(tl.int32), mask=there)
    tl.store(out + line + at, tl.where(good, 0, 1).to(tl.int32), mask=there)
