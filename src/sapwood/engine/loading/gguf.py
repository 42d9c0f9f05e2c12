"""Reads GGUF files: metadata, and tensors dequantised to float32 with numpy. What they mean is not known here."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from .model_files import ModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[Any]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SLAB = 1 << 14  # blocks that are dequantised at a time


class GGUFTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # rows first, as numpy and torch count
    kind: int
    start: int  # in the file

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        block = _KINDS[self.kind]
        return self.size // block.values * block.bytes

    @property
    def dtype(self) -> str:
        """What `GGUFFile.read` gives, as safetensors spells it: the smallest type that holds every value exactly."""
        return _KINDS[self.kind].dtype


class GGUFFile:
    """An open GGUF file. Nothing in it is trusted: a length that leaves the file is an error that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as problem:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path}: cannot be read as GGUF ({problem})") from None
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as problem:  # struct.error: the file is too short
            self._broken(str(problem))

    def read(self, tensor: GGUFTensor) -> Floats:
        """The values of a tensor, in its `dtype` (BF16 as its bits, in uint16)."""
        block = _KINDS[tensor.kind]
        raw = np.frombuffer(self._map, np.uint8, tensor.bytes, tensor.start).reshape(-1, block.bytes)
        slabs = np.split(raw, range(_SLAB, len(raw), _SLAB))  # what is worked on fits into the CPU's cache
        return np.concatenate([block.unpack(slab).reshape(-1) for slab in slabs]).reshape(tensor.shape)

    def _parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._map[:4] != b"GGUF":
            self._broken("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            self._broken(f"version {version}; versions 2 and 3 of little-endian files are read")
        tensors, entries = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        found = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            self._broken(f"general.alignment is {alignment!r:.40}")
        data = -(-self._at // alignment) * alignment
        placed = [tensor._replace(start=data + tensor.start) for tensor in found]
        for tensor in placed:
            if tensor.start + tensor.bytes > len(self._map):
                self._broken(f"tensor {tensor.name} ends beyond the file, at byte {tensor.start + tensor.bytes}")
        if len({tensor.name for tensor in placed}) < len(placed):
            self._broken("two tensors have one name")
        return metadata, {tensor.name: tensor for tensor in placed}

    def _tensor(self) -> GGUFTensor:
        name = self._string()
        shape = [self._scalar("Q") for _ in range(self._scalar("I"))]
        kind, start = self._scalar("I"), self._scalar("Q")
        if kind not in _KINDS:
            known = ", ".join(block.name for block in _KINDS.values())
            raise ModelError(
                f"{self.path}: tensor {name} is quantised as {_OTHERS.get(kind, f'type {kind}')}, which is not "
                f"supported (supported: {known})"
            )
        block = _KINDS[kind]
        if not shape or not math.prod(shape) or shape[0] % block.values:
            self._broken(f"tensor {name} of type {block.name} has shape {shape}")
        return GGUFTensor(name, tuple(reversed(shape)), kind, start)

    def _value(self, kind: int, inside_array: bool = False) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or inside_array:
            self._broken(f"a value of type {kind} at byte {self._at}")
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind not in _SCALARS:
            return [self._value(kind, inside_array=True) for _ in range(count)]
        form = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(form, self._map, self._at)
        self._at += struct.calcsize(form)
        return list(values)

    def _string(self) -> str:
        start = self._at + 8
        self._at = start + self._scalar("Q")
        return str(self._map[start : self._at], "utf-8")

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._map, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _broken(self, why: str) -> NoReturn:
        raise ModelError(f"{self.path}: not a GGUF file that can be read, or only a part of one: {why}")


# ---- how values lie in blocks. A function gets blocks as rows of bytes and gives rows of values.


def _half(blocks: Bytes, start: int) -> Floats:
    """A column of scales."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The low halves of all bytes, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | fifth << 4).astype(np.float32) - 16)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _scales_and_mins(blocks: Bytes) -> tuple[Floats, Floats]:
    """Q4_K and Q5_K: 8 scales and 8 minima of 6 bits each in 12 bytes, times the block's own two."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low, mid, high = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    mins = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=1)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * mins)[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    scales, mins = _scales_and_mins(blocks)
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return scales * values - mins


def _q5_k(blocks: Bytes) -> Floats:
    scales, mins = _scales_and_mins(blocks)
    values = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return scales * (values | fifth << 4).astype(np.float32) - mins


def _q6_k(blocks: Bytes) -> Floats:
    """Two halves of 128 values; in each, 4 rows of 32 that take 4 bits from `low` and 2 from `high`."""
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    values = (_nibbles(low).reshape(-1, 2, 4, 32) | high << 4).astype(np.float32) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scales[:, :, None] * values.reshape(-1, 16, 16)


@dataclass(frozen=True, slots=True)
class _Block:
    name: str
    values: int
    bytes: int
    unpack: Callable[[Bytes], Floats]
    dtype: str = "F32"


_KINDS = {
    0: _Block("F32", 1, 4, lambda blocks: blocks.view(np.float32)),
    1: _Block("F16", 1, 2, lambda blocks: blocks.view(np.float16), "F16"),
    2: _Block("Q4_0", 32, 18, _q4_0),
    3: _Block("Q4_1", 32, 20, _q4_1),
    6: _Block("Q5_0", 32, 22, _q5_0),
    8: _Block("Q8_0", 32, 34, _q8_0),
    12: _Block("Q4_K", 256, 144, _q4_k),
    13: _Block("Q5_K", 256, 176, _q5_k),
    14: _Block("Q6_K", 256, 210, _q6_k),
    30: _Block("BF16", 1, 2, lambda blocks: blocks.view(np.uint16), "BF16"),
}
_OTHERS = {7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4"}  # seen most, for messages
