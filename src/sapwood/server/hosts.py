"""Which names a server without a key answers to. Strangers are kept off it by the address it listens on, and a browser
on this machine, or in this network, reaches that: a strange page in it must not get to use the server.

A page whose own name was made to mean this machine (DNS rebinding) is known by its Host, a page that only posts here by
its Origin. An address cannot be rebound, so any is a right Host. As an Origin it is no better than a name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from .errors import ApiError

_PORT = re.compile(r":\d*$")
_LOCAL = "localhost"


class Hosts:
    """`allowed`: names besides those of this machine; *.example.com is all below it, * everything. `origins`: pages
    that may ask, as CORS has them. `bound`: the address that is listened on."""

    def __init__(self, allowed: Sequence[str], origins: Sequence[str], bound: str) -> None:
        given = {name.lower().rstrip(".") for name in allowed}
        self._all = "*" in given
        self._below = tuple(name[1:] for name in given if name.startswith("*."))
        own = socket.gethostname().lower()
        self._names = {*given, bound.lower().strip("[]"), own, own.partition(".")[0]} - {"", "0.0.0.0", "::"}
        self._origins = set(origins)

    def check(self, host: bytes | None, origin: bytes | None) -> None:
        """403 for what is foreign. Clients that are no browser may leave out both."""
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
