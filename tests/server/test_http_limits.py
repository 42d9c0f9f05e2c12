"""Clients that are slow, greedy, broken or gone, on raw sockets, against a real uvicorn with small limits. After each
of them a good request works."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

uvicorn = pytest.importorskip("uvicorn")
import httptools  # noqa: E402
from uvicorn.protocols.http import httptools_impl  # noqa: E402
from uvicorn.protocols.http.flow_control import FlowControl  # noqa: E402

from sapwood.server import connection  # noqa: E402
from sapwood.server.connection import limited_protocol  # noqa: E402
from sapwood.server.limits import LINGER_SECONDS, MAX_PIPELINED_REQUESTS, HttpLimits  # noqa: E402
from sapwood.server.listen import open_socket  # noqa: E402

# Nobody is too slow for these, on any machine; tests of what happens to who is have less time for one thing.
SMALL = HttpLimits(
    header_bytes=4096, header_seconds=240, body_bytes=100_000, body_seconds=240, write_seconds=240, streams_per_client=0
)
SECONDS = 0.4  # for that one thing
PATIENCE = 240.0  # seconds until a test gives up


class App:
    """The smallest application. It notes what it saw, and can be held."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.received = self.sent = 0
        self.late = 1.5 * SECONDS
        self.entered = threading.Semaphore(0)
        self.disconnected = threading.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        self.scopes.append(scope)
        self.entered.release()
        path = scope["path"]
        if path == "/early":
            return await self.answer(send, 401, b"who are you?")
        if path == "/crash":
            raise RuntimeError("a mistake of the application")
        if path == "/late":
            await asyncio.sleep(self.late)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.release()
                return
            body += message["body"]
            self.received += len(message["body"])
            if not message["more_body"]:
                break
        self.bodies.append(body)
        if path == "/hold":  # until the client goes
            assert (await receive())["type"] == "http.disconnect"
            self.disconnected.release()
        elif path == "/stream":
            await self.stream(receive, send)
        elif path == "/large":
            await self.answer(send, 200, b"x" * int(scope["query_string"]))
        elif path == "/last":
            await self.answer(send, 200, b"bye", (b"connection", b"close"))
        elif path == "/cut":  # a mistake in the middle of the answer
            await self.answer(send, 200, b"x" * 50_000, more=True)
            raise RuntimeError("a mistake of the application")
        else:
            await self.answer(send, 200, path.encode() + b" %d" % len(body))

    async def answer(
        self, send: Any, status: int, body: bytes, *headers: tuple[bytes, bytes], more: bool = False
    ) -> None:
        length = (b"content-length", b"%d" % (len(body) + more))
        await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def stream(self, receive: Any, send: Any) -> None:
        """64 MB, unless the client goes before."""
        import asyncio

        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        piece = b"x" * 65536
        for _ in range(1024):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if gone.done():
                assert gone.result()["type"] == "http.disconnect"
                self.disconnected.release()
                return
            self.sent += len(piece)
        await send({"type": "http.response.body", "body": b""})

    def saw_disconnect(self, seconds: float = PATIENCE) -> bool:
        return self.disconnected.acquire(timeout=seconds)


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """Of an error in OpenAI's form."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        kind = {429: "rate_limit_error", 503: "service_unavailable_error"}.get(self.status, "invalid_request_error")
        assert error["type"] == kind and error["param"] is None
        return error["code"]


class Client:
    """A raw connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(PATIENCE)
        self.unread = b""

    def send(self, *parts: bytes) -> Client:
        self.sock.sendall(b"".join(parts))
        return self

    def answer(self, method: str = "GET") -> Answer:
        """The next one, by its Content-Length."""
        while b"\r\n\r\n" not in self.unread:
            self._read()
        head, _, self.unread = self.unread.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        length = 0 if method == "HEAD" else int(headers.get("content-length", 0))
        while len(self.unread) < length:
            self._read()
        body, self.unread = self.unread[:length], self.unread[length:]
        return Answer(int(status.split()[1]), headers, body)

    def last_answer(self, method: str = "GET") -> Answer:
        """The next one: it says that it is the last, and it is. No reset."""
        answer = self.answer(method)
        assert answer.headers["connection"] == "close"
        assert not self.unread and self.sock.recv(1) == b""
        return answer

    def trickle(self, more: bytes, seconds: float) -> None:
        """Sends a little now and then, until there is an answer."""
        until = time.monotonic() + PATIENCE
        self.sock.settimeout(seconds)
        with contextlib.suppress(ConnectionError):
            while not self.unread and time.monotonic() < until:
                self.send(more)
                with contextlib.suppress(TimeoutError):
                    self._read()
        self.sock.settimeout(PATIENCE)

    def _read(self) -> None:
        data = self.sock.recv(1 << 16)
        assert data, f"the connection ended after {self.unread!r:.200}"
        self.unread += data


