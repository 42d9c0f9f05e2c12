"""What adapters add to a linear layer, for tokens of any adapters in one batch, in two kernels:

    shrink   h[token] = A[slot of token] x[token]          split over x, so that a few tokens keep the device busy
    expand   y[token] += B[slot of token] (sum of h)       in the order of the splits, so that sums repeat

A program has a slot and a block of tokens, and ends at once if none of them are of that slot: the base model's rows
cost nothing, and the weights of an adapter are read once for all tokens of a block. Which slot a token has is read from
the device's memory, and all shapes are those of the batch: both kernels can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_TOKENS = 64  # of a program
_LEAST_SPLIT, _MOST_SPLITS = 1024, 8
_WARPS = 8


class _Tiles(NamedTuple):
    """Columns of x that a program of `shrink` reads at once, and columns of y that one of `expand` writes."""

    columns_in: int
    columns_out: int


_WIDE, _NARROW, _EXACT = _Tiles(256, 256), _Tiles(64, 64), _Tiles(32, 128)


@triton.jit
def _mine(slots_ptr, ranks_ptr, tokens, slot, part, PARTS: tl.constexpr, TOKENS: tl.constexpr):
    """A program's block of tokens, which of them have its slot, and the rank that is theirs."""
    rank = tl.load(ranks_ptr + slot * PARTS + part)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mine = tl.load(slots_ptr + token, mask=token < tokens, other=0) == slot
    return token, mine, rank


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _shrink_kernel(
    x_ptr, a_ptr, h_ptr, slots_ptr, ranks_ptr, tokens, width, x_token, a_slot, a_part,
    PARTS: tl.constexpr, SPLIT: tl.constexpr, RANK: tl.constexpr, STORED: tl.constexpr, EXACT: tl.constexpr,
    TOKENS: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1) + 1
    part = tl.program_id(2) % PARTS
    split = tl.program_id(2) // PARTS
    token, mine, rank = _mine(slots_ptr, ranks_ptr, tokens, slot, part, PARTS, TOKENS)
    if tl.max(mine.to(tl.int32), 0) * rank == 0:
        return
    r = tl.arange(0, RANK)
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_token
    a_at = a_ptr + slot.to(tl.int64) * a_slot + part * a_part + r[:, None] * width
    total = tl.zeros((TOKENS, RANK), tl.float32)
    for begin in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, width), IN):
        column = begin + tl.arange(0, IN)
        there = column < tl.minimum(split * SPLIT + SPLIT, width)
        x = tl.load(x_at + column[None, :], mask=mine[:, None] & there[None, :], other=0.0)
        a = tl.load(a_at + column[None, :], mask=(r < rank)[:, None] & there[None, :], other=0.0)
        if EXACT:
            total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(a), total)
    h_at = h_ptr + (((split * PARTS + part) * tokens).to(tl.int64) + token)[:, None] * STORED + r[None, :]
    tl.store(h_at, total, mask=mine[:, None] & (r < STORED)[None, :])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _expand_kernel(
    h_ptr, b_ptr, y_ptr, slots_ptr, ranks_ptr, blocks_ptr, tokens, y_token, b_slot,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, RANK: tl.constexpr, STORED: tl.constexpr, EXACT: tl.constexpr,
    TOKENS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(2)
    slot = tl.program_id(1) + 1
    part = tl.load(blocks_ptr + 3 * block)
    token, mine, rank = _mine(slots_ptr, ranks_ptr, tokens, slot, part, PARTS, TOKENS)
    if tl.max(mine.to(tl.int32), 0) * rank == 0:
        return
    r = tl.arange(0, RANK)
    begin, end = tl.load(blocks_ptr + 3 * block + 1), tl.load(blocks_ptr + 3 * block + 2)
    column = begin + tl.arange(0, OUT)
    there = column < end
    b_at = b_ptr + slot.to(tl.int64) * b_slot + column[:, None] * STORED + r[None, :]
    b = tl.load(b_at, mask=there[:, None] & (r < rank)[None, :], other=0.0)
    y_at = y_ptr + token.to(tl.int64)[:, None] * y_token + column[None, :]
    here = mine[:, None] & there[None, :]
    y = tl.load(y_at, mask=here, other=0.0)
    h = tl.zeros((TOKENS, RANK), tl.float32)
    for split in tl.static_range(SPLITS):
        h_at = h_ptr + (((split * PARTS + part) * tokens).to(tl.int64) + token)[:, None] * STORED + r[None, :]
        h += tl.load(h_at, mask=mine[:, None] & (r < rank)[None, :], other=0.0)
    if EXACT:
        added = tl.dot(h, tl.trans(b), input_precision="ieee")
    else:
        added = tl.dot(h.to(b.dtype), tl.trans(b))
    tl.store(y_at, (y.to(tl.float32) + added).to(y.dtype), mask=here)


def _tiles(stack: Tensor) -> _Tiles:
    """As large as the memory of a processor allows, for a stack [..., rank, in] or [..., rank]."""
    if stack.dtype is torch.float32:
        return _EXACT
    return _WIDE if stack.shape[2] <= 64 else _NARROW


def out_blocks(sizes: list[int], a: Tensor) -> Tensor:
    """The pieces in which outputs are written, none of them across two parts: (part, first column, end), int32."""
    found, first, step = [], 0, _tiles(a).columns_out
    for part, size in enumerate(sizes):
        found += [(part, first + at, first + min(size, at + step)) for at in range(0, size, step)]
        first += size
    return torch.tensor(found, dtype=torch.int32, device=a.device)


def room(x: Tensor, a: Tensor) -> Tensor:
    """Memory for what `shrink` makes of x [T, in]: [splits, parts, T, rank]."""
    return torch.empty((_splits(a)[1], a.shape[1], len(x), a.shape[2]), dtype=torch.float32, device=x.device)


def shrink(x: Tensor, a: Tensor, ranks: Tensor, slots: Tensor, shrunk: Tensor) -> None:
    """x [T, in] by the A of each token's slot, in splits of the sum. a [slots + 1, parts, rank, in]; `ranks`
    [slots + 1, parts] says how many of a rank's rows are meant, 0: nothing is added. `slots` [T] int32: 0 is the base
    model."""
    tokens, width = x.shape
    rows, parts, stored, _ = a.shape
    split, splits = _splits(a)
    exact = x.dtype is torch.float32
    launch(
        _shrink_kernel, (triton.cdiv(tokens, _TOKENS), rows - 1, parts * splits),
        x, a, shrunk, slots, ranks, tokens, width, x.stride(0), a.stride(0), a.stride(1),
        PARTS=parts, SPLIT=split, RANK=_padded(stored), STORED=stored, EXACT=exact,
        TOKENS=_TOKENS, IN=_tiles(a).columns_in, num_warps=_WARPS,
    )  # fmt: skip


def expand(shrunk: Tensor, y: Tensor, b: Tensor, ranks: Tensor, slots: Tensor, blocks: Tensor) -> None:
    """Add to y [T, out] in place what the B of each token's slot makes of that. b [slots + 1, out, rank]; `blocks`:
    from `out_blocks`."""
    splits, parts, tokens, stored = shrunk.shape
    launch(
        _expand_kernel, (triton.cdiv(tokens, _TOKENS), len(b) - 1, len(blocks)),
        shrunk, b, y, slots, ranks, blocks, tokens, y.stride(0), b.stride(0),
        PARTS=parts, SPLITS=splits, RANK=_padded(stored), STORED=stored, EXACT=y.dtype is torch.float32,
        TOKENS=_TOKENS, OUT=_tiles(b).columns_out, num_warps=_WARPS,
    )  # fmt: skip


def _splits(a: Tensor) -> tuple[int, int]:
    """How many columns of x a program adds up, and how many programs there are for that."""
    width, step = a.shape[3], _tiles(a).columns_in
    few = max(1, min(_MOST_SPLITS, width // _LEAST_SPLIT))
    split = triton.cdiv(triton.cdiv(width, few), step) * step
    return split, triton.cdiv(width, split)


def _padded(rank: int) -> int:
    return max(16, int(triton.next_power_of_2(rank)))
