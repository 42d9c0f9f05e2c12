"""Norms, rotary positions and gated activations as Triton kernels: one launch each, where torch takes five to ten.

What is computed in float32 inside is rounded where transformers rounds it, so that bf16 answers stay close to theirs.
Nothing here reads the host's memory: all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_ROW = 4096  # numbers that one program of a norm works on, if a row has fewer
_HEADS = 8  # heads that one program turns
_ACTS = 1024  # outputs of one program of an activation


@triton.jit(do_not_specialize=["rows", "inner"])
def _norm_kernel(
    x_ptr, weight_ptr, out_ptr, rows, inner, x_outer, x_inner, out_outer, out_inner, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    here = (row < rows)[:, None] & (column < WIDTH)[None, :]
    outer, inside = row // inner, row % inner
    x = tl.load(x_ptr + (outer * x_outer + inside * x_inner)[:, None] + column[None, :], mask=here, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    normed = wide * scale[:, None]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    if PLUS_ONE:
        y = normed * (1.0 + weight.to(tl.float32))[None, :]
    else:
        y = normed.to(x.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    place = (outer * out_outer + inside * out_inner)[:, None] + column[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=here)


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """x / sqrt(mean(x^2) + eps), times the weight, or times one plus the weight, over the last dimension of `x`."""
    x = _two_level(x)
    out = torch.empty_like(x)
    width = x.shape[-1]
    (outer, inner), (x_outer, x_inner) = _rows(x)
    _, (out_outer, out_inner) = _rows(out)
    padded = triton.next_power_of_2(width)
    per = max(1, min(32, _ROW // padded))
    launch(
        _norm_kernel, (triton.cdiv(outer * inner, per),),
        x, weight, out, outer * inner, inner, x_outer, x_inner, out_outer, out_inner, eps,
        WIDTH=width, PADDED=padded, ROWS=per, PLUS_ONE=plus_one, num_warps=8 if padded >= 2048 else 4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["q_heads", "heads"])
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, out_ptr, q_heads, heads, q_head, q_token, k_head, k_token, cos_token, sin_token,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, PADDED)
    half = column < HALF
    cos_1 = tl.load(cos_ptr + token * cos_token + column, mask=half, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos_ptr + token * cos_token + HALF + column, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin_ptr + token * sin_token + column, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin_ptr + token * sin_token + HALF + column, mask=half, other=0.0).to(tl.float32)[None, :]
    of_q = (head < q_heads) & half[None, :]
    of_k = (head >= q_heads) & (head < heads) & half[None, :]
    q_at = q_ptr + token * q_token + head * q_head + column[None, :]
    k_at = k_ptr + token * k_token + (head - q_heads) * k_head + column[None, :]
    # Each is zero where the other is.
    x_1 = (tl.load(q_at, mask=of_q, other=0.0) + tl.load(k_at, mask=of_k, other=0.0)).to(tl.float32)
    x_2 = (tl.load(q_at + HALF, mask=of_q, other=0.0) + tl.load(k_at + HALF, mask=of_k, other=0.0)).to(tl.float32)
    out_at = out_ptr + (token * heads + head) * (2 * HALF) + column[None, :]
    kind = out_ptr.dtype.element_ty
    tl.store(out_at, (x_1 * cos_1 - x_2 * sin_1).to(kind), mask=of_q | of_k)
    tl.store(out_at + HALF, (x_2 * cos_2 + x_1 * sin_2).to(kind), mask=of_q | of_k)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [1, H, T, D] and k [1, Hkv, T, D], turned by cos and sin [1, T, D]: the first half of D with the second."""
    (_, q_heads, tokens, width), k_heads = q.shape, k.shape[1]
    heads = q_heads + k_heads
    out = q.new_empty(tokens, heads, width)
    launch(
        _rotary_kernel, (tokens, triton.cdiv(heads, _HEADS)),
        q, k, cos, sin, out, q_heads, heads, q.stride(1), q.stride(2), k.stride(1), k.stride(2),
        cos.stride(1), sin.stride(1),
        HALF=width // 2, PADDED=triton.next_power_of_2(width // 2), HEADS=_HEADS, num_warps=4,
    )  # fmt: skip
    turned = out.transpose(0, 1)[None]
    return turned[:, :q_heads], turned[:, q_heads:]


def can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `rotary` takes these."""
    return (
        len(q) == 1
        and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        and cos.ndim == sin.ndim == 3
        and len(cos) == len(sin) == 1
        and q.shape[-1] % 2 == 0
        and q.dtype == k.dtype
        and all(each.stride(-1) == 1 for each in (q, k, cos, sin))
    )


@triton.jit
def _gated_kernel(x_ptr, out_ptr, x_row, out_row, width, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    raw = tl.load(x_ptr + row * x_row + column, mask=here, other=0.0)
    up = tl.load(x_ptr + row * x_row + width + column, mask=here, other=0.0)
    gate = raw.to(tl.float32)
    if TANH:  # gelu by its formula with tanh(y) = 2 sigmoid(2 y) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        acted = gate * tl.sigmoid(2.0 * inner)
    else:
        acted = gate * tl.sigmoid(gate)
    y = acted.to(raw.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * out_row + column, y.to(raw.dtype), mask=here)


def _gated(both: Tensor, tanh: bool) -> Tensor:
    width = both.shape[-1] // 2
    flat = both.reshape(-1, 2 * width)
    out = both.new_empty(*both.shape[:-1], width)
    launch(
        _gated_kernel, (len(flat), triton.cdiv(width, _ACTS)),
        flat, out, flat.stride(0), width, width, TANH=tanh, BLOCK=_ACTS, num_warps=4,
    )  # fmt: skip
    return out


def silu_mul(both: Tensor) -> Tensor:
    """[..., gate and up] -> silu(gate) * up."""
    return _gated(both, tanh=False)


def gelu_tanh_mul(both: Tensor) -> Tensor:
    """[..., gate and up] -> gelu(gate) * up, by the formula with tanh."""
    return _gated(both, tanh=True)


def _two_level(x: Tensor) -> Tensor:
    """`x`, or a copy whose rows can be counted with two strides."""
    few = sum(size > 1 for size in x.shape[:-1]) <= 2
    return x if x.stride(-1) == 1 and few else x.contiguous()


def _rows(x: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes and strides of the dimensions before the last, as two."""
    dims: list[Any] = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if len(dims) > 2:  # contiguous
        return (1, x.numel() // x.shape[-1]), (0, x.shape[-1])
    (outer, outer_stride), (inner, inner_stride) = [(1, 0)] * (2 - len(dims)) + dims
    return (outer, inner), (outer_stride, inner_stride)
