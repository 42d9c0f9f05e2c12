"""Kernels for norms, rotary positions, activations, adapters, sampling and small copies against torch: on a GPU where
there is one, else under Triton's interpreter. Everything that nobody may read is NaN."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, silu

from sapwood.engine.executor.sampling import Sampler
from sapwood.engine.executor.step_buffer import PinnedCopies
from sapwood.engine.params import SamplingParams

from .triton_kit import CARD, DEVICE, QUIET, elementwise_kernels, lora_kernels, sampling_kernels, step_kernels

pytestmark = QUIET
VOCABULARY = 151_936 if CARD else 300
KINDS = [torch.float32, torch.bfloat16]
PRODUCTS = [torch.float32, torch.bfloat16 if CARD else torch.float16]  # the interpreter's products know no bfloat16


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Within the rounding of one operation."""
    most = 1e-5 if one.dtype is torch.float32 else 1e-2
    return one.shape == other.shape and bool((one.float() - other.float()).norm() <= most * other.float().norm())


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("plus_one", [False, True])
def test_norms(dtype, plus_one):
    """Rows of any width, of a whole tensor, of heads, and of heads behind others and transposed.

    Mutation: `_rows` takes the inner stride for the outer one; the mean is over the padded width.
    """
    for width in (16, 40, 96, 4096 if CARD else 130):
        weight = some(width, seed=1, dtype=dtype)
        heads = some(1, 7, 5 * width, seed=2, dtype=dtype)[..., width : 4 * width].view(1, 7, 3, width)
        for x in (some(1, 5, width, dtype=dtype), some(9, width, dtype=dtype), heads, heads.transpose(1, 2)):
            wide = x.double()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            right = normed * (weight.double() + plus_one)
            assert close(elementwise_kernels.rms_norm(x, weight, 1e-6, plus_one), right.to(dtype))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (7, 1, 24), (9, 9, 80), (32, 8, 128)])
