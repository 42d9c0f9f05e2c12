"""`mooncake://master:port?segment=0`: Mooncake Store, memory of many machines, through its own client.

Pages are sent from and received into the registered host memory; the header lies in a small registered buffer of its
own, one for each thread. Mooncake reports failures by codes and can block for seconds when its master or a provider is
gone; a key that exists may be impossible to get. So only a page that a get brought and that fits its header counts.
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .protocol import FAILED, MISSING, Backend, Got, PutResult, StoreError
from .values import HEAD_BYTES, Item

_NO_ROOM = -200
_WRONG_SIZE = -600
_NOT_FOUND = -704
_NO_MASTER = -900


class MooncakeBackend(Backend):
    """`segment`: bytes that this process lends to all; `buffer`: its client's own; `host`: this machine's address."""

    workers = 2
    part_pages = 32

    def __init__(
        self, master: str, port: int, *, segment: int, buffer: int, host: str, protocol: str, device: str, metadata: str
    ) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise StoreError(
                "mooncake:// needs Mooncake's client: pip install 'sapwood[mooncake]' and Debian's libibverbs1 "
                f"(importing it says: {error})"
            ) from None
        self._local = threading.local()
        self._lock = threading.Lock()
        self._registered: list[int] = []
        self._kept: list[mmap.mmap] = []
        self._codes: dict[int, int] = {}
        _reach(master, port)
        self._client = MooncakeDistributedStore()
        address = f"{master}:{port}"
        code = self._client.setup(
            host or _address_towards(master, port), metadata, segment, buffer, protocol, device, address
        )
        if code != 0:
            raise StoreError(f"mooncake://{address}: setting up the client failed with code {code}")

    def register(self, group: str, array: NDArray[np.uint8]) -> None:
        self._register(int(array.ctypes.data), array.nbytes, f"memory of group {group!r}")

    def _register(self, address: int, size: int, what: str) -> None:
        code = self._client.register_buffer(address, size)
        if code != 0:
            raise StoreError(f"mooncake:// does not take the {what} ({size} bytes): code {code}")
        with self._lock:
            self._registered.append(address)

    def exists(self, names: Sequence[str]) -> list[bool]:
        codes = self._client.batch_is_exist(list(names))
        self._note(codes)
        if any(code < 0 for code in codes):
            raise StoreError(f"exists: code {min(codes)}")
        return [code == 1 for code in codes]

    def get(self, items: Sequence[Item]) -> Iterator[Got]:
        heads, address = self._heads()
        pointers, sizes = self._buffers(items, address)
        codes = self._client.batch_get_into_multi_buffers([item.name for item in items], pointers, sizes)
        self._note(codes)
        if all(code == _NO_MASTER for code in codes):
            raise StoreError(f"get: code {_NO_MASTER}, no master")
        for i, code in enumerate(codes):
            if code == _NOT_FOUND:
                yield Got(i, b"", MISSING)
            elif code == _WRONG_SIZE:  # a value of another length: nothing was read
                yield Got(i, b"", 0)
            elif code < 0:
                yield Got(i, b"", FAILED)
            else:
                head = heads[i * HEAD_BYTES : (i + 1) * HEAD_BYTES]
                yield Got(i, head[: max(0, code)], max(0, code - HEAD_BYTES))

    def put(self, items: Sequence[Item]) -> Iterator[PutResult]:
        heads, address = self._heads()
        for i, item in enumerate(items):
            heads[i * HEAD_BYTES : (i + 1) * HEAD_BYTES] = item.head()
        pointers, sizes = self._buffers(items, address)
        codes = self._client.batch_put_from_multi_buffers([item.name for item in items], pointers, sizes)
        self._note(codes)
        for i, code in enumerate(codes):
            yield PutResult(i, "" if code == 0 else "full" if code == _NO_ROOM else "error")

    def delete(self, names: Sequence[str]) -> None:
        self._note(self._client.batch_remove(list(names), True))

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {"codes": {str(code): n for code, n in sorted(self._codes.items())}}

    def close(self) -> None:
        for address in self._registered:
            self._client.unregister_buffer(address)
        self._client.close()

    def _heads(self) -> tuple[memoryview, int]:
        """This thread's headers, registered, and where they lie."""
        heads: tuple[memoryview, int] | None = getattr(self._local, "heads", None)
        if heads is None:
            room = mmap.mmap(-1, self.part_pages * HEAD_BYTES)
            address = int(np.frombuffer(room, np.uint8).ctypes.data)
            self._register(address, len(room), "headers")
            self._kept.append(room)
            heads = self._local.heads = (memoryview(room), address)
        return heads

    def _buffers(self, items: Sequence[Item], heads: int) -> tuple[list[list[int]], list[list[int]]]:
        pointers = [[heads + i * HEAD_BYTES, item.address] for i, item in enumerate(items)]
        return pointers, [[HEAD_BYTES, len(item.page)] for item in items]

    def _note(self, codes: Sequence[int]) -> None:
        bad = [code for code in codes if code < 0]
        if bad:
            with self._lock:
                for code in bad:
                    self._codes[code] = self._codes.get(code, 0) + 1


def _reach(master: str, port: int) -> None:
    """Connect to the master once: Mooncake's client tries for long and then returns a number, a plain connection fails
    at once and with a reason."""
    try:
        socket.create_connection((master, port), timeout=3.0).close()
    except OSError as error:
        raise StoreError(f"mooncake://{master}:{port}: no master answers there: {error.strerror or error}") from None


def _address_towards(master: str, port: int) -> str:
    """The address of this machine as the master's network sees it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, port))
        return str(probe.getsockname()[0])