class Running:
    """A server in a thread."""

    def __init__(self, limits: HttpLimits, **config: Any) -> None:
        self.app = App()
        self.sock = open_socket("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]
        self.protocol = limited_protocol(limits)
        settings: dict[str, Any] = {"loop": "uvloop", "ws": "none", "lifespan": "off", "log_config": None, **config}
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.app, http=self.protocol, **settings))
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.sock]}, daemon=True)
        self.thread.start()
        self.clients: list[Client] = []

    def connect(self, receive_buffer: int = 0) -> Client:
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(("127.0.0.1", self.port))
        self.clients.append(Client(sock))
        return self.clients[-1]

    def send(self, *parts: bytes) -> Client:
        return self.connect().send(*parts)

    def still_works(self) -> None:
        answer = self.send(post("/good", b"abc")).answer()
        assert (answer.status, answer.body) == (200, b"/good 3")

    def has_no_connections(self) -> bool:
        return eventually(lambda: not self.uvicorn.server_state.connections)

    def stop(self) -> None:
        for client in self.clients:
            client.sock.close()
        self.uvicorn.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(limits: HttpLimits = SMALL, **config: Any) -> Iterator[Running]:
    server = Running(limits, **config)
    try:
        yield server
        server.still_works()
    finally:
        server.stop()


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@contextlib.contextmanager
def hasty(**seconds: float) -> Iterator[Running]:
    """A server that has little time for something. Others may be too slow for it on a busy machine: nobody looks."""
    server = Running(dataclasses.replace(SMALL, **seconds))
    try:
        yield server
    finally:
        server.stop()


def get(path: str, *headers: bytes) -> bytes:
    return b"\r\n".join([b"GET %s HTTP/1.1" % path.encode(), b"host: a", *headers, b"", b""])


def post_head(path: str, *headers: bytes) -> bytes:
    return b"\r\n".join([b"POST %s HTTP/1.1" % path.encode(), b"host: a", *headers, b"", b""])


def post(path: str, body: bytes) -> bytes:
    return post_head(path, b"content-length: %d" % len(body)) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED = b"transfer-encoding: chunked"


def test_a_connection_that_stays_silent_is_closed():
    """No request was begun, so there is nothing to answer.

    Mutation: `LimitedProtocol.connection_made` sets no deadline.
    """
    with hasty(header_seconds=SECONDS) as server:
        began = time.monotonic()
        assert server.connect().sock.recv(1) == b""
        assert time.monotonic() - began >= SECONDS


@pytest.mark.parametrize(
    "begun, more",
    [
        (b"\r\n", b"\r\n"),
        (b"GE", b""),
        (b"GET /very/lo", b"o"),
        (b"GET / HTTP/1.1\r\nhos", b"t"),
        (b"GET / HTTP/1.1\r\nhost: a\r\n", b"a: b\r\n"),
    ],
)
@pytest.mark.parametrize("before", [b"", get("/one")], ids=["first", "second"])
def test_slow_headers_are_late_however_busy_the_client_looks(begun, more, before):
    """A byte now and then does not move the deadline; on a connection kept alive it counts from the first byte.

    Mutation: `LimitedProtocol.data_received` calls `_begin_head` for every read.
    """
    with hasty(header_seconds=SECONDS) as server:
        for _ in range(100):
            client = server.connect()
            with contextlib.suppress(AssertionError, OSError):  # too slow for it
                if not before or client.send(before).answer().status == 200:
                    client.send(begun)
                    break
        client.trickle(more, SECONDS / 4)
        answer = client.last_answer()
        assert (answer.status, answer.code) == (408, "header_timeout")


