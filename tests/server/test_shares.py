"""What tenants share: none takes from another what that one may have. Seats in the engine, responses that are kept,
places and turns of grammars to be compiled."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import Future

import pytest

from sapwood.bench.paced import PacedEngine
from sapwood.engine.loading.default_model import default_model
from sapwood.engine.params import SamplingParams
from sapwood.server.api.response_store import ResponseStore, StoredResponse
from sapwood.server.config import ServerConfig
from sapwood.server.limits import HttpLimits
from sapwood.server.listen import open_socket
from sapwood.server.process.engine_process import EngineSide
from sapwood.server.process.grammars import _MAX_WAITING, FairQueue, Grammars, GrammarsBusy, GrammarSpec
from sapwood.server.process.messages import Drop, End, StepOutput, Submit
from sapwood.server.request_head import client_of

from . import test_http_limits
from .kit import Running as Process
from .kit import paced_flags, until
from .scripted import Scripted

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
KEYS = {"api_key": ("alpha", "beta"), "admin_key": "root"}


# ---- seats in the engine


def ask(app: Scripted, key: str | None, **fields: object):
    return asyncio.ensure_future(app.ask("POST", COMPLETIONS, {"prompt": "hi", **fields}, key))


async def comes(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_L21_a_key_cannot_have_all_seats():
    """Samples count, waiting or running, of all requests of the key; another key has its own, and the administrator
    as many as he likes. Those that end, or whose client leaves, give their seats back.

    Mutation: `_check_queue` does not look at `max_requests_per_key`; `live` counts all; a request counts as one.
    """

    async def story() -> None:
        app = Scripted("Hello", max_requests_per_key=4, **KEYS)
        app.link.held = []
        first, second = ask(app, "alpha", n=3), ask(app, "alpha")
        await comes(lambda: len(app.link.lanes) == 4)
        for fields in ({}, {"n": 2}, {"prompt": ["a", "b"]}):
            refused = await ask(app, "alpha", **fields)
            assert (refused.status, refused.error["code"]) == (429, "key_full")
            assert refused.headers["retry-after"] == "1"
        others = [ask(app, "beta", n=4), ask(app, "root", n=5), ask(app, "root")]
        await comes(lambda: len(app.link.lanes) == 14)
        assert (await ask(app, "beta")).status == 429
        first.cancel()  # its client leaves
        await asyncio.gather(first, return_exceptions=True)
        third = ask(app, "alpha", n=3)
        await comes(lambda: len(app.link.lanes) == 14)
        assert (await ask(app, "alpha")).status == 429
        app.link.go()
        assert [answer.status for answer in await asyncio.gather(second, third, *others)] == [200] * 5
        assert (await ask(app, "alpha", n=4)).status == 200

    asyncio.run(asyncio.wait_for(story(), 240))


def test_what_a_key_may_never_have():
    """No Retry-After for what will not be had later either; and without keys there is nobody to count for.

    Mutation: `_check_queue` answers 429 in any case; `__post_init__` does not look at `keys`.
    """
    app = Scripted("Hello", max_requests_per_key=4, **KEYS)
    refused = app.post(COMPLETIONS, {"prompt": "hi", "n": 5}, "alpha")
    assert refused.status == 400 and refused.error["param"] == "n"
    assert app.post(COMPLETIONS, {"prompt": "hi", "n": 4}, "alpha").status == 200
    with pytest.raises(ValueError, match="max_requests_per_key needs api_key"):
        ServerConfig(max_requests_per_key=4)


@pytest.mark.parametrize(
    "client, address",
    [
        (("192.0.2.7", 5), "192.0.2.7"),
        (("::ffff:192.0.2.7", 5), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::"),
        (("2001:db8:1:2::1", 5), "2001:db8:1:2::"),
        (("fe80::1%eth0", 5), "fe80::"),
        (("::1", 5), "::"),
        (("not an address: really", 5), "not an address: really"),
        (None, ""),
    ],
)
def test_who_an_address_stands_for(client, address):
    """With IPv6 one host has 2^64 addresses, and is one client; an IPv4 address is the same on a socket of both.

    Mutation: `client_of` returns what it is given.
    """
    assert client_of(client) == address


def test_clients_of_a_unix_socket_are_one(tmp_path, monkeypatch):
    """They have no address, and a bound all the same; over all connections, and given back with each answer.

    Mutation: `_check_head` or `_count` leaves out a client without an address.
    """
    path = str(tmp_path / "socket")
    monkeypatch.setattr(test_http_limits, "open_socket", lambda host, port: open_socket(host, port, path))
    server = test_http_limits.Running(HttpLimits(streams_per_client=2))

    def sent(*parts: bytes) -> test_http_limits.Client:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        server.clients.append(test_http_limits.Client(sock))
        return server.clients[-1].send(*parts)

    try:
        for _ in range(2):
            sent(test_http_limits.get("/hold"))
            assert server.app.entered.acquire(timeout=240)
        assert sent(test_http_limits.get("/")).last_answer().status == 429
        server.clients[0].sock.close()
        assert server.app.saw_disconnect()
        again = sent(test_http_limits.get("/"))
        for _ in range(3):
            assert again.answer().status == 200
            again.send(test_http_limits.get("/"))
        assert again.answer().status == 200
    finally:
        server.stop()
    assert not server.protocol.in_flight


# ---- responses that are kept


def stored(owner: str | None, size: int = 10) -> StoredResponse:
    return StoredResponse(owner, b"x" * size, ())


def test_L21_one_key_cannot_push_out_the_responses_of_another():
    """One may use what others leave, and gives it back when they want their share: first the oldest.

    Mutation: `put` takes the oldest of all, or of the key that puts; it compares responses alone, or bytes alone.
    """
    store = ResponseStore(most=6, most_bytes=1000)
    for number in range(20):
        store.put(f"a{number}", stored("alpha"))
    assert len(store) == 6 and store.get("a14", "alpha") is not None
    for number in range(20):
        store.put(f"b{number}", stored("beta"))
    kept = [owner for owner, ids in (("alpha", "a"), ("beta", "b")) for i in range(20) if store.get(f"{ids}{i}", owner)]
    assert kept == ["alpha"] * 3 + ["beta"] * 3 and store.get("b19", "beta") and store.get("a19", "alpha")
    for number in range(100):
        store.put(f"c{number}", stored(None, 300))
        assert store.bytes <= 1000 and len(store) <= 6
        assert store.get("a19", "alpha") and store.get("b19", "beta")
    assert store.get("c99", None)
    whole = ResponseStore(most=6, most_bytes=1000)
    for number in range(3):
        whole.put(f"a{number}", stored("alpha", 300))
    whole.put("b0", stored("beta", 150))
    assert whole.get("b0", "beta") and not whole.get("a0", "alpha") and whole.get("a1", "alpha") and whole.bytes == 750
    for owner, id in (("alpha", "a19"), ("beta", "b19"), (None, "c99")):
        assert not store.delete(id, "somebody else") and store.delete(id, owner) and store.get(id, owner) is None


def test_a_flood_of_responses_leaves_those_of_others():
    """Over HTTP, with two keys: whoever comes back for his own finds it.

    Mutation: `put` takes the oldest of all.
    """
    app = Scripted("Hello", max_responses=4, **KEYS)
    mine = app.post(RESPONSES, {"input": "hi"}, "alpha").json["id"]
    for _ in range(10):
        theirs = app.post(RESPONSES, {"input": "hi"}, "beta").json["id"]
    assert app.request("GET", f"{RESPONSES}/{mine}", key="alpha").status == 200
    assert app.request("GET", f"{RESPONSES}/{theirs}", key="beta").status == 200
    assert app.request("GET", f"{RESPONSES}/{mine}", key="beta").status == 404
    assert app.post(RESPONSES, {"input": "go on", "previous_response_id": mine}, "alpha").status == 200


# ---- grammars


def test_turns_are_shared():
    """One of each in turn, however many one has put in before.

    Mutation: `take` leaves a name where it was.
    """
    queue = FairQueue[str](10)
    for thing in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queue.put(thing[0], thing)
    assert [queue.take() for _ in range(3)] == ["a1", "b1", "c1"]
    queue.put("c", "c2")
    assert [queue.take() for _ in range(4)] == ["a2", "b2", "c2", "a3"]
    assert len(queue) == 0 and queue.close() == [] and queue.take() is None


def test_places_are_shared():
    """Who has most gives up the newest; who has his share is refused; nobody is thrown out for nothing.

    Mutation: `put` refuses whoever comes last; it takes the oldest; it compares without the one that comes.
    """
    queue = FairQueue[str](4)
    assert [queue.put("a", f"a{i}") for i in range(5)] == [None, None, None, None, "a4"]
    assert [queue.put("b", f"b{i}") for i in range(3)] == ["a3", "a2", "b2"]
    assert [queue.put("c", f"c{i}") for i in range(2)] == ["a1", "c1"]
    assert [queue.take() for _ in range(4)] == ["a0", "b0", "c0", "b1"]
    queue.put("a", "again")
    queue.remove(lambda thing: thing == "again")
    waiting = threading.Thread(target=lambda: found.append(queue.take()))
    found: list[str | None] = []
    waiting.start()
    queue.put("d", "d0")
    waiting.join()
    assert found == ["d0"]


def spec(number: int) -> GrammarSpec:
    return GrammarSpec("regex", f"a{number}")


@pytest.fixture
def idle():
    """Grammars that nobody compiles."""
    made = Grammars(default_model() / "tokenizer.json", 49152, [2], compilers=0)
    yield made
    made.close()


def test_L21_one_key_cannot_have_the_whole_queue_of_grammars(idle: Grammars):
    """Another one gets a place, and the newest of the many is told to come again: not that it is wrong.

    Mutation: `compile` puts in everything by one name; it raises a ValueError.
    """
    many = [idle.compile(spec(i), owner="alpha") for i in range(_MAX_WAITING)]
    full, other = idle.compile(spec(-1), owner="alpha"), idle.compile(spec(-2), owner="beta")
    assert [future.done() for future in (*many, full, other)] == [False] * (_MAX_WAITING - 1) + [True, True, False]
    for future in (many[-1], full):
        assert isinstance(future.exception(), GrammarsBusy)


class Slow:
    """Grammars that are compiled when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Future]] = []
        self.cancelled: list[Future] = []

    def compile(self, spec: GrammarSpec, samples: int, owner: str) -> Future:
        self.asked.append((owner, Future()))
        return self.asked[-1][1]

    def cancel(self, future: Future) -> None:
        self.cancelled.append(future)


