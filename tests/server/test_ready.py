"""Ready means that the next request is answered: at the start, whatever of it is slow, and when an engine has died."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .kit import PATIENCE, Answer, Running, paced_flags, until
from .scripted import Scripted

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("life")]

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
EARLY = ("/health", "/ping", "/version", "/openapi.json", "/")  # these answer before the server is ready
PARTS = ("engine", "tokenizer", "template", "defaults", "first", "second")  # the last two are adapters
ENDPOINTS = [(each.path, each.method) for each in Scripted("").app._endpoints()]
# What each endpoint is asked, and the status of a proper answer. Others are asked with an empty body.
ASKED: dict[tuple[str, str], tuple[Any, int]] = {
    (CHAT, "POST"): ({"messages": HELLO, "max_tokens": 2, "model": "first"}, 200),
    ("/v1/completions", "POST"): ({"prompt": "hello", "max_tokens": 2, "model": "second"}, 200),
    ("/v1/responses", "POST"): ({"input": "hello", "max_output_tokens": 2}, 200),
    ("/v1/responses/{id}", "GET"): (None, 404),
    ("/v1/responses/{id}", "DELETE"): (None, 404),
    ("/v1/messages", "POST"): ({"messages": HELLO, "max_tokens": 2, "model": "paced"}, 200),
    ("/v1/messages/count_tokens", "POST"): ({"messages": HELLO, "model": "paced"}, 200),
    ("/v1/models/{name:path}", "GET"): (None, 200),
    ("/v1/load_lora_adapter", "POST"): ({"lora_name": "third", "lora_path": "third"}, 200),
    ("/v1/unload_lora_adapter", "POST"): ({"lora_name": "third"}, 200),
    ("/tokenize", "POST"): ({"prompt": "hello"}, 200),
    ("/detokenize", "POST"): ({"tokens": [400]}, 200),
    ("/cache/explain", "POST"): ({"prompt": "hello"}, 200),
    ("/cache/tree", "GET"): (None, 403),
    ("/reset_prefix_cache", "POST"): (None, 200),
    **{(path, "GET"): (None, 200) for path in ("/v1/models", "/cache/stats", "/metrics", *EARLY)},
    ("/ping", "POST"): (None, 200),
}


class Held:
    """A server whose parts of the start are held as long as a test wants."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.holds = folder / "holds"
        self.holds.mkdir()
        for name in ("first", "second", "third"):
            (folder / "adapters" / name).mkdir(parents=True)
            (folder / "adapters" / name / "adapter_config.json").write_text("{}")
            (folder / "adapters" / name / "adapter_model.safetensors").touch()
        self._arguments = [
            *paced_flags(max_loras=2, holds=str(self.holds)),
            *("--factory", "tests.server.slow_start:held", "--enable-lora", "--lora-root", str(folder / "adapters")),
            *("--lora-modules", f"first={folder}/adapters/first", *arguments),
        ]
        self.folder = folder
        self.server: Any = None

    def start(self, *arguments: str) -> Running:
        program = ("tests.server.slow_start", str(self.holds))
        self.server = Running(*self._arguments, *arguments, program=program)
        return self.server

    def hold(self, *parts: str) -> None:
        for part in parts:
            (self.holds / part).touch()

    def is_held(self, part: str, times: int = 1) -> None:
        until(lambda: self.server.lines.count(f"held: {part}") >= times)

    def let_go(self, part: str) -> None:
        (self.holds / part).unlink()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    yield made
    if made.server is not None:
        made.server.kill()


def ask(server: Running, path: str, method: str) -> Answer:
    where = path.replace("{id}", "resp_none").replace("{name:path}", "second")
    body, _ = ASKED.get((path, method), ({}, 0))
    return server.request(method, where, body)


def nothing_is_answered(server: Running) -> None:
    """Every endpoint says that the server is not ready, or answers properly: that is, with nothing of the model."""
    for path, method in ENDPOINTS:
        answer = ask(server, path, method)
        if path in EARLY and path not in ("/health", "/ping"):
            assert answer.status == 200, path
        elif path != "/metrics" or answer.status != 200:  # once there are figures, they are there without an engine
            assert answer.status in (503, 403), (path, answer.status, answer.body)
            assert answer.status == 403 or answer.headers["retry-after"]


def everything_is_answered(server: Running, *but: str) -> None:
    for path, method in ENDPOINTS:
        if path in but:
            continue
        answer = ask(server, path, method)
        _, status = ASKED.get((path, method), (None, 0))
        assert answer.status == status if status else answer.status < 500, (path, answer.status, answer.body)


