"""The memory that requests hold: bodies that come and answers that nobody takes have a budget, and it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import select
import socket
import weakref
from typing import Any

import numpy as np
import pytest

from sapwood.engine.params import SamplingParams
from sapwood.server import inflight
from sapwood.server.connection import HOLDS
from sapwood.server.generation import MAX_TAKEN_TOKENS, Generation, Model, Prompt, TextPiece
from sapwood.server.inflight import Inflight
from sapwood.server.limits import HttpLimits
from sapwood.server.process import engine_client as links
from sapwood.server.process.engine_client import _LIKELY, _TOKEN, EngineJob
from sapwood.server.process.messages import End

from . import test_http_limits
from .kit import Running as Process
from .kit import paced_flags, until
from .scripted import Scripted, tokens
from .test_http_limits import App, Client, Running, chunk, eventually, get, post, post_head, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}


# ---- the budget


class Somebody:
    def __init__(self, budget: Inflight) -> None:
        self.budget = budget
        self.held = 0
        self.gave_up = False

    def holds(self, bytes: int) -> bool:
        return self.budget.hold(self, bytes)

    def give_up(self) -> None:
        self.gave_up = True


def test_small_ones_are_served_beside_large_ones():
    """Of those that hold more than a little the last one gives up, and its bytes are there at once.

    Mutation: `hold` refuses whoever asks; it takes the first, or the one with most; it leaves `used` as it is.
    """
    budget = Inflight(100)
    large = [Somebody(budget) for _ in range(3)]
    small = [Somebody(budget) for _ in range(20)]
    assert [each.holds(30) for each in large] == [True] * 3 and budget.used == 90
    assert all(each.holds(2) for each in small)
    assert [each.gave_up for each in large] == [False, False, True] and budget.used == 100
    assert not large[2].holds(30)
    assert budget.used == 100 and not any(each.gave_up for each in small)
    for each in (*large, *small):
        assert each.holds(0)
    assert budget.used == 0 and not budget._holders


def test_somebody_is_served_to_the_end():
    """Many that are alike: those who began first go on, or none would ever come to its end.

    Mutation: `hold` looks for the largest.
    """
    budget = Inflight(1000)
    many = [Somebody(budget) for _ in range(40)]
    done = 0
    for size in range(1, 101):
        done = 0
        for each in many:
            if not each.gave_up:
                each.gave_up = not each.holds(size)
        assert budget.used == sum(each.held for each in many) <= 1000
    done = [each.held == 100 for each in many]
    assert done == [True] * 10 + [False] * 30


def test_one_that_alone_is_too_much():
    """It gives up, and nobody else does.

    Mutation: `hold` says True.
    """
    budget = Inflight(100)
    one, other = Somebody(budget), Somebody(budget)
    assert one.holds(10) and not other.holds(101)
    assert budget.used == one.held == 10 and not one.gave_up and other.held == 0
    with pytest.raises(ValueError, match="inflight_bytes must be from body_bytes"):
        HttpLimits(body_bytes=100, inflight_bytes=99)


def test_memory_goes_back_to_the_system(monkeypatch):
    """The C library keeps what was freed of many bodies: after so much of it, it is asked to give it back.

    Mutation: `_release` counts nothing; `hold` does not call it for those who give up.
    """

    async def story() -> None:
        given_back = asyncio.Event()
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(inflight, "_TRIM_DELAY_SECONDS", 0.0)
        monkeypatch.setattr(inflight, "give_back", lambda: loop.call_soon_threadsafe(given_back.set))
        budget = Inflight(2 * inflight._TRIM_BYTES)
        one, other = Somebody(budget), Somebody(budget)
        assert one.holds(inflight._TRIM_BYTES // 2) and one.holds(0)
        assert other.holds(2 * inflight._TRIM_BYTES) and not other.holds(2 * inflight._TRIM_BYTES + 1)
        await given_back.wait()

    inflight.give_back()
    asyncio.run(asyncio.wait_for(story(), 240))


# ---- bodies

SMALL = HttpLimits(
    header_seconds=240, body_seconds=240, write_seconds=240, body_bytes=1_000_000, inflight_bytes=3_000_000
)


class Holding(App):
    """Reads a body, and answers when it is told to. /keep?N keeps N bytes of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in ("/wait", "/keep"):
            while (await receive())["more_body"]:
                pass
            self.loop = asyncio.get_running_loop()
            gone = asyncio.ensure_future(receive())
            if scope["path"] == "/keep":
                scope[HOLDS](int(scope["query_string"]))
            self.entered.release()
            waiting = asyncio.ensure_future(self.go.wait())
            await asyncio.wait([gone, waiting], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.disconnected.release()
            waiting.cancel()
            await self.answer(send, 200, b"at last")
        else:
            await super().__call__(scope, receive, send)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(test_http_limits, "App", Holding)
    with running(SMALL) as server:
        yield server
    assert server.protocol.inflight.used == 0 and not server.protocol.inflight._holders


def used(server: Running) -> int:
    return server.protocol.inflight.used


def release(server: Running) -> None:
    """The applications that wait answer now."""
    server.app.loop.call_soon_threadsafe(server.app.go.set)


def works(server: Running) -> None:
    assert server.send(post("/good", b"x" * 1000)).answer().status == 200


def test_bodies_that_never_end_leave_room_for_others(server: Running):
    """Each of them may be so large; together they may not. Those that are too many hear of it, small requests are
    served all the while, and what the flood held is there again when it leaves.

    Mutation: `on_body` does not call `_hold`; `connection_lost` does not; `_refuse` does not.
    """
    body = b"x" * 900_000
    flood: list[Client] = []
    for _ in range(10):
        flood.append(server.send(post_head("/slow", b"content-length: 1000000"), body))
        if len(flood) > 3:  # it pushes out the one before it, or has to go itself
            (gone, *more), _, _ = select.select([client.sock for client in flood], [], [], 240)
            out = next(client for client in flood if client.sock is gone)
            assert not more and flood.index(out) >= 2
            flood.remove(out)
            answer = out.last_answer()
            assert answer.status == 503 and answer.headers["retry-after"] == "1"
            error = json.loads(answer.body)["error"]
            assert (error["code"], error["type"]) == ("inflight_full", "service_unavailable_error")
        assert eventually(lambda: used(server) == len(flood) * 900_000)
        works(server)
    for client in flood:
        assert client.send(b"x" * 100_000).answer().body == b"/slow 1000000"
    for _ in range(3):
        server.send(post_head("/slow", b"content-length: 1000000"), body)
    assert eventually(lambda: used(server) == 2_700_000)
    for client in server.clients:
        client.sock.close()
    assert eventually(lambda: used(server) == 0)
    assert server.send(post("/good", b"x" * 1_000_000)).answer().status == 200


def test_bodies_count_until_they_are_answered(server: Running):
    """What was read is parsed, and waits. One that gives up has its answer, and its application hears of it.

    Mutation: `on_message_complete` sets the count back; `give_up` aborts, or does nothing.
    """
    waiting = []
    for number in range(4):
        waiting.append(server.send(post("/wait", b"x" * 600_000)))
        assert server.app.entered.acquire(timeout=240)
        assert used(server) == (number + 1) * 600_000
    assert server.send(post("/wait", b"x" * 900_000)).last_answer().status == 503
    small = [server.send(post("/wait", b"x" * 100_000)) for _ in range(7)]
    assert server.app.saw_disconnect()
    assert waiting[3].last_answer().status == 503
    works(server)
    release(server)
    assert [client.answer().body for client in (*waiting[:3], *small)] == [b"at last"] * 10
    assert eventually(lambda: used(server) == 0)


def test_chunked_and_pipelined_bodies_count(server: Running):
    """By what came, as nobody said before how much it would be; each for itself, until its own answer.

    Mutation: `on_response_complete` does not take the first of `_bodies`; `on_body` adds to the first.
    """
    client = server.send(post_head("/slow", b"transfer-encoding: chunked"), chunk(b"x" * 400_000))
    assert eventually(lambda: used(server) == 400_000)
    client.send(b"0\r\n\r\n")
    assert client.answer().status == 200
    assert eventually(lambda: used(server) == 0)
    client = server.send(post("/wait", b"x" * 50_000) + post("/hold", b"x" * 60_000))
    assert server.app.entered.acquire(timeout=240)
    assert eventually(lambda: used(server) == 110_000)
    release(server)
    assert client.answer().body == b"at last"
    assert eventually(lambda: used(server) == 60_000)
    client.sock.close()
    assert eventually(lambda: used(server) == 0)


# ---- answers


def stopped(server: Running, path: str) -> Client:
    """A reader who takes the beginning of an answer, and no more."""
    client = server.connect(receive_buffer=4096)
    client.send(get(path))
    client.sock.recv(1, socket.MSG_PEEK)
    return client


def test_answers_that_nobody_takes_have_a_budget(server: Running):
    """Readers who stop hold what was written for them. Those that are too many are cut, and what they held comes back;
    so does what the others hold when they leave.

    Mutation: `_watch_writes` does not count; `give_up` does not abort; `connection_lost` leaves `_unsent`.
    """
    server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    first = stopped(server, "/large?1200000")
    assert eventually(lambda: used(server) > 1_000_000)
    second = stopped(server, "/large?1200000")
    assert eventually(lambda: used(server) > 2_000_000)
    works(server)
    third = stopped(server, "/large?1200000")
    with pytest.raises((ConnectionResetError, AssertionError)):
        third.answer()
    works(server)
    assert len(first.answer().body) == 1_200_000  # it goes on, and has all of it
    assert eventually(lambda: 1_000_000 < used(server) < 1_300_000)
    second.sock.close()
    assert eventually(lambda: used(server) == 0)


def test_answers_that_are_collected_count(server: Running):
    """The application tells what it keeps: when that is too much, whoever has begun last gets 503.

    Mutation: `keeps` does not look at what `_hold` says; `on_headers_complete` puts nothing into the scope.
    """
    first = server.send(get("/keep?1400000"))
    assert server.app.entered.acquire(timeout=240) and used(server) == 1_400_000
    second = server.send(get("/keep?1400000"))
    assert server.app.entered.acquire(timeout=240) and used(server) == 2_800_000
    assert server.send(get("/keep?3000001")).last_answer().status == 503
    assert used(server) == 2_800_000
    third = server.send(get("/keep?500000"))
    assert second.last_answer().status == 503
    works(server)
    release(server)
    assert [client.answer().body for client in (first, third)] == [b"at last"] * 2


# ---- what waits in a generation


class Told(links.EngineClient):
    """A link without an engine."""

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda why: None)  # type: ignore[arg-type,return-value]
        self.down = "there is none"

    def generation(self, lanes: int, top: int | None = None) -> Generation:
        job = EngineJob(self, 1, lanes, "")
        params = SamplingParams(n=lanes, logprobs=top)
        return Generation(job, [Prompt(np.array([500], np.int32))], params, tokens().detokenizer, Model("m", None))