@pytest.mark.parametrize("whole", [True, False], ids=["at once", "in pieces"])
@pytest.mark.parametrize(
    "head",
    [
        get("/" + "x" * 5000),
        get("/", b"a: " + b"x" * 5000),
        get("/", b"a" * 5000 + b": x"),
        get("/", *[b"a: b"] * 900),
        get("/", b"a: " + b"x" * 4_000_000),
    ],
    ids=["target", "value", "name", "many", "4 MB"],
)
def test_large_headers_are_refused(server, head, whole):
    """The client reads the answer after it has sent everything, and has it without a reset; or it never ends.

    Mutation: `check_head` does not compare `size`; `data_received` does not compare `_wire_bytes`; `_end` closes at
    once.
    """
    client = server.connect()
    if whole:
        client.send(head)
    else:
        for start in range(0, 5000, 1000):
            client.send(head[start : start + 1000])
            time.sleep(0.01)
    answer = client.last_answer()
    assert (answer.status, answer.code) == (431, "headers_too_large")
    assert not server.app.scopes


def test_headers_up_to_the_limit_are_taken(server):
    """Header bytes are counted exactly when all of them are there, also behind a body that came in the same read.

    Mutation: `check_head` compares `size` with half of `header_bytes`.
    """
    size = len(get("/fits", b"a: "))
    head = get("/fits", b"a: " + b"x" * (SMALL.header_bytes - size))
    client = server.send(head).send(post("/one", b"x" * 50_000) + head)
    assert [client.answer().body for _ in range(3)] == [b"/fits 0", b"/one 50000", b"/fits 0"]
    assert server.send(get("/fits", b"a: " + b"x" * (SMALL.header_bytes - size + 3))).last_answer().status == 431


def test_a_body_larger_than_the_limit_is_refused_by_its_length(server):
    """Before the first byte of it and without the application; also to a client that sends all of it before it reads.

    Mutation: `check_head` does not compare `length`; `_end` closes at once.
    """
    client = server.send(post_head("/", b"content-length: %d" % (SMALL.body_bytes + 1)))
    answer = client.last_answer()
    assert (answer.status, answer.code) == (413, "body_too_large")
    client = server.send(post("/", b"x" * 8_000_000))
    assert client.last_answer().status == 413
    assert not server.app.scopes
    assert server.send(post("/", b"x" * SMALL.body_bytes)).answer().body == b"/ %d" % SMALL.body_bytes


def test_a_body_larger_than_the_limit_is_refused_while_it_is_read(server):
    """Chunked, so nobody knows before. The application has begun to read it, and sees a disconnect.

    Mutation: `on_body` does not compare `_body_bytes`; `_refuse` does not call `_disconnect`.
    """
    client = server.send(post_head("/", CHUNKED))
    for _ in range(8):
        client.send(chunk(b"x" * 1_000_000))
    answer = client.last_answer()
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert server.app.saw_disconnect(LINGER_SECONDS / 2) and not server.app.bodies


def test_chunks_of_one_byte_are_no_attack(server):
    """They are mostly framing, and still a body.

    Mutation: `data_received` takes `_body_bytes` once from `_wire_bytes`; `on_headers_complete` keeps `_wire_bytes`.
    """
    client = server.send(post_head("/", b"a: " + b"x" * 4000, CHUNKED))
    assert server.app.entered.acquire(timeout=PATIENCE)
    client.send(b"1;" + b"x" * 200 + b"\r\nx\r\n")
    assert eventually(lambda: server.app.received == 1)
    client.send(chunk(b"x") * 19_999)
    assert eventually(lambda: server.app.received == 20_000)
    assert client.send(b"0\r\n\r\n").answer().body == b"/ 20000"


@pytest.mark.parametrize(
    "rest", [b"1;" + b"x" * 9_000, b"0\r\nX-Trailer: " + b"x" * 9_000, b"0\r\n" + b"X: y\r\n" * 2000]
)
def test_a_body_cannot_hide_bytes_in_its_framing(server, rest):
    """Extensions of chunks and trailers are read by nobody, and must not fill the memory.

    Mutation: `data_received` does not compare `framing`.
    """
    client = server.send(post_head("/", CHUNKED))
    assert server.app.entered.acquire(timeout=PATIENCE)
    answer = client.send(rest).last_answer()
    assert (answer.status, answer.code) == (400, "bad_request")
    assert server.app.saw_disconnect(LINGER_SECONDS / 2)


