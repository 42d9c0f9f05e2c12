"""Moving pages with torch: CUDA streams, pinned host memory, and the same on the CPU, where the tests reach it.

    save   device pages --index_select--> staging (device) --+--> long runs of host pages: one copy each
                                                             +--> scattered ones: one index_copy_ by the GPU itself,
                                                                  straight into pinned host memory
    load   the same, the other way round

Scattered pages go by kernel because a copy costs about 7 us to issue, in which the link moves 400 KB; long runs go by
the copy engine because it takes no multiprocessor from the model. Saves and loads have a stream each, so that both ways
of the link are used at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.cache import CacheGroup

from .arena import Block, Bytes, DeviceArena, HostArena, fold
from .transfer import Ids, Kind, Mover, Part, long_runs, told

STAGING = 32 << 20  # bytes each way: what is gathered before it is copied
LONG_RUN = {"cpu": 32 << 10, "cuda": 512 << 10}  # bytes a run, from which on runs are copied one by one
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PinnedArena(HostArena):
    """A host arena whose memory CUDA has pinned: copies to and from it go on beside everything else, and kernels
    reach it. Pinned in place, a group at a time: torch's own pinned memory comes in powers of two.
    """

    def __init__(self, groups: Iterable[CacheGroup]) -> None:
        super().__init__(groups)
        if not torch.cuda.is_available():
            raise ValueError("a PinnedArena needs CUDA; use HostArena")
        torch.cuda.init()
        pinned: list[int] = []
        self._unpin = weakref.finalize(self, _unpin, pinned)
        for name, pages in self.pages.items():
            error = torch.cuda.cudart().cudaHostRegister(pages.ctypes.data, pages.nbytes, 0)
            if int(error):
                self.close()
                raise MemoryError(
                    f"the host cache wants {self.nbytes} bytes pinned, and CUDA refused the {pages.nbytes} of group "
                    f"{name!r} ({error}): ask for fewer host pages, or raise the limit on locked memory (ulimit -l)"
                )
            pinned.append(pages.ctypes.data)

    def close(self) -> None:
        self._unpin()
        super().close()


def _unpin(addresses: list[int]) -> None:
    if addresses:
        torch.cuda.synchronize()
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


class TorchArena(DeviceArena):
    """The device's memory over tensors that somebody else owns, all on one device. `memory[group]` is one tensor or a
    list, page axis first, as in `DeviceArena`: an engine that keeps [layers, 2, pages + 1, ...] passes
    `kv.movedim(2, 0)`."""

    device: torch.device

    def __init__(self, memory: Mapping[str, Any]) -> None:
        super().__init__(memory)
        found = {block.rows.device for blocks in self.blocks.values() for block in blocks}
        if len(found) != 1 or next(iter(found)).type not in LONG_RUN:
            raise ValueError(f"memory must be on one device, CUDA or CPU, got {sorted(map(str, found))}")
        self.device = found.pop()

    def as_numpy(self) -> DeviceArena:
        """The same memory, if it is main memory, as numpy sees it."""
        return DeviceArena({group: [block.rows.numpy() for block in blocks] for group, blocks in self.blocks.items()})

    def _rows(self, group: str, array: Any) -> int:
        if not isinstance(array, Tensor) or array.ndim < 2 or array.layout is not torch.strided:
            raise ValueError(f"memory of group {group!r} must be dense tensors [pages + 1, ...]")
        return int(array.shape[0])

    def _views(self, group: str, array: Tensor) -> list[Tensor]:
        folded = fold(array.shape, array.stride())
        if folded is None:
            return [view for i in range(array.shape[1]) for view in self._views(group, array[:, i])]
        shape, strides = folded
        return [array.detach().as_strided(shape, strides).view(torch.uint8)]


class _Group(NamedTuple):
    """A group in words: the widest integers that fit all of its strides and offsets. Kernels are as fast as these."""

    blocks: list[Block]  # rows [pages + 1, planes, words], offsets in words
    host: Tensor  # [host pages + 1, words], for copies
    reached: Tensor  # the same memory as the device's kernels see it
    nbytes: int  # of a page


class _Flight(NamedTuple):
    """An operation under way: why it failed, if it did, its event, and the pinned memory its ids came from."""

    op: int
    reason: str
    event: torch.cuda.Event
    ids: Tensor | None


class _Lane:
    """One way of the link: a stream of its own where there are streams, staging, and what is under way in order."""

    def __init__(self, device: torch.device, staging: int) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.current = torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()
        with torch.inference_mode(), self.current:
            self.staging = torch.empty(staging, dtype=torch.uint8, device=device)
        self.pending: deque[_Flight] = deque()
        self.spare: list[Tensor] = []  # pinned memory for ids that nobody reads any more

    def buffer(self, n: int) -> Tensor:
        """Pinned memory for `n` ids. Kept, and not torch's, which is slow to give any while copies are under way."""
        for i, spare in enumerate(self.spare):
            if len(spare) >= n:
                return self.spare.pop(i)
        return torch.empty(max(1024, 1 << (n - 1).bit_length()), dtype=torch.int64, pin_memory=True)


