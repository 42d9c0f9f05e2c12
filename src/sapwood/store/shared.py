"""Memory that another process can map too: what a store in a process of its own reads pages from and writes them to."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CAN_SHARE = hasattr(os, "memfd_create")


class Mapping(mmap.mmap):
    """All of a memory file, which has no name and goes when nobody maps it or has it open."""

    file: int


class SharedPlace(NamedTuple):
    """Where an array lies in such memory."""

    file: int
    offset: int


def shared(shape: tuple[int, int]) -> NDArray[np.uint8]:
    """A uint8 array that a store in a process of its own can be given. It begins at a multiple of the system's page
    size, is all zeros, and its memory is taken when it is first written. MemoryError if there is none."""
    if not CAN_SHARE:
        raise MemoryError("memory for another process needs memfd_create, which this system has not got")
    nbytes = shape[0] * shape[1]
    file = os.memfd_create("sapwood", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, max(nbytes, 1))
        mapping = Mapping(file, max(nbytes, 1))
    except (OSError, ValueError, OverflowError) as error:
        os.close(file)
        raise MemoryError(f"{nbytes} bytes cannot be mapped: {error}") from None
    mapping.file = file
    weakref.finalize(mapping, os.close, file)
    with contextlib.suppress(OSError, AttributeError):  # where the system gives huge pages to such memory
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8, nbytes).reshape(shape)


def place_of(array: NDArray[np.uint8]) -> SharedPlace | None:
    """Where an array lies in memory that `shared` made; None if it lies elsewhere."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, Mapping):
        return None
    first = np.frombuffer(base, np.uint8, 1).ctypes.data
    return SharedPlace(base.file, int(array.ctypes.data) - first)


def attach(file: int, offset: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """The array that another process has at this place. Closes `file`."""
    try:
        nbytes = shape[0] * shape[1]
        mapping = mmap.mmap(file, offset + nbytes)
    finally:
        os.close(file)
    return np.frombuffer(mapping, np.uint8, nbytes, offset).reshape(shape)
