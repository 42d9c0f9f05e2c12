"""A token a row by min_p, top_k and top_p, in one Triton kernel and without sorting.

What a row gets is defined with whole numbers (sampling.py): the mass of a token is its weight times 2**40. With C(v)
the number and M(v) the mass of the tokens whose weight is at least v, a filter leaves the tokens from a threshold on:

    top_k   the largest v with C(v) >= k
    top_p   the largest v with M(v) >= p * M(threshold so far)

Both are searched for among the bit patterns of floats, which are in the order of the floats. A pass over the weights
looks at eight patterns at once; what cannot be the answer is left out of the next pass. However the search goes, its
result is the same as a sort's.

Weights below 2**-40 have no mass. No row can get their tokens, so that the search need not go below them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_TILE = 512  # weights that are compared with eight patterns at once
_LONG = 4096  # weights that are looked at once
_WARPS = 8


@triton.jit
def _masses(patterns):
    return (patterns.to(tl.float32, bitcast=True) * 1099511627776.0).to(tl.int64)


@triton.jit
def _search(
    x_ptr, n, list_ptr, low, high, at_low, target, BY_MASS: tl.constexpr, TILE: tl.constexpr, LONG: tl.constexpr
):  # fmt: skip
    """The largest v from `low` to below `high` with F(v) >= target, or `low`, and F of it; F is C, or M by mass. `x`
    has all patterns from `low` on; F(low) is `at_low`, and F(high) is 0. Patterns still in question go to `list`, which
    may be `x`."""
    above = at_low - at_low  # F(high of the list)
    at_high = above
    while high - low > 1:
        step = (high - low + 7) // 8
        pivots = low + (1 + tl.arange(0, 8)) * step
        if BY_MASS:
            sums = tl.zeros((TILE, 8), tl.int64)
        else:
            sums = tl.zeros((TILE, 8), tl.int32)
        for begin in tl.range(0, n, TILE, num_stages=4):
            i = begin + tl.arange(0, TILE)
            x = tl.load(x_ptr + i, mask=i < n, other=0)
            reaches = x[:, None] >= pivots[None, :]
            if BY_MASS:
                sums += tl.where(reaches, _masses(x)[:, None], 0)
            else:
                sums += reaches.to(tl.int32)
        found = above + tl.sum(sums, 0)
        passed = tl.sum((found >= target).to(tl.int32), 0)  # F falls: these are the first
        index = tl.arange(0, 8)
        if passed > 0:
            at_low = tl.sum(tl.where(index == passed - 1, found, 0), 0)
        if low + (passed + 1) * step < high:
            high = low + (passed + 1) * step
            at_high = tl.sum(tl.where(index == passed, found, 0), 0)
        low = low + passed * step
        if n > TILE:
            above = at_high
            kept = 0
            for begin in range(0, n, LONG):
                i = begin + tl.arange(0, LONG)
                x = tl.load(x_ptr + i, mask=i < n, other=0)
                keep = ((x >= low) & (x < high)).to(tl.int32)
                place = kept + tl.cumsum(keep, 0) - 1
                tl.debug_barrier()  # all threads have read before one writes
                tl.store(list_ptr + place, x, mask=keep > 0)
                kept += tl.sum(keep, 0)
            tl.debug_barrier()
            x_ptr = list_ptr
            n = kept
    return low, at_low


@triton.jit
def _choose_kernel(
    x_ptr, list_ptr, numbers_ptr, out_ptr, width, stride,
    LEAST: tl.constexpr, ONE: tl.constexpr, TILE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    list_ptr += row * width
    share = tl.load(numbers_ptr + 4 * row).to(tl.float32).to(tl.int32, bitcast=True)
    k = tl.load(numbers_ptr + 4 * row + 1).to(tl.int32)
    p = tl.load(numbers_ptr + 4 * row + 2)
    uniform = tl.load(numbers_ptr + 4 * row + 3)
    low = tl.maximum(share, LEAST)
    high = tl.full((), ONE + 1, tl.int32)
    if k < width:
        low, _ = _search(x_ptr, width, list_ptr, low, high, width, k, False, TILE, LONG)

    # What is left, and its mass.
    each = tl.zeros((LONG,), tl.int64)
    kept = 0
    for begin in tl.range(0, width, LONG, num_stages=3):
        i = begin + tl.arange(0, LONG)
        x = tl.load(x_ptr + i, mask=i < width, other=0)
        keep = (x >= low).to(tl.int32)
        each += tl.where(x >= low, _masses(x), 0)
        if p < 1.0:
            tl.store(list_ptr + kept + tl.cumsum(keep, 0) - 1, x, mask=keep > 0)
            kept += tl.sum(keep, 0)
    total = tl.sum(each, 0)
    if p < 1.0:
        tl.debug_barrier()
        need = tl.ceil(total.to(tl.float64) * p).to(tl.int64)
        low, total = _search(list_ptr, kept, list_ptr, low, high, total, need, True, TILE, LONG)

    # The first token with which the mass is above a random part of the whole: first the tile that it is in.
    aim = (uniform * total.to(tl.float64)).to(tl.int64)
    before, reached = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    tile = 0
    for begin in tl.range(0, width, LONG, num_stages=3):
        i = begin + tl.arange(0, LONG)
        x = tl.load(x_ptr + i, mask=i < width, other=0)
        after = reached + tl.sum(tl.where(x >= low, _masses(x), 0), 0)
        inside = (reached <= aim) & (aim < after)
        before = tl.where(inside, reached, before)
        tile = tl.where(inside, begin, tile)
        reached = after
    i = tile + tl.arange(0, LONG)
    x = tl.load(x_ptr + i, mask=i < width, other=0)
    passed = before + tl.cumsum(tl.where(x >= low, _masses(x), 0), 0) <= aim
    tl.store(out_ptr + row, (tile + tl.sum((passed & (i < width)).to(tl.int32), 0)).to(tl.int64))


def choose(weights: Tensor, numbers: Tensor) -> Tensor:
    """A token for each row of `weights` [rows, vocabulary], float32 and at most 1. `numbers` [rows, 4], float64: min_p,
    top_k (the vocabulary: no filter), top_p (1: no filter), and where from 0 to below 1 the row's random number is."""
    rows, width = weights.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=weights.device)
    scratch = torch.empty((rows, width), dtype=torch.int32, device=weights.device)
    launch(
        _choose_kernel, (rows,),
        weights.view(torch.int32), scratch, numbers, tokens, width, weights.stride(0),
        LEAST=_pattern(2.0**-40), ONE=_pattern(1.0), TILE=_TILE, LONG=_LONG, num_warps=_WARPS,
    )  # fmt: skip
    return tokens


def _pattern(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32))