class TorchMover(Mover):
    """Between tensors and a host arena. On CUDA `start` only issues work, on streams of its own:

    - a save begins when everything issued before it on the stream that is current in `start` is done;
    - a load does not wait for the model: pages are given out only when no step in flight can touch them;
    - an operation has ended when its event has passed, also if it failed half-way: what was issued is still writing.

    On the CPU all of it is done when `start` returns.
    """

    def __init__(self, device: TorchArena, host: HostArena) -> None:
        super().__init__(device, host)
        self._device = device.device
        if self._device.type == "cuda" and not isinstance(host, PinnedArena):
            raise ValueError("memory on CUDA needs a PinnedArena on host")
        self._groups = {
            group.name: _in_words(device.blocks[group.name], host.pages[group.name], self._device)
            for group in host.groups
        }
        staging = max([STAGING, *(group.page_bytes for group in host.groups)])
        self._lanes: dict[Kind, _Lane] = {"save": _Lane(self._device, staging), "load": _Lane(self._device, staging)}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # whoever made the memory may still be filling it

    def _begin(self, kind: Kind, op: int, parts: list[Part]) -> None:
        lane = self._lanes[kind]
        move = self._save if kind == "save" else self._load
        reason = ""
        event: torch.cuda.Event | None = None
        pinned: Tensor | None = None
        try:
            if lane.stream and kind == "save":
                lane.stream.wait_stream(torch.cuda.current_stream(lane.stream.device_index))
            # Inference mode: the engine's memory may have been made in it, and then is written in it only.
            with torch.inference_mode(), lane.current:
                ids = torch.from_numpy(_columns(parts))
                if lane.stream:
                    pinned = lane.buffer(len(ids))
                    ids = pinned[: len(ids)].copy_(ids).to(self._device, non_blocking=True)
                for part in parts:
                    n = len(part.sources)
                    move(lane, part, ids[:n], ids[n : 2 * n])
                    ids = ids[2 * n :]
        except Exception as error:  # whatever it is, the step loop goes on
            reason = told(error)
        if lane.stream:
            try:
                event = torch.cuda.Event()
                event.record(lane.stream)
            except Exception as error:  # the device is gone: nothing writes any more
                reason, event = reason or told(error), None
        if event is None:
            self._end(op, reason)
        else:
            lane.pending.append(_Flight(op, reason, event, pinned))

    def _advance(self) -> None:
        for lane in self._lanes.values():
            while lane.pending:
                op, reason, event, pinned = lane.pending[0]
                try:
                    if not event.query():
                        break
                except Exception as error:
                    reason = reason or told(error)
                lane.pending.popleft()
                if pinned is not None:
                    lane.spare.append(pinned)
                self._end(op, reason)

    def _block(self, op: int) -> None:
        for lane in self._lanes.values():
            for flight in lane.pending:
                if flight.op == op:
                    with contextlib.suppress(Exception):  # `_advance` asks again, and tells
                        flight.event.synchronize()
        self._advance()

    def close(self) -> None:
        super().close()
        for lane in self._lanes.values():
            lane.staging = torch.empty(0)

    # ---- one group's pages, on the lane's stream; `sources` and `targets` are the part's ids on the device

    def _save(self, lane: _Lane, part: Part, sources: Tensor, targets: Tensor) -> None:
        group = self._groups[part.group]
        if stretches := self._direct(group, part):
            rows = group.blocks[0].rows[:, 0]
            for source, target, n in stretches:
                group.host.narrow(0, target, n).copy_(rows.narrow(0, source, n), non_blocking=True)
            return
        for low, high, staging in self._rounds(lane, group, len(part.sources)):
            for block in group.blocks:
                torch.index_select(block.rows, 0, sources[low:high], out=_within(staging, block))
            if stretches := self._neighbours(group, part.targets[low:high]):
                for at, target, n in stretches:
                    group.host.narrow(0, target, n).copy_(staging.narrow(0, at, n), non_blocking=True)
            else:
                group.reached.index_copy_(0, targets[low:high], staging)

    def _load(self, lane: _Lane, part: Part, sources: Tensor, targets: Tensor) -> None:
        group = self._groups[part.group]
        if stretches := self._direct(group, part):
            rows = group.blocks[0].rows[:, 0]
            for source, target, n in stretches:
                rows.narrow(0, target, n).copy_(group.host.narrow(0, source, n), non_blocking=True)
            return
        for low, high, staging in self._rounds(lane, group, len(part.sources)):
            if stretches := self._neighbours(group, part.sources[low:high]):
                for at, source, n in stretches:
                    staging.narrow(0, at, n).copy_(group.host.narrow(0, source, n), non_blocking=True)
            else:
                torch.index_select(group.reached, 0, sources[low:high], out=staging)
            for block in group.blocks:
                block.rows.index_copy_(0, targets[low:high], _within(staging, block))

    def _direct(self, group: _Group, part: Part) -> list[tuple[int, int, int]]:
        """Runs to be copied from page to page without staging: long ones, of pages that are one piece on the device."""
        if len(group.blocks) > 1 or group.blocks[0].rows.shape[1] > 1:
            return []
        return self._long(group, part.sources, part.targets)

    def _neighbours(self, group: _Group, ids: Ids) -> list[tuple[int, int, int]]:
        """Runs of neighbours on host, if they are long: (where in staging, host page, how many)."""
        stretches = self._long(group, np.arange(len(ids), dtype=ids.dtype), ids)
        self._counts["copies"] += len(group.blocks) + (not stretches)
        return stretches

    def _long(self, group: _Group, sources: Ids, targets: Ids) -> list[tuple[int, int, int]]:
        stretches = long_runs(sources, targets, group.nbytes, LONG_RUN[self._device.type])
        self._counts["copies"] += len(stretches)
        return stretches

    def _rounds(self, lane: _Lane, group: _Group, pages: int) -> Iterator[tuple[int, int, Tensor]]:
        """Pages [low, high) of a part, as many as staging has room for, and that room: [high - low, words]."""
        step = lane.staging.numel() // group.nbytes
        for low in range(0, pages, step):
            high = min(low + step, pages)
            room = lane.staging[: (high - low) * group.nbytes].view(group.host.dtype)
            yield low, high, room.view(high - low, -1)


