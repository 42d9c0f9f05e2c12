"""Whatever a client sends, it gets an answer in OpenAI's form in less than a second, and nobody else notices."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from sapwood.engine.lora.process import AT_ONCE

from .bad_requests import ALL, CHAT, COMPLETIONS, GOOD, LOAD, ODD, Bad, Odd
from .kit import Answer, Running, paced_flags, spent
from .venvs import python_with, run

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bad")]

BODY_SECONDS = 8
MEGABYTE = b"x" * (1 << 20)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Running]:
    root, outside = tmp_path_factory.mktemp("adapters"), tmp_path_factory.mktemp("outside")
    for folder in (root / "one", outside):
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
    for name in ("empty", "fifo", "leads out"):
        (root / name).mkdir()
    os.mkfifo(root / "fifo" / "adapter_config.json")
    (root / "leads out" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (root / "file").write_text("{}")
    (root / "link").symlink_to(outside)
    (root / "ring").symlink_to(root / "ring")
    running = Running(
        *paced_flags(host_pages=2000, max_loras=2),
        *("--lora-root", str(root), "--admin-key", "root", "--body-seconds", str(BODY_SECONDS)),
    )
    try:
        yield running.ready()
    finally:
        running.kill()


def sent(server: Running, bad: Bad) -> tuple[Answer, float]:
    """The answer, and what it has cost of processors: by the clock it depends on who else is busy."""
    body, pids = bad.body(), (server.process.pid, server.engine())
    before = sum(map(spent, pids))
    answer = server.request(bad.method, bad.path, body, bad.headers)
    return answer, sum(map(spent, pids)) - before


def checked(bad: Bad, answer: Answer) -> None:
    """The right status, and an error that says what is wrong, in the form of the API that was asked."""
    assert answer.status == bad.status, answer.body[:500]
    error = answer.error
    if bad.path.startswith("/v1/messages"):
        assert answer.json["type"] == "error" and error["type"].endswith(("_error", "_too_large"))
    else:
        assert set(error) == {"message", "type", "param", "code"} and error["type"]
        if bad.param is not None:
            assert (error["param"] or "").startswith(bad.param), error
    assert 0 < len(error["message"]) < 1500 and "Traceback" not in error["message"]


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: ascii(bad.name))
def test_a_bad_request_is_refused_and_a_good_one_still_served(server: Running, bad: Bad):
    """Wrong types, numbers out of range, texts that are none, deep and wide bodies, bombs: 4xx, at once.

    Mutation: `parse` counts nothing; `_check_depth` is left out; `known_tokens` looks at nothing; `_bound` lets all
    pass; `surely_more` is always False; `Folder` does not look where it is; `ChatTemplate.render` catches TypeError
    alone.
    """
    answer, seconds = sent(server, bad)
    checked(bad, answer)
    assert seconds < bad.seconds
    good = server.post(COMPLETIONS, GOOD[COMPLETIONS])
    assert good.status == 200 and good.json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: ascii(odd.name))
def test_what_looks_bad_and_is_not(server: Running, odd: Odd):
    """Zero bytes, names of Python, unknown fields, any content type: text is text, and JSON is JSON.

    Mutation: `render` passes kwargs by name; `_bound` counts a request of one sample as one of many.
    """
    answer = server.request("POST", odd.path, odd.body(), odd.headers)
    assert answer.status == 200, answer.body[:500]


# ---- bodies that are too large or too slow


class Raw:
    """A connection on which anything can be sent."""

    def __init__(self, server: Running) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=240)
        self.began = time.monotonic()

    def send(self, data: bytes) -> bool:
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def answer(self) -> Answer:
        data = b""
        while True:
            try:
                more = self.socket.recv(65536)
            except ConnectionError:
                break
            if not more:
                break
            data += more
        self.seconds = time.monotonic() - self.began
        head, _, body = data.partition(b"\r\n\r\n")
        return Answer(int(head.split()[1]), {}, body)


def head(*lines: str) -> bytes:
    return "\r\n".join(
        [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines, "", ""]
    ).encode()


def test_a_body_of_100_megabytes(server: Running):
    """By its length it is refused before a byte of it is sent; in chunks, as soon as there are too many.

    Mutation: `check_head` looks at no length; `on_body` counts nothing.
    """
    told = Raw(server)
    told.send(head(f"Content-Length: {100 << 20}"))
    assert told.answer().status == 413
    chunked = Raw(server)
    chunked.send(head("Transfer-Encoding: chunked"))
    chunk = b"%x\r\n%s\r\n" % (len(MEGABYTE), MEGABYTE)
    megabytes = 0
    while megabytes < 100 and chunked.send(chunk):
        megabytes += 1
    answer = chunked.answer()
    assert answer.status == 413 and answer.error["type"] == "invalid_request_error"
    assert server.post(CHAT, GOOD[CHAT]).status == 200


def test_bodies_that_come_slowly_or_never(server: Running):
    """They are refused when their time is over, not when they like; others are served meanwhile.

    Mutation: `on_headers_complete` sets no deadline; a byte that comes moves it.
    """
    silent, slow = Raw(server), Raw(server)
    silent.send(head("Content-Length: 1000"))
    slow.send(head("Content-Length: 1000"))
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05) and slow.send(b" "):
            pass

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    assert server.post(CHAT, GOOD[CHAT]).status == 200
    for connection in (silent, slow):
        answer = connection.answer()
        assert answer.status == 408 and "body" in answer.error["message"]
        assert connection.seconds > BODY_SECONDS * 0.9
    stop.set()
    dripping.join()


# ---- all at once


def test_all_of_them_at_once_beside_streams_that_are_not_disturbed(server: Running):
    """Sixteen streams run while every bad request comes, sixteen at a time: each stream says what it says alone, to its
    end, and every bad request gets the answer it gets alone.

    Mutation: an exception in one request ends the loop that dispatches tokens; `parse` keeps one request for all.
    """
    asked = [{"prompt": f"stream {i}", "max_tokens": 1500, "seed": i, "temperature": 0.5} for i in range(16)]

    loads = threading.Semaphore(AT_ONCE)  # more of them at once are told to come again, and rightly

    def stream(body: dict[str, Any]) -> list[Any]:
        return list(server.stream(COMPLETIONS, body).events())

    def attack(bad: Bad) -> tuple[Answer, float]:
        with loads if bad.path == LOAD else nullcontext():
            return sent(server, bad)

    with ThreadPoolExecutor(16) as streams, ThreadPoolExecutor(16) as attackers:
        said = [streams.submit(stream, body) for body in asked]
        for bad, (answer, _) in zip(ALL, attackers.map(attack, ALL), strict=True):
            if answer.status == 408 != bad.status:  # this machine was too slow to send it: once more, alone
                answer, _ = attack(bad)
            assert answer.status == bad.status, (bad.name, answer.body[:300])
        events = [each.result() for each in said]
        alone = list(streams.map(lambda body: server.post(COMPLETIONS, body).json["choices"][0], asked))
    for given, same in zip(events, alone, strict=True):
        assert given[-1] == "[DONE]" and not any("error" in event for event in given[:-1])
        choices = [event["choices"][0] for event in given[:-1]]
        assert "".join(choice["text"] for choice in choices) == same["text"]
        assert choices[-1]["finish_reason"] == "length"
    stats = server.get("/cache/stats").json
    assert stats["decoding"] == 0 and "internal" not in json.dumps(server.lines[-50:])


# ---- what the server says of itself


@pytest.mark.long  # installs a package in an environment of its own, and sends thousands of requests
def test_the_openapi_description_is_true(tmp_path):
    """Schemathesis, by what /openapi.json says: no 5xx, no status, content or error that is not described.

    Mutation: `description` leaves out 404; `_refusals` gives Anthropic's errors OpenAI's form.
    """
    python = python_with("schemathesis==4.32.5")
    if isinstance(python, str):
        pytest.skip(python)
    server = Running(
        *paced_flags(step_ms=0, max_model_len=256, max_loras=2),
        *("--admin-key", "root", "--lora-root", str(tmp_path)),
    )
    try:
        said = run(python, "../schemathesis_check.py", f"http://127.0.0.1:{server.ready().port}", seconds=900)
        assert "No issues found" in said, said[-2000:]
    finally:
        server.kill()
