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
import torch
from torch import Tensor

from sapwood.cache import CacheGroup

from .arena import Block, Bytes, DeviceArena, HostArena, fold
from .transfer import Ids, Kind, Mover, Part, told

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
    words: int  # of a page


class _Lane:
    """One way of the link: a stream of its own where there are streams, staging, and what is under way in order."""

    def __init__(self, device: torch.device, staging: int) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with self.entered():
            self.staging = torch.empty(staging, dtype=torch.uint8, device=device)
        self.pending: deque[tuple[int, str, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        # Inference mode: the engine's memory may have been made in it, and then is written in it only.
        with torch.inference_mode(), torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            yield


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
        try:
            if lane.stream and kind == "save":
                lane.stream.wait_stream(torch.cuda.current_stream(self._device))
            with lane.entered():
                for part in parts:
                    move(lane, part)
        except Exception as error:  # whatever it is, the step loop goes on
            reason = told(error)
        if lane.stream:
            try:
                event = torch.cuda.Event(blocking=True)
                event.record(lane.stream)
            except Exception as error:  # the device is gone: nothing writes any more
                reason, event = reason or told(error), None
        if event is None:
            self._end(op, reason)
        else:
            lane.pending.append((op, reason, event))

    def _advance(self) -> None:
        for lane in self._lanes.values():
            while lane.pending:
                op, reason, event = lane.pending[0]
                try:
                    if not event.query():
                        break
                except Exception as error:
                    reason = reason or told(error)
                lane.pending.popleft()
                self._end(op, reason)

    def _block(self, op: int) -> None:
        for lane in self._lanes.values():
            for other, _, event in lane.pending:
                if other == op:
                    with contextlib.suppress(Exception):  # `_advance` asks again, and tells
                        event.synchronize()
        self._advance()

    def close(self) -> None:
        super().close()
        for lane in self._lanes.values():
            lane.staging = torch.empty(0)

    # ---- one group's pages, on the lane's stream

    def _save(self, lane: _Lane, part: Part) -> None:
        group = self._groups[part.group]
        if stretches := self._direct(group, part):
            rows = group.blocks[0].rows[:, 0]
            for source, target, n in stretches:
                group.host[target : target + n].copy_(rows[source : source + n], non_blocking=True)
            return
        for some in part.cut(self._at_once(lane, group)):
            staging = self._staging(lane, group, len(some.sources))
            sources, targets = self._ids(some)
            for block in group.blocks:
                torch.index_select(block.rows, 0, sources, out=_within(staging, block))
                self._counts["copies"] += 1
            if stretches := self._long(group, _enumerated(some.targets)):
                for at, target, n in stretches:
                    group.host[target : target + n].copy_(staging[at : at + n], non_blocking=True)
            else:
                group.reached.index_copy_(0, targets, staging)
                self._counts["copies"] += 1

    def _load(self, lane: _Lane, part: Part) -> None:
        group = self._groups[part.group]
        if stretches := self._direct(group, part):
            rows = group.blocks[0].rows[:, 0]
            for source, target, n in stretches:
                rows[target : target + n].copy_(group.host[source : source + n], non_blocking=True)
            return
        for some in part.cut(self._at_once(lane, group)):
            staging = self._staging(lane, group, len(some.sources))
            sources, targets = self._ids(some)
            if stretches := self._long(group, _enumerated(some.sources)):
                for at, source, n in stretches:
                    staging[at : at + n].copy_(group.host[source : source + n], non_blocking=True)
            else:
                torch.index_select(group.reached, 0, sources, out=staging)
                self._counts["copies"] += 1
            for block in group.blocks:
                block.rows.index_copy_(0, targets, _within(staging, block))
                self._counts["copies"] += 1

    def _direct(self, group: _Group, part: Part) -> list[tuple[int, int, int]]:
        """Runs to be copied from page to page without staging: long ones, of pages that are one piece on the device."""
        if len(group.blocks) > 1 or group.blocks[0].rows.shape[1] > 1:
            return []
        return self._long(group, part)

    def _long(self, group: _Group, part: Part) -> list[tuple[int, int, int]]:
        """The runs of a part, if they are long enough to be copied one by one; else none."""
        stretches = part.runs()
        nbytes = len(part.sources) * group.words * group.host.itemsize
        if nbytes < LONG_RUN[self._device.type] * len(stretches):
            return []
        self._counts["copies"] += len(stretches)
        return stretches

    def _at_once(self, lane: _Lane, group: _Group) -> int:
        return lane.staging.numel() // (group.words * group.host.itemsize)

    def _staging(self, lane: _Lane, group: _Group, pages: int) -> Tensor:
        nbytes = pages * group.words * group.host.itemsize
        return lane.staging[:nbytes].view(group.host.dtype).view(pages, group.words)

    def _ids(self, part: Part) -> tuple[Tensor, Tensor]:
        """Both columns of ids on the device, in one copy that nobody waits for."""
        both = torch.from_numpy(np.stack((part.sources, part.targets)).astype(np.int64))
        if self._device.type == "cuda":
            both = both.pin_memory().to(self._device, non_blocking=True)
        return both[0], both[1]


def _enumerated(ids: Ids) -> Part:
    """Pages 0, 1, 2 ... of staging with the ids they come from or go to: their runs are runs of neighbours on host."""
    return Part("", np.arange(len(ids), dtype=ids.dtype), ids)


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
        pages.shape[1] // word.itemsize,
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