def test_trailers_are_no_headers(server):
    """What comes after the body cannot pass for a header that somebody checked.

    Mutation: `on_headers_complete` leaves `headers` as they are.
    """
    client = server.send(post_head("/", CHUNKED), chunk(b"abc"), b"0\r\nauthorization: admin\r\n\r\n")
    assert client.answer().body == b"/ 3"
    assert b"authorization" not in dict(server.app.scopes[0]["headers"])


@pytest.mark.parametrize("head", [post_head("/", b"content-length: 1000"), post_head("/", CHUNKED)])
def test_a_slow_body_is_late_however_busy_the_client_looks(head):
    """The whole body has one deadline.

    Mutation: `on_body` sets a new deadline; `on_headers_complete` sets none.
    """
    with hasty(body_seconds=SECONDS) as server:
        began = time.monotonic()
        client = server.send(head)
        client.trickle(b"x" if CHUNKED not in head else chunk(b"x"), SECONDS / 8)
        answer = client.last_answer()
        assert (answer.status, answer.code) == (408, "body_timeout")
        assert time.monotonic() - began >= SECONDS
        assert server.app.saw_disconnect()


@pytest.mark.parametrize("expect", [False, True], ids=["reading paused", "waits for 100"])
def test_a_slow_application_is_not_the_clients_fault(expect):
    """The body's time does not run out while the application is the one that does not read.

    Mutation: `pause_reading` leaves `_deadline` as it is; `_late` does not look at `expect_100_continue`.
    """

    def answered(seconds: float) -> bool:
        with hasty(body_seconds=seconds, body_bytes=8_000_000) as server:
            server.app.late = 1.5 * seconds
            body = b"x" * 8_000_000
            client = server.connect()
            if expect:
                client.send(post_head("/late", b"content-length: %d" % len(body), b"expect: 100-continue"))
                assert client.answer().status == 100
                client.send(body)
            else:
                client.send(post("/late", body))
            return client.answer().body == b"/late 8000000"

    # On a busy machine the client may be the slow one: then it has more time.
    assert any(answered(SECONDS * 4**more) for more in range(4))


