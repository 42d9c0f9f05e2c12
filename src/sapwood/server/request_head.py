"""What the head of a request says: which client sends it, and which heads are refused.

check_head   by the connection: sizes, framing, versions and upgrades
client_of    by the connection: which client an address stands for
Hosts        by the app: names in Host and Origin, where no key decides who may use the server

A server without a key is kept from strangers by the address it listens on. A browser on this machine, or in this
network, reaches that address, and a foreign page in the browser must not get to use the server. A page whose own name
was made to mean this machine (DNS rebinding) is known by its Host, a page that only posts here by its Origin. An
address cannot be rebound, so any address is a right Host. As an Origin it is no better than a name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

from .errors import ApiError, HttpRefusal
from .limits import HttpLimits

_CHECKED = frozenset({b"host", b"content-length", b"transfer-encoding", b"upgrade"})
_PORT = re.compile(r":\d*$")
_LOCAL = "localhost"


class Caller(NamedTuple):
    """The client of a request. `tenant`: the clients that count as one where something is shared equally: those with
    the same key (by its number), or without keys those at the same address."""

    id: str  # of the request
    key: str | None
    admin: bool
    tenant: str = ""


def headers_too_large(most: int) -> HttpRefusal:
    return HttpRefusal(431, "headers_too_large", f"The request line and headers must be at most {most} bytes.")


def body_too_large(most: int) -> HttpRefusal:
    return HttpRefusal(413, "body_too_large", f"The body must be at most {most} bytes.")


def check_head(
    limits: HttpLimits, version: str, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """The header that frames the body. HttpRefusal for a head that is too large, that asks for a protocol which is not
    spoken here, or that a proxy might read differently. The parser has refused all other wrong lengths and characters
    already."""
    size, length, hosts = len(method) + len(target) + len(b"  HTTP/1.1\r\n"), 0, 0
    codings: list[bytes] = []
    upgrade = b""
    for name, value in headers:
        size += len(name) + len(value) + len(b": \r\n")
        if name in _CHECKED:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                length = int(value)  # the parser lets one through, of digits alone
            elif name == b"transfer-encoding":
                codings.append(value.lower())
            else:
                upgrade = value.lower()
    if size > limits.header_bytes:
        raise headers_too_large(limits.header_bytes)
    if length > limits.body_bytes:
        raise body_too_large(limits.body_bytes)
    if version not in ("1.0", "1.1"):
        raise HttpRefusal(505, "http_version_not_supported", "This server speaks HTTP/1.1.")
    if method == b"CONNECT":
        raise HttpRefusal(501, "not_implemented", "This server is no proxy.")
    if hosts > 1:
        raise HttpRefusal(400, "bad_request", "A request has one Host header.")
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise HttpRefusal(400, "bad_request", "Transfer-Encoding must be chunked, and needs HTTP/1.1.")
    if upgrade == b"websocket":
        raise HttpRefusal(400, "upgrade_not_supported", "This server does not speak WebSocket: use plain HTTP.")
    return b"transfer-encoding: chunked" if codings else b"content-length: %d" % length


def client_of(client: tuple[str, int] | None) -> str:
    """The client that an address stands for: the address itself, or with IPv6 the network of 2^64 addresses that one
    host has. All clients of a Unix socket count as one."""
    if client is None:
        return ""
    host = client[0].partition("%")[0]
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(address) >> 64 << 64))


class Hosts:
    """The names that a request may have in Host and in Origin. `allowed`: names besides those of this machine;
    *.example.com stands for all names below it, * for any. `origins`: pages that may send requests, as CORS has them.
    `bound`: the address that the server listens on."""

    def __init__(self, allowed: Sequence[str], origins: Sequence[str], bound: str) -> None:
        given = {name.lower().rstrip(".") for name in allowed}
        self._all = "*" in given
        self._below = tuple(name[1:] for name in given if name.startswith("*."))
        own = socket.gethostname().lower()
        self._names = {*given, bound.lower().strip("[]"), own, own.partition(".")[0]} - {"", "0.0.0.0", "::"}
        self._origins = set(origins)

    def check(self, host: bytes | None, origin: bytes | None) -> None:
        """ApiError 403 for a foreign name. Clients that are no browser may leave out both."""
        if self._all:
            return
        name = None if host is None else host.decode("latin-1").lower()
        if name is not None and not (_address(_bare(name)) or self._ours(_bare(name))):
            raise ApiError(
                403,
                f"the Host of this request is {name!r:.100}, which is no name of this server: add it with "
                "--allowed-hosts, or set an API key",
                "host_not_allowed",
            )
        if origin is not None and not self._may_ask(origin.decode("latin-1"), name):
            raise ApiError(
                403,
                f"pages of {origin.decode('latin-1')!r:.100} may not ask this server: add them with --allowed-origins, "
                "or the name with --allowed-hosts, or set an API key",
                "origin_not_allowed",
            )

    def _may_ask(self, origin: str, host: str | None) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        scheme, _, place = origin.lower().partition("://")
        if scheme not in ("http", "https"):
            return False
        return place == host or self._ours(_bare(place))

    def _ours(self, name: str) -> bool:
        if name in self._names or name == _LOCAL or name.endswith(("." + _LOCAL, *self._below)):
            return True
        address = _address(name)
        return address is not None and address.is_loopback


def _bare(place: str) -> str:
    """The name in "name:port" or "[address]:port"."""
    return _PORT.sub("", place).strip("[]").rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
