"""What recurrent layers do with their states, as Triton kernels over the rows of a step: each goes on from the state in
its slot, token by token, and leaves it there. Needs Triton; import it late.

They stand in for functions of transformers that take a batch of one token each (models/recurrent.py), with the same
arguments: here the batch is all tokens of a step, row after row, and the states are those of all slots. What a chunk
computes does not depend on where it begins or ends. Nothing reads the host's memory: all of it can be captured in a
CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..models.recurrent import Runs
from .launch import compiling, launch

__all__ = ["compiling", "conv", "delta_rule", "scan"]

_CHANNELS = 256
_STATE = 4096  # numbers of a state that one program keeps


# ---- short convolutions


@triton.jit
def _conv_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, out_ptr, whose_ptr, rows_ptr,
    x_token, x_channel, slot_stride, channels,
    KEPT: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < channels
    row = tl.load(whose_ptr + token)
    total = tl.zeros([BLOCK], tl.float32)
    if row >= 0:
        first = tl.load(rows_ptr + row * 3)
        slot = tl.load(rows_ptr + row * 3 + 2).to(tl.int64)
        if HAS_BIAS:
            total += tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS):
            at = token - first - (TAPS - 1) + tap  # in the row; below 0: in what was kept
            now = tl.load(
                x_ptr + (first + at).to(tl.int64) * x_token + channel * x_channel, mask=there & (at >= 0), other=0.0
            )
            kept = state_ptr + slot * slot_stride + channel * KEPT + (KEPT + at)
            before = tl.load(kept, mask=there & (at < 0), other=0.0)
            weight = tl.load(weight_ptr + channel * TAPS + tap, mask=there, other=0.0).to(tl.float32)
            total += weight * (now.to(tl.float32) + before.to(tl.float32))  # one of them is zero
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        if SILU:
            total = total / (1 + tl.exp(-total))
    tl.store(out_ptr + token.to(tl.int64) * channels + channel, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _keep_kernel(
    x_ptr, state_ptr, rows_ptr, x_token, x_channel, slot_stride, channels,
    KEPT: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    count = tl.load(rows_ptr + row * 3 + 1)
    if count > 0:
        first = tl.load(rows_ptr + row * 3)
        slot = tl.load(rows_ptr + row * 3 + 2).to(tl.int64)
        channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
        column = tl.arange(0, PADDED)[None, :]
        there = (channel < channels) & (column < KEPT)
        at = count - KEPT + column
        now = tl.load(
            x_ptr + (first + at).to(tl.int64) * x_token + channel * x_channel, mask=there & (at >= 0), other=0.0
        )
        whole = state_ptr + slot * slot_stride + channel * KEPT
        before = tl.load(whole + (KEPT + at), mask=there & (at < 0), other=0.0)
        tl.debug_barrier()  # what one thread writes, another has read
        kind = state_ptr.dtype.element_ty
        tl.store(whole + column, tl.where(at >= 0, now.to(kind), before), mask=there)


def conv(
    runs: Runs, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """x [T, C, 1], state [slots, C, kept], weight [C, taps] -> [T, C, 1]."""
    tokens, channels, _ = x.shape
    kept, taps = state.shape[-1], weight.shape[-1]
    assert kept >= taps - 1 and activation in (None, "silu", "swish") and _is_packed(state), (state.shape, activation)
    weight = weight.contiguous()
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    shared = (x.stride(0), x.stride(1), state.stride(0), channels)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, block)
    launch(
        _conv_kernel, (tokens, blocks),
        x, state, weight, weight if bias is None else bias, out, *runs, *shared,
        KEPT=kept, TAPS=taps, HAS_BIAS=bias is not None, SILU=activation is not None, BLOCK=block,
    )  # fmt: skip
    padded = triton.next_power_of_2(kept)
    grid = (len(runs.rows), blocks)
    launch(_keep_kernel, grid, x, state, runs.rows, *shared, KEPT=kept, PADDED=padded, BLOCK=block)
    return out[:, :, None]


# ---- state spaces


@triton.jit
def _scan_kernel(
    state_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, bias_ptr, z_ptr, out_ptr, rows_ptr,
    slot_stride, x_token, x_head, x_dim, dt_token, dt_head, dt_dim, a_head, a_dim, a_n,
    b_token, b_group, b_n, c_token, c_group, c_n, d_head, d_dim, bias_head, bias_dim, z_token, z_head, z_dim,
    heads, per_group,
    DIM: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_Z: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(rows_ptr + row * 3), tl.load(rows_ptr + row * 3 + 1)
    if count > 0:
        slot = tl.load(rows_ptr + row * 3 + 2).to(tl.int64)
        dim = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        n = tl.arange(0, PADDED)
        of_dim, of_n = dim < DIM, n < N
        there = of_dim[:, None] & of_n[None, :]
        place = state_ptr + slot * slot_stride + (head * DIM + dim[:, None]) * N + n[None, :]
        state = tl.load(place, mask=there, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + head * a_head + dim[:, None] * a_dim + n[None, :] * a_n, mask=there, other=0.0).to(
            tl.float32
        )
        if HAS_D:
            d = tl.load(d_ptr + head * d_head + dim * d_dim, mask=of_dim, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + head * bias_head + dim * bias_dim, mask=of_dim, other=0.0).to(tl.float32)
        group = head // per_group
        for step in range(count):
            token = (first + step).to(tl.int64)
            x = tl.load(x_ptr + token * x_token + head * x_head + dim * x_dim, mask=of_dim, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + token * dt_token + head * dt_head + dim * dt_dim, mask=of_dim, other=0.0).to(
                tl.float32
            )
            b = tl.load(b_ptr + token * b_token + group * b_group + n * b_n, mask=of_n, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + token * c_token + group * c_group + n * c_n, mask=of_n, other=0.0).to(tl.float32)
            if HAS_BIAS:
                dt += bias
            if SOFTPLUS:
                grown = tl.exp(tl.minimum(dt, 20.0))
                dt = tl.where(dt > 20.0, dt, tl.where(dt < -15.0, grown, tl.log(1 + grown)))
            state = state * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1)
            if HAS_D:
                y += x * d
            if HAS_Z:
                z = tl.load(z_ptr + token * z_token + head * z_head + dim * z_dim, mask=of_dim, other=0.0).to(
                    tl.float32
                )
                y *= z / (1 + tl.exp(-z))
            tl.store(out_ptr + (token * heads + head) * DIM + dim, y.to(out_ptr.dtype.element_ty), mask=of_dim)
        tl.store(place, state.to(state_ptr.dtype.element_ty), mask=there)


def scan(
    runs: Runs,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """x, dt, z [T, H, P], state [slots, H, P, N], A [H, P, N], B and C [T, groups, N], D and the bias [H, P]; or all of
    them without heads. What comes out is as `hidden_states`."""
    x = hidden_states
    if alone := x.dim() == 2:
        x, dt, A, B, C, state = x[:, None], dt[:, None], A[None], B[:, None], C[:, None], state[:, None]
        D, dt_bias, z = (None if each is None else each.unsqueeze(-2) for each in (D, dt_bias, z))
    assert _is_packed(state), state.stride()
    tokens, heads, dims = x.shape
    n = state.shape[-1]
    out = torch.zeros(tokens, heads, dims, dtype=x.dtype, device=x.device)  # padding stays zero
    padded = triton.next_power_of_2(n)
    block = min(triton.next_power_of_2(dims), max(1, _STATE // padded))
    d, bias, gate = (x if each is None else each for each in (D, dt_bias, z))
    strides = [stride for each in (x, dt, A, B, C) for stride in each.stride()]
    more = [*d.stride()[-2:], *bias.stride()[-2:], *gate.stride()]
    launch(
        _scan_kernel, (len(runs.rows), heads, triton.cdiv(dims, block)),
        state, x, dt, A, B, C, d, bias, gate, out, runs.rows,
        state.stride(0), *strides, *more, heads, heads // B.shape[1],
        DIM=dims, N=n, PADDED=padded, BLOCK=block, HAS_D=D is not None, HAS_BIAS=dt_bias is not None,
        HAS_Z=z is not None, SOFTPLUS=dt_softplus,
    )  # fmt: skip
    return out[:, 0] if alone else out


# ---- the gated delta rule


@triton.jit
def _delta_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, rows_ptr,
    slot_stride, q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
    heads, scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(rows_ptr + row * 3), tl.load(rows_ptr + row * 3 + 1)
    if count > 0:
        slot = tl.load(rows_ptr + row * 3 + 2).to(tl.int64)
        key = tl.arange(0, PADDED)
        value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        of_key, of_value = key < KEYS, value < VALUES
        there = of_key[:, None] & of_value[None, :]
        place = state_ptr + slot * slot_stride + (head * KEYS + key[:, None]) * VALUES + value[None, :]
        state = tl.load(place, mask=there, other=0.0).to(tl.float32)
        for step in range(count):
            token = (first + step).to(tl.int64)
            q = tl.load(q_ptr + token * q_token + head * q_head + key, mask=of_key, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + token * k_token + head * k_head + key, mask=of_key, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + token * v_token + head * v_head + value, mask=of_value, other=0.0).to(tl.float32)
            decay = tl.exp(tl.load(g_ptr + token * g_token + head * g_head).to(tl.float32))
            beta = tl.load(beta_ptr + token * beta_token + head * beta_head).to(tl.float32)
            if NORMED:
                q *= tl.rsqrt(tl.sum(q * q) + 1e-6)
                k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
            state *= decay
            delta = (v - tl.sum(state * k[:, None], 0)) * beta
            state += k[:, None] * delta[None, :]
            y = tl.sum(state * (q * scale)[:, None], 0)
            tl.store(out_ptr + (token * heads + head) * VALUES + value, y.to(out_ptr.dtype.element_ty), mask=of_value)
        tl.store(place, state.to(state_ptr.dtype.element_ty), mask=there)


def delta_rule(
    runs: Runs,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """query, key [T, 1, H, K], value [T, 1, H, V], g and beta [T, 1, H], state [slots, H, K, V] -> [T, 1, H, V]."""
    q, k, v = (each[:, 0] if each.stride(-1) == 1 else each[:, 0].contiguous() for each in (query, key, value))
    g, beta, state = g[:, 0], beta[:, 0], initial_state
    assert _is_packed(state) and g.dim() == 2 and q.shape[1] == v.shape[1], (state.stride(), g.shape, q.shape, v.shape)
    tokens, heads, values = v.shape
    keys = k.shape[-1]
    out = torch.zeros(tokens, heads, values, dtype=query.dtype, device=v.device)  # padding stays zero
    padded = triton.next_power_of_2(keys)
    block = min(triton.next_power_of_2(values), max(16, _STATE // padded))
    strides = [stride for each in (q, k, v, g, beta) for stride in each.stride()[:2]]
    launch(
        _delta_kernel, (len(runs.rows), heads, triton.cdiv(values, block)),
        state, q, k, v, g, beta, out, runs.rows, state.stride(0), *strides, heads, keys**-0.5,
        KEYS=keys, VALUES=values, PADDED=padded, BLOCK=block, NORMED=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out[:, None], state


def _is_packed(state: Tensor) -> bool:
    """Whether each slot's numbers lie side by side. (Slots lie where pages do.)"""
    return state[0].is_contiguous()