def test_expect_continue(server):
    """A body that fits is asked for, one that does not is refused before it is sent, and HTTP/1.0 knows no 100.

    Mutation: `check_head` leaves `length` to `on_body`; `_check_head` leaves `expect_100_continue` as it is.
    """
    expect = b"expect: 100-continue"
    client = server.send(post_head("/", b"content-length: 3", expect))
    assert client.answer().status == 100
    assert client.send(b"abc").answer().body == b"/ 3"
    assert server.send(post_head("/", b"content-length: 100001", expect)).last_answer().status == 413
    client = server.send(b"POST / HTTP/1.0\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
    assert client.send(b"abc").last_answer().body == b"/ 3"


def test_an_answer_before_the_end_of_the_body_arrives_and_is_the_last(server):
    """The application refuses a large upload without reading it: a client that sends everything first has the answer.

    Mutation: `close` closes at once; `on_headers_complete` leaves `keep_alive` as it is.
    """
    with running(HttpLimits()) as server:
        client = server.send(post("/early", b"x" * 16_000_000))
        answer = client.last_answer()
        assert (answer.status, answer.body) == (401, b"who are you?")
        client = server.send(post_head("/early", b"content-length: 3", b"expect: 100-continue"))
        assert client.last_answer().status == 401
        client = server.send(post("/early", b"abc"))  # all of it was read: nothing has to end
        assert client.answer().status == client.send(get("/early")).answer().status == 401


def test_a_reader_who_stops_is_cut_off():
    """The application is told, and has not been let to write everything into the server's memory.

    Mutation: `pause_writing` does not call `_watch_writes`.
    """
    with hasty(write_seconds=SECONDS) as server:
        client = server.send(get("/stream"))
        assert server.app.saw_disconnect()
        assert server.app.sent < 24_000_000  # what the kernel took, of 64 MB
        assert server.has_no_connections()
        with contextlib.suppress(ConnectionResetError):
            while client.sock.recv(1 << 20):
                pass


@pytest.mark.parametrize(
    "head",
    [get("/large?50000", b"connection: close"), get("/large?50000"), get("/cut")],
    ids=["close", "keep-alive", "failed"],
)
def test_a_reader_who_stops_near_the_end_is_cut_off(head):
    """The application is done, and what is left is too little for the transport to be paused: it still ends.

    Mutation: `close` does not call `_watch_writes`, or `on_response_complete` does not.
    """
    with hasty(write_seconds=SECONDS) as server:
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = server.connect(receive_buffer=4096)
        client.send(head)
        client.sock.recv(1, socket.MSG_PEEK)
        assert server.has_no_connections()


def test_a_slow_reader_of_a_large_answer_is_not_cut_off():
    """Who takes a little all the time may take longer than the limit for one who takes nothing.

    Mutation: `_check_reader` does not look at `_unwritten`.
    """

    def all_of_it(seconds: float) -> bool:
        with hasty(write_seconds=seconds) as server:
            server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client = server.connect(receive_buffer=4096)
            client.send(b"GET /large?400000 HTTP/1.1\r\nhost: a\r\n\r\n")
            began, read = time.monotonic(), 0
            while read < 400_000:
                with contextlib.suppress(ConnectionResetError):
                    if data := client.sock.recv(8192):
                        read += len(data)
                        ahead = began + 3 * seconds * read / 400_000 - time.monotonic()
                        time.sleep(max(0, ahead))
                        continue
                return False
            return time.monotonic() - began > 2 * seconds

    # On a busy machine this reader may take nothing for a while: then he has more time.
    assert any(all_of_it(SECONDS * 4**more) for more in range(4))


def test_pipelined_requests_are_answered_in_order_and_bounded(server):
    """A few wait for their turn; the one too many is refused after them.

    Mutation: `on_message_begin` does not look at `_open`; `_refuse` answers at once.
    """
    client = server.send(*[get(f"/{n}") for n in range(3)])
    assert [client.answer().body for _ in range(3)] == [b"/0 0", b"/1 0", b"/2 0"]
    client = server.send(*[get(f"/{n}") for n in range(100)])
    assert [client.answer().body for _ in range(MAX_PIPELINED_REQUESTS)] == [
        b"/%d 0" % n for n in range(MAX_PIPELINED_REQUESTS)
    ]
    answer = client.last_answer()
    assert (answer.status, answer.code) == (429, "too_many_requests")
    assert len(server.app.scopes) == 3 + MAX_PIPELINED_REQUESTS


@pytest.mark.parametrize(
    "bad, status",
    [
        (b"garbage\r\n\r\n", 400),
        (post_head("/bad", b"content-length: 1000000"), 413),
        (post_head("/bad", CHUNKED) + b"nonsense\r\n", 400),
        (get("/bad", b"a: " + b"x" * 5000), 431),
    ],
)
def test_a_bad_request_waits_for_the_answers_before_it(server, bad, status):
    """What is wrong with the second request does not show up in the middle of the first answer.

    Mutation: `_refuse` answers at once; it leaves the bad one in `pipeline`.
    """
    client = server.send(get("/one") + bad)
    assert client.answer().body == b"/one 0"
    answer = client.last_answer()
    assert answer.status == status and answer.code
    server.still_works()
    assert [scope["path"] for scope in server.app.scopes] == ["/one", "/good"]


@pytest.mark.parametrize("path", ["/crash", "/last", "/cut"])
def test_a_connection_ends_when_the_request_before_the_refused_one_ends_it(server, path):
    """Nothing is left to answer after an application that failed, or after an answer that was the last.

    Mutation: `close` does nothing while `_refusal` waits.
    """
    client = server.send(get(path), b"garbage\r\n\r\n")
    answers = b"".join(iter(lambda: client.sock.recv(1 << 20), b""))
    assert answers.count(b"HTTP/1.1") == 1 and b"bad_request" not in answers
    client.sock.close()
    assert server.has_no_connections()


def test_every_application_hears_that_its_client_has_gone(server):
    """Also that of a request with another one queued behind it.

    Mutation: `connection_lost` does not call `_disconnect`.
    """
    client = server.send(get("/hold") + get("/next"))
    assert server.app.entered.acquire(timeout=PATIENCE)
    client.sock.close()
    assert server.app.saw_disconnect()


BAD = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    "unknown method": b"FOO / HTTP/1.1\r\n\r\n",
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "not ascii": b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    "nul in target": b"GET /\0 HTTP/1.1\r\n\r\n",
    "nul in value": get("/", b"a: b\0c"),
    "nul in name": get("/", b"a\0b: c"),
    "space in name": get("/", b"a b: c"),
    "space before colon": post_head("/", b"content-length : 3") + b"abc",
    "no name": get("/", b": c"),
    "no colon": get("/", b"abc"),
    "carriage return": get("/", b"a: b\rc: d"),
    "line feeds": b"GET / HTTP/1.1\nhost: a\n\n",
    "folded": get("/", b" a: b"),
    "folded framing": post_head("/", b"transfer-encoding:", b" chunked") + b"0\r\n\r\n",
    "two lengths": post_head("/", b"content-length: 3", b"content-length: 4") + b"abcd",
    "same length twice": post_head("/", b"content-length: 3", b"content-length: 3") + b"abc",
    "list of lengths": post_head("/", b"content-length: 3, 3") + b"abc",
    "signed length": post_head("/", b"content-length: +3") + b"abc",
    "negative length": post_head("/", b"content-length: -3") + b"abc",
    "hex length": post_head("/", b"content-length: 0x3") + b"abc",
    "empty length": post_head("/", b"content-length: ") + b"abc",
    "length over 64 bits": post_head("/", b"content-length: 99999999999999999999999"),
    "length and chunked": post_head("/", b"content-length: 3", CHUNKED) + b"0\r\n\r\n",
    "chunked and length": post_head("/", CHUNKED, b"content-length: 3") + b"0\r\n\r\n",
    "chunked twice": post_head("/", CHUNKED, CHUNKED) + b"0\r\n\r\n",
    "another coding": post_head("/", b"transfer-encoding: gzip, chunked") + b"0\r\n\r\n",
    "identity": post_head("/", b"transfer-encoding: identity") + b"abc",
    "chunked in 1.0": b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two hosts": get("/", b"host: b"),
    "websocket": get("/", b"connection: upgrade", b"upgrade: WebSocket", b"sec-websocket-key: eA==", b"x: y"),
}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.mark.parametrize("request_bytes", BAD.values(), ids=BAD)
def test_what_is_no_request_gets_an_error_in_openais_form(shared_server, request_bytes):
    """Everything that two servers may read differently is refused, and no application sees it.

    Mutation: `check_head` does not look at `hosts`, `codings` or `upgrade`.
    """
    server = shared_server
    calls = len(server.app.scopes)
    answer = server.send(request_bytes).last_answer()
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert answer.code in ("bad_request", "upgrade_not_supported")
    assert len(server.app.scopes) == calls
    server.still_works()


