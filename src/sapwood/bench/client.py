"""A client that measures a server: connections that stay open, bodies handed on the moment they arrive, and a name for
every way in which a request can fail. Nothing is scheduled for a piece of a body: one call of `data_received` takes it
from the socket to its reader. Tokens are what `usage` says, never how many pieces their text came in."""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser

from sapwood import __version__

Receive = Callable[[bytes, float], None]  # a piece of a body, and when it came (time.perf_counter)
MOST_BODY = 64 << 20  # bytes of an answer that is not streamed
SILENT = "nothing said"  # the kind of a failure: tokens, and neither text nor their ids
_MOST_LINE = 16 << 20  # bytes of one event
_Count = Annotated[int, msgspec.Meta(ge=0)]


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
                    continue  # closed by the server while it was not used
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
            self.abort()  # no request waits for it
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


# ---- answers in OpenAI's form, read and timed while they arrive


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None  # of a completion
    delta: _Delta | None = None  # of a chat
    token_ids: list[int] | None = None  # where they were asked for
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether tokens came with it. A completion's may have no text, such as the first half of a character; a chat
        begins with a role and may end with a reason, which are none."""
        if self.delta is None:
            return bool(self.text or self.token_ids) or self.finish_reason is None
        delta = self.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Heard(NamedTuple):
    """One request that was answered. Times are of time.perf_counter."""

    sent: float
    times: array[float]  # of each piece of the answer, one or more
    end: float
    prompt: int  # tokens, all as `usage` has them
    cached: int | None  # None: the server does not say
    output: int
    text: str  # of a chat


class Stream:
    """An answer while it arrives."""

    def __init__(self) -> None:
        self.times = array("d")
        self.text: list[str] = []
        self.usage: _Usage | None = None
        self._ended = False
        self._rest = b""  # of a line that is not complete

    def receive(self, piece: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MOST_LINE:
            raise Failure("not understood", f"an event of more than {_MOST_LINE} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            chunk = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise Failure("not understood", f"{error!s:.100}") from None
        if chunk.error is not None:
            raise Failure("error in the stream", message_of(chunk.error))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            if choice.says_something:
                self.times.append(now)
                if choice.delta is not None:
                    self.text.append(choice.delta.content or "")

    def close(self) -> _Usage:
        """Its usage, when no more comes. Raises Failure if something is missing."""
        if not self._ended:
            raise Failure("broken", "the stream ended without [DONE]")
        if self.usage is None:
            raise Failure("no usage", "the server does not say how many tokens there were")
        if not self.times:
            raise Failure(SILENT, f"{self.usage.completion_tokens} tokens, and no text")
        return self.usage


def message_of(error: Any) -> str:
    """What an error of OpenAI's form says, cut to a line."""
    if isinstance(error, bytes):
        try:
            error = msgspec.json.decode(error)
        except msgspec.DecodeError:
            error = error.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(error, dict) and name in error:
            error = error[name]
    return " ".join(str(error).split())[:200]


async def ask(client: Client, path: str, body: bytes) -> Heard:
    """Raises Failure."""
    stream = Stream()
    sent = time.perf_counter()
    answer = await client.post(path, body, stream.receive)
    end = time.perf_counter()
    if answer.status != 200:
        raise Failure(f"status {answer.status}", message_of(answer.body))
    usage = stream.close()
    details = usage.prompt_tokens_details
    return Heard(
        sent,
        stream.times,
        end,
        usage.prompt_tokens,
        None if details is None else details.cached_tokens,
        usage.completion_tokens,
        "".join(stream.text),
    )
