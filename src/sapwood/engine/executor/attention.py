"""Attention over pages: what the rows of a step read of one group, and two ways to compute it.

A step's rows lie flat in one batch. Every layer first writes the K and V of all of them into pages, and then each row
attends over its own table:

    q [T, H, D]   rows one after the other: decode rows have one token, others a chunk
    k_pages, v_pages [pages + 1, page, heads, dim]   strided views of page-major memory
    columns that a row reads: from the first that its window reaches to the one it has just written

What pads a table points at a page of the row's own, never at the null page: what is masked is multiplied by zero, and
the null page may hold anything. A page is clean beyond what was written: it was scrubbed when its first token came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from ..models.model import Gather

Ints = npt.NDArray[Any]


class Decodes(NamedTuple):
    """Rows of one token that read about as many columns each."""

    tokens: Tensor  # [B] where in the batch
    table: Tensor  # [B, C] pages, padded with the row's own
    seen: Tensor  # [B, C * page] bool: keys that the token sees


class ChunkRow(NamedTuple):
    """A row of several tokens."""

    first: int
    last: int  # tokens [first, last) of the batch
    table: Tensor  # [C] pages
    seen: Tensor | None  # [T, C * page] bool; None: all up to itself, from position 0 on
    keys: int  # how many of them there are


class AttentionRows(NamedTuple):
    """What a step does in one group."""

    pages: Tensor  # [T] where K and V go; 0 for what is there already
    offsets: Tensor
    fresh: Tensor  # those of the pages whose first token comes now, and whose last one does not
    decodes: list[Decodes]
    chunks: list[ChunkRow]
    gather: Gather | None = None  # where the keys of all rows lie, for models that attend by themselves


class ScoreOptions(NamedTuple):
    """How a layer wants its scores."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None  # [H] a column of scores that takes part in the softmax, and has no value


class Attention(Protocol):
    """A way to compute attention over pages."""

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: AttentionRows, asked: ScoreOptions) -> Tensor:
        """[T, H, Dv] for q [T, H, D], after K and V were written."""


