"""Where the bytes of pages lie: how a page is laid out, the host tier's arena, and the device's memory. numpy only.

A page is one contiguous piece in every tier: a row of [pages + 1, page_bytes], so one copy moves it, and a store keeps
it as one object. A layer sees its part of every page as a strided view, and nothing is copied for that.

                                 one page of a group: page_bytes
    row 0     null page    |  K, layer 0  |  V, layer 0  |  K, layer 1  |  V, layer 1  | ...
    row 1     page 1       |  K, layer 0  |  V, layer 0  |  K, layer 1  |  V, layer 1  | ...
    row 2     page 2       |  ...                        |              |
                                                         +--- view(1, "k"): [pages + 1, page_size, heads, dim]

Row 0 is the null page in every tier: it pads and fills holes, and is never moved.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from sapwood.cache import CacheGroup
from sapwood.store.spawn import CAN_SHARE, shared

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 4096  # of the first byte of a group: pages of a multiple of it can be read and written with O_DIRECT
PART_ALIGNMENT = 128  # of the parts of a page and of pages: a cache line of a GPU, and more than any dtype needs


class PagePart(NamedTuple):
    """What a layer keeps in a page under a name: K, V, a latent, or a state. The shape is that of one page ([page_size,
    heads, dim]; a state has any), the dtype numpy's or torch's, as the memory it is used with."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        try:
            size: int = np.dtype(self.dtype).itemsize
        except TypeError:  # torch's
            size = self.dtype.itemsize
        return math.prod(self.shape) * size