def likely(top: int) -> dict[int, tuple[float, int]]:
    return {token: (-1.0, token + 1) for token in range(top)}


@pytest.mark.parametrize("top", [None, 4])
def test_what_has_piled_up_is_taken_in_portions(top):
    """A reader who stopped and goes on has thousands of tokens waiting: others have their turn in between. None is
    lost, each has its own log-probabilities, and the end comes last.

    Mutation: `take` takes all; `_take` does not cut `likely`; it tells the end with the first of it.
    """

    async def story() -> None:
        generation = Told().generation(3, top)
        job, said = generation.job, [list(range(400 + i, 3000 + i)) for i in range(3)]
        for lane, ids in zip(job.lanes, said, strict=True):
            lane.tokens, lane.end = list(ids), End(lane.job.first, "length", None, 0, "")
            lane.likely = [{token: (-1.0, 1), **likely((top or 1) - 1)} for token in ids] if top else []
        job.news, most = True, MAX_TAKEN_TOKENS // (1 + (top or 0))
        got: list[list[int]] = [[], [], []]
        while job.news:
            pieces: list[TextPiece] = generation.take()
            assert 0 < sum(len(piece.tokens) for piece in pieces) <= most
            for piece in pieces:
                assert len(piece.likely) == (len(piece.tokens) if top else 0)
                assert all(token in scores for token, scores in zip(piece.tokens, piece.likely, strict=False))
                got[piece.index] += piece.tokens
                assert (piece.finish is not None) == (len(got[piece.index]) == 2600)
        assert got == said and not generation.open

    asyncio.run(story())


