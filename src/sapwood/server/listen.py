"""The socket that a server listens on, or a plain message why it cannot."""

from __future__ import annotations

import errno
import os
import socket
import stat

from sapwood.cache import whole_number

BACKLOG = 2048
MAX_SOCKET_PATH_BYTES = 107  # of a Unix socket, on Linux


class ServeError(ValueError):
    """The server cannot listen. The message says what to do about it."""


def open_socket(host: str, port: int, uds: str | None = None) -> socket.socket:
    """A socket that listens on a host and port (0: any free one), or on a path. It listens already, since only then the
    port is really ours: two sockets that do not listen may share one. Clients wait until the server accepts."""
    if uds is not None:
        return _open_path(uds)
    whole_number("port", port, 0, 65535)
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = socket.getaddrinfo(name or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ServeError(
            f"host {host!r:.60} is not known here: give --host 127.0.0.1 for this machine alone, 0.0.0.0 for everybody"
        ) from None
    found.sort(
        key=lambda address: address[0] != socket.AF_INET
    )  # "localhost" has both families, and so has an empty host
    family, _, _, _, address = found[0]
    try:
        return _listen(family, address)
    except OSError as error:
        raise ServeError(_problem(error, host or "all addresses", port)) from None


def _problem(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host:.60} is in use: stop the other server, or give another --port"
        case errno.EACCES | errno.EPERM:
            return f"port {port} on {host:.60} is not for this user: give a --port above 1023"
        case errno.EADDRNOTAVAIL:
            return f"host {host:.60} is no address of this machine: give --host 127.0.0.1, or 0.0.0.0 for all of them"
        case errno.EAFNOSUPPORT:
            return f"host {host:.60} needs IPv6, which this machine does not have: give --host 127.0.0.1"
    return f"cannot listen on port {port} of {host:.60}: {error.strerror}"


def _listen(family: int, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" listens on IPv4 too
        sock.bind(address)  # type: ignore[arg-type]
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _open_path(path: str) -> socket.socket:
    if not 0 < len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES or "\0" in path:
        raise ServeError(f"uds must be a path of 1 to {MAX_SOCKET_PATH_BYTES} bytes, got {path!r:.60}")
    try:
        if os.path.lexists(path):
            _remove_stale(path)
        return _listen(socket.AF_UNIX, path)
    except OSError as error:
        raise ServeError(f"cannot listen on uds {path!r:.120}: {error.strerror}") from None


def _remove_stale(path: str) -> None:
    """Remove the socket that a killed server has left. ServeError if the path is something else, or in use."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ServeError(f"uds {path!r:.120} is a file that is no socket: give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass  # a busy server has it
    raise ServeError(f"uds {path!r:.120} is in use: stop the other server, or give another path")