def submit(number: int, tenant: str = "") -> Submit:
    prompt = b"\1\0\0\0" * 4
    return Submit(number, prompt, SamplingParams(n=2, max_tokens=1), grammar=GrammarSpec("json_object"), tenant=tenant)


def test_grammars_of_clients_that_left_are_cancelled():
    """The engine hears that a request is dropped: its grammar need not be made, and leaves its place to others.

    Mutation: `_drop` does not call `cancel`; `cancel` leaves the job in the queue; `_submit` does not say whose it is.
    """
    slow, sent = Slow(), []
    side = EngineSide(PacedEngine({}, False).requests, sent.append, slow, None)  # type: ignore[arg-type]
    for number, tenant in ((1, "alpha"), (3, "beta")):
        side._take(submit(number, tenant))
    assert [owner for owner, _ in slow.asked] == ["alpha", "beta"]
    side._take(Drop([1, 2], False))
    assert slow.cancelled == [slow.asked[0][1]]
    slow.asked[1][1].set_exception(GrammarsBusy("later"))
    side._compiled()
    side._send_step([])
    assert [(end.number, end.reason, end.error) for end in sent[-1].ends] == [
        (3, "busy", "later"),
        (4, "busy", "later"),
    ]


def test_what_was_cancelled_leaves_its_place(idle: Grammars):
    """A flood of clients that leave at once keeps nobody waiting.

    Mutation: `cancel` cancels the future alone.
    """
    for i in range(10 * _MAX_WAITING):
        idle.cancel(idle.compile(spec(i), owner=str(i % 7)))
    assert not any(idle.compile(spec(i)).done() for i in range(_MAX_WAITING))
    assert isinstance(idle.compile(spec(-1)).exception(), GrammarsBusy)


