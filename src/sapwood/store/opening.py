"""`open_store`: the one place that knows every backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from . import uri as uris
from .breaker import Breaker, Missing
from .file import FileBackend
from .folder import check_folder, check_place
from .jobs import ThreadStore
from .keys import Fingerprint
from .mooncake import MooncakeBackend
from .process import ProcessStore
from .protocol import Backend, StoreError
from .redis import RedisBackend, Tls
from .store import Store
from .testing import Faults, FaultyBackend, MemoryBackend
from .uri import Where
from .values import checksum


def open_store(
    uri: str,
    fingerprint: Fingerprint,
    *,
    queue_pages: int = 8192,
    breaker: Breaker | None = None,
    missing: Missing | None = None,
    on_report: Callable[[], None] | None = None,
    wrap: Callable[[Backend], Backend] | None = None,
    process: bool = False,
) -> Store:
    """Open the store at `uri`.

    file:///path?size=20GiB · redis://host:port/db?ttl=3600 · rediss:// (with TLS) · redis+cluster://host:port ·
    mooncake://master:port · memory://name?size=1GiB; with `faulty+` before it, its options are faults to make.
    With `process` it runs in a process of its own, on memory that `shared` made, and cannot keep an engine's step
    waiting; else on threads of this process, on any memory.
    Raises ValueError for a URI that is wrong and StoreError for a place that cannot be used.
    """
    if not isinstance(fingerprint, Fingerprint):
        raise ValueError(f"fingerprint must be a Fingerprint, got {fingerprint!r:.60}")
    try:
        checksum(memoryview(b""))
    except ModuleNotFoundError as error:
        raise StoreError(str(error)) from None
    options: dict[str, Any] = {
        "queue_pages": queue_pages, "breaker": breaker, "missing": missing, "on_report": on_report
    }  # fmt: skip
    if process:
        if wrap is not None:
            raise ValueError("wrap must be None with process=True: a function cannot go to another process")
        return ProcessStore(uri, fingerprint, shown=uris.parse(uri).shown, **options)
    backend, shown = open_backend(uri)
    if wrap is not None:
        backend = wrap(backend)
    return ThreadStore(backend, fingerprint, shown=shown, **options)


def check_uri(uri: str) -> None:
    """ValueError if a URI is wrong; StoreError for a folder that cannot be used, or that other users may write to. No
    store is opened or made, and no package of a backend is needed."""
    _opener(uri)
    folder = store_folder(uri)
    if folder is not None:
        check_place(folder)
        if uris.parse(uri).options.get("trusted") != "1":
            check_folder(folder)


def open_backend(uri: str) -> tuple[Backend, str]:
    """The backend that a URI names, and the URI as it may be shown."""
    opens, shown = _opener(uri)
    return opens(), shown


def _opener(uri: str) -> tuple[Callable[[], Backend], str]:
    where = uris.parse(uri)
    faults: dict[str, float] = {}
    seed = 0
    scheme = where.scheme.removeprefix("faulty+")
    if scheme != where.scheme:
        seed = where.take("seed", uris.whole, 0)
        for fault in fields(Faults):
            read = uris.seconds if fault.name in ("slow", "hang_seconds") else uris.share
            faults[fault.name] = where.take(fault.name, read, getattr(Faults, fault.name))
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise ValueError(f"the scheme of a store's URI must be one of {known}; got {scheme!r:.60}")
    opens = _SCHEMES[scheme](where)
    if scheme == where.scheme:
        return opens, where.shown
    asked = Faults(**faults)
    return lambda: FaultyBackend(opens(), seed, asked), where.shown


def store_folder(uri: str) -> str | None:
    """The folder of a store of files."""
    where = uris.parse(uri)
    return os.path.normpath(where.path) if where.scheme.removeprefix("faulty+") == "file" else None


def _file(where: Where) -> Callable[[], Backend]:
    if where.host not in ("", "localhost") or where.port is not None or where.user is not None:
        raise ValueError("path of file:// must be absolute and on this machine: file:///path?size=20GiB")
    if not os.path.isabs(where.path) or where.path == "/" or "\0" in where.path:
        raise ValueError("path of file:// must name a folder: file:///path?size=20GiB")
    size = where.take("size", uris.nbytes, 0)
    trusted = where.take("trusted", uris.yes, False)
    where.no_more("size, trusted")
    if size <= 0:
        raise ValueError("size of file:// must be given, in bytes with a unit: file:///path?size=20GiB")
    return partial(FileBackend, os.path.normpath(where.path), size, trusted)


def _redis(where: Where) -> Callable[[], Backend]:
    scheme = where.scheme.removeprefix("faulty+")
    cluster = where.take("cluster", uris.yes, False) or scheme.endswith("+cluster")
    ttl = where.take("ttl", uris.whole, 0)
    timeout = where.take("timeout", uris.seconds, 2.0)
    known = "ttl, timeout, cluster"
    tls = None
    if scheme.startswith("rediss"):
        insecure = where.take("insecure", uris.yes, False)
        ca, cert, key = (where.take(name, uris.path, "") for name in ("ca", "cert", "key"))
        if bool(cert) is not bool(key):
            raise ValueError(f"cert and key of {where.scheme}:// must be given together: the client's certificate")
        if insecure and ca:
            raise ValueError(
                f"of ca and insecure, {where.scheme}:// takes one: either it looks whom it talks to or not"
            )
        tls = Tls(ca or None, cert or None, key or None, insecure)
        known += ", ca, cert, key, insecure"
    elif where.options.keys() & {"ca", "cert", "key", "insecure"}:
        raise ValueError(f"ca, cert, key and insecure are options of rediss://, and {where.scheme}:// is without TLS")
    where.no_more(known)
    if not where.host:
        raise ValueError(f"host of {where.scheme}:// must be given: {where.scheme}://host:6379")
    database = where.path.strip("/")
    if database and not (database.isdecimal() and len(database) < 6):
        raise ValueError(f"database of {where.scheme}:// must be a number: {where.scheme}://host:6379/0")
    if cluster and database not in ("", "0"):
        raise ValueError("database of a Redis cluster must be 0 or left out")
    return partial(RedisBackend, where, ttl or None, timeout, cluster, tls)


def _mooncake(where: Where) -> Callable[[], Backend]:
    if not where.host or where.port is None:
        raise ValueError("master of mooncake:// must be given with its port: mooncake://host:50051")
    if where.path.strip("/") or where.user is not None:
        raise ValueError("mooncake:// has neither a path nor a user: mooncake://host:50051")
    options: dict[str, Any] = {
        "segment": where.take("segment", uris.nbytes, 0),
        "buffer": where.take("buffer", uris.nbytes, 64 << 20),
        "host": where.take("host", uris.word, ""),
        "protocol": where.take("protocol", uris.word, "tcp"),
        "device": where.take("device", uris.word, ""),
        "metadata": where.take("metadata", uris.word, "P2PHANDSHAKE"),
    }
    where.no_more("segment, buffer, host, protocol, device, metadata")
    return partial(MooncakeBackend, where.host, where.port, **options)


def _memory(where: Where) -> Callable[[], Backend]:
    size = where.take("size", uris.nbytes, 1 << 30)
    where.no_more("size")
    return partial(MemoryBackend, where.host + where.path, size)


_SCHEMES: dict[str, Callable[[Where], Callable[[], Backend]]] = {
    "file": _file,
    "redis": _redis,
    "rediss": _redis,
    "redis+cluster": _redis,
    "rediss+cluster": _redis,
    "mooncake": _mooncake,
    "memory": _memory,
}
