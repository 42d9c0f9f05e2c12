"""For the clients' scripts: whoever connects to anything but this machine is told no, and remembered, since libraries
pass over what goes wrong with their reports to others."""

from __future__ import annotations

import socket
from typing import Any

tried: list[Any] = []
_HERE = ("127.0.0.1", "localhost", "::1")
_connect, _resolve = socket.socket.connect, socket.getaddrinfo


def _is_here(host: Any) -> bool:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, *_HERE):
        return True
    tried.append(name)
    return False


def _connected(self: socket.socket, address: Any) -> None:
    if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_here(address[0]):
        raise ConnectionRefusedError(f"nothing but this machine may be asked, got {address!r:.80}")
    _connect(self, address)


def _resolved(host: Any, *more: Any, **options: Any) -> Any:
    if not _is_here(host):
        raise socket.gaierror(f"nothing but this machine may be asked, got {host!r:.80}")
    return _resolve(host, *more, **options)


socket.socket.connect = _connected  # type: ignore[method-assign]
socket.getaddrinfo = _resolved


def well() -> None:
    """All went well, and nobody was asked who should not be."""
    assert not tried, f"somebody else was asked: {sorted(map(str, tried))}"
    print("all is well")  # noqa: T201