def test_a_full_queue_of_grammars_is_no_fault_of_the_request():
    """503, and when to come again.

    Mutation: `_last` knows no "busy".
    """
    app = Scripted("Hello")
    begin = app.link._begin

    def busy(message: Submit, script: object) -> None:
        end = End(message.number, "busy", None, 0, "64 other grammars wait to be compiled: try again later")
        app.link._dispatch(StepOutput(1, 0.0, b"", b"", [], [end], {}, {}))
        app.link._wake_readers()

    app.link._begin = busy  # type: ignore[assignment,method-assign]
    for stream in (False, True):
        asked = {"prompt": "hi", "stream": stream, "guided_regex": "a"}
        refused = app.post(COMPLETIONS, asked)
        assert (refused.status, refused.error["code"]) == (503, "grammars_full") and refused.headers[
            "retry-after"
        ] == "1"
    app.link._begin = begin  # type: ignore[method-assign]
    assert app.post(COMPLETIONS, {"prompt": "hi"}).status == 200


@pytest.mark.server
@pytest.mark.xdist_group("shares")
def test_L21_a_flood_of_grammars_keeps_nobody_else_waiting():
    """One key sends more than can wait, each without end to compile. Another key's is made in its turn, and when the
    clients leave, what they wanted is not made.

    Mutation: `submit` does not say whose a grammar is.
    """
    server = Process(*paced_flags(), "--api-key", "alpha", "beta").ready()

    def schema(number: int) -> dict[str, object]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"multipleOf": number}}}

    def asked(key: str, number: int) -> bytes:
        body = json.dumps({"prompt": "hi", "max_tokens": 2, "response_format": schema(number)}).encode()
        lines = [f"POST {COMPLETIONS} HTTP/1.1", f"Authorization: Bearer {key}", f"Content-Length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode() + body

    def flood(numbers: Iterable[int]) -> list[socket.socket]:
        sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in numbers]
        for sock, number in zip(sockets, numbers, strict=True):
            sock.sendall(asked("alpha", number))
        return sockets

    def good(key: str, number: int) -> bool:
        body = {"prompt": "hi", "max_tokens": 2, "response_format": schema(number)}
        return server.post(COMPLETIONS, body, headers={"Authorization": f"Bearer {key}"}).status == 200

    try:
        attackers = flood(range(900_001, 900_001 + 2 * (2 * _MAX_WAITING)))
        assert good("beta", 2)
        answered, _, _ = select.select(attackers, [], [], 0)
        assert len(answered) < len(attackers)  # they still wait, and this one has not waited for them
        assert {int(sock.recv(12)[9:]) for sock in answered} <= {400, 503}
        for sock in attackers:
            sock.close()
        assert good("beta", 3)
        until(lambda: good("alpha", 5))  # once it is known that they left
        assert server.stop() == 0
    finally:
        server.kill()
