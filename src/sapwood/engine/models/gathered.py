"""Models that attend by themselves (Falcon, GPT-J, CodeGen, XGLM): they call no attention function of transformers,
and have only a cache to ask for what came before. Here the cache hands them K and V of all rows, one after the other,
and a mask says which of them each token sees:

    update(k, v, layer)   K and V of the step into pages --> those of every row, gathered from pages  [1, heads, L, dim]
    mask [1, 1, T, L]     0 where a token sees a key, the least number where it does not

Every token is multiplied with the keys of every row: right for any mix of rows, and slow where there are many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..executor.attention import AttentionRows, Ints

if TYPE_CHECKING:
    from .model import LayerPages


class Gather(NamedTuple):
    """Where the keys of a step's rows lie, and which tokens see them."""

    places: Tensor  # [L] page * page_size + offset
    seen: Tensor  # [T, L]


def gather_of(starts: Ints, lengths: Ints, table: Ints, page: int, device: Any) -> Gather:
    """For rows that compute [start, start + length), with `table` [rows, columns] as it is now."""
    ends = starts + lengths
    row = np.repeat(np.arange(len(ends)), ends)  # of each key
    position = np.arange(len(row)) - np.repeat(np.cumsum(ends) - ends, ends)
    places = table[row, position // page].astype(np.int64) * page + position % page
    asks = np.repeat(np.arange(len(ends)), lengths)  # the row of each token
    at = starts[asks] + np.arange(len(asks)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    seen = (asks[:, None] == row) & (position <= at[:, None])
    return Gather(torch.from_numpy(places).to(device), torch.from_numpy(seen).to(device))


class GatheringCache:
    """What such a model takes for its cache, for one forward. It has no past: all of it comes by `update`."""

    is_compileable = False

    def __init__(self, kept: Mapping[int, LayerPages], rows: AttentionRows) -> None:
        assert rows.gather is not None
        self._kept, self._rows, self._gather = kept, rows, rows.gather

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        kept, place = self._kept[layer_idx], (self._rows.pages, self._rows.offsets)
        kept.k_pages.index_put_(place, k[0].transpose(0, 1))
        kept.v_pages.index_put_(place, v[0].transpose(0, 1))
        return self._all(kept.k_pages), self._all(kept.v_pages)

    def _all(self, pages: Tensor) -> Tensor:
        size, places = pages.shape[1], self._gather.places
        return pages[places // size, places % size].transpose(0, 1)[None]

    def mask(self, dtype: torch.dtype) -> Tensor:
        seen = self._gather.seen
        nothing = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return nothing.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def __len__(self) -> int:
        return len(self._kept)
