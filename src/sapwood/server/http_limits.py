"""HTTP connections with limits: uvicorn's protocol, bounded in bytes, in time and in requests at once.

    uvicorn.Config(app, http=limited_protocol(HttpLimits()), ws="none", ...)

A connection is always in one phase, and what is late or too large there is refused with OpenAI's error body:

    FRESH --byte--> HEAD --headers--> BODY --end of body--> REPLY --response--> IDLE --byte--> HEAD ...
    any of them --refused, or closed while the client still sends--> ENDING --> GONE

All that is used of uvicorn's insides is used in this file. Nothing here runs for each chunk of a response."""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import math
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sapwood.cache import whole_number

from .http_refusals import (
    HttpRefusal,
    body_too_large,
    check_head,
    headers_too_large,
    too_many,
    too_much_at_once,
)
from .inflight import Inflight

MOST_PIPELINED = 8  # requests of one connection that wait for their answers
LINGER_SECONDS = 2.0  # for a client that still sends to see the answer
WRITE_PROGRESS = 16 << 10  # bytes a slow reader takes within write_seconds
HOLDS = "sapwood.holds"  # in a scope: called with the bytes that are kept of an answer
_NEVER = math.inf
_CHUNK_OF_ONE = 6  # bytes on the wire of a chunk that holds one


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """What one connection, or one client, may ask of the server.

    header_bytes        of the request line and all headers: 431
    header_seconds      from connecting, or from the first byte of a request, to the end of its headers: 408; a
                        connection that never sent a byte is closed
    body_bytes          of a request's body, by its Content-Length or while it is read: 413
    body_seconds        for the whole body, not counting while the application does not read it: 408; up to twice
                        that for a client who waits for 100 Continue
    write_seconds       for a reader who stops: then the connection is aborted
    streams_per_client  requests in flight from one address (with IPv6: from one network /64), over all its connections:
                        429; 0: no limit. Behind a proxy, and on a Unix socket, all clients are one
    inflight_bytes      of bodies and of answers that are not taken, over all connections: 503
    """

    header_bytes: int = 64 << 10
    header_seconds: float = 10.0
    body_bytes: int = 32 << 20
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    streams_per_client: int = 0
    inflight_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        whole_number("header_bytes", self.header_bytes, 256, 16 << 20)
        whole_number("body_bytes", self.body_bytes, 1, 1 << 40)
        whole_number("streams_per_client", self.streams_per_client, 0, 1 << 20)
        whole_number("inflight_bytes", self.inflight_bytes, 1, 1 << 44)
        if self.inflight_bytes < self.body_bytes:
            raise ValueError(
                f"inflight_bytes must be from body_bytes ({self.body_bytes}) on, got {self.inflight_bytes}"
            )
        for field in ("header_seconds", "body_seconds", "write_seconds"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.01 <= value <= 86400:
                raise ValueError(f"{field} must be a number from 0.01 to 86400, got {value!r:.60}")
            object.__setattr__(self, field, float(value))


def limited_protocol(limits: HttpLimits) -> type[LimitedProtocol]:
    """The class that `uvicorn.Config(http=...)` takes; one for each server, since it counts the server's requests."""

    class Limited(LimitedProtocol):
        in_flight: ClassVar[dict[str, int]] = {}
        inflight: ClassVar[Inflight] = Inflight(limits.inflight_bytes)

    Limited.limits = limits
    return Limited


class Phase(enum.Enum):
    FRESH = enum.auto()  # connected, no byte yet
    IDLE = enum.auto()  # between requests; uvicorn's keep-alive timeout runs
    HEAD = enum.auto()  # request line and headers
    BODY = enum.auto()
    REPLY = enum.auto()  # the request is read, its answer is not finished
    ENDING = enum.auto()  # nothing is parsed any more
    GONE = enum.auto()


FRESH, IDLE, HEAD, BODY, REPLY, ENDING, GONE = Phase  # `Phase.HEAD` takes half a microsecond


class _Transport:
    """The connection as uvicorn sees it: closing it and pausing go through the protocol, all else straight to it."""

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self._transport = transport
        self.write = transport.write  # an attribute of its own: this is called for every chunk
        self.close = protocol.close
        self.is_closing = protocol.is_closing
        self.pause_reading = protocol.pause_reading
        self.resume_reading = protocol.resume_reading

    def let_go(self) -> None:
        """The connection is lost; without a reference back to it, it needs no garbage collector."""
        for name in ("close", "is_closing", "pause_reading", "resume_reading"):
            setattr(self, name, getattr(self._transport, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. It has at most one timer, which is never later than the next deadline, and may be earlier: moving
    a deadline away costs nothing."""

    limits: ClassVar[HttpLimits]
    in_flight: ClassVar[dict[str, int]]  # requests by client address, where there are any
    inflight: ClassVar[Inflight]  # what all connections hold together
    _raw: asyncio.Transport  # what `transport` stands for

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = FRESH
        self._address = ""  # of the client, as `client_of` has it
        self._deadline = _NEVER  # of the phase; never, while reading is paused
        self._seconds_left = _NEVER  # then
        self._write_deadline = _NEVER
        self._unwritten = 0  # bytes, when _write_deadline was set
        self._timer: asyncio.TimerHandle | None = None
        self._open: deque[RequestResponseCycle] = deque()  # without a complete response, oldest first
        self._bodies: deque[int] = deque()  # bytes that came of the bodies of these
        self._answer = 0  # bytes that the application keeps for an answer
        self._unsent = 0  # bytes that wait for a reader who is slow
        self.held = 0  # all three, as `inflight` counts them
        self._holds = _Holds(self)
        self._wire_bytes = 0  # read since the phase began, not counting the read it began in
        self._body_bytes = 0
        self._keep_alive = True  # after this request
        self._refusal: HttpRefusal | None = None  # waits for the answers to earlier requests
        self._upgrade: bytes | None = None  # a head that says how the body of a refused upgrade is framed
        self._replaying = False  # that head is being parsed

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        super().connection_made(cast(asyncio.Transport, _Transport(transport, self)))
        self._address = client_of(self.client)
        self._set_deadline(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = GONE
        self._deadline = self._write_deadline = _NEVER
        self._refusal = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for cycle in self._open:  # uvicorn tells the newest only
            _disconnect(cycle)
        self._count(-len(self._open))
        self._open.clear()
        self._bodies.clear()
        self._answer = self._unsent = 0
        self._hold()
        super().connection_lost(exc)
        cast(_Transport, self.transport).let_go()

    def close(self) -> None:
        """Where uvicorn closes the transport. A client that still sends would get a reset, and lose the answer."""
        if self.is_closing():
            return
        if self._phase in (HEAD, BODY, ENDING) or self.flow.read_paused:
            self._end(b"")
        else:
            self._raw.close()
            self._watch_writes()

    def is_closing(self) -> bool:
        return self._raw.is_closing() or (self._phase is ENDING and self._refusal is None)

    def shutdown(self) -> None:
        self._keep_alive = False
        super().shutdown()

    # Reading

    def data_received(self, data: bytes) -> None:
        if self._phase is ENDING:
            return  # read only so that the kernel sends no reset
        self._unset_keepalive_if_required()
        if self._phase in (FRESH, IDLE):
            self._begin_head()
        self._wire_bytes += len(data)
        try:
            self._parse(data)
            if self._phase is HEAD and self._wire_bytes > self.limits.header_bytes:
                raise headers_too_large(self.limits.header_bytes)
            # Neither trailers nor chunk extensions are body; both have to fit where headers do.
            framing = self._wire_bytes - self._body_bytes * _CHUNK_OF_ONE
            if self._phase is BODY and framing > self.limits.header_bytes:
                raise HttpRefusal(400, "bad_request", "The chunks of the body have too long extensions or trailers.")
        except HttpRefusal as refusal:
            self._refuse(refusal)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay_with_http(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, HttpRefusal):
                raise error.__context__ from None
            raise HttpRefusal(400, "bad_request", "This is not a valid HTTP/1.1 request.") from None

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        if len(self._open) >= MOST_PIPELINED:
            raise too_many(f"At most {MOST_PIPELINED} requests may wait for their answers on one connection.")
        if self._phase is not HEAD:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        self._check_head()
        super().on_headers_complete()
        self.headers = []  # for trailers: nothing of them belongs into the headers that the application has
        if not self.flow.write_paused:
            self._write_deadline = _NEVER
        self._phase = BODY
        self._wire_bytes = self._body_bytes = 0
        self._set_deadline(self.limits.body_seconds)
        self._open.append(self.cycle)
        self._bodies.append(0)
        self.scope[HOLDS] = self._holds  # type: ignore[literal-required]
        self._count(1)
        # A response before the end of the body says that it is the last one.
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self.limits.body_bytes:
            raise body_too_large(self.limits.body_bytes)
        if self._bodies:
            self._bodies[-1] += len(body)
            if not self._hold():
                raise too_much_at_once()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade is not None:
            return  # the body is still to come
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        self._phase = REPLY
        self._set_deadline(_NEVER)
        self._wire_bytes = 0

    def _begin_head(self) -> None:
        self._phase = HEAD
        self._wire_bytes = self._body_bytes = 0
        self._set_deadline(self.limits.header_seconds)

    def _check_head(self) -> None:
        version, method = self.parser.get_http_version(), self.parser.get_method()
        self.scope["method"] = method.decode()  # for the answer, if this is refused
        framing = check_head(self.limits, version, method, self.url, self.headers)
        if self.parser.should_upgrade():
            self._upgrade = b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n"
        most = self.limits.streams_per_client
        if 0 < most <= self.in_flight.get(self._address, 0):
            raise too_many(f"At most {most} requests at once are taken from one address.")
        if version == "1.0":
            self.expect_100_continue = False  # it would not know what to do with a 100
        if not self.url.startswith(b"/"):
            target = httptools.parse_url(self.url)
            self.url = (target.path or b"/") + (b"?" + target.query if target.query else b"")

    def _stay_with_http(self, data: bytes) -> None:
        """Reads on as if no upgrade (to h2c, say) had been asked for, as a server may. The parser takes what follows an
        upgrade for another protocol, the body too: so another parser is told how the body is framed."""
        assert self._upgrade is not None
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        head, self._upgrade = self._upgrade, None
        self._replaying = True
        self._parse(head)
        self._replaying = False
        self._parse(data)

    # Refusing and ending

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Answers the request that is being read, after those before it, and ends the connection. An application that
        has it already is told that its client has gone."""
        host, port = self.client or ("", 0)
        self.logger.info("%s:%d refused: %d %s", host, port, refusal.status, refusal.code)
        answer = refusal.reply(self.server_state.default_headers, self._method())
        if self._phase is BODY:
            if self._open and self._open[-1] is self.cycle:
                self._open.pop()
                self._bodies.pop()
                self._hold()
                self._count(-1)
                if self.pipeline and self.pipeline[0][0] is self.cycle:
                    self.pipeline.popleft()
                _disconnect(self.cycle)
            if self.cycle.response_started:
                answer = b""
        if self._open:
            self._phase = ENDING
            self._set_deadline(_NEVER)
            self._refusal = refusal
        else:
            self._end(answer)

    def _end(self, answer: bytes) -> None:
        """Writes the answer and half-closes; what the client still sends is dropped, so that it gets no reset before it
        has read the answer."""
        self._phase, self._refusal = ENDING, None
        for cycle in self._open:
            _disconnect(cycle)
        if self._raw.is_closing():
            return
        if answer:
            self._raw.write(answer)
        if self._raw.can_write_eof():
            self._raw.write_eof()
        self.flow.resume_reading()
        self._set_deadline(LINGER_SECONDS)

    def on_response_complete(self) -> None:
        self._open.popleft()
        self._bodies.popleft()
        self._answer = 0
        self._hold()
        self._count(-1)
        super().on_response_complete()
        if self._refusal is not None and not self._open:
            self._end(self._refusal.reply(self.server_state.default_headers, self._method()))
        elif not self._open:
            if self._phase is REPLY:
                self._phase = IDLE
            self._watch_writes()

    def _method(self) -> str:
        """Of the request being read, if that is known."""
        return "" if self.scope is None else self.scope.get("method", "")

    def _count(self, requests: int) -> None:
        if not self.limits.streams_per_client:
            return
        address = self._address
        if now := self.in_flight.get(address, 0) + requests:
            self.in_flight[address] = now
        else:
            self.in_flight.pop(address, None)

    # Memory

    def _hold(self) -> bool:
        return self.inflight.hold(self, sum(self._bodies) + self._answer + self._unsent)

    def keeps(self, answer: int) -> None:
        """The application keeps so many bytes of an answer that is not written yet."""
        if self._open:
            self._answer = answer
            if not self._hold():
                self.give_up()

    def give_up(self) -> None:
        """Others need what is held here. Who has no answer yet is told to come again; the rest ends in the middle."""
        self.logger.info("%s:%d gives up what it holds", *(self.client or ("", 0)))
        cycle = self._open[0] if len(self._open) == 1 else None
        if cycle is None or cycle.response_started or self.flow.write_paused or self._raw.is_closing():
            self._raw.abort()
        elif self._phase is BODY:
            self._refuse(too_much_at_once())
        else:
            self._end(too_much_at_once().reply(self.server_state.default_headers, self._method()))
            self._open.clear()
            self._bodies.clear()
            self._answer = 0
            self._count(-1)

    # Time

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent = 0
        self._hold()
        if self._open:
            self._write_deadline = _NEVER
        else:  # nothing more is written, but what there is must go
            self._watch_writes()

    def _watch_writes(self) -> None:
        """From now on the reader must take something: nothing is added to the buffer until it has."""
        self._write_deadline = _NEVER
        if unwritten := self._raw.get_write_buffer_size():
            self._unwritten = unwritten
            if self.flow.write_paused:
                self._unsent = unwritten
                if not self._hold():
                    self.loop.call_soon(self._raw.abort)  # not in the middle of a write
            self._write_deadline = self.loop.time() + self.limits.write_seconds
            self._wake_at(self._write_deadline)

    def pause_reading(self) -> None:
        """Where uvicorn pauses the transport: the application does not read, and the client's time stands still."""
        self._raw.pause_reading()
        self._seconds_left, self._deadline = self._deadline - self.loop.time(), _NEVER

    def resume_reading(self) -> None:
        self._raw.resume_reading()
        self._set_deadline(self._seconds_left)

    def _set_deadline(self, seconds: float) -> None:
        if self.flow.read_paused:
            self._seconds_left = seconds
        else:
            self._deadline = self.loop.time() + seconds
            self._wake_at(self._deadline)

    def _wake_at(self, when: float) -> None:
        if when == _NEVER:
            return
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._timer = None
        now = self.loop.time()
        if now >= self._deadline:
            self._late()
        if now >= self._write_deadline:
            self._check_reader()
        self._wake_at(min(self._deadline, self._write_deadline))

    def _late(self) -> None:
        self._deadline = _NEVER
        if self._phase is ENDING:
            self._raw.abort()
        elif self._phase is FRESH:
            self._raw.close()
        elif self._raw.is_closing():
            return
        elif self._phase is BODY and self.expect_100_continue:
            # The application has not asked for the body, or perhaps only just now.
            self.expect_100_continue = self.cycle.waiting_for_100_continue
            self._set_deadline(self.limits.body_seconds)
        elif self._phase is HEAD:
            seconds = self.limits.header_seconds
            self._refuse(HttpRefusal(408, "header_timeout", f"The headers did not come within {seconds:g} seconds."))
        elif self._phase is BODY:
            seconds = self.limits.body_seconds
            self._refuse(HttpRefusal(408, "body_timeout", f"The body did not come within {seconds:g} seconds."))

    def _check_reader(self) -> None:
        if self._raw.get_write_buffer_size() > max(0, self._unwritten - WRITE_PROGRESS):
            self._write_deadline = _NEVER
            self.logger.info("%s:%d aborted: it stopped reading", *(self.client or ("", 0)))
            self._raw.abort()
        else:
            self._watch_writes()


def client_of(client: tuple[str, int] | None) -> str:
    """Whom an address stands for: itself, or the network of 2^64 addresses that one host has with IPv6. All clients of
    a Unix socket are one."""
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


class _Holds:
    """What an application is given to tell what it keeps. It holds no reference to the connection, which holds the
    request that this is a part of."""

    __slots__ = ("_connection",)

    def __init__(self, connection: LimitedProtocol) -> None:
        self._connection = weakref.ref(connection)

    def __call__(self, answer: int) -> None:
        connection = self._connection()
        if connection is not None:
            connection.keeps(answer)


def _disconnect(cycle: RequestResponseCycle) -> None:
    """The application gets `http.disconnect`, and what it sends goes nowhere."""
    cycle.disconnected = True
    cycle.waiting_for_100_continue = False
    cycle.message_event.set()
