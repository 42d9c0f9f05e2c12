"""One HTTP request, as raw ASGI: its body, its answer in one piece or as a stream of events, and its end.

A stream is written piece by piece as tokens come, in two halves: `render` makes the bytes of events, `_write_events`
sends them. When a step has ended, `render` is called for every request that it has news for, and only then do the tasks
run that send: all writes of a step follow each other. A write that finds its client awake, because another stream was
just written to, costs a fraction of one that wakes it.

A client that leaves is noticed at once and its request aborted; one that reads slowly gets pieces together; one that
stops reading is cut off (connection.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec

from .connection import HOLDS
from .errors import ApiError, Disconnected, bad, shown
from .generation import Generation, TextPiece
from .limits import MAX_QUERY_FIELDS
from .request_head import Caller

Headers = list[tuple[bytes, bytes]]
_KEEP_ALIVE = b": waiting\n\n"
_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Writer(Protocol):
    """How an API writes a generation."""

    def opening(self) -> bytes:
        """Events before the first piece."""

    def piece(self, piece: TextPiece) -> bytes:
        """Events for what has become final; b"" if there is nothing to show."""

    def closing(self) -> bytes:
        """Events behind the last piece."""

    def failed(self, error: ApiError) -> bytes:
        """Events for a stream that ends with an error."""

    def whole(self) -> Any:
        """The answer in one piece, after all pieces went through `piece`."""


class Call:
    """A request and its answer."""

    def __init__(self, scope: Any, receive: Any, send: Any, caller: Caller, headers: Headers) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.caller = caller
        self.status = 0
        self.generation: Generation | None = None  # that runs for the request
        self._headers = headers  # of the answer, whatever it is

    async def body(self) -> bytes:
        parts = []
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            if message.get("body"):
                parts.append(message["body"])
            if not message.get("more_body"):
                return b"".join(parts)

    async def answer(
        self, status: int, body: bytes, content_type: bytes = b"application/json", more: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        given = [(name.lower().encode(), value.encode()) for name, value in (more or {}).items()]
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *given, *self._headers]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def json(self, value: Any, status: int = 200) -> None:
        await self.answer(status, msgspec.json.encode(value))

    async def error(self, error: ApiError) -> None:
        await self.answer(error.status, error.encoded(), more=error.headers)

    async def whole(self, generation: Generation, writer: Writer) -> None:
        """Answer in one piece, when all has come."""
        self.generation = generation
        job = generation.job

        def render() -> None:
            for piece in generation.take():
                job.keeps(len(writer.piece(piece)))  # about as much as the event that a stream would have

        async with _Reading(self, generation, render):
            while generation.open:
                await job.rendered()
                if job.news:  # there is more already, but other requests have their turn first
                    await asyncio.sleep(0)
        await self.json(writer.whole())

    async def stream(self, generation: Generation, writer: Writer, keepalive: float) -> None:
        """Answer as tokens come. Nothing is sent before the engine has accepted the request: a refusal is a 4xx."""
        self.generation = generation
        job = generation.job

        def render() -> list[bytes]:
            if self.status and not job.idle:
                return [writer.piece(piece) for piece in generation.take()]
            events = [] if self.status else [writer.opening()]  # `take` raises where the engine refuses the request
            if job.idle:
                job.idle = False
                return [*events, _KEEP_ALIVE]
            return events + [writer.piece(piece) for piece in generation.take()]

        async with _Reading(self, generation, render, keepalive):
            try:
                await asyncio.create_task(self._write_events(generation))
                await self._write(writer.closing())
            except ApiError as error:
                if not self.status:
                    raise
                await self._write(writer.failed(error))
        await self.send({"type": "http.response.body", "body": b""})

    async def _write_events(self, generation: Generation) -> None:
        """Send the events that `render` has made. This is a task of its own: a wake-up for each token costs more, the
        more coroutines wait for each other."""
        send, rendered = self.send, generation.job.rendered
        while generation.open:
            events = await rendered()
            if not self.status:
                self.status = 200
                await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM, *self._headers]})
            for event in events:
                if event:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            if generation.job.news:  # there is more already, but other requests have their turn first
                await asyncio.sleep(0)

    async def _write(self, event: bytes) -> None:
        await self.send({"type": "http.response.body", "body": event, "more_body": True})


def _nothing() -> None:
    pass


class _Reading:
    """A request reads a generation: its job calls `render` for news, a client that leaves ends it, and after
    `keepalive` seconds without news `render` is called for a sign of life."""

    def __init__(
        self, call: Call, generation: Generation, render: Callable[[], Any], keepalive: float | None = None
    ) -> None:
        self._call = call
        self._generation = generation
        self._job = generation.job
        self._job.render = render
        self._job.holds = call.scope.get(HOLDS, self._job.holds)
        self._keepalive = keepalive
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.ensure_future(self._call.receive())
        self._task.add_done_callback(lambda _: self._job.leave())
        if self._keepalive is not None:
            self._tick()

    async def __aexit__(self, *_: object) -> None:
        self._generation.close()
        self._job.render = _nothing  # `render` refers to the job: without that, no garbage collector has to free them
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task

    def _tick(self) -> None:
        """Every `keepalive` seconds: if nothing has come since the last time, a comment is sent."""
        assert self._keepalive is not None
        now = time.monotonic()
        if now - self._job.since >= self._keepalive * 0.9:
            self._job.idle = True
            self._job.since = now
            self._job.wake()
        self._timer = asyncio.get_running_loop().call_later(self._keepalive, self._tick)


def new_id(prefix: str) -> str:
    """Of a request or an answer."""
    return f"{prefix}-{secrets.token_hex(12)}"


def event(value: Any) -> bytes:
    """One event of a stream, as OpenAI writes them."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One event of a stream, as Anthropic and the Responses API write them."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


def query_texts(call: Call, name: str) -> list[str]:
    """All values of a field of the query."""
    try:
        given = parse_qs(
            call.scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS
        )
    except ValueError:
        raise bad(name, f"the query has more than {MAX_QUERY_FIELDS} fields") from None
    return given.get(name, [])


def query_text(call: Call, name: str, default: str) -> str:
    return [default, *query_texts(call, name)][-1]


def query_number(call: Call, name: str, default: int, most: int) -> int:
    text = query_text(call, name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
        raise bad(name, f"{name} must be a number from 1 to {most}, got {shown(text)}")
    return int(text)
