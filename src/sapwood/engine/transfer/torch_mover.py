"""Moving pages with torch: CUDA streams, pinned host memory, and the same on the CPU, where the tests reach it.

    save   device pages --+-- one cuMemcpyBatchAsync an operation, an entry a run of pages --+--> pinned host pages
                          +-- or a memcpy a run, where the driver has no batches ------------+
    load   the same, the other way round

Copies are the copy engine's alone: a kernel that reads the link takes multiprocessors from the batch beside it. Saves
and loads have a stream each, so that both ways of the link are used at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sapwood.cache import CacheGroup

from .arena import DeviceArena, HostArena, aligned
from .movers import Kind, Mover, TransferPart, reason_of, runs

log = logging.getLogger(__name__)


class PinnedArena(HostArena):
    """A host arena whose memory CUDA has pinned: copies to and from it go on beside everything else. Pinned in place,
    a group at a time: torch's own pinned memory comes in powers of two.
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
    """The device's memory in tensors, all on one device: as `DeviceArena`, `allocate(..., device="cuda")` included."""

    device: torch.device

    def __init__(self, memory: Mapping[str, Any]) -> None:
        super().__init__(memory)
        found = {rows.device for rows in self.rows.values()}
        if len(found) != 1 or next(iter(found)).type not in ("cpu", "cuda"):
            raise ValueError(f"memory must be on one device, CUDA or CPU, got {sorted(map(str, found))}")
        self.device = found.pop()

    def as_numpy(self) -> DeviceArena:
        """The same memory, if it is main memory, as numpy sees it."""
        return DeviceArena({group: rows.numpy() for group, rows in self.rows.items()})

    @staticmethod
    def _zeros(shape: tuple[int, int], device: Any = "cpu") -> Any:
        if torch.device(device).type == "cpu":  # taken when it is first written: a start need not wait for gigabytes
            return torch.from_numpy(aligned(shape))
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    def _look(self, group: str, array: Any) -> None:
        if not isinstance(array, Tensor) or array.ndim < 2 or array.layout is not torch.strided:
            raise ValueError(f"memory of group {group!r} must be one dense tensor [pages + 1, ...]")
        if not array.is_contiguous():
            raise ValueError(f"memory of group {group!r} must be contiguous, page axis first: a page is one piece")

    def _bytes(self, array: Any) -> Any:
        return array.detach().view(len(array), -1).view(torch.uint8)


class _OperationInFlight(NamedTuple):
    """An operation under way: why it failed, if it did, and its event."""

    op: int
    reason: str
    event: torch.cuda.Event


class _Lane:
    """One way of the link: a stream of its own where there are streams, and what is under way in order."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.current = torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()
        self.pending: deque[_OperationInFlight] = deque()


class TorchMover(Mover):
    """Between tensors and a host arena. On CUDA `start` only issues work, on streams of its own:

    - a save begins when everything issued before it on the stream that is current in `start` is done;
    - a load does not wait for the model: pages are given out only when no step in flight can touch them;
    - an operation has ended when its event has passed, also if it failed half-way: what was issued is still writing.

    On the CPU all of it is done when `start` returns.
    """

    def __init__(self, device: TorchArena, host: HostArena) -> None:
        super().__init__(device, host)
        cuda = device.device.type == "cuda"
        if cuda and not isinstance(host, PinnedArena):
            raise ValueError("memory on CUDA needs a PinnedArena on host")
        self._rows = {name: (rows, torch.from_numpy(pages)) for name, (rows, pages) in self._rows.items()}
        self._lanes: dict[Kind, _Lane] = {"save": _Lane(device.device), "load": _Lane(device.device)}
        self._batch = batch_copy() if cuda else None
        if cuda:
            torch.cuda.synchronize(device.device)  # the memory may still be being filled

    def _begin(self, kind: Kind, op: int, parts: list[TransferPart]) -> None:
        lane = self._lanes[kind]
        reason = ""
        event: torch.cuda.Event | None = None
        try:
            if lane.stream and kind == "save":
                lane.stream.wait_stream(torch.cuda.current_stream(lane.stream.device_index))
            # Inference mode: the engine's memory may have been made in it, and then is written in it only.
            with torch.inference_mode(), lane.current:
                if not self._move_at_once(kind, lane, parts):
                    for part in parts:
                        self._move(kind, part)
        except Exception as error:  # whatever it is, the step loop goes on
            reason = reason_of(error)
        if lane.stream:
            try:
                event = torch.cuda.Event()
                event.record(lane.stream)
            except Exception as error:  # the device is gone: nothing writes any more
                reason, event = reason or reason_of(error), None
        if event is None:
            self._end(op, reason)
        else:
            lane.pending.append(_OperationInFlight(op, reason, event))

    def _move_at_once(self, kind: Kind, lane: _Lane, parts: list[TransferPart]) -> bool:
        """Issue all copies of an operation in one call, if this driver can."""
        if self._batch is None or not parts:
            return False
        if lane.stream:
            lane.stream.query()  # torch's own calls give this thread the device's context, which the driver's need
        entries: list[Any] = []
        for part in parts:
            there, here = self._ends(kind, part.group)
            pieces = (pages.astype(np.int64) * there.shape[1] for pages in runs(part.sources, part.targets))
            sources, targets, sizes = pieces
            entries.append((targets + here.data_ptr(), sources + there.data_ptr(), sizes))
        targets, sources, sizes = (np.concatenate(column) for column in zip(*entries, strict=True))
        error = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.byref(_Attributes(srcAccessOrder=_STREAM_ORDER)),
            ctypes.byref(ctypes.c_size_t(0)),  # from the first copy on
            1,
            ctypes.byref(ctypes.c_size_t(0)),
            lane.stream.cuda_stream if lane.stream else None,
        )
        if error:  # what it has issued by then is copied twice, in order
            log.warning("the driver takes no batches of copies (error %d): pages are copied one by one", error)
            self._batch = None
            return False
        self._counts["copies"] += len(sizes)
        return True

    def _move(self, kind: Kind, part: TransferPart) -> None:
        there, here = self._ends(kind, part.group)
        for source, target, n in zip(*(ids.tolist() for ids in runs(part.sources, part.targets)), strict=True):
            here.narrow(0, target, n).copy_(there.narrow(0, source, n), non_blocking=True)
            self._counts["copies"] += 1

    def _advance(self) -> None:
        for lane in self._lanes.values():
            while lane.pending:
                op, reason, event = lane.pending[0]
                try:
                    if not event.query():
                        break
                except Exception as error:
                    reason = reason or reason_of(error)
                lane.pending.popleft()
                self._end(op, reason)

    def _block(self, op: int) -> None:
        for lane in self._lanes.values():
            for flight in lane.pending:
                if flight.op == op:
                    with contextlib.suppress(Exception):  # `_advance` asks again, and tells
                        flight.event.synchronize()
        self._advance()


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h. The hints (type and id) are for managed memory only."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", ctypes.c_int * 2),
        ("dstLocHint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when what is before in the stream is done
BATCH_ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),  # dsts, srcs, sizes, count
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),  # attrs, attrsIdxs, numAttrs
    *(ctypes.c_void_p, ctypes.c_void_p),  # failIdx, hStream
)


def batch_copy() -> Any:
    """`cuMemcpyBatchAsync` of the driver that torch uses, or None where it has none: before CUDA 12.8. The driver keeps
    these arguments under this name; what the headers of CUDA 13 call so, without failIdx, is its `_v2`."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except (OSError, AttributeError):
        return None
    call.argtypes = BATCH_ARGUMENTS
    call.restype = ctypes.c_int
    return call
