"""Where the bytes of pages lie: the host tier's arena, and the device's memory as transfers see it. numpy only.

    a page of a group       on the device                          on host, and in a store
                            K of layer 0   [pages + 1, ...]        row i of [pages + 1, page_bytes]:
    page i                  V of layer 0   [pages + 1, ...]          K0[i] V0[i] K1[i] V1[i] ...
                            K of layer 1   ...                     one object, one contiguous piece of memory

Row 0 is the null page in every tier: it pads and fills holes, and is never moved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.cache import CacheGroup
from sapwood.store.shared import CAN_SHARE, shared

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 4096  # of the first byte of a group: pages of a multiple of it can be read and written with O_DIRECT


class HostArena:
    """The memory of the host tier: for each group with host pages, `host_pages + 1` rows of `page_bytes`.

    `pages[group]` is a uint8 array of that shape; row i is page i. Memory that a store's process can map too, where the
    system has such, and which it hands out when it is first written. Where there is CUDA, use
    `sapwood.engine.transfer_torch.PinnedArena`.
    """

    def __init__(self, groups: Iterable[CacheGroup]) -> None:
        self.groups = tuple(group for group in groups if group.host_pages)
        for group in self.groups:
            if group.page_bytes < 1:
                raise ValueError(f"page_bytes of group {group.name!r} must be at least 1, got {group.page_bytes}")
        self.nbytes = sum((group.host_pages + 1) * group.page_bytes for group in self.groups)
        room = available_bytes()
        if room is not None and self.nbytes > room:
            raise MemoryError(
                f"the host cache wants {_readable(self.nbytes)} and {_readable(room)} are available: "
                f"ask for fewer host pages ({self._wanted()})"
            )
        self.pages: dict[str, Bytes] = {}
        for group in self.groups:
            try:
                self.pages[group.name] = _host((group.host_pages + 1, group.page_bytes))
            except MemoryError:
                raise MemoryError(
                    f"the host cache wants {_readable(self.nbytes)}, and the system has not got them: "
                    f"ask for fewer host pages ({self._wanted()})"
                ) from None
            self.pages[group.name][0] = 0

    def _wanted(self) -> str:
        return ", ".join(f"{g.name}: {g.host_pages} pages of {_readable(g.page_bytes)}" for g in self.groups)

    def close(self) -> None:
        """Give the memory back. Views that others still hold keep their group's."""
        self.pages.clear()


class Block(NamedTuple):
    """Some of a group's device memory: `rows` is a view of its bytes [pages + 1, planes, width], width contiguous. Row
    i is the part of page i that begins at `offset`."""

    rows: Any
    offset: int

    @property
    def nbytes(self) -> int:
        """Of a page."""
        return int(self.rows.shape[1] * self.rows.shape[2])