def test_rotary_positions(dtype, heads, kv_heads, width):
    """Queries and keys that are parts of one product, heads of any number and width.

    Mutation: `_rotary_kernel` takes the cosine of the first half for both; keys begin at the query's head.
    """
    tokens = 5
    both = some(1, tokens, (heads + kv_heads) * width, dtype=dtype).view(1, tokens, -1, width).transpose(1, 2)
    q, k = both[:, :heads], both[:, heads:]
    cos, sin = some(1, tokens, width, seed=3, dtype=dtype), some(1, tokens, width, seed=4, dtype=dtype)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.double().chunk(2, -1)
        return (x.double() * cos.double()[:, None] + torch.cat([-second, first], -1) * sin.double()[:, None]).to(dtype)

    assert elementwise_kernels.can_rotate(q, k, cos, sin)
    found = elementwise_kernels.rotary(q, k, cos, sin)
    assert close(found[0], turned(q)) and close(found[1], turned(k))
    assert not elementwise_kernels.can_rotate(q, k, cos[..., : width // 2], sin[..., : width // 2])


@pytest.mark.parametrize("dtype", KINDS)
def test_activations(dtype):
    """Mutation: gate and up change places; the last block is written whole."""
    for width in (24, 1100):
        both = some(1, 3, 2 * width, dtype=dtype)
        gate, up = both.double().chunk(2, -1)
        assert close(elementwise_kernels.silu_mul(both), (silu(gate) * up).to(dtype))
        assert close(elementwise_kernels.gelu_tanh_mul(both), (gelu(gate, approximate="tanh") * up).to(dtype))


def lora_case(tokens: int, sizes: list[int], width: int, rank: int, dtype: torch.dtype, slots: int = 4) -> Any:
    """Slots with adapters of several ranks on some of the parts, and NaN beyond their ranks."""
    rng = random.Random(tokens)
    a = some(slots + 1, len(sizes), rank, width, seed=5, dtype=dtype) / width**0.5
    b = some(slots + 1, sum(sizes), rank, seed=6, dtype=dtype)
    ranks = torch.tensor(
        [[0 if slot == 0 else rng.choice([0, 1, rank // 2, rank]) for _ in sizes] for slot in range(slots + 1)],
        dtype=torch.int32,
    ).to(DEVICE)
    ends = np.cumsum(sizes).tolist()
    for slot in range(slots + 1):
        for part, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            a[slot, part, int(ranks[slot, part]) :] = torch.nan
            b[slot, end - size : end, int(ranks[slot, part]) :] = torch.nan
    of = torch.tensor([rng.randrange(slots + 1) for _ in range(tokens)], dtype=torch.int32).to(DEVICE)
    x, y = some(tokens, width, seed=7, dtype=dtype), some(tokens, sum(sizes), seed=8, dtype=dtype)
    return x, y, a, b, ranks, of


def add(x: Any, y: Any, a: Any, b: Any, ranks: Any, of: Any, sizes: list[int]) -> None:
    shrunk = lora_kernels.room(x, a).fill_(torch.nan)
    lora_kernels.shrink(x, a, ranks, of, shrunk)
    lora_kernels.expand(shrunk, y, b, ranks, of, lora_kernels.out_blocks(sizes, a))


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize(
    ("tokens", "sizes", "width", "rank"),
    [
        (5, [24], 40, 4),
        (70, [32, 16, 16], 64, 16),
        (130, [200, 40], 300, 7),
        (3, [16], 2500, 64),
        (64, [130], 1300, 33),
    ],
)
def test_adapters_of_any_rows(tokens, sizes, width, rank, dtype):
    """Each token has what its slot adds to each part; base rows stay as they are, bit for bit.

    Mutation: `mine` is not asked for in the store; `part` of a block is always 0; `rank` is not a mask.
    """
    x, y, a, b, ranks, of = lora_case(tokens, sizes, width, rank, dtype)
    right, first = y.double(), 0
    for part, size in enumerate(sizes):
        for token in range(tokens):
            slot = int(of[token])
            n = int(ranks[slot, part])
            columns = slice(first, first + size)
            h = a[slot, part, :n].double() @ x[token].double()
            right[token, columns] += b[slot, columns, :n].double() @ h
        first += size
    before = y.clone()
    add(x, y, a, b, ranks, of, sizes)
    assert close(y, right.to(dtype))
    assert torch.equal(y[of == 0], before[of == 0])


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_an_adapter_mixed_is_the_adapter_alone(dtype):
    """What a token gets does not depend on the others, bit for bit.

    Mutation: `_shrink_kernel` adds up tokens; the sum over splits is made by whoever comes first.
    """
    x, y, a, b, ranks, of = lora_case(70, [32, 16], 2100, 16, dtype)
    alone = y.clone()
    add(x, y, a, b, ranks, of, [32, 16])
    for token in (0, 13, 69):
        one = alone[token : token + 1].clone()
        add(x[token : token + 1], one, a, b, ranks, of[token : token + 1].clone(), [32, 16])
        assert torch.equal(one[0], y[token])


def samplers(rows: int, params: list[SamplingParams]) -> tuple[Sampler, Sampler]:
    """One that sorts, and one with the kernel, for the same requests."""
    pair = Sampler(rows, VOCABULARY, DEVICE, random.Random(1)), Sampler(rows, VOCABULARY, DEVICE, random.Random(1))
    pair[0]._kernel, pair[1]._kernel = None, sampling_kernels.choose
    for slot, each in enumerate(params):
        for sampler in pair:
            sampler.seat(slot, each, [1], [], [], 0)
    return pair


@pytest.mark.parametrize("seed", range(6 if CARD else 2))
def test_sampling_is_that_of_a_sort(seed, monkeypatch):
    """Any mix of min_p, top_k, top_p and temperatures; logits that are flat, steep, or equal in many places: the same
    tokens, bit for bit, with other random numbers at each index.

    Mutation: `need` is not rounded up; `_search` keeps what is above `high`; `token` is one too far; ties are dropped.
    """
    if not CARD:
        monkeypatch.setattr(sampling_kernels, "_TILE", 32)
        monkeypatch.setattr(sampling_kernels, "_LONG", 64)
    rng = random.Random(seed)
    rows = 64 if CARD else 5
    params = [
        SamplingParams(
            temperature=rng.choice([0.2, 1.0, 3.0]),
            top_k=rng.choice([0, 1, 5, 50, 250]),
            top_p=rng.choice([1.0, 0.9, 0.5, 0.01, 0.999, 0.999999999]),
            min_p=rng.choice([0.0, 0.0, 0.05, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            seed=rng.randrange(100),
        )
        for _ in range(rows)
    ]
    sorting, kernel = samplers(rows, params)
    slots = np.arange(rows)
    for index, spread in enumerate((0.0, 0.1, 3.0, 20.0) if CARD else (0.1, 4.0)):
        for coarse in (False, True):
            logits = some(rows, VOCABULARY, seed=10 * seed + index) * spread
            logits = (logits * 2).round() / 2 if coarse else logits
            at = np.full(rows, 2 * index + coarse)
            one, other = sorting.sample(logits.clone(), slots, at), kernel.sample(logits.clone(), slots, at)
            assert torch.equal(one.tokens, other.tokens), (spread, coarse)
            assert not other.bad.any()


def test_rows_of_nan_are_bad_and_harm_nobody(monkeypatch):
    """Mutation: `_search` goes on while `low` is below `high` by one."""
    if not CARD:
        monkeypatch.setattr(sampling_kernels, "_TILE", 32)
        monkeypatch.setattr(sampling_kernels, "_LONG", 64)
    params = [SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=1)] * 3
    sorting, kernel = samplers(3, params)
    logits = some(3, VOCABULARY)
    logits[1] = torch.nan
    logits[2, 5] = torch.inf
    one, other = (each.sample(logits.clone(), np.arange(3), np.zeros(3, int)) for each in (sorting, kernel))
    assert other.bad.tolist() == [False, True, True]
    assert torch.equal(one.tokens, other.tokens)


def test_what_is_put_and_fetched():
    """Arrays of any kind, more than the ring has room for, while the device is busy; one that is too large, none at
    all, and ones that are changed right after. What is fetched is the same.

    Mutation: `PinnedCopies._take` begins anew in a part that is still read; `put` keeps the caller's memory.
    """
    rng = np.random.default_rng(3)
    link = PinnedCopies(torch.device(DEVICE), step_kernels.move)
    busy = some(2048, 2048) if CARD else None
    put = []
    for n in range(60):
        if busy is not None:
            busy = busy @ busy * 1e-3
        size = int(rng.integers(1, 300_000 if CARD else 900)) if n % 5 else n
        array = rng.integers(-(2**31), 2**31, size).astype([np.int64, np.int32, np.float64, np.float32][n % 4])
        kept = array.copy()
        put.append((kept, link.put(array[:, None] if n % 3 else array)))
        array[:] = 0
    large = rng.integers(0, 9, 1 << 20)
    put.append((large, link.put(large)))
    fetched = [link.fetch(there) for _, there in put]
    if CARD:
        torch.cuda.synchronize()
    for (kept, there), here in zip(put, fetched, strict=True):
        assert here.shape == there.shape and here.numpy().dtype == kept.dtype
        assert (here.numpy().reshape(-1) == kept).all()
