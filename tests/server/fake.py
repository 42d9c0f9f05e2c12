"""A server of OpenAI's HTTP in a thread, without a model: it says what a test tells it to, also what none should."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """What a request gets."""

    pieces: tuple[str, ...] = ("Hello", ",", " you")
    tokens: int = 7  # said in `usage`; on purpose not the number of pieces
    cached: int | None = 3
    usage: bool = True
    cache: dict[str, Any] | None = None
    reasoning: str = ""
    wait: float = 0.0  # seconds before the first piece
    gap: float = 0.0  # between two
    status: int = 200
    message: str = "because of the test"
    broken_after: int | None = None  # pieces, then the connection is closed
    hangs_after: int | None = None  # pieces, then nothing until the client goes
    error_after: int | None = None  # pieces, then an event that is an error
    ids: bool = False  # pieces are told as token ids, without text
    raw: bytes | None = None  # sent as it is, and the connection is closed
    close: bool = False  # after the answer, without a word


@dataclass
class Seen:
    """A request, and when it came (time.perf_counter)."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float


@dataclass
class Fake:
    """`reply` is asked for every request but that for the models."""

    reply: Callable[[int, dict[str, Any]], Reply] = lambda number, body: Reply()
    tls: ssl.SSLContext | None = None
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    most: int = 0  # requests at a time
    gone: threading.Event = field(default_factory=threading.Event)  # a client went before the end
    url: str = ""
    _running: int = 0

    def __enter__(self) -> Fake:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=[started], daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        async def run() -> None:
            self._stop = asyncio.Event()
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0, ssl=self.tls)
            scheme = "http" if self.tls is None else "https"
            self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            started.set()
            await self._stop.wait()
            server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._loop.run_until_complete(run())
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._request(reader, writer):
                pass
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may be used again."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        path = first.split()[1]
        if path == "/v1/models":
            _answer(writer, 200, {"data": [{"id": "fake"}]})
            return True
        seen = Seen(path, headers, json.loads(data), time.perf_counter())
        self.seen.append(seen)
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            return await self._say(self.reply(len(self.seen) - 1, seen.body), seen, reader, writer)
        finally:
            self._running -= 1

    async def _say(self, reply: Reply, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if reply.raw is not None:
            writer.write(reply.raw)
            return False
        if reply.status != 200:
            _answer(writer, reply.status, {"error": {"message": reply.message}})
            return not reply.close
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chat = seen.path.endswith("/chat/completions")
        if chat:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if reply.reasoning:
            _event(writer, {"choices": [{"delta": {"reasoning_content": reply.reasoning}}]})
        await asyncio.sleep(reply.wait)
        for number, piece in enumerate([*reply.pieces, None]):
            if reply.broken_after == number:
                await writer.drain()
                return False
            if reply.hangs_after == number:
                if not await reader.read(1):
                    self.gone.set()
                return False
            if reply.error_after == number:
                _event(writer, {"error": {"message": reply.message, "code": 500}})
                return False
            if piece is not None:
                await asyncio.sleep(reply.gap if number else 0)
                said = {"text": "", "token_ids": [number]} if reply.ids else {"text": piece}
                _event(writer, {"choices": [{"delta": {"content": piece}} if chat else said]})
                await writer.drain()
        _chunk(writer, b": a comment\n\n")
        end = {"finish_reason": "length"}
        _event(writer, {"choices": [{"delta": {}, **end} if chat else {"text": "", **end}]})
        if reply.usage:
            _event(writer, {"choices": [], "usage": self._usage(reply, seen.body), "cache": reply.cache})
        _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")
        return not reply.close

    @staticmethod
    def _usage(reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
        said = body.get("messages", [])
        prompt = len(body["prompt"]) if "prompt" in body else sum(len(each["content"].split()) for each in said)
        details = None if reply.cached is None else {"cached_tokens": reply.cached}
        return {"prompt_tokens": prompt, "completion_tokens": reply.tokens, "prompt_tokens_details": details}


def _answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
