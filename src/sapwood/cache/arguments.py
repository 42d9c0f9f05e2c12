"""What callers pass in, seen to be right; and tokens turned into the one form the cache keeps: the bytes of int32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = bytes | bytearray | memoryview | npt.NDArray[Any] | Sequence[int]

_MAX_TOKEN = 2**31 - 1
_INT32 = np.dtype(np.int32)
_FORMATS = ("i", "<i", "=i", "B", "b", "c")  # of memoryviews: int32, or their bytes


def whole_number(what: str, value: object, low: int, high: int) -> int:
    """`value` if it is an int within bounds, else a ValueError that names the field, the value and what is right."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{what} must be an integer from {low} to {high}, got {value!r:.60}")
    return value


def operation_number(op: int, kind: str) -> int:
    """`op` if it can be the number of an operation."""
    if type(op) is not int:
        raise ValueError(f"no {kind} with number {op!r:.40} is under way")
    return op


def prompt_bytes(tokens: Tokens) -> bytes:
    """A prompt as bytes of int32. Bytes have been through `token_bytes` already, and are taken as they are."""
    if type(tokens) is not bytes:
        return token_bytes(tokens)
    if not tokens or len(tokens) % 4:
        raise ValueError(f"tokens must be one or more int32 values, got {len(tokens)} bytes")
    return tokens


def token_bytes(tokens: Tokens) -> bytes:
    """The bytes of int32 of a list, an integer array, or a buffer of int32. ValueError if a token is not 0..2**31-1."""
    if type(tokens) is np.ndarray and tokens.dtype is _INT32 and tokens.ndim == 1 and len(tokens):  # the usual, quickly
        if tokens.item(tokens.argmin()) >= 0:  # in a third of the time of `min`
            return tokens.tobytes()
    if isinstance(tokens, memoryview) and (tokens.ndim != 1 or tokens.format not in _FORMATS):
        raise ValueError(f"tokens as a buffer must be one row of int32 values, got format {tokens.format!r}")
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        raw = bytes(tokens)
        if len(raw) % 4:
            raise ValueError(f"tokens as a buffer must be int32 values (4 bytes each), got {len(raw)} bytes")
        array: npt.NDArray[Any] = np.frombuffer(raw, np.int32)
    else:
        try:
            array = np.asarray(tokens)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"tokens must be a list of integers or an int32 array: {error}") from None
    if array.ndim != 1 or not len(array):
        raise ValueError(f"tokens must be one non-empty row of integers, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _MAX_TOKEN:
        raise ValueError(f"tokens must be from 0 to 2**31 - 1, got {low if low < 0 else high}")
    return np.ascontiguousarray(array, np.int32).tobytes()