def rows_of(
    starts: Ints, lengths: Ints, table: Ints, write_from: Ints, page: int, window: int | None, device: Any
) -> AttentionRows:
    """What rows that compute [start, start + length) read and write, with `table` [rows, columns] as it is now."""
    ends = starts + lengths
    first = np.maximum(0, starts - window + 1) // page if window else np.zeros_like(starts)
    last = -(-ends // page)
    row = np.repeat(np.arange(len(starts)), lengths)
    at = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = starts[row] + at
    pages = table[row, positions // page].astype(np.int64)
    pages[positions < write_from[row]] = 0
    begins = np.cumsum(lengths) - lengths
    single = (lengths == 1).nonzero()[0]
    offsets = positions % page
    return AttentionRows(
        torch.from_numpy(pages).to(device),
        torch.from_numpy(offsets).to(device),
        torch.from_numpy(pages[(offsets == 0) & (pages > 0) & (positions + page > ends[row])]).to(device),
        [
            _decodes(begins[some], ends[some], first[some], last[some], table[some], page, window, device)
            for some in _alike(single, (last - first)[single])
        ],
        [
            _chunk(int(begins[i]), int(starts[i]), int(ends[i]), table[i, first[i] : last[i]], page, window, device)
            for i in (lengths > 1).nonzero()[0].tolist()
        ],
    )


def _alike(rows: Ints, columns: Ints) -> list[Ints]:
    """Rows in parts that waste little when they are padded to the longest of each."""
    order = rows[np.argsort(columns, kind="stable")]
    wide = np.sort(columns, kind="stable")
    parts, begin = [], 0
    for at in range(1, len(order) + 1):
        if at == len(order) or wide[at] > 2 * wide[begin] + 2:
            parts.append(np.sort(order[begin:at]))  # all rows in one part are the batch as it is
            begin = at
    return parts


def _decodes(
    tokens: Ints, ends: Ints, first: Ints, last: Ints, table: Ints, page: int, window: int | None, device: Any
) -> Decodes:
    columns = int((last - first).max())
    which = np.minimum(first[:, None] + np.arange(columns), last[:, None] - 1)
    keys = first[:, None] * page + np.arange(columns * page)
    seen = keys < ends[:, None]
    if window:
        seen &= keys >= (ends - window)[:, None]
    pages = np.take_along_axis(table, which, 1).astype(np.int64)
    return Decodes(*(torch.from_numpy(each).to(device) for each in (tokens, pages, seen)))


def _chunk(begin: int, start: int, end: int, table: Ints, page: int, window: int | None, device: Any) -> ChunkRow:
    base = (-(-end // page) - len(table)) * page
    seen = None
    if start or (window and end > window):
        keys, queries = base + np.arange(len(table) * page), np.arange(start, end)[:, None]
        mask = keys <= queries
        if window:
            mask &= keys > queries - window
        seen = torch.from_numpy(mask).to(device)
    pages = torch.from_numpy(table.astype(np.int64)).to(device)
    return ChunkRow(begin, begin + end - start, pages, seen, end - base)


def _gathered(pages: Tensor, table: Tensor) -> Tensor:
    """[..., C * page, heads, dim] of a table [..., C]. index_select is four times as fast as indexing here."""
    picked = pages.index_select(0, table.reshape(-1))
    return picked.view(*table.shape[:-1], table.shape[-1] * pages.shape[1], *pages.shape[2:])


class PlainAttention:
    """Row by row, in the words of the formula. Runs everywhere; the others are held against it."""

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: AttentionRows, asked: ScoreOptions) -> Tensor:
        out = q.new_zeros(len(q), q.shape[1], v_pages.shape[3])
        for decodes in rows.decodes:
            for token, table, seen in zip(*decodes, strict=True):
                out[token] = self._row(q[token, None], k_pages, v_pages, table, seen[None], asked)[0]
        for chunk in rows.chunks:
            keys = len(chunk.table) * k_pages.shape[1]
            seen = chunk.seen
            if seen is None:
                n = chunk.last - chunk.first
                seen = torch.arange(keys, device=q.device) <= torch.arange(n, device=q.device)[:, None]
            out[chunk.first : chunk.last] = self._row(
                q[chunk.first : chunk.last], k_pages, v_pages, chunk.table, seen, asked
            )
        return out

    @staticmethod
    def _row(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, seen: Tensor, asked: ScoreOptions) -> Tensor:
        k, v = k_pages[table].flatten(0, 1), v_pages[table].flatten(0, 1)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,lhd->htl", q, k) * asked.scaling
        if asked.softcap is not None:
            scores = asked.softcap * torch.tanh(scores / asked.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if asked.sinks is not None:
            scores = torch.cat([scores, asked.sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)], -1)
        weights = torch.softmax(scores.float() if scores.dtype is not torch.float64 else scores, -1).to(v.dtype)
        return torch.einsum("htl,lhd->thd", weights[..., : len(k)], v)


class FoldedAttention:
    """All decode rows of a part at once, chunks by fused kernels. The query heads that share a K/V head are folded
    into queries of that head, so that neither K nor V is repeated."""

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: AttentionRows, asked: ScoreOptions) -> Tensor:
        heads, group = k_pages.shape[2], q.shape[1] // k_pages.shape[2]
        sinks = None if asked.sinks is None else asked.sinks.view(heads, group, 1, 1)
        out = q.new_empty(len(q), q.shape[1], v_pages.shape[3])
        for tokens, table, mask in rows.decodes:
            k, v = _gathered(k_pages, table).transpose(1, 2), _gathered(v_pages, table).transpose(1, 2)
            whole = len(tokens) == len(q)
            folded = (q if whole else q[tokens]).reshape(len(tokens), heads, group, -1)
            column = None if sinks is None else sinks.squeeze(-1)
            answer = _attend(folded, k, v, mask[:, None, None, :], asked, column)
            answer = answer.reshape(len(tokens), heads * group, -1)
            if whole:
                return answer
            out[tokens] = answer
        for first, last, table, seen, keys in rows.chunks:
            k = _gathered(k_pages, table)[:keys].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
            v = _gathered(v_pages, table)[:keys].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
            folded = q[first:last].transpose(0, 1).reshape(heads, group, last - first, -1)
            answer = _attend(folded, k, v, None if seen is None else seen[:, :keys], asked, sinks)
            out[first:last] = answer.reshape(heads * group, last - first, -1).transpose(0, 1)
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, asked: ScoreOptions, sinks: Tensor | None) -> Tensor:
    """Fused where torch can; softcaps and sinks by hand. `seen` None: causal, queries and keys from position 0 on."""
    if asked.softcap is None and sinks is None:
        causal = seen is None and q.shape[-2] > 1
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, scale=asked.scaling)
    scores = torch.matmul(q, k.transpose(-1, -2)) * asked.scaling
    if asked.softcap is not None:
        scores = asked.softcap * torch.tanh(scores / asked.softcap)
    if seen is None:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = torch.softmax(scores if scores.dtype is torch.float64 else scores.float(), -1).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[-2]], v)