def _columns(parts: list[Part]) -> npt.NDArray[np.int64]:
    """All ids of an operation: the sources and the targets of each part in turn."""
    return np.concatenate([[], *(column for part in parts for column in part[1:])], dtype=np.int64, casting="unsafe")


def _within(staging: Tensor, block: Block) -> Tensor:
    """A block's part of pages in staging, in the block's shape."""
    _, planes, words = block.rows.shape
    return staging[:, block.offset : block.offset + planes * words].view(len(staging), planes, words)


def _in_words(blocks: list[Block], pages: Bytes, device: torch.device) -> _Group:
    numbers = [pages.shape[1]]
    for rows, offset in blocks:
        numbers += [offset, rows.shape[2], rows.stride(0), rows.stride(1), rows.data_ptr(), rows.storage_offset()]
    word = next(word for word in _WORDS if all(number % word.itemsize == 0 for number in numbers))
    host = torch.from_numpy(pages)
    reached = torch.as_tensor(_Reached(pages), device=device) if device.type == "cuda" else host
    return _Group(
        [Block(rows.view(word), offset // word.itemsize) for rows, offset in blocks],
        host.view(word),
        reached.view(word),
        pages.shape[1],
    )


class _Reached:
    """Pinned host memory, as something torch takes for memory of the device: both see it at the same address."""

    def __init__(self, pages: Bytes) -> None:
        self.__cuda_array_interface__ = {
            "shape": pages.shape,
            "typestr": pages.dtype.str,
            "data": (pages.ctypes.data, False),
            "strides": None,
            "version": 3,
        }
