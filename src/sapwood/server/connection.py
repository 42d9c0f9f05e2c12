"""HTTP connections with limits: uvicorn's protocol, bounded in bytes, in time and in requests at once.

    uvicorn.Config(app, http=limited_protocol(HttpLimits()), ws="none", ...)

A connection is always in one phase. A head or body that is late or too large is refused with OpenAI's error body:

    FRESH --byte--> HEAD --headers--> BODY --end of body--> REPLY --response--> IDLE --byte--> HEAD ...
    any of them --refused, or closed while the client still sends--> ENDING --> GONE

All that is used of uvicorn's insides is used in this file. Nothing here runs for each chunk of a response."""

from __future__ import annotations

import asyncio
import enum
import math
import weakref
from collections import deque
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import HttpRefusal
from .inflight import Inflight
from .limits import LINGER_SECONDS, MAX_PIPELINED_REQUESTS, WRITE_PROGRESS_BYTES, HttpLimits
from .request_head import body_too_large, check_head, client_of, headers_too_large

HOLDS = "sapwood.holds"  # in a scope: called with the bytes that are kept of an answer
_NEVER = math.inf
_ONE_BYTE_CHUNK_BYTES = 6  # on the wire


def limited_protocol(limits: HttpLimits) -> type[LimitedProtocol]:
    """The class that `uvicorn.Config(http=...)` takes. Each server has its own, since the class counts its requests."""

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
    """The transport as uvicorn sees it. Closing and pausing go through the protocol, all else to the transport."""

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self._transport = transport
        self.write = transport.write  # without `__getattr__`: it is called for every chunk
        self.close = protocol.close
        self.is_closing = protocol.is_closing
        self.pause_reading = protocol.pause_reading
        self.resume_reading = protocol.resume_reading

    def let_go(self) -> None:
        """The connection is lost. Without references to the protocol, no garbage collector is needed to free both."""
        for name in ("close", "is_closing", "pause_reading", "resume_reading"):
            setattr(self, name, getattr(self._transport, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. It has at most one timer, which fires at the next deadline or before it: to move a deadline away
    costs nothing then."""

    limits: ClassVar[HttpLimits]
    in_flight: ClassVar[dict[str, int]]  # client address -> requests; without addresses that have none
    inflight: ClassVar[Inflight]  # the bytes that all connections hold together
    _raw: asyncio.Transport  # the transport itself; `transport` is the `_Transport` around it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = FRESH
        self._address = ""  # of the client, as `client_of` has it
        self._deadline = _NEVER  # of the phase; while reading is paused, never
        self._seconds_left = _NEVER  # of the phase, while reading is paused
        self._write_deadline = _NEVER
        self._unwritten = 0  # bytes in the write buffer when _write_deadline was set
        self._timer: asyncio.TimerHandle | None = None
        self._open: deque[RequestResponseCycle] = deque()  # requests without a complete response, oldest first
        self._bodies: deque[int] = deque()  # bytes received of the body of each open request
        self._answer = 0  # bytes that the application keeps for an answer
        self._unsent = 0  # bytes that wait for a slow reader
        self.held = 0  # bodies, answer and unsent bytes, as `inflight` counts them
        self._holds = _Holds(self)
        self._wire_bytes = 0  # received since the phase began, without the read in which it began
        self._body_bytes = 0
        self._keep_alive = True  # the connection stays open after this request
        self._refusal: HttpRefusal | None = None  # waits until earlier requests are answered
        self._upgrade: bytes | None = None  # a head that frames the body of a request whose upgrade is ignored
        self._replaying = False  # `_upgrade` is being parsed

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
        for cycle in self._open:  # uvicorn disconnects the newest only
            _disconnect(cycle)
        self._count(-len(self._open))
        self._open.clear()
        self._bodies.clear()
        self._answer = self._unsent = 0
        self._hold()
        super().connection_lost(exc)
        cast(_Transport, self.transport).let_go()

    def close(self) -> None:
        """Called where uvicorn closes the transport. A client that still sends would get a reset, and lose the answer:
        its connection ends slowly."""
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
            return  # it was received only so that the kernel sends no reset
        self._unset_keepalive_if_required()
        if self._phase in (FRESH, IDLE):
            self._begin_head()
        self._wire_bytes += len(data)
        try:
            self._parse(data)
            if self._phase is HEAD and self._wire_bytes > self.limits.header_bytes:
                raise headers_too_large(self.limits.header_bytes)
            # Trailers and chunk extensions are no part of the body: both count as headers do.
            framing = self._wire_bytes - self._body_bytes * _ONE_BYTE_CHUNK_BYTES
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
        if len(self._open) >= MAX_PIPELINED_REQUESTS:
            raise _too_many(f"At most {MAX_PIPELINED_REQUESTS} requests may wait for their answers on one connection.")
        if self._phase is not HEAD:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        self._check_head()
        super().on_headers_complete()
        self.headers = []  # takes trailers from here on, which the application does not get
        if not self.flow.write_paused:
            self._write_deadline = _NEVER
        self._phase = BODY
        self._wire_bytes = self._body_bytes = 0
        self._set_deadline(self.limits.body_seconds)
        self._open.append(self.cycle)
        self._bodies.append(0)
        self.scope[HOLDS] = self._holds  # type: ignore[literal-required]
        self._count(1)
        # A response that begins before the end of the body is the last one of its connection.
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self.limits.body_bytes:
            raise body_too_large(self.limits.body_bytes)
        if self._bodies:
            self._bodies[-1] += len(body)
            if not self._hold():
                raise _over_budget()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade is not None:
            return  # the body is yet to come
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
        self.scope["method"] = method.decode()  # a refusal needs it
        framing = check_head(self.limits, version, method, self.url, self.headers)
        if self.parser.should_upgrade():
            self._upgrade = b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n"
        most = self.limits.streams_per_client
        if 0 < most <= self.in_flight.get(self._address, 0):
            raise _too_many(f"At most {most} requests at once are taken from one address.")
        if version == "1.0":
            self.expect_100_continue = False  # HTTP/1.0 has no 100 Continue
        if not self.url.startswith(b"/"):
            target = httptools.parse_url(self.url)
            self.url = (target.path or b"/") + (b"?" + target.query if target.query else b"")

    def _stay_with_http(self, data: bytes) -> None:
        """Read on as if the client had asked for no upgrade (to h2c, say), as a server may. The parser takes all that
        follows an upgrade for another protocol, the body too: so a new parser reads a short head that frames the body,
        and then the body."""
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
        """Answer the request that is being read, after those before it, and end the connection. An application that
        has the request already gets `http.disconnect`."""
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
        """Write the answer and half-close. What the client still sends is dropped, so that no reset reaches it before
        it has read the answer."""
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
        """The method of the request that is being read; "" if it is not known yet."""
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
        """The application keeps `answer` bytes of an answer that is not written yet."""
        if self._open:
            self._answer = answer
            if not self._hold():
                self.give_up()

    def give_up(self) -> None:
        """Other connections need the memory. A request whose answer has not begun gets 503 with Retry-After; any other
        is cut off."""
        self.logger.info("%s:%d gives up what it holds", *(self.client or ("", 0)))
        cycle = self._open[0] if len(self._open) == 1 else None
        if cycle is None or cycle.response_started or self.flow.write_paused or self._raw.is_closing():
            self._raw.abort()
        elif self._phase is BODY:
            self._refuse(_over_budget())
        else:
            self._end(_over_budget().reply(self.server_state.default_headers, self._method()))
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
        else:  # no answer is being written, but the reader must take the rest of the last one
            self._watch_writes()

    def _watch_writes(self) -> None:
        """From now on the reader must take some bytes within write_seconds. None are added to the buffer until it
        has."""
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
        """Called where uvicorn pauses the transport, because the application does not read: the client's time stands
        still."""
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
            # The client waits for 100 Continue: the application has not read the body, or has only just begun to.
            self.expect_100_continue = self.cycle.waiting_for_100_continue
            self._set_deadline(self.limits.body_seconds)
        elif self._phase is HEAD:
            seconds = self.limits.header_seconds
            self._refuse(HttpRefusal(408, "header_timeout", f"The headers did not come within {seconds:g} seconds."))
        elif self._phase is BODY:
            seconds = self.limits.body_seconds
            self._refuse(HttpRefusal(408, "body_timeout", f"The body did not come within {seconds:g} seconds."))

    def _check_reader(self) -> None:
        if self._raw.get_write_buffer_size() > max(0, self._unwritten - WRITE_PROGRESS_BYTES):
            self._write_deadline = _NEVER
            self.logger.info("%s:%d aborted: it stopped reading", *(self.client or ("", 0)))
            self._raw.abort()
        else:
            self._watch_writes()


class _Holds:
    """In a request's scope: the application calls it with the bytes that it keeps. Its reference to the connection is
    weak, since the connection holds the request."""

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


def _too_many(message: str) -> HttpRefusal:
    return HttpRefusal(429, "too_many_requests", message, (b"retry-after", b"1"))


def _over_budget() -> HttpRefusal:
    return HttpRefusal(
        503,
        "inflight_full",
        "Requests and answers fill the memory that this server has for them: try again later.",
        (b"retry-after", b"1"),
    )
