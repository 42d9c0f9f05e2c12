"""HTTP/1.1 as somebody needs it who measures a server: connections that stay open, bodies handed on the moment they
arrive, and a name for every way in which a request can fail. Nothing is scheduled for a piece of a body: one call of
`data_received` takes it from the socket to whoever reads it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser

from sapwood import __version__

Receive = Callable[[bytes, float], None]  # a piece of a body, and when it came (time.perf_counter)
MOST_BODY = 64 << 20  # bytes of an answer that is not streamed


class Failure(Exception):
    """A request without a whole answer. `kind` says how it failed, in words that are counted; `detail` says more."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


class HttpAnswer(NamedTuple):
    status: int
    body: bytes  # nothing of what was handed on


class ServerAddress(NamedTuple):
    """Where a server is."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    prefix: str  # of every path


def place_of(url: str, insecure: bool = False) -> ServerAddress:
    """ValueError if it is no address of a server. A "/v1" at the end is left out: paths begin with it."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ValueError(f"the address of a server must be like http://127.0.0.1:8000, got {url!r:.60}")
    tls = None
    if parts.scheme == "https":
        tls = ssl.create_default_context()
        if insecure:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return ServerAddress(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))


class Client:
    """Requests to one server. A connection that is free is used again; there are as many as requests at a time."""

    def __init__(self, place: ServerAddress, headers: Mapping[str, str], timeout: float) -> None:
        """`timeout`: seconds without a byte from the server."""
        self.place = place
        self._timeout = timeout
        self._free: list[_Connection] = []
        host = f"[{place.host}]" if ":" in place.host else place.host
        own = {"Host": f"{host}:{place.port}", "User-Agent": f"sapwood/{__version__}"}
        self._head = "".join(f"{name}: {_printable(name, value)}\r\n" for name, value in {**own, **headers}.items())

    async def get(self, path: str) -> HttpAnswer:
        return await self._request("GET", path, b"", None)

    async def post(self, path: str, body: bytes, receive: Receive | None = None) -> HttpAnswer:
        """`receive` gets the body piece by piece if the status is 200. Raises Failure if there is no whole answer; what
        `receive` raises ends the request, and is raised here."""
        return await self._request("POST", path, body, receive)

    async def _request(self, method: str, path: str, body: bytes, receive: Receive | None) -> HttpAnswer:
        about = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        head = f"{method} {self.place.prefix}{path} HTTP/1.1\r\n{self._head}{about}\r\n"
        while True:
            used = bool(self._free)
            connection = self._free.pop() if used else await self._connect()
            try:
                answer = await connection.ask(head.encode("latin-1") + body, receive)
            except Failure as failure:
                if used and failure.kind == "broken" and not connection.answered:
                    continue  # closed by the server while nobody used it
                raise
            if connection.open:
                self._free.append(connection)
            return answer

    async def _connect(self) -> _Connection:
        loop, place = asyncio.get_running_loop(), self.place
        try:
            async with asyncio.timeout(self._timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._free, self._timeout), place.host, place.port, ssl=place.tls
                )
        except TimeoutError:
            raise Failure("timeout", "while connecting") from None
        except OSError as error:
            raise Failure("no connection", str(error)) from None
        return connection

    def close(self) -> None:
        while self._free:
            self._free.pop().abort()


def _printable(name: str, value: str) -> str:
    if not f"{name}{value}".isprintable() or not f"{name}{value}".isascii():
        raise ValueError(f"the header {name!r:.60} must be printable ASCII")
    return value


class _Connection(asyncio.Protocol):
    """One request at a time. httptools calls the methods that begin with `on_`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, free: list[_Connection], timeout: float) -> None:
        self._loop = loop
        self._free = free
        self._timeout = timeout
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[HttpAnswer] | None = None
        self._receive: Receive | None = None
        self._now = 0.0  # when the last bytes came
        self._reset()

    def _reset(self) -> None:
        self._parser = HttpResponseParser(self)
        self._body = bytearray()
        self._framed = False  # the head says where the body ends
        self._headed = False  # the head is there
        self.answered = False  # something is

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, receive: Receive | None) -> HttpAnswer:
        if self._transport is None:
            raise Failure("broken", "the connection was closed")
        self._reset()
        self._receive = receive
        self._done = self._loop.create_future()
        self._now = time.perf_counter()
        watch = self._loop.call_later(self._timeout, self._watch, self._done)
        self._transport.write(request)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            watch.cancel()
            self._done = self._receive = None

    def _watch(self, done: asyncio.Future[HttpAnswer]) -> None:
        """Nothing runs for each piece that arrives: this looks when the last one did, and comes again."""
        if done.done():
            return
        left = self._now + self._timeout - time.perf_counter()
        if left > 0:
            self._loop.call_later(left, self._watch, done)
        else:
            self._fail(Failure("timeout", f"nothing came for {self._timeout:g} s"))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.abort()

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            self.abort()  # nobody has asked
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError as error:
            self._fail(error.__context__ if isinstance(error.__context__, Exception) else error)
        except HttpParserError as error:
            self._fail(Failure("not HTTP", f"{error!s:.100}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        with suppress(ValueError):
            self._free.remove(self)
        if self._headed and not self._framed and error is None:
            self.on_message_complete()
        self._fail(Failure("broken", str(error or "the connection was closed before the end of the answer")))

    # ---- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._headed = True
        if self._parser.get_status_code() != 200:
            self._receive = None

    def on_body(self, body: bytes) -> None:
        if self._receive is not None:
            self._receive(body, self._now)
        elif len(self._body) + len(body) <= MOST_BODY:
            self._body += body
        else:
            raise Failure("too long", f"an answer of more than {MOST_BODY} bytes")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return  # "100 Continue" and its like come before the answer
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(HttpAnswer(status, bytes(self._body)))
