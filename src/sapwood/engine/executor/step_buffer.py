"""The numbers of a step in one buffer of int32: packed on host, sent in one copy, read by kernels at fixed places.

    | changes | tokens | positions | wanted | targets | states, runs | adapters | places | items, merges | ...

There is one layout for steps of any size up to the largest, so that a graph finds everything where it was when it was
captured. Two copies on host, in pinned memory: one is packed while the other may still be on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .pinned_copies import kernel_of
from .work_list import ITEM_NUMBERS, MERGE_NUMBERS

Ints = npt.NDArray[np.int32]
MAX_TABLE_CHANGES = 4096  # entries of page tables that a step may bring; where there are more, whole tables are sent


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
