"""The numbers of a step between host and device: one buffer of int32 that is sent, and small arrays to and fro.

The buffer is packed on host, sent in one copy, and read by kernels at fixed places:

    | changes | tokens | positions | wanted | targets | states, runs | adapters | places | items, merges | ...

There is one layout for steps of any size up to the largest, so that a graph finds everything where it was when it was
captured. Two copies on host, in pinned memory: one is packed while the other may still be on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .work_list import ITEM_NUMBERS, MERGE_NUMBERS

Ints = npt.NDArray[np.int32]
MAX_TABLE_CHANGES = 4096  # entries of page tables that a step may bring; where there are more, whole tables are sent
Move = Callable[[Tensor, Tensor], bool]  # from, to: both int32 and of one size; False if nothing was done
_PARTS, _WORDS = 8, 1 << 19  # of the ring, and of each part: masks of a hundred rows


class ListRoom(NamedTuple):
    """How many items and merges a work list may have."""

    items: int
    merges: int


class LargestStep(NamedTuple):
    """The largest step."""

    tokens: int
    wanted: int
    rows: int
    groups: tuple[str, ...]  # that attention reads
    lists: tuple[ListRoom, ...]


class Packed:
    """The fields of a step, as numpy arrays on host or as tensors on the device: the same names for the same places.

    count     [1] how many changes there are
    changed   [2, CHANGES] places in all page tables, and what stands there from now on
    tokens    [T] ids; below 0: the token sampled last for slot -id - 1
    positions [T]
    wanted    [R] the tokens whose logits are wanted
    targets   [R] the slots whose last token those become
    states    [T] the state slot of each token
    whose     [T] the row of each token; -1: padding
    runs      [rows, 3] first token, how many, and the state slot of each row
    adapters  [T] the slot of each token's adapter; 0: it has none
    places    by group [T]: page * page size + offset that K and V go to
    items, merges   by work list
    """

    def __init__(self, whole: Any, room: LargestStep) -> None:
        self._whole, self._at = whole, 0
        self.whole = whole
        self.count = self._take(1)
        self.changed = self._take(2, MAX_TABLE_CHANGES)
        self.tokens = self._take(room.tokens)
        self.positions = self._take(room.tokens)
        self.wanted = self._take(room.wanted)
        self.targets = self._take(room.wanted)
        self.states = self._take(room.tokens)
        self.whose = self._take(room.tokens)
        self.runs = self._take(room.rows, 3)
        self.adapters = self._take(room.tokens)
        self.places = {group: self._take(room.tokens) for group in room.groups}
        self.items = [self._take(each.items, ITEM_NUMBERS) for each in room.lists]
        self.merges = [self._take(each.merges, MERGE_NUMBERS) for each in room.lists]

    def _take(self, *shape: int) -> Any:
        size = int(np.prod(shape))
        taken = self._whole[self._at : self._at + size].reshape(shape)
        self._at += -(-size // 4) * 4  # fields begin at multiples of 16 bytes
        return taken

    @staticmethod
    def size(room: LargestStep) -> int:
        return Packed(_Measure(), room)._at


class _Measure:
    """Stands in for a buffer while its size is looked for."""

    def __getitem__(self, _: slice) -> _Measure:
        return self

    def reshape(self, _: Sequence[int]) -> _Measure:
        return self


class StepBuffer:
    """A step's numbers here and there. `packing` gives the fields to fill, `send` brings them to `device`."""

    def __init__(self, room: LargestStep, device: torch.device) -> None:
        size, self._cuda = Packed.size(room), device.type == "cuda"
        hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda) for _ in range(2)]
        self._hosts = [(whole, Packed(whole.numpy(), room)) for whole in hosts]
        self._sent: list[Any] = [None, None]
        self._turn = 0
        self._move = kernel_of(device)
        self.device: Packed = Packed(torch.zeros(size, dtype=torch.int32, device=device), room)

    def packing(self) -> Packed:
        """The copy on host that is not on its way. What was packed into it before has arrived."""
        self._turn = 1 - self._turn
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        return self._hosts[self._turn][1]

    def send(self) -> None:
        """What was packed last, behind everything issued so far."""
        whole: Tensor = self.device.whole
        if self._move is None:
            whole.copy_(self._hosts[self._turn][0], non_blocking=True)
        else:
            self._move(self._hosts[self._turn][0], whole)
        if self._cuda:
            self._sent[self._turn] = torch.cuda.Event()
            self._sent[self._turn].record()


# ---- small arrays, through pinned memory
#
# A copy of a few bytes waits until whatever was issued before it in the same direction is through, and that may be the
# pages of a long prompt: 87 ms for 32K tokens, in which every stream would stand still (`python -m tests.gpu.link`
# shows it). Kernels that read or write pinned memory do not queue there.
#
#     put      host array --> ring of pinned memory --> kernel --> tensor on the device
#     fetch    tensor on the device --> kernel --> pinned tensor, which is there when the stream has got so far


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
