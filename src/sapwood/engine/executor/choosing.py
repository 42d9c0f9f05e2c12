"""A token a row by min_p, top_k and top_p, in torch: what kernels/sampling.py does in one kernel, with the same tokens.

Sums are made of integers (`_masses`), so that no order of adding changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LIKELIEST_WEIGHT = 2.0**40  # the weight of the likeliest token
Put = Callable[[npt.NDArray[Any]], Tensor]  # to the device of the weights


def choose(weights: Tensor, numbers: npt.NDArray[np.float64], put: Put) -> Tensor:
    """A token for each row of `weights` [rows, vocabulary], which are at most 1. `numbers` [rows, 4]: min_p, top_k (the
    vocabulary: no filter), top_p (1: no filter), and where from 0 to below 1 the row's random number is."""
    _filter(weights, numbers, put)
    reached = _masses(weights).cumsum(-1)
    aim = (put(numbers[:, 3, None]) * reached[:, -1:]).long()
    return torch.searchsorted(reached, aim, right=True)[:, 0]


def _filter(weights: Tensor, numbers: npt.NDArray[np.float64], put: Put) -> None:
    """Make the weights of tokens zero that min_p, top_k and top_p, in that order, leave out."""
    vocabulary = weights.shape[1]
    which = np.flatnonzero(numbers[:, 0] > 0)
    if len(which):
        share = put(numbers[which, 0, None]).to(weights.dtype)
        on_rows(weights, which, lambda x: _drop(x, share), put)
    which = np.flatnonzero((numbers[:, 1] < vocabulary) | (numbers[:, 2] < 1))
    if not len(which):
        return
    first = put(vocabulary - numbers[which, 1, None].astype(np.int64))
    p = put(numbers[which, 2, None]) if (numbers[which, 2] < 1).any() else None

    def keep(x: Tensor) -> None:
        ascending = _ascending(x)
        least = ascending.gather(1, first)
        if p is not None:
            reached = _masses(_drop(ascending, least)).cumsum(-1)
            total = reached[:, -1:]
            at = torch.searchsorted(reached, total - (total * p).ceil().long(), right=True)
            at.clamp_(max=vocabulary - 1)  # rows of NaN may be beyond
            least = torch.maximum(least, ascending.gather(1, at))
        _drop(x, least)

    on_rows(weights, which, keep, put)


def on_rows(x: Tensor, which: npt.NDArray[np.int64], stage: Callable[[Tensor], object], put: Put) -> None:
    """Run a stage in place on some rows of `x`."""
    if len(which) == len(x):
        stage(x)
    else:
        at = put(which)
        some = x.index_select(0, at)
        stage(some)
        x.index_copy_(0, at, some)


def _masses(weights: Tensor) -> Tensor:
    """Weights as integers, whose sums are exact; the whole vocabulary's fits."""
    return (weights * _LIKELIEST_WEIGHT).long()


def _drop(weights: Tensor, least: Tensor) -> Tensor:
    """Make those below `least` zero, in place. By multiplying: a masked fill takes ten times as long on a CPU."""
    return weights.mul_(torch.ge(weights, least, out=torch.empty_like(weights)))


def _ascending(weights: Tensor) -> Tensor:
    """Each row sorted; by numpy on the CPU, where torch takes tens of times as long."""
    if weights.device.type == "cpu":
        return torch.from_numpy(np.sort(weights.numpy(), -1))
    return weights.sort(-1).values
