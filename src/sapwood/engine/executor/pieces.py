"""A plan's batch in pieces that are computed one after the other: usually one, more of them where memory is short.

What a piece leaves in pages and states is what the next one reads, so that a chunk may be cut anywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.scheduler import Batch

Ints = npt.NDArray[Any]


class BatchPiece(NamedTuple):
    """Some of a batch's tokens, [first, last) of them: parts of these rows, in their order."""

    first: int
    last: int
    rows: Ints  # of the batch
    starts: Ints
    lengths: Ints
    samples: Ints  # those of `rows`, by place here, whose token is sampled


def pieces(batch: Batch, most: int) -> list[BatchPiece]:
    """The batch in pieces of at most `most` tokens."""
    starts, lengths = batch.starts.astype(np.int64), batch.lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    if total <= most:
        return [BatchPiece(0, total, np.arange(len(starts)), starts, lengths, batch.samples.nonzero()[0])]
    begins, found = ends - lengths, []
    for first in range(0, total, most):
        last = min(first + most, total)
        rows = ((begins < last) & (ends > first)).nonzero()[0]
        low, high = np.maximum(begins[rows], first), np.minimum(ends[rows], last)
        samples = (batch.samples[rows] & (high == ends[rows])).nonzero()[0]
        found.append(BatchPiece(first, last, rows, starts[rows] + low - begins[rows], high - low, samples))
    return found
