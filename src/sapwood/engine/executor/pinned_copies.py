"""Small arrays between host and device, for a step: by a kernel that reads or writes pinned memory.

A copy of a few bytes waits until whatever was issued before it in the same direction is through, and that may be the
pages of a long prompt: 87 ms for 32K tokens, in which every stream would stand still (`python -m
tests.gpu.link` shows it). Kernels do not queue there.

    put      host array --> ring of pinned memory --> kernel --> tensor on the device
    fetch    tensor on the device --> kernel --> pinned tensor, which is there when the stream has got so far
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Move = Callable[[Tensor, Tensor], bool]  # from, to: both int32 and of one size; False if nothing was done
_PARTS, _WORDS = 8, 1 << 19  # of the ring, and of each part: masks of a hundred rows


class PinnedCopies:
    """One for each stream of work. On a CPU, and without Triton, torch's own copies."""

    def __init__(self, device: torch.device, move: Move | None = None) -> None:
        """`move`: instead of the kernel."""
        self.device = device
        self._move = move or kernel_of(device)
        self._at, self._part = 0, 0
        if self._move is not None:
            cuda = device.type == "cuda"
            self._ring = torch.zeros((_PARTS, _WORDS), dtype=torch.int32, pin_memory=cuda)
            self._room = self._ring.numpy()
            self._used: list[Any] = [None] * _PARTS  # by part: the event behind everything that reads it

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """The same numbers on the device. The array is the caller's again at once."""
        if self._move is None or array.nbytes % 4 or not array.nbytes:
            return torch.from_numpy(array).to(self.device, non_blocking=True)
        words = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        there = torch.empty(array.shape, dtype=kind, device=self.device)
        for first in range(0, len(words), _WORDS):
            some = words[first : first + _WORDS]
            here = self._take(len(some))
            here.numpy()[:] = some
            if not self._move(here, there.view(-1).view(torch.int32)[first : first + len(some)]):
                there.zero_()  # what is looked up with it must be there
        return there

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy on host. Its numbers are there once the device has done all that was issued until now, and it must be
        kept until then."""
        if self._move is None or self.device.type != "cuda":
            return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if tensor.numel():
            there = tensor.contiguous()
            if (there.numel() * there.element_size()) % 4:
                return here.copy_(there, non_blocking=True)
            self._move(there.view(-1).view(torch.int32), here.view(-1).view(torch.int32))
        return here

    def _take(self, words: int) -> Tensor:
        """Room in the ring that is not read any more."""
        if self._at + words > _WORDS:
            if self.device.type == "cuda":
                self._used[self._part] = torch.cuda.Event()
                self._used[self._part].record()
            self._at, self._part = 0, (self._part + 1) % _PARTS
            if self._used[self._part] is not None:
                self._used[self._part].synchronize()
        here = self._ring[self._part, self._at : self._at + words]
        self._at += -(-words // 4) * 4  # at multiples of 16 bytes
        return here


def kernel_of(device: torch.device) -> Move | None:
    """What moves words between pinned memory and a device, if anything does."""
    if device.type != "cuda":
        return None
    try:
        from ..kernels.steps import move
    except ImportError:
        return None
    return move