def test_no_sample_waits_for_ever():
    """Where more comes than is taken, each has its turn.

    Mutation: `take` always begins with the first.
    """

    async def story() -> None:
        generation = Told().generation(4)
        seen = set()
        for _ in range(4):
            for lane in generation.job.lanes:
                lane.tokens += [500] * MAX_TAKEN_TOKENS
            seen |= {piece.index for piece in generation.take()}
        assert seen == {0, 1, 2, 3}

    asyncio.run(story())


def test_tokens_that_nobody_takes_are_told():
    """While a reader has stopped, what comes is counted, with what stands beside it; when he goes on, that is told too.

    Mutation: `wake` does not call `_report`; `rendered` does not; `_report` leaves out the likely ones.
    """

    async def story() -> None:
        generation, told = Told().generation(2, 3), list[int]()
        job = generation.job
        job.holds, job.render = told.append, generation.take
        for _ in range(1000):
            for lane in job.lanes:
                lane.tokens.append(500)
                lane.likely.append({500: (-1.0, 1), **likely(3)})
            job.wake()
        least = 2 * 1000 * (_TOKEN + 4 * _LIKELY)
        assert least * 0.8 < told[-1] <= least and told == sorted(told)
        while job.news:
            await job.rendered()
        job._waiter = None
        job.rendered()
        assert told[-1] == 0
        job.keeps(100_000)
        assert told[-1] == 100_000

    asyncio.run(story())