class DeviceArena:
    """The device's memory as transfers see it, over numpy arrays that somebody else owns.

    `memory[group]` is one array or several, of any dtypes, whose *first* axis is the page: page i of the group is
    the bytes of `array[i]` of each in turn. An engine that keeps [layers, 2, pages + 1, ...] passes
    `np.moveaxis(kv, 2, 0)`; one that keeps a tensor a layer passes the list of them. Nothing is copied. State slots
    are pages like others. Let memory begin at a multiple of 64 bytes, as `aligned` and torch do: some processors copy
    pages that lie 16 bytes off (numpy's own large arrays do) at a quarter of the speed.
    """

    def __init__(self, memory: Mapping[str, Any]) -> None:
        self.pages: dict[str, int] = {}  # how many can be given out
        self.page_bytes: dict[str, int] = {}
        self.blocks: dict[str, list[Block]] = {}
        for group, given in memory.items():
            arrays = list(given) if isinstance(given, (list, tuple)) else [given]
            if not arrays:
                raise ValueError(f"group {group!r} must have at least one array, got none")
            counts = {self._rows(group, array) for array in arrays}
            if len(counts) > 1 or min(counts) < 2:
                raise ValueError(
                    f"arrays of group {group!r} must have pages + 1 rows each, at least 2, got {sorted(counts)}"
                )
            blocks: list[Block] = []
            offset = 0
            for array in arrays:
                for view in self._views(group, array):
                    blocks.append(Block(view, offset))
                    offset += blocks[-1].nbytes
            if not offset:
                raise ValueError(f"pages of group {group!r} must have at least one byte, got none")
            self.pages[group] = counts.pop() - 1
            self.page_bytes[group] = offset
            self.blocks[group] = blocks

    def _rows(self, group: str, array: Any) -> int:
        if not isinstance(array, np.ndarray) or array.ndim < 2 or array.dtype.hasobject:
            raise ValueError(f"memory of group {group!r} must be arrays [pages + 1, ...] of plain dtypes")
        if not array.flags.writeable:
            raise ValueError(f"memory of group {group!r} must be writeable")
        return int(array.shape[0])

    def _views(self, group: str, array: Any) -> list[Any]:
        """An array [pages + 1, ...] as views of bytes [pages + 1, planes, width]: one, if its axes allow."""
        strides = [stride // array.itemsize for stride in array.strides]
        if any(stride * array.itemsize != given for stride, given in zip(strides, array.strides, strict=True)):
            raise ValueError(f"memory of group {group!r} must have strides of whole elements")
        folded = fold(array.shape, strides)
        if folded is None:
            return [view for i in range(array.shape[1]) for view in self._views(group, array[:, i])]
        shape, strides = folded
        view = np.lib.stride_tricks.as_strided(array, shape, [stride * array.itemsize for stride in strides])
        return [view.view(np.uint8)]


def fold(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """[pages, ...] as [pages, planes, width], width contiguous: shape and strides in elements, or None if the axes
    between cannot be one. What is contiguous at the end is the width; what is before must step evenly."""
    axes = [(n, stride) for n, stride in zip(shape[1:], strides[1:], strict=True) if n != 1]
    width = 1
    while axes and axes[-1][1] == width:
        width *= axes.pop()[0]
    planes, step = axes.pop() if axes else (1, width)
    while axes and axes[-1][1] == step * planes:
        planes *= axes.pop()[0]
    if axes:
        return None
    return [shape[0], planes, width], [strides[0], step, 1]


def with_host_bytes(groups: Sequence[CacheGroup], nbytes: int) -> tuple[CacheGroup, ...]:
    """The groups with as many host pages as `nbytes` hold, null pages counted, in proportion to their device pages."""
    for group in groups:
        if group.page_bytes < 1:
            raise ValueError(f"page_bytes of group {group.name!r} must be at least 1, got {group.page_bytes}")
    null = sum(group.page_bytes for group in groups)
    whole = sum(group.device_pages * group.page_bytes for group in groups)
    room = nbytes - null
    pages = [room * group.device_pages // whole for group in groups] if room > 0 else [0]
    if min(pages) < 1:
        rarest = min(group.device_pages for group in groups)
        least = null + -(-whole // rarest)
        raise ValueError(f"a host cache for these groups must have at least {least} bytes, got {nbytes!r:.60}")
    return tuple(replace(group, host_pages=n) for group, n in zip(groups, pages, strict=True))


def _host(shape: tuple[int, int]) -> Bytes:
    return shared(shape) if CAN_SHARE else aligned(shape)


def aligned(shape: tuple[int, int]) -> Bytes:
    """Memory that is not touched yet and begins at a multiple of ALIGNMENT."""
    nbytes = shape[0] * shape[1]
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -whole.ctypes.data % ALIGNMENT
    return whole[first : first + nbytes].reshape(shape)


def available_bytes() -> int | None:
    """How much memory this process can still get, or None where the system does not tell."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(told["MemAvailable"].split()[0]) * 1024)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # what a container may have, if it has a limit
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path("/sys/fs/cgroup", limit).read_text()))
    return min(found) if found else None


def _readable(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} bytes"