class PageLayout:
    """How a page of a group is laid out: its parts one after the other, in the order given, each at a multiple of
    PART_ALIGNMENT. `page_bytes` is what its CacheGroup has to say."""

    def __init__(self, parts: Iterable[PagePart]) -> None:
        self.parts = tuple(parts)
        self.offsets: dict[tuple[int, str], int] = {}
        self.page_bytes = 0
        self._parts: dict[tuple[int, str], PagePart] = {}
        for part in self.parts:
            if (place := (part.layer, part.name)) in self.offsets:
                raise ValueError(f"layer {part.layer} must have one part {part.name!r}, got two")
            if part.nbytes < 1:
                raise ValueError(f"part {part.name!r} of layer {part.layer} must have at least one byte, got {part}")
            self._parts[place] = part
            self.offsets[place] = self.page_bytes
            self.page_bytes += -(-part.nbytes // PART_ALIGNMENT) * PART_ALIGNMENT
        if not self.parts:
            raise ValueError("a page must have at least one part, got none")

    def view(self, rows: Any, layer: int, name: str) -> Any:
        """One part in every page, [pages + 1, *shape], of bytes [pages + 1, page_bytes]: an array or a tensor."""
        part, first = self._parts[layer, name], self.offsets[layer, name]
        return rows[:, first : first + part.nbytes].view(part.dtype).reshape(len(rows), *part.shape)


class HostArena:
    """The memory of the host tier: for each group with host pages, `host_pages + 1` rows of `page_bytes`.

    `pages[group]` is a uint8 array of that shape; row i is page i. Memory that a store's process can map too, where the
    system has such, and which it hands out when it is first written. Where there is CUDA, use
    `sapwood.engine.transfer.torch_mover.PinnedArena`.
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
                f"the host cache wants {readable(self.nbytes)} and {readable(room)} are available: "
                f"ask for fewer host pages ({self._wanted()})"
            )
        self.pages: dict[str, Bytes] = {}
        for group in self.groups:
            try:
                self.pages[group.name] = _host((group.host_pages + 1, group.page_bytes))
            except MemoryError:
                raise MemoryError(
                    f"the host cache wants {readable(self.nbytes)}, and the system has not got them: "
                    f"ask for fewer host pages ({self._wanted()})"
                ) from None
            self.pages[group.name][0] = 0

    def _wanted(self) -> str:
        return ", ".join(f"{g.name}: {g.host_pages} pages of {readable(g.page_bytes)}" for g in self.groups)

    def close(self) -> None:
        """Give the memory back. Views that others still hold keep their group's."""
        self.pages.clear()


class DeviceArena:
    """The device's memory as transfers see it, in numpy arrays: `rows[group]` is its bytes, [pages + 1, page_bytes].

    `memory[group]` is one contiguous array of any dtype, page axis first, that somebody else owns: nothing is copied.
    `allocate` makes memory of its own, in which `view` shows a layer its part of every page. State slots are pages like
    others. Let memory begin at a multiple of 64 bytes, as `allocate` and torch do: some processors copy pages that lie
    16 bytes off (numpy's own large arrays do) at a quarter of the speed.
    """

    def __init__(self, memory: Mapping[str, Any]) -> None:
        self.pages: dict[str, int] = {}  # how many can be given out
        self.page_bytes: dict[str, int] = {}
        self.rows: dict[str, Any] = {}
        self.layouts: dict[str, PageLayout] = {}
        for group, array in memory.items():
            self._look(group, array)
            if len(array) < 2:
                raise ValueError(f"memory of group {group!r} must have pages + 1 rows, at least 2, got {len(array)}")
            if not array.nbytes:
                raise ValueError(f"pages of group {group!r} must have at least one byte, got none")
            self.rows[group] = self._bytes(array)
            self.pages[group] = len(array) - 1
            self.page_bytes[group] = array.nbytes // len(array)

    @classmethod
    def allocate(cls, groups: Iterable[CacheGroup], layouts: Mapping[str, PageLayout], **where: Any) -> Self:
        """Memory for these groups, all zeros, with pages laid out so. A TorchArena wants to know where: `device=`."""
        memory = {}
        for group in groups:
            if group.name not in layouts:
                raise ValueError(f"layouts must have group {group.name!r}, has {sorted(layouts)}")
            if group.page_bytes != (page_bytes := layouts[group.name].page_bytes):
                raise ValueError(
                    f"page_bytes of group {group.name!r} must be its layout's {page_bytes}, got {group.page_bytes}"
                )
            memory[group.name] = cls._zeros((group.device_pages + 1, page_bytes), **where)
        arena = cls(memory)
        arena.layouts = {name: layouts[name] for name in memory}
        return arena

    def close(self) -> None:
        """Let go of the memory. Views that others still hold keep their group's."""
        self.rows.clear()

    def view(self, group: str, layer: int, name: str) -> Any:
        """A layer's part of every page of a group that was allocated here: [pages + 1, *shape], writeable."""
        return self.layouts[group].view(self.rows[group], layer, name)

    @staticmethod
    def _zeros(shape: tuple[int, int]) -> Any:
        return aligned(shape)

    def _look(self, group: str, array: Any) -> None:
        """ValueError if this cannot be the memory of a group."""
        if not isinstance(array, np.ndarray) or array.ndim < 2 or array.dtype.hasobject:
            raise ValueError(f"memory of group {group!r} must be one array [pages + 1, ...] of a plain dtype")
        if not array.flags.writeable:
            raise ValueError(f"memory of group {group!r} must be writeable")
        if not array.flags.c_contiguous:
            raise ValueError(f"memory of group {group!r} must be contiguous, page axis first: a page is one piece")

    def _bytes(self, array: Any) -> Any:
        return array.reshape(len(array), -1).view(np.uint8)


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
    """Zeros that begin at a multiple of ALIGNMENT; memory is taken when it is first written, if there is much of it."""
    nbytes = shape[0] * shape[1]
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
    first = -whole.ctypes.data % ALIGNMENT
    return whole[first : first + nbytes].reshape(shape)


def available_bytes() -> int | None:
    """How much memory this process can still get, or None where the system does not tell."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(told["MemAvailable"].split()[0]) * 1024)
    names = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    for folder, (limit, use) in names.items():
        with contextlib.suppress(OSError, ValueError, KeyError):  # a container's limit, and what it has taken of that
            group = Path("/sys/fs/cgroup", folder)
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            taken = int((group / use).read_text()) - int(stat["inactive_file"])  # files would make room
            found.append(max(0, int((group / limit).read_text()) - taken))
    return min(found) if found else None


def readable(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} bytes"