class Asked:
    """One request to an app, whose client leaves when it is told, and takes nothing before."""

    def __init__(self, app: Scripted, path: str, stream: bool, takes: bool, **fields: object) -> None:
        self.left = asyncio.Event()
        self.told: list[int] = []
        self.sent = 0
        self._takes = takes
        self._body = [
            {"type": "http.request", "body": json.dumps({**ASKED[path], "stream": stream, **fields}).encode()}
        ]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": "", "headers": []}
        self.task = asyncio.ensure_future(app.app({**scope, HOLDS: self.told.append}, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body:
            return self._body.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent += 1
        if not self._takes:
            await self.left.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_requests_need_no_garbage_collector(path, leaves, stream, monkeypatch):
    """However they end: what they held is large, and the collector comes rarely.

    Mutation: `close` does not call `leave`; `wake` keeps the traceback of what it raises.
    """

    class Seen(EngineJob):
        __slots__ = ("__weakref__",)

    monkeypatch.setattr(links, "EngineJob", Seen)

    async def story() -> None:
        app = Scripted("Hello you")
        jobs: weakref.WeakSet[EngineJob] = weakref.WeakSet()
        make = app.link.job

        def job(*given: Any) -> EngineJob:
            jobs.add(made := make(*given))
            return made

        app.link.job = job  # type: ignore[method-assign]
        app.link.held = [] if leaves else None
        asked = Asked(app, path, stream, True)
        if leaves:
            while not app.link.held:
                await asyncio.sleep(0)
            asked.left.set()
        await asked.task
        asked.task = app.link.held = None  # type: ignore[assignment]
        for _ in range(5):
            await asyncio.sleep(0)
        assert not jobs

    gc.collect()
    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(story(), 240))
    finally:
        gc.enable()


def test_a_reader_who_stops_is_counted_and_forgotten():
    """In the whole app: its tokens wait, and are told; it leaves, and nothing of it is live.

    Mutation: `_Reading` does not give `holds` to the job.
    """

    async def story() -> None:
        app = Scripted(" word" * 1500)
        asked = Asked(app, COMPLETIONS, True, False, logprobs=5, max_tokens=1500)
        while not asked.told:
            await asyncio.sleep(0)
        assert asked.told[-1] > 64 << 10
        asked.left.set()
        await asked.task
        assert not app.link.lanes
        assert (await app.ask("POST", COMPLETIONS, {"prompt": "hi"})).status == 200

    asyncio.run(asyncio.wait_for(story(), 240))


# ---- a server


@pytest.mark.server
@pytest.mark.xdist_group("inflight")
def test_stopped_readers_and_endless_bodies_of_a_real_server():
    """They fill the budget, a good request is answered all the while, and when they leave all of it is free.

    Mutation: `_uvicorn` makes a protocol of its own; `_render_metrics` tells nothing.
    """
    server = Process(
        *paced_flags(device_pages=60_000),
        *(
            "--inflight-bytes",
            "8000000",
            "--body-bytes",
            "4000000",
            "--write-seconds",
            "3600",
            "--body-seconds",
            "3600",
        ),
    ).ready()

    def held() -> int:
        (line,) = [line for line in server.get("/metrics").body.decode().splitlines() if line.startswith("sapwood:inf")]
        return int(float(line.rpartition(" ")[2]))

    def sent(head: str, body: bytes) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(f"POST {head} HTTP/1.1\r\nHost: localhost\r\n".encode() + body)
        return sock

    def good() -> bool:
        return server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 2}).status == 200

    asked = {**ASKED[CHAT], "stream": True, "n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 19_000}
    body = json.dumps(asked).encode()
    stream = b"Content-Length: %d\r\n\r\n" % len(body) + body
    endless = b"Content-Length: 4000000\r\n\r\n" + b" " * 3_000_000
    try:
        readers = [sent(CHAT, stream) for _ in range(6)]
        assert all(sock.recv(1, socket.MSG_PEEK) for sock in readers)
        until(lambda: good() and held() <= 8_000_000 and not server.get("/cache/stats").json["decoding"])
        until(lambda: held() == 0)  # all were cut: none of them took anything
        for sock in readers:
            told = b""
            with contextlib.suppress(ConnectionError):
                while data := sock.recv(1 << 20):
                    told += data
            assert told.startswith(b"HTTP/1.1 200") and b"[DONE]" not in told
        assert good()
        senders = [sent(CHAT, endless) for _ in range(6)]
        until(lambda: good() and 2_000_000 < held() <= 8_000_000)
        for sock in senders:
            sock.close()
        until(lambda: held() == 0)
        assert good() and server.stop() == 0
    finally:
        server.kill()
