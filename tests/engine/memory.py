"""Device memory of every kind the movers know, filled with random bytes, and read back without their help."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from sapwood.cache import CacheGroup
from sapwood.engine import DeviceArena, HostArena, Mover, NumpyMover, PageLayout, PagePart

Bytes = npt.NDArray[np.uint8]
TORCH = importlib.util.find_spec("torch") is not None

# What an engine may keep: for each group a family, and either the parts (layer, name, shape, dtype) of a PageLayout or
# one part without a layer: an array that the engine made itself. "b2" is bfloat16 where there is one.
Part = tuple[int | None, str, tuple[int, ...], str]
LAYOUTS: dict[str, dict[str, tuple[str, list[Part]]]] = {
    "rows": {"full": ("full", [(None, "", (4096,), "u1")])},
    "layers": {"full": ("full", [(i, kv, (4, 2, 16), "f2") for i in range(3) for kv in "kv"])},
    "own": {"full": ("full", [(None, "", (3, 2, 4, 24), "b2")])},
    "hybrid": {
        "full": ("full", [(i, kv, (4, 2, 8), "b2") for i in range(2) for kv in "kv"]),
        "window": ("window", [(None, "", (333,), "u1")]),
        "state": (
            "state",
            [(i, *part) for i in range(2) for part in (("conv", (11, 3), "b2"), ("ssm", (3, 5, 4), "f4"))],
        ),
    },
    "large": {"full": ("full", [(None, "", (65536,), "u1")]), "more": ("full", [(0, "latent", (128, 256), "b2")])},
}


class Backend(NamedTuple):
    """How memory is made and moved: with numpy, with torch in main memory (seen as numpy, or by torch), on CUDA."""

    name: str
    device: str  # "" for numpy
    open: Callable[[Mapping[str, Any], Sequence[CacheGroup]], Mover]


def numpy_mover(memory: Mapping[str, Any], groups: Sequence[CacheGroup]) -> Mover:
    return NumpyMover(DeviceArena(memory), HostArena(groups))


def numpy_on_tensors(memory: Mapping[str, Any], groups: Sequence[CacheGroup]) -> Mover:
    from sapwood.engine import open_mover
    from sapwood.engine.transfer.torch_mover import TorchArena

    mover = open_mover(TorchArena(memory), HostArena(groups))
    assert isinstance(mover, NumpyMover)
    return mover


def torch_mover(memory: Mapping[str, Any], groups: Sequence[CacheGroup]) -> Mover:
    from sapwood.engine.transfer.torch_mover import PinnedArena, TorchArena, TorchMover

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
        self.layouts: dict[str, PageLayout] = {}
        self.memory = {name: self._make(name, parts, pages + 1) for name, (_, parts) in LAYOUTS[layout].items()}
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

    def _make(self, name: str, parts: list[Part], rows: int) -> Any:
        """A group's memory in the backend's hands."""
        typed = [PagePart(layer or 0, part, shape, self._dtype(dtype)) for layer, part, shape, dtype in parts]
        shape, dtype = typed[0].shape, typed[0].dtype
        if parts[0][0] is not None:
            self.layouts[name] = PageLayout(typed)
            shape, dtype = (self.layouts[name].page_bytes,), self._dtype("u1")
        if not self.backend.device:
            return np.empty((rows, *shape), dtype)
        import torch

        return torch.empty((rows, *shape), dtype=dtype, device=self.backend.device)

    def _dtype(self, dtype: str) -> Any:
        if not self.backend.device:
            return np.dtype({"b2": "u2"}.get(dtype, dtype))
        import torch

        return {"u1": torch.uint8, "f2": torch.float16, "b2": torch.bfloat16, "f4": torch.float32}[dtype]

    def scramble(self) -> None:
        """Write random bytes into every page of the device."""
        for array in self.memory.values():
            write(array, self.random)

    def device(self, group: str) -> Bytes:
        """What the device holds now: [pages + 1, page_bytes], read page by page."""
        return np.stack(read(self.memory[group]))

    def ids(self, n: int, limit: int) -> npt.NDArray[np.int32]:
        return (self.random.permutation(limit)[:n] + 1).astype(np.int32)

    def start(self, kind: Any, pages: Mapping[str, Any]) -> int:
        self.op += 1
        self.mover.start(kind, self.op, pages)
        return self.op

    def done(self, kind: Any, pages: Mapping[str, Any]) -> bool:
        return self.mover.wait(self.start(kind, pages))


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