@pytest.mark.parametrize(
    "data",
    [b"ffffffffffffffffff\r\n", b"-1\r\na\r\n", b"1\na\r\n", b"1\r\naX0\r\n", b"3\r\nab\r\n0\r\n\r\n", b"xyz\r\n"],
)
def test_a_broken_chunk_ends_the_request(server, data):
    """The application has begun to read: it sees a disconnect, the client an error.

    Mutation: `_refuse` does not call `_disconnect`.
    """
    client = server.send(post_head("/", CHUNKED) + chunk(b"abc"))
    assert server.app.entered.acquire(timeout=PATIENCE)
    answer = client.send(data).last_answer()
    assert (answer.status, answer.code) == (400, "bad_request")
    assert server.app.saw_disconnect(LINGER_SECONDS / 2)


def test_other_versions_and_methods(server):
    """HTTP/1.0 is served, other versions and CONNECT are not. An answer to HEAD has no body, also an error.

    Mutation: `check_head` does not look at `version`, or `method`; `reply` does not look at `method`.
    """
    assert server.send(b"GET /old HTTP/1.0\r\n\r\n").last_answer().body == b"/old 0"
    assert server.send(b"GET / HTTP/2.0\r\n\r\n").last_answer().status == 505
    assert server.send(b"GET /\r\n\r\n").last_answer().status == 505
    assert server.send(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n").last_answer().status == 501
    client = server.send(b"HEAD /large?10 HTTP/1.1\r\n\r\n")
    assert client.answer("HEAD").headers["content-length"] == "10"
    assert client.send(b"HEAD / HTTP/1.1\r\na: " + b"x" * 4080 + b"\r\n\r\n").last_answer("HEAD").status == 431


@pytest.mark.parametrize(
    "target, path, query",
    [
        (b"http://a", "/", b""),
        (b"http://a?x=1", "/", b"x=1"),
        (b"http://a:80/v1/models?x=1", "/v1/models", b"x=1"),
        (b"/a%20b", "/a b", b""),
    ],
)
def test_targets_in_absolute_form(server, target, path, query):
    """Proxies ask like this, and the application sees a path.

    Mutation: `_check_head` leaves `url` as it is.
    """
    assert server.send(b"GET " + target + b" HTTP/1.1\r\nhost: a\r\n\r\n").answer().status == 200
    scope = server.app.scopes[0]
    assert (scope["path"], scope["query_string"]) == (path, query)


@pytest.mark.parametrize("split", [True, False], ids=["apart", "together"])
@pytest.mark.parametrize("body", [b"", b"GET /admin HTTP/1.1\r\n\r\n"], ids=["empty", "smuggled"])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_to_http_2_is_ignored_and_the_body_is_a_body(server, split, body, chunked):
    """Some clients (Java's) ask for it with every request. The body is not taken for the next request.

    Mutation: `_parse` does not call `_stay_with_http`; `on_message_complete` does not look at `_upgrade`.
    """
    framing = CHUNKED if chunked else b"content-length: %d" % len(body)
    head = post_head("/java", b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAM", framing)
    sent = (chunk(body) if body else b"") + b"0\r\n\r\n" if chunked else body
    client = server.connect()
    if split and sent:
        client.send(head)
        assert server.app.entered.acquire(timeout=PATIENCE)
        client.send(sent)
    else:
        client.send(head + sent)
    assert client.answer().body == b"/java %d" % len(body)
    assert client.send(head + sent, get("/next")).answer().body == b"/java %d" % len(body)
    assert client.answer().body == b"/next 0"
    assert server.app.bodies == [body, body, b""]


def test_one_address_has_so_many_requests_at_once():
    """A connection that waits for nothing does not count, one that is answered or gone does not count any more.

    Mutation: `on_response_complete` does not call `_count`; `connection_lost` does not call `_count`.
    """
    with running(HttpLimits(streams_per_client=2)) as server:
        idle = [server.connect() for _ in range(5)]
        assert idle[0].send(get("/")).answer().status == 200
        holding = [server.send(get("/hold")) for _ in range(2)]
        for _ in range(3):
            assert server.app.entered.acquire(timeout=PATIENCE)
        answer = idle[1].send(get("/")).last_answer()
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "too_many_requests", "1")
        holding[0].sock.close()
        assert server.app.saw_disconnect()
        for _ in range(5):
            assert server.send(get("/")).answer().status == 200
        holding[1].sock.close()
        assert server.app.saw_disconnect()
        assert not server.protocol.in_flight


def test_connections_need_no_garbage_collector(server):
    """However they end: a server that collects rarely, so that its streams do not stutter, must not grow.

    Mutation: `let_go` does nothing; `connection_lost` leaves `_refusal` as it is.
    """
    gc.collect()
    gc.disable()
    try:
        known = weakref.WeakSet()
        bad, held = b"garbage\r\n\r\n", get("/hold")
        for sent in [b"", get("/"), bad, get("/") + bad, post("/early", b"x" * 70_000), held, held + bad]:
            client = server.send(sent)
            assert eventually(lambda: bool(server.uvicorn.server_state.connections))
            known.update(server.uvicorn.server_state.connections)
            if sent and not sent.startswith(held):
                client.answer()
            client.sock.close()
            assert server.has_no_connections()
        assert eventually(lambda: not known), list(known)
    finally:
        gc.enable()


def test_a_server_that_stops_lets_the_body_come_and_then_closes():
    """Stopping is not forgotten when the body ends.

    Mutation: `LimitedProtocol.shutdown` leaves `_keep_alive` as it is.
    """
    server = Running(SMALL)
    client = server.send(post_head("/", b"content-length: 3"))
    assert server.app.entered.acquire(timeout=PATIENCE)
    server.uvicorn.should_exit = True
    assert eventually(lambda: server.sock.fileno() == -1)  # just before it tells its connections
    time.sleep(0.05)
    assert client.send(b"abc").last_answer().body == b"/ 3"
    server.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_limits_hold_with_tls(tmp_path, monkeypatch):
    """There is no half-close with TLS: the answer arrives all the same, and the connection ends.

    Mutation: `_end` does not look at `can_write_eof`; it sets no deadline.
    """
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.3)
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    files = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    server, late, stops = (
        Running(dataclasses.replace(SMALL, **seconds), **files)
        for seconds in ({}, {"header_seconds": 5.0}, {"write_seconds": SECONDS})
    )
    try:

        def connect(server: Running) -> Client:
            client = server.connect()
            client.sock = context.wrap_socket(client.sock)
            client.sock.settimeout(PATIENCE)
            return client

        assert connect(server).send(post("/", b"x" * 8_000_000)).answer().status == 413
        assert connect(late).send(b"GET /").last_answer().status == 408
        stopped = connect(stops).send(get("/stream"))
        assert stops.app.saw_disconnect()
        stopped.sock.close()
        assert connect(server).send(post("/good", b"abc")).answer().body == b"/good 3"
    finally:
        for each in (server, late, stops):
            each.stop()


