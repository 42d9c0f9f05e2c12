"""Attention over pages as Triton kernels, driven by a work list (work_list.py). Needs Triton; import it late.

    write     K and V of all tokens into their places; what is not to be written has place 0, in the null page
    attend    one program an item and a K/V head: the queries of a tile, with all query heads that share the K/V head as
              rows of one matrix, over the keys of the item, block by block
    merge     joins the parts of tiles whose keys were cut

Nothing outside the keys of an item is read: the null page, and what strangers left in a page, may be anything.
Shapes that are no powers of two are padded inside the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..executor.attention import ScoreOptions
from ..executor.work_list import ITEM_NUMBERS, MERGE_NUMBERS, Tiles
from .launch import launch

_LOG2E = 1.4426950408889634


class HeadShape(NamedTuple):
    """Heads of a layer: `group` query heads share each of `heads` K/V heads; keys are `dim` wide, values `values`."""

    heads: int
    group: int
    dim: int
    values: int


class Tuned(NamedTuple):
    """How a kernel is built: rows of a tile (queries times heads), keys of a block, warps, stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


SMALL = Tuned(16, 64, 4, 2)  # decode rows
MIDDLE = Tuned(64, 64, 4, 3)  # decode rows beside a chunk
LARGE = Tuned(128, 64, 8, 3)  # chunks


class Processor(NamedTuple):
    """What a GPU has: how many multiprocessors, and how much memory a program can have on one."""

    processors: int
    memory: int

    @classmethod
    def of(cls, device: torch.device) -> Processor:
        if device.type != "cuda":  # under the interpreter, where each program takes milliseconds
            return cls(2, 1 << 20)
        properties: Any = torch.cuda.get_device_properties(device)
        memory = int(getattr(properties, "shared_memory_per_block_optin", 96 << 10))
        return cls(properties.multi_processor_count, memory - (4 << 10))


