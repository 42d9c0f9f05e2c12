"""The least that a server can do for a stream, for others to be measured against: raw ASGI under uvicorn with uvloop
and httptools, constant bytes, one yield and one chunk a token. `python -m benchmarks.bare_server` prints its port.

A request that says {"step_ms": 5} gets a token every 5 ms together with all others that do; what its chunks say of
"created" is when the step was over, on the monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import uvicorn

# As long as a chunk of /v1/chat/completions.
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":%d,"model":"paced",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
TIMED = CHUNK.replace(b"%d", b"%.6f")
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


class Steps:
    """Wakes all waiting tasks, every so many seconds while there are any."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[bytes]] = []
        self._runs = False
        self._due = 0.0

    def next(self, seconds: float) -> asyncio.Future[bytes]:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.append(waiter)
        if not self._runs:
            self._runs, self._due = True, loop.time()
            self._later(seconds)
        return waiter

    def _later(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._due = max(self._due + seconds, loop.time())
        loop.call_at(self._due, self._step, seconds)

    def _step(self, seconds: float) -> None:
        chunk = TIMED % time.monotonic()
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(chunk)
        self._runs = bool(waiting)
        if waiting:
            self._later(seconds)


steps = Steps()


async def app(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    seconds = json.loads(body).get("step_ms", 0) / 1e3
    gone = asyncio.ensure_future(receive())
    await send(START)
    message = {"type": "http.response.body", "body": CHUNK % 1_700_000_000, "more_body": True}
    if not seconds:
        while not gone.done():
            await send(message)
            await asyncio.sleep(0)
        return
    while not gone.done():
        chunk = await steps.next(seconds)
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
