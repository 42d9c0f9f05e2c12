"""Device memory of every kind the movers know, filled with random bytes, and read back without their help."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from sapwood.cache import CacheGroup
from sapwood.engine import DeviceArena, HostArena, Mover, NumpyMover

Bytes = npt.NDArray[np.uint8]
TORCH = importlib.util.find_spec("torch") is not None

# What an engine may keep: for each group a family and arrays (shape, dtype, page axis). "b2" is bfloat16 where there is
# one. `n` stands for pages + 1.
Layout = dict[str, tuple[str, list[tuple[tuple[Any, ...], str, int]]]]
LAYOUTS: dict[str, Layout] = {
    "rows": {"full": ("full", [(("n", 4096), "u1", 0)])},
    "layers": {"full": ("full", [((3, 2, "n", 4, 2, 16), "f2", 2)])},
    "tensor a layer": {"full": ("full", [((2, "n", 4, 24), "b2", 1)] * 3)},
    "hybrid": {
        "full": ("full", [((2, 2, "n", 4, 2, 8), "b2", 2)]),
        "window": ("window", [(("n", 333), "u1", 0)]),
        "state": ("state", [((2, "n", 12, 4), "b2", 1), ((2, "n", 3, 5, 4), "f4", 1)]),
    },
    "large": {"full": ("full", [(("n", 65536), "u1", 0)]), "more": ("full", [((4, "n", 16384), "u1", 1)])},
}


class Backend(NamedTuple):
    """How memory is made and moved: with numpy, with torch in main memory (seen as numpy, or by torch), on CUDA."""

    name: str
    device: str  # "" for numpy
    open: Callable[[Mapping[str, list[Any]], Sequence[CacheGroup]], Mover]


def numpy_mover(memory: Mapping[str, list[Any]], groups: Sequence[CacheGroup]) -> Mover:
    return NumpyMover(DeviceArena(memory), HostArena(groups))


def numpy_on_tensors(memory: Mapping[str, list[Any]], groups: Sequence[CacheGroup]) -> Mover:
    from sapwood.engine import open_mover
    from sapwood.engine.transfer_torch import TorchArena

    mover = open_mover(TorchArena(memory), HostArena(groups))
    assert isinstance(mover, NumpyMover)
    return mover


def torch_mover(memory: Mapping[str, list[Any]], groups: Sequence[CacheGroup]) -> Mover:
    from sapwood.engine.transfer_torch import PinnedArena, TorchArena, TorchMover

    arena = TorchArena(memory)
    return TorchMover(arena, PinnedArena(groups) if arena.device.type == "cuda" else HostArena(groups))


BACKENDS = {
    "numpy": Backend("numpy", "", numpy_mover),
    "tensors as numpy": Backend("tensors as numpy", "cpu", numpy_on_tensors),
    "torch": Backend("torch", "cpu", torch_mover),
    "cuda": Backend("cuda", "cuda", torch_mover),
}


def need(name: str) -> Backend:
    """The backend, or a skip that says why it cannot be had here."""
    backend = BACKENDS[name]
    if backend.device and not TORCH:
        pytest.skip("torch is not installed: pip install 'sapwood[torch]'")
    if backend.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
    return backend


class World:
    """Device and host memory of a layout, full of random bytes, with a mover between."""

    def __init__(self, backend: Backend, layout: str, pages: int = 24, host_pages: int = 40, seed: int = 0) -> None:
        self.backend = backend
        self.random = np.random.default_rng(seed)
        self.memory = {
            name: [np_or_torch(backend, shape, dtype, axis, pages + 1) for shape, dtype, axis in arrays]
            for name, (_, arrays) in LAYOUTS[layout].items()
        }
        self.groups = [
            CacheGroup(name, family, pages, host_pages, 16 if family == "window" else None, self.device(name).shape[1])
            for name, (family, _) in LAYOUTS[layout].items()
        ]
        self.scramble()
        self.mover = backend.open(self.memory, self.groups)
        self.host = self.mover.host.pages
        for name in self.memory:
            self.host[name][1:] = self.bytes(self.host[name][1:].shape)
        self.op = 0

    def bytes(self, shape: Sequence[int]) -> Bytes:
        return np.frombuffer(self.random.bytes(int(np.prod(shape))), np.uint8).reshape(shape)

    def scramble(self) -> None:
        """Write random bytes into every page of the device."""
        for arrays in self.memory.values():
            for array in arrays:
                write(array, self.random)

    def device(self, group: str) -> Bytes:
        """What the device holds now: [pages + 1, page_bytes], read page by page."""
        return np.stack([np.concatenate(page) for page in zip(*map(read, self.memory[group]), strict=True)])

    def ids(self, n: int, limit: int) -> npt.NDArray[np.int32]:
        return (self.random.permutation(limit)[:n] + 1).astype(np.int32)

    def start(self, kind: Any, pages: Mapping[str, Any]) -> int:
        self.op += 1
        self.mover.start(kind, self.op, pages)
        return self.op

    def done(self, kind: Any, pages: Mapping[str, Any]) -> bool:
        return self.mover.wait(self.start(kind, pages))


def np_or_torch(backend: Backend, shape: Sequence[Any], dtype: str, axis: int, rows: int) -> Any:
    """An array of this shape in the backend's memory, seen with the page axis first."""
    sizes = [rows if n == "n" else n for n in shape]
    if not backend.device:
        return np.moveaxis(np.empty(sizes, {"b2": "u2"}.get(dtype, dtype)), axis, 0)
    import torch

    kinds = {"u1": torch.uint8, "f2": torch.float16, "b2": torch.bfloat16, "f4": torch.float32}
    return torch.empty(sizes, dtype=kinds[dtype], device=backend.device).movedim(axis, 0)


def write(array: Any, random: np.random.Generator) -> None:
    width = array.itemsize
    shape = (*array.shape, width)
    fresh = np.frombuffer(random.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    if isinstance(array, np.ndarray):
        array[...] = fresh.view(array.dtype)[..., 0]
        return
    import torch

    array.copy_(torch.from_numpy(fresh.copy()).view(array.dtype)[..., 0])


def read(array: Any) -> list[Bytes]:
    """The bytes of each page of an array."""
    if not isinstance(array, np.ndarray):
        import torch

        array = array.cpu().contiguous().view(torch.uint8).numpy()
    return [np.frombuffer(np.ascontiguousarray(page).tobytes(), np.uint8) for page in array]