class Built(NamedTuple):
    """Kernels for one shape of layer and one size of tile."""

    tuned: Tuned
    shape: HeadShape
    folded: int  # query heads of one K/V head in a tile, a power of two
    blocks: int  # tiles that all query heads of one K/V head take
    processors: int

    @property
    def tiles(self) -> Tiles:
        programs = self.shape.heads * self.blocks  # of one item
        return Tiles(self.tuned.rows // self.folded, max(1, 4 * self.processors // programs))


def build(shape: HeadShape, tuned: Tuned, processor: Processor, itemsize: int) -> Built:
    """Kernels for these heads, of numbers of `itemsize` bytes. Wide ones get fewer keys a block, then fewer rows, so
    that what a program holds fits the memory of a processor."""
    keys_wide, values_wide = _padded(shape)
    rows, keys, warps, stages = tuned
    while keys > 16 and max(keys_wide, values_wide) * keys > 128 * tuned.keys:
        keys //= 2

    def fits() -> bool:
        return itemsize * (rows * keys_wide + stages * keys * (keys_wide + values_wide)) <= processor.memory

    while not fits() and (rows, keys, stages) != (16, 16, 1):
        if stages > 2:
            stages -= 1
        elif keys > 32:
            keys //= 2
        elif rows > 16:
            rows //= 2
        elif keys > 16:
            keys //= 2
        else:
            stages = 1
    if rows * values_wide > 64 * 256:
        warps = 8
    folded = min(triton.next_power_of_2(shape.group), rows)
    return Built(Tuned(rows, keys, warps, stages), shape, folded, -(-shape.group // folded), processor.processors)


def _padded(shape: HeadShape) -> tuple[int, int]:
    """How wide keys and values are as kernels see them: powers of two, and what products take at least."""
    return max(16, triton.next_power_of_2(shape.dim)), triton.next_power_of_2(shape.values)


class Scratch:
    """What parts leave for the merge: one for a device, as large as the largest step of any layer needs."""

    def __init__(self, numbers: int, rows: int, device: Any) -> None:
        self.sums = torch.empty(numbers, dtype=torch.float32, device=device)
        self.marks = torch.empty(2 * rows, dtype=torch.float32, device=device)

    @staticmethod
    def sizes(built: Built) -> tuple[int, int]:
        rows = built.tiles.most_parts() * built.shape.heads * built.blocks * built.tuned.rows
        return rows * _padded(built.shape)[1], rows


def write(k: Tensor, v: Tensor | None, k_pages: Tensor, v_pages: Tensor, places: Tensor) -> None:
    """K [T, heads, dim] and V into pages, each token at its place (page * page size + offset). V None: it is in K."""
    tokens, heads, dim = k.shape
    k, v = _steady(k), None if v is None else _steady(v)
    values = 0 if v is None else v.shape[2]
    other = k if v is None else v
    launch(
        _write,
        (tokens,),
        *(k, other, k_pages, v_pages, places),
        *(*k.stride()[:2], *other.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3]),
        HEADS=heads,
        DIM=dim,
        VALUES=values,
        PAGE=k_pages.shape[1],
        H2=triton.next_power_of_2(heads),
        D2=triton.next_power_of_2(dim),
        V2=triton.next_power_of_2(max(1, values)),
        num_warps=4,
    )


def _steady(x: Tensor) -> Tensor:
    """`x` [T, heads, dim], or a copy where its numbers are not side by side, or where its strides are multiples of 16
    for some numbers of tokens only: Triton would compile kernels for both."""
    by_head = x.stride(1) > x.stride(0)
    return x.contiguous() if x.stride(-1) != 1 or (by_head and x.stride(0) % 16) else x


def attend(
    built: Built,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    items: Tensor,
    merges: Tensor,
    scratch: Scratch,
    window: int | None,
    asked: ScoreOptions,
) -> Tensor:
    """[T, H, Dv] for q [T, H, D]. `table` [slots, columns] of pages; `items` [n, ITEM] and `merges` [m, MERGE] of a
    work list, padded with rows of zeros."""
    tuned, shape = built.tuned, built.shape
    q = _steady(q)
    out = q.new_empty(len(q), q.shape[1], shape.values)
    sinks = asked.sinks if asked.sinks is not None else scratch.marks
    keys_wide, values_wide = _padded(shape)
    scale = asked.scaling * _LOG2E
    cap = 0.0 if asked.softcap is None else asked.softcap
    fixed: dict[str, Any] = {
        "ROWS": tuned.rows,
        "FOLDED": built.folded,
        "V2": values_wide,
        "VALUES": shape.values,
        "SINKS": asked.sinks is not None,
    }
    programs = shape.heads * built.blocks
    launch(
        _attend,
        (len(items), programs),
        *(q, k_pages, v_pages, out, scratch.sums, scratch.marks, table, items, sinks),
        *(scale, cap, window or 0, shape.group, shape.heads, table.stride(0)),
        *(*q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], *out.stride()[:2]),
        DIM=shape.dim,
        D2=keys_wide,
        PAGE=k_pages.shape[1],
        KEYS=tuned.keys,
        BLOCKS=built.blocks,
        CAPPED=asked.softcap is not None,
        WINDOWED=window is not None,
        APART=tuned.rows >= 128 and window is None,
        PRECISE=q.dtype is torch.float32,
        ITEM_NUMBERS=ITEM_NUMBERS,
        **fixed,
        num_warps=tuned.warps,
        num_stages=tuned.stages,
    )
    if len(merges):
        launch(
            _merge,
            (len(merges), programs),
            *(out, scratch.sums, scratch.marks, merges, sinks, shape.group, *out.stride()[:2]),
            BLOCKS=built.blocks,
            MERGE_NUMBERS=MERGE_NUMBERS,
            **fixed,
            num_warps=4,
        )
    return out


@triton.jit
def _write(
    k, v, k_pages, v_pages, places,
    k_token, k_head, v_token, v_head, kp_page, kp_token, kp_head, vp_page, vp_token, vp_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    H2: tl.constexpr, D2: tl.constexpr, V2: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    page, offset = place // PAGE, place % PAGE
    h = tl.arange(0, H2)[:, None]
    d = tl.arange(0, D2)[None, :]
    here = (h < HEADS) & (d < DIM)
    numbers = tl.load(k + token * k_token + h * k_head + d, mask=here)
    tl.store(k_pages + page * kp_page + offset * kp_token + h * kp_head + d, numbers, mask=here)
    if VALUES > 0:
        d = tl.arange(0, V2)[None, :]
        here = (h < HEADS) & (d < VALUES)
        numbers = tl.load(v + token * v_token + h * v_head + d, mask=here)
        tl.store(v_pages + page * vp_page + offset * vp_token + h * vp_head + d, numbers, mask=here)


@triton.jit
def _block(
    q, best, total, sums, keys, pages, positions, first, end, k_pages, v_pages,
    scale, cap, window, k_page, k_token, v_page, v_token,
    PAGE: tl.constexpr, DIM: tl.constexpr, D2: tl.constexpr, VALUES: tl.constexpr, V2: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One block of keys. MASKED: some of them may be none of the item's, or none that every query sees."""
    d = tl.arange(0, D2)
    dv = tl.arange(0, V2)
    wide = pages.to(tl.int64)
    k_at = k_pages + (wide * k_page + (keys % PAGE) * k_token)[None, :] + d[:, None]
    v_at = v_pages + (wide * v_page + (keys % PAGE) * v_token)[:, None] + dv[None, :]
    there = (keys >= first) & (keys < end)
    if MASKED:
        k = tl.load(k_at, mask=there[None, :] & (d < DIM)[:, None], other=0.0)
    elif DIM == D2:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=(d < DIM)[:, None], other=0.0)
    scores = tl.dot(q, k, input_precision="ieee" if PRECISE else "tf32")
    if CAPPED:
        capped = scores * (scale / 1.4426950408889634 / cap)
        capped = 1.0 - 2.0 / (tl.exp2(capped * 2.8853900817779268) + 1.0)  # tanh
        scores = capped * (cap * 1.4426950408889634)
    else:
        scores = scores * scale
    if MASKED:
        seen = there[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOWED:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weights, 1)
    if MASKED:
        v = tl.load(v_at, mask=there[:, None] & (dv < VALUES)[None, :], other=0.0)
    elif VALUES == V2:
        v = tl.load(v_at)
    else:
        v = tl.load(v_at, mask=(dv < VALUES)[None, :], other=0.0)
    sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee" if PRECISE else "tf32")
    return higher, total, sums


@triton.jit
def _attend(
    q, k_pages, v_pages, out, part_sums, part_marks, table, items, sinks,
    scale, cap, window, group, heads, columns,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, o_token, o_head,
    DIM: tl.constexpr, D2: tl.constexpr, VALUES: tl.constexpr, V2: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FOLDED: tl.constexpr, BLOCKS: tl.constexpr,
    SINKS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, APART: tl.constexpr, PRECISE: tl.constexpr,
    ITEM_NUMBERS: tl.constexpr,
):  # fmt: skip
    item = items + tl.program_id(0) * ITEM_NUMBERS
    queries = tl.load(item + 2)
    if queries > 0:
        slot = tl.load(item)
        query = tl.load(item + 1)
        position = tl.load(item + 3)
        first = tl.load(item + 4)
        end = tl.load(item + 5)
        part = tl.load(item + 6)
        head = tl.program_id(1) // BLOCKS
        block = tl.program_id(1) % BLOCKS

        row = tl.arange(0, ROWS)
        mine = block * FOLDED + row % FOLDED  # of the query heads that share this K/V head
        real = (row // FOLDED < queries) & (mine < group)
        tokens = (query + row // FOLDED).to(tl.int64)
        positions = position + row // FOLDED
        d = tl.arange(0, D2)
        at = q + tokens * q_token + (head * group + mine) * q_head
        rows = tl.load(at[:, None] + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0)

        best = tl.full([ROWS], -1e30, tl.float32)  # below every score; minus infinity less itself would be no number
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, V2], tl.float32)
        if SINKS:
            if part < 0:
                sink = tl.load(sinks + head * group + mine, mask=real, other=0.0).to(tl.float32)
                best = sink * 1.4426950408889634
                total += 1.0

        # The pages of a block are read while the one before it is computed.
        pages_at = table + slot.to(tl.int64) * columns
        k_pages += head * k_head
        v_pages += head * v_head
        begin = first // KEYS * KEYS
        keys = begin + tl.arange(0, KEYS)
        pages = tl.load(pages_at + keys // PAGE, mask=(keys >= first) & (keys < end), other=0)
        masked = begin
        if APART:  # what every query sees, up to the first block with a key that one does not
            masked = begin + tl.maximum(0, tl.minimum(position + 1, end) - begin) // KEYS * KEYS
            for at_key in range(begin, masked, KEYS):
                keys = at_key + tl.arange(0, KEYS)
                ahead = tl.load(pages_at + (keys + KEYS) // PAGE, mask=keys + KEYS < end, other=0)
                best, total, sums = _block(
                    rows, best, total, sums, keys, pages, positions, first, end, k_pages, v_pages,
                    scale, cap, window, k_page, k_token, v_page, v_token,
                    PAGE, DIM, D2, VALUES, V2, CAPPED, WINDOWED, False, PRECISE,
                )  # fmt: skip
                pages = ahead
        for at_key in range(masked, end, KEYS):
            keys = at_key + tl.arange(0, KEYS)
            ahead = tl.load(pages_at + (keys + KEYS) // PAGE, mask=keys + KEYS < end, other=0)
            best, total, sums = _block(
                rows, best, total, sums, keys, pages, positions, first, end, k_pages, v_pages,
                scale, cap, window, k_page, k_token, v_page, v_token,
                PAGE, DIM, D2, VALUES, V2, CAPPED, WINDOWED, True, PRECISE,
            )  # fmt: skip
            pages = ahead

        dv = tl.arange(0, V2)
        if part < 0:
            answer = sums / tl.where(total > 0, total, 1.0)[:, None]
            at = out + tokens * o_token + (head * group + mine) * o_head
            tl.store(at[:, None] + dv[None, :], answer.to(out.dtype.element_ty),
                     mask=real[:, None] & (dv < VALUES)[None, :])  # fmt: skip
        else:
            line = (part.to(tl.int64) * heads * BLOCKS + tl.program_id(1)) * ROWS + row
            tl.store(part_sums + line[:, None] * V2 + dv[None, :], sums)
            tl.store(part_marks + 2 * line, best)
            tl.store(part_marks + 2 * line + 1, total)


@triton.jit
def _merge(
    out, part_sums, part_marks, merges, sinks, group, o_token, o_head,
    ROWS: tl.constexpr, FOLDED: tl.constexpr, BLOCKS: tl.constexpr, VALUES: tl.constexpr, V2: tl.constexpr,
    SINKS: tl.constexpr, MERGE_NUMBERS: tl.constexpr,
):  # fmt: skip
    merge = merges + tl.program_id(0) * MERGE_NUMBERS
    queries = tl.load(merge + 1)
    if queries > 0:
        first = tl.load(merge + 2).to(tl.int64)
        count = tl.load(merge + 3)
        head = tl.program_id(1) // BLOCKS
        row = tl.arange(0, ROWS)
        mine = tl.program_id(1) % BLOCKS * FOLDED + row % FOLDED
        real = (row // FOLDED < queries) & (mine < group)
        dv = tl.arange(0, V2)
        best = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, V2], tl.float32)
        if SINKS:
            best = tl.load(sinks + head * group + mine, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
        for part in range(count):
            line = ((first + part) * tl.num_programs(1) + tl.program_id(1)) * ROWS + row
            theirs = tl.load(part_marks + 2 * line)
            higher = tl.maximum(best, theirs)
            shrink, grow = tl.exp2(best - higher), tl.exp2(theirs - higher)
            sums = sums * shrink[:, None] + tl.load(part_sums + line[:, None] * V2 + dv[None, :]) * grow[:, None]
            total = total * shrink + tl.load(part_marks + 2 * line + 1) * grow
            best = higher
        tokens = (tl.load(merge) + row // FOLDED).to(tl.int64)
        at = out + tokens * o_token + (head * group + mine) * o_head
        answer = sums / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(at[:, None] + dv[None, :], answer.to(out.dtype.element_ty),
                 mask=real[:, None] & (dv < VALUES)[None, :])  # fmt: skip