@pytest.mark.parametrize(
    "field, value",
    [
        ("header_bytes", 255),
        ("header_bytes", 1e6),
        ("header_seconds", 0),
        ("header_seconds", float("nan")),
        ("body_bytes", 0),
        ("body_bytes", True),
        ("body_seconds", -1),
        ("body_seconds", "9" * 100),
        ("write_seconds", float("inf")),
        ("streams_per_client", -1),
    ],
)
def test_limits_are_checked_when_made(field, value):
    """The message names the field and what would be right, and does not repeat a long value.

    Mutation: `__post_init__` of `HttpLimits` leaves out a field.
    """
    with pytest.raises(ValueError, match=rf"^{field} must be an? (integer|number) from .* to .*, got ") as caught:
        HttpLimits(**{field: value})
    assert len(str(caught.value)) < 160


def names_used(source: ast.AST) -> dict[str, set[str]]:
    """What a file uses of `self`, `super()` and the objects that uvicorn hands out, by the name of the owner."""
    used: dict[str, set[str]] = {"self": set(), "super": set(), "cycle": set(), "flow": set(), "parser": set()}
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            used.get(name, set()).add(node.attr)
    return used


def test_uvicorn_has_what_is_used_of_it():
    """A new version of uvicorn that lacks a name we rely on is told here by that name, and not by a strange failure.

    Mutation: `LimitedProtocol` uses a name that uvicorn does not have.
    """
    tree = ast.parse(Path(connection.__file__).read_text())
    ours = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LimitedProtocol")
    methods = {node.name: node for node in ours.body if isinstance(node, ast.FunctionDef)}
    own = {*methods, *names_used(methods["__init__"])["self"]}
    own |= {node.target.id for node in ours.body if isinstance(node, ast.AnnAssign)}

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    protocol = httptools_impl.HttpToolsProtocol(
        uvicorn.Config(app, log_config=None), uvicorn.server.ServerState(), {}, object()
    )
    protocol.on_message_begin()
    cycle = httptools_impl.RequestResponseCycle(*[None] * 11)
    parser = httptools.HttpRequestParser(protocol)
    has = {"self": protocol, "super": protocol, "cycle": cycle, "flow": FlowControl(None), "parser": parser}
    used = names_used(ours)
    used["self"] -= own
    used["cycle"] |= names_used(tree)["cycle"]
    assert all(used.values())
    gone = {owner: {name for name in names if not hasattr(has[owner], name)} for owner, names in used.items()}
    assert not any(gone.values()), f"uvicorn {uvicorn.__version__} has not what connection.py uses of it: {gone}"
