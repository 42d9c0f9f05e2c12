"""Where a store is: URIs taken apart, and shown without their credentials."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

_UNITS = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True)
class Where:
    """A URI in parts. `repr` and `shown` hold no credentials."""

    scheme: str
    host: str
    port: int | None
    path: str
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)
    options: dict[str, str] = field(repr=False)

    @property
    def shown(self) -> str:
        secret = "***@" if self.user is not None or self.password is not None else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{secret}{host}{port}{self.path}"

    def take(self, name: str, read: Callable[[str, str], T], default: T) -> T:
        """An option, read and removed from the options."""
        text = self.options.pop(name, None)
        return default if text is None else read(f"{name} of {self.scheme}://", text)

    def no_more(self, known: str) -> None:
        """ValueError if an option is left that was not taken."""
        for name in self.options:
            named = repr(name) if re.fullmatch(r"[A-Za-z_]{1,32}", name) else "one that is no word"
            raise ValueError(f"options of {self.scheme}:// are {known}; got {named}")


def parse(uri: str) -> Where:
    """Take a URI apart. Errors name the part that is wrong, never its text if that can be a secret."""
    if not isinstance(uri, str) or "://" not in uri:
        raise ValueError("a store is given as a URI such as file:///var/cache/sapwood?size=20GiB")
    scheme = uri.partition("://")[0].lower()
    if not re.fullmatch(r"[a-z][a-z0-9+]*", scheme):
        raise ValueError("the scheme of a store's URI must be a word such as file, redis or mooncake")
    try:
        parts = urlsplit(uri)
        port = parts.port
        host = parts.hostname or ""
    except ValueError:
        raise ValueError(
            f"host and port of {scheme}:// must be host:port with a port from 0 to 65535 "
            "(in a user name or password write : / ? # @ as %3A %2F %3F %23 %40)"
        ) from None
    if ("@" in parts.path and not scheme.endswith("file")) or "@" in parts.query or parts.fragment:
        raise ValueError(f"in a {scheme}:// URI write @ as %40, # as %23 and / in a password as %2F")
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ValueError(f"options of {scheme}:// must be written as ?name=value&name=value") from None
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ValueError(f"options of {scheme}:// must be given once each")
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    return Where(scheme, host, port, unquote(parts.path), user, password, options)


def nbytes(what: str, text: str) -> int:
    """A number of bytes with a unit: 20GiB, 500MB, 4096."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{what} must be bytes with a unit such as 20GiB or 500MB, got {text!r:.60}")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def seconds(what: str, text: str) -> float:
    """A number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{what} must be a number of seconds above 0, got {text!r:.60}")
    return number


def whole(what: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise ValueError(f"{what} must be a whole number, got {text!r:.60}")
    return int(text)


def share(what: str, text: str) -> float:
    """A probability."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"{what} must be a number from 0 to 1, got {text!r:.60}")
    return number


def path(what: str, text: str) -> str:
    if not os.path.isabs(text) or "\0" in text:
        raise ValueError(f"{what} must be the absolute path of a file, got {text!r:.60}")
    return text


def yes(what: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{what} must be 1 (yes) or 0 (no), got {text!r:.60}")
    return text == "1"


def word(what: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:,/-]{1,255}", text):
        raise ValueError(f"{what} must be a plain word")
    return text
