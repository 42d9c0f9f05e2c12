"""Streams as many clients read them: one thread and epoll. What comes is kept with its time, and looked at when all is
over: reading costs next to nothing while a server is measured."""

from __future__ import annotations

import heapq
import json
import re
import select
import socket
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
WIDTH = 5  # characters of every token's text: a space and four letters
_TOKENS = re.compile(rb'"created":([0-9.]+)[^\n]*?"content":"((?: [a-z]{4})+)"')


class Chunks(NamedTuple):
    """What a stream has brought, token by token."""

    came: Times  # when each token came
    made: Times  # what its chunk says of "created"
    events: Times  # when each event came


class Stream:
    """One request and its answer. `closed`: when we have closed it; `ended`: when the server has."""

    def __init__(self, connection: socket.socket, request: bytes, name: int) -> None:
        self.connection = connection
        self.unsent = memoryview(request)
        self.name = name
        self.times: list[float] = []
        self.data: list[bytes] = []
        self.ended: float | None = None
        self.closed: float | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.data)

    def when(self, ends: list[int]) -> Times:
        """When the bytes before each of these places had come."""
        return np.array(self.times)[np.searchsorted(np.cumsum([len(data) for data in self.data]), ends)]

    def chunks(self) -> Chunks:
        found = [(each.end(), float(each[1]), len(each[2]) // WIDTH) for each in _TOKENS.finditer(self.body)]
        came = self.when([end for end, _, _ in found]) if found else np.empty(0)
        counts = np.array([count for _, _, count in found], np.int64)
        made = np.array([made for _, made, _ in found])
        return Chunks(np.repeat(came, counts), np.repeat(made, counts), came)


class Clients:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: list[Stream] = []
        self.open = 0
        self._poll = select.epoll()
        self._by_file: dict[int, Stream] = {}
        self._due: list[tuple[float, int, bytes]] = []

    def begin(self, request: bytes, name: int = 0) -> Stream:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        stream = Stream(connection, request, name)
        self.streams.append(stream)
        self._by_file[connection.fileno()] = stream
        self._poll.register(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)
        self.open += 1
        return stream

    def begin_at(self, requests: Iterable[tuple[float, bytes]]) -> None:
        """While `read` runs, these begin at their times."""
        for at, (when, request) in enumerate(requests):
            heapq.heappush(self._due, (when, at, request))

    def read(self, until: float) -> float:
        """Take what comes until then, or until every stream has ended. The time when it returned."""
        clock, poll, files, due = time.monotonic, self._poll.poll, self._by_file, self._due
        while (self.open or due) and (now := clock()) < until:
            while due and due[0][0] <= now:
                self.begin(heapq.heappop(due)[2])
            for file, mask in poll(min(until, due[0][0] if due else until) - now):
                stream = files[file]
                try:
                    if mask & select.EPOLLOUT:
                        self._send(stream)
                    data = stream.connection.recv(1 << 18)
                except BlockingIOError:
                    continue
                except ConnectionError:
                    data = b""
                if data:
                    stream.times.append(clock())
                    stream.data.append(data)
                else:
                    stream.ended = clock()
                    self._drop(stream)
        return clock()

    def _send(self, stream: Stream) -> None:
        stream.unsent = stream.unsent[stream.connection.send(stream.unsent) :]
        if not stream.unsent:
            self._poll.modify(stream.connection.fileno(), select.EPOLLIN)

    def hang_up(self, stream: Stream) -> None:
        if stream.ended is None and stream.closed is None:
            stream.closed = time.monotonic()
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        del self._by_file[stream.connection.fileno()]
        stream.connection.close()
        self.open -= 1

    def close(self) -> None:
        for stream in list(self._by_file.values()):
            self.hang_up(stream)
        self._poll.close()


def post(path: str, body: Any) -> bytes:
    raw = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    ).encode() + raw
