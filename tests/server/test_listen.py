"""Where a server listens: what it gets, and what it is told when it cannot."""

from __future__ import annotations

import os
import socket

import pytest

from sapwood.server import listen
from sapwood.server.listen import ServeError, open_socket


def answers(sock: socket.socket, family: int, address: object) -> bool:
    """Whether a client reaches it."""
    with socket.socket(family) as client, sock:
        client.connect(address)
        return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_a_free_port_is_given(host, monkeypatch):
    """With port 0 it is any free one, and IPv4 reaches it, whatever a name means first.

    Mutation: `open_socket` does not sort what it `found`; `_listen` does not call `listen`.
    """
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.insert(0, (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    sock = open_socket(host, 0)
    assert answers(sock, socket.AF_INET, ("127.0.0.1", sock.getsockname()[1]))


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_ipv6(host):
    """With and without brackets; all addresses include those of IPv4.

    Mutation: `open_socket` keeps the brackets; `_listen` sets `IPV6_V6ONLY`.
    """
    try:
        open_socket("::1", 0).close()
    except ServeError as error:
        assert "IPv6" in str(error) or "no address" in str(error)
        pytest.skip("this machine has no IPv6")
    sock = open_socket(host, 0)
    port = sock.getsockname()[1]
    assert answers(sock, *((socket.AF_INET, ("127.0.0.1", port)) if host == "::" else (socket.AF_INET6, ("::1", port))))


def test_a_port_in_use_is_said_plainly():
    """Whether the other one has this address or all of them.

    Mutation: `_problem` leaves `EADDRINUSE` to the last line; `_listen` does not call `listen`.
    """
    for theirs, ours in [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")]:
        with open_socket(theirs, 0) as other:
            port = other.getsockname()[1]
            with pytest.raises(ServeError) as caught:
                open_socket(ours, port)
        said = f"port {port} on {ours} is in use: stop the other server, or give another --port"
        assert str(caught.value) == said


def test_a_port_is_free_again_right_after_a_server_with_clients_ended():
    """The kernel remembers the connections for a minute; that keeps nobody from starting again.

    Mutation: `_listen` does not set `SO_REUSEADDR`.
    """
    sock = open_socket("127.0.0.1", 0)
    address = sock.getsockname()
    with socket.create_connection(address) as client:
        sock.setblocking(True)
        accepted, _ = sock.accept()
        accepted.close()  # first, so that the server's side is the one that waits
        assert client.recv(1) == b""
    sock.close()
    open_socket(*address).close()


@pytest.mark.parametrize(
    "host, port, said",
    [
        ("203.0.113.9", 0, "host 203.0.113.9 is no address of this machine"),
        ("no such host", 0, "host 'no such host' is not known here"),
        ("a" * 300, 0, "is not known here: give --host 127.0.0.1"),
        ("127.0.0.1", 65536, "port must be an integer from 0 to 65535, got 65536"),
        ("127.0.0.1", -1, "port must be an integer from 0 to 65535, got -1"),
    ],
)
def test_what_cannot_be_listened_on(host, port, said):
    """The message says what to give instead, and a long name is cut.

    Mutation: `open_socket` does not catch `UnicodeError`; `_problem` does not know `EADDRNOTAVAIL`.
    """
    with pytest.raises(ValueError, match=said) as caught:
        open_socket(host, port)
    assert len(str(caught.value)) < 250


def test_a_port_that_needs_more_rights(monkeypatch):
    """Who may not take port 80 is told which ports to take.

    Mutation: `_problem` does not know `EACCES`.
    """

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(listen, "_listen", denied)
    with pytest.raises(ServeError, match=r"port 80 on 127\.0\.0\.1 is not for this user: give a --port above 1023"):
        open_socket("127.0.0.1", 80)


def test_a_path(tmp_path):
    """What a killed server left behind is taken away; what somebody uses, or what is no socket, is not.

    Mutation: `_remove_stale` does not call `unlink`, or does so always; it does not look at `S_ISSOCK`.
    """
    path = os.path.relpath(tmp_path / "s") if len(str(tmp_path)) > 90 else str(tmp_path / "s")
    with open_socket("", 0, uds=path), pytest.raises(ServeError, match="is in use: stop the other server"):
        open_socket("", 0, uds=path)
    sock = open_socket("", 0, uds=path)  # closed, and its file still there
    assert answers(sock, socket.AF_UNIX, path)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ServeError, match="is a file that is no socket"):
        open_socket("", 0, uds=str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    "path, said",
    [
        ("", "uds must be a path of 1 to 107 bytes"),
        ("/tmp/" + "a" * 200, "uds must be a path of 1 to 107 bytes"),
        ("a\0b", "uds must be a path of 1 to 107 bytes"),
        ("/no/such/folder/s", "cannot listen on uds '/no/such/folder/s': No such file or directory"),
    ],
)
def test_a_path_that_cannot_be(path, said):
    """Too long for the kernel, or in no folder.

    Mutation: `_open_path` does not look at `MAX_SOCKET_PATH_BYTES`.
    """
    with pytest.raises(ServeError, match=said):
        open_socket("", 0, uds=path)