def first_200(server: Running, meanwhile: Callable[[], None] = lambda: None) -> None:
    def healthy() -> bool:
        meanwhile()
        return server.get("/health").status == 200

    until(healthy)


@pytest.mark.parametrize("part", PARTS)
def test_S17_the_first_200_of_health_means_that_everything_is_answered(held: Held, part: str):
    """Whatever part of the start takes long: until then every endpoint says 503 and when to come again; with the first
    200 the model has its names, its tokenizer and template, its adapters and its metrics.

    Mutation: `unready` looks at `link.ready` alone; `_bring_up` sets `ready` before it loads adapters; `_read` is not
    called.
    """
    held.hold(part)
    server = held.start("--lora-modules", f"second={held.folder}/adapters/second")
    held.is_held(part)
    nothing_is_answered(server)
    held.let_go(part)
    first_200(server)
    everything_is_answered(server)


def test_S17_ready_again_means_ready(held: Held):
    """An engine that died is started again: 503 until it has the adapters that the last one had, those of the command
    line as those that came over HTTP; one whose folder is gone by then is left out, and everything else is answered.

    Mutation: `_load_adapters` loads `config.lora_modules` again; `ready` stays True from one engine to the next;
    `sources` has no adapter that came over HTTP.
    """
    server = held.start("--restart")
    first_200(server)
    for name in ("second", "third"):
        assert server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": name}).status == 200
    everything_is_answered(server, "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    (held.folder / "adapters" / "third" / "adapter_config.json").unlink()
    held.hold("engine", "tokenizer", "second")
    os.kill(server.engine(), signal.SIGKILL)
    until(lambda: server.get("/health").status == 503)
    nothing_is_answered(server)
    for part in ("engine", "tokenizer", "second"):
        held.is_held(part)
        nothing_is_answered(server)
        held.let_go(part)
    first_200(server)
    everything_is_answered(server, "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    server.said("adapter third is not there any more")
    names = [each["id"] for each in server.get("/v1/models").json["data"]]
    assert names == ["paced", "first", "second"]


def test_S17_an_engine_that_dies_before_all_is_there(held: Held):
    """While its adapters are loaded, an engine that took another's place dies too: that is one more try, and the server
    is ready when one of them has everything.

    Mutation: `_started_again` lets an ApiError out; `_death` is not cleared, so that the next one counts as dead.
    """
    server = held.start("--restart")
    first_200(server)
    held.hold("first")
    os.kill(server.engine(), signal.SIGKILL)
    held.is_held("first")
    os.kill(server.engine(), signal.SIGKILL)
    nothing_is_answered(server)
    held.is_held("first", 2)
    nothing_is_answered(server)
    held.let_go("first")
    first_200(server)
    everything_is_answered(server, "/v1/models/{name:path}", "/v1/completions")
    assert server.stop() == 0
    assert sum("starting the engine again" in line for line in server.lines) == 2


def test_S17_a_request_that_was_on_its_way_when_the_engine_died(held: Held):
    """Its body came while the server was ready, its last byte when the next engine had no adapter yet: it is told to
    come again, not that its adapter is unknown.

    Mutation: `_check_queue` does not look at `unready`; `_load_adapters` clears `models.adapters` first.
    """
    server = held.start("--restart", "--body-seconds", "1000")
    first_200(server)
    with Slowly(server.port, {"prompt": "hello", "max_tokens": 2, "model": "first"}) as slowly:
        held.hold("first")
        os.kill(server.engine(), signal.SIGKILL)
        held.is_held("first")
        told = slowly.ends()
    assert told.startswith(b"HTTP/1.1 503 ") and b"not_ready" in told
    held.let_go("first")
    first_200(server)
    everything_is_answered(server, "/v1/models/{name:path}", "/v1/completions")


class Slowly:
    """A completion whose last byte is sent when it is told to."""

    def __init__(self, port: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n"
        )
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._socket.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
        assert self._socket.recv(65536).startswith(b"HTTP/1.1 100 ")  # the body is waited for
        self._socket.sendall(raw[:-1])
        self._last = raw[-1:]

    def __enter__(self) -> Slowly:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ends(self) -> bytes:
        """The answer."""
        self._socket.sendall(self._last)
        return b"".join(iter(lambda: self._socket.recv(65536), b""))
