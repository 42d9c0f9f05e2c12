"""A server's life: how it starts, how it ends, and what becomes of streams when either of its processes dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from sapwood.server.process.engine_child import EngineChild
from sapwood.server.process.engine_client import EngineClient
from sapwood.server.process.engine_process import _opened
from sapwood.server.process.messages import Ready, Settings

from .kit import Running, alive, paced_flags, until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("life")]

CHAT = "/v1/chat/completions"


def endless(**more) -> dict:
    return {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 15000, **more}


@pytest.fixture
def start():
    """Servers that are ended with the test."""
    running: list[Running] = []

    def starter(*arguments: str, environment=None, ready=True, **flags) -> Running:
        one = Running(*paced_flags(**flags), *arguments, environment=environment)
        running.append(one)
        return one.ready() if ready else one

    yield starter
    for one in running:
        one.kill()


def test_it_says_so_until_it_is_ready(start, tmp_path):
    """The port answers at once: 503 and what is being done. Then it serves.

    Mutation: `_health` looks at `down` alone; `early` is True for every endpoint.
    """
    go_on = tmp_path / "go on"
    server = start("--factory", "tests.server.late:late", ready=False, until=str(go_on))
    until(lambda: "waiting for the test" in (early := server.get("/health")).error["message"] and early.status == 503)
    go_on.touch()
    statuses = []
    while 200 not in statuses:
        statuses.append(server.get("/health").status)
        assert set(statuses) <= {200, 503}
    server.ready()
    assert server.post(CHAT, endless(max_tokens=2)).status == 200


@pytest.mark.parametrize("everybody", [False, True])
def test_a_clean_stop(start, everybody):
    """After SIGTERM nobody new comes in, who runs ends as it would have, and the exit status is 0; also where every
    process gets the signal, as systemd sends it.

    Mutation: `_drain` cuts at once; `draining` is not looked at; the engine process ends at SIGTERM.
    """
    server = start(step_ms=5)
    stream = server.stream(CHAT, endless(max_tokens=200))
    events = stream.events()
    next(events)
    engine = server.engine()
    if everybody:
        os.kill(engine, signal.SIGTERM)
    os.kill(server.process.pid, signal.SIGTERM)
    server.said("SIGTERM: no new requests; 1 may end within 30 s")
    refused = server.post(CHAT, endless())
    assert refused.status == 503 and "stopping" in refused.error["message"]
    assert server.get("/health").status == 503
    rest = list(events)
    assert rest[-1] == "[DONE]" and rest[-2]["choices"][0]["finish_reason"] == "length"
    assert server.ended() == 0 and not alive(engine)


def test_who_is_cut_is_told(start):
    """Those that run longer than --drain-seconds get an error event, and the exit status is 0 all the same.

    Mutation: `cut` wakes nobody.
    """
    server = start("--drain-seconds", "0.2", step_ms=5)
    stream = server.stream(CHAT, endless())
    events = stream.events()
    next(events)
    os.kill(server.process.pid, signal.SIGTERM)
    rest = list(events)
    assert rest[-1] == "[DONE]" and "stopping" in rest[-2]["error"]["message"]
    assert server.ended() == 0


@pytest.mark.parametrize("which, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_ends_at_once(start, which, status):
    """Whoever asks twice does not wait for the drain, and no process is left.

    Mutation: `_signal` counts nothing.
    """
    server = start("--drain-seconds", "1000", step_ms=5)
    stream = server.stream(CHAT, endless())
    next(stream.events())
    engine = server.engine()
    os.kill(server.process.pid, which)
    server.said("no new requests")
    os.kill(server.process.pid, which)
    assert server.ended() == status  # long before the drain would be over
    until(lambda: not alive(engine))


def test_a_dead_engine(start):
    """Killed with -9: every stream ends with an error, and so does the server, with status 1.

    Mutation: `_died` wakes nobody; `_engine_died` ends with 0.
    """
    server = start(step_ms=5)
    streams = [server.stream(CHAT, endless()) for _ in range(8)]
    events = [stream.events() for stream in streams]
    for each in events:
        next(each)
    os.kill(server.engine(), signal.SIGKILL)
    for each in events:
        rest = list(each)
        assert rest[-1] == "[DONE]" and "killed by SIGKILL" in rest[-2]["error"]["message"]
    assert server.ended() == 1


def test_a_dead_api_process(start):
    """Killed with -9: the engine process ends with it.

    Mutation: `_die_with` is not called.
    """
    server = start()
    engine = server.engine()
    os.kill(server.process.pid, signal.SIGKILL)
    until(lambda: not alive(engine))


def test_an_engine_that_is_started_again(start):
    """With --restart: 503 while it is away, and then it serves again.

    Mutation: `_keep_engine` starts no other; `start` keeps the old `down`.
    """
    server = start("--restart", step_ms=5)
    os.kill(server.engine(), signal.SIGKILL)
    until(lambda: server.get("/health").status == 503)
    refused = server.post(CHAT, endless())
    assert refused.status == 503 and refused.headers["retry-after"]
    until(lambda: server.get("/health").status == 200)
    assert server.post(CHAT, endless(max_tokens=2)).status == 200
    assert server.stop() == 0


def test_a_step_that_hangs(start):
    """A step longer than --step-timeout turns /health to 503; when it is over, health is back.

    Mutation: `hangs` is always 0; the engine says that it lives from another thread.
    """
    server = start("--step-timeout", "2.5", step_ms=5)
    later = server.stream_later(CHAT, endless(max_tokens=2000))
    until(lambda: server.get("/cache/stats").json["decoding"])
    engine = server.engine()
    os.kill(engine, signal.SIGSTOP)  # a step of which nobody knows the end
    try:
        told = until(lambda: (found := server.get("/health")).status == 503 and found)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert "hangs" in told.error["message"]
    assert later.answer().status == 200
    until(lambda: server.get("/health").status == 200)


def test_a_stream_is_kept_alive_while_its_prompt_waits(start):
    """Proxies cut what is silent: comments are sent meanwhile, and change nothing.

    Mutation: `_tick` does nothing.
    """
    server = start("--keepalive-seconds", "0.2", step_ms=2000)
    stream = server.stream(CHAT, endless(max_tokens=2))
    events = list(stream.events())
    assert stream.comments and events[-1] == "[DONE]"


def test_a_full_queue_and_a_queue_that_takes_too_long(start):
    """One more than may wait gets 429 and when to come again; who waits too long gets 503.

    Mutation: `_check_queue` counts those that run; `expire` expires those that have begun.
    """
    server = start("--max-queue", "2", step_ms=5, max_num_seqs=1)
    first = server.stream(CHAT, endless())
    next(first.events())
    waiting = [server.stream_later(CHAT, endless(max_tokens=2)) for _ in range(2)]
    until(lambda: server.get("/cache/stats").json["waiting"] == 2)
    refused = server.post(CHAT, endless())
    assert refused.status == 429 and refused.headers["retry-after"] == "1" and refused.error["code"] == "queue_full"
    first.close()
    assert [each.answer().status for each in waiting] == [200, 200]
    server = start("--queue-timeout", "1.5", step_ms=5, max_num_seqs=1)
    first = server.stream(CHAT, endless())
    next(first.events())
    assert server.post(CHAT, endless(max_tokens=2)).status == 503
    assert next(first.events())["choices"]


def test_flags_from_a_file_and_the_environment(start, tmp_path):
    """The command line goes first, then the environment, then the file; lists and switches too.

    Mutation: `_from_file_and_environment` puts the file behind the environment.
    """
    file = tmp_path / "server.yaml"
    file.write_text("served-model-name: [from-file]\nmax_queue: 7\nkeepalive_seconds: 3\n")
    server = start(
        "--config", str(file), environment={"SAPWOOD_SERVED_MODEL_NAME": "from-environment", "SAPWOOD_API_KEY": "k1,k2"}
    )
    assert server.get("/v1/models").status == 401
    names = [each["id"] for each in server.get("/v1/models", headers={"Authorization": "Bearer k2"}).json["data"]]
    assert "from-environment" in names
    assert server.get("/health").status == server.get("/ping").status == 200


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--port", "99999"], "port must be an integer from 0 to 65535"),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size must be 1"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--lora-modules", "a=b"], "lora_modules needs --enable-lora"),
        (["--kv-events-config", "{"], "kv"),
        (["/no/such/model"], "/no/such/model"),
        (["--salt-by-key"], "salt_by_key needs api_key"),
    ],
)
def test_what_cannot_be_served_is_said(arguments, said):
    """One line that says what is wrong, and a status that is not 0.

    Mutation: `main` lets a ValueError out.
    """
    server = Running(*arguments)
    assert server.ended() in (1, 2)
    assert said in "\n".join(server.lines) and "Traceback" not in "\n".join(server.lines)


def test_a_port_in_use(start):
    """Who comes second is told, and the first goes on.

    Mutation: `open_socket` shares ports.
    """
    first = start()
    second = Running(*paced_flags(), "--port", str(first.port))
    assert second.ended() == 1 and "is in use" in "\n".join(second.lines)
    assert first.get("/health").status == 200


def test_a_stores_password_is_in_no_log(start, tmp_path):
    """The log says where the store is, without what follows it; and why it cannot be opened, in one line.

    Mutation: `_log_ready` shows the flag as it was given; `StoreError` is not known in `main` of the engine's side.
    """
    server = start(store=f"file://{tmp_path}?size=8MiB", host_pages=64)
    assert server.said(r"store: (.*)")[1] == f"file://{tmp_path}"
    server = start(store="redis://me:secret@127.0.0.1:1/0", host_pages=64, ready=False)
    assert server.ended() == 1
    assert server.said(r"ERROR +sapwood serve: redis://\*\*\*@127.0.0.1:1/0: no Redis server answers there")
    assert not any("secret" in line or "Traceback" in line for line in server.lines)


@pytest.mark.parametrize("faults, pages", [("", 0), ("&fail=1", 16)])
def test_m09_a_stopping_server_says_what_it_could_not_write(start, tmp_path, faults, pages):
    """Pages and bytes, in the log of the server; one that has written all says nothing of it.

    Mutation: `say_unwritten` is not called, or before the store is closed.
    """
    server = start(store=f"faulty+file://{tmp_path}/store?size=64MiB{faults}", host_pages=200)
    assert server.post("/v1/completions", {"prompt": list(range(1, 16 * 16 + 2)), "max_tokens": 1}).status == 200
    if not pages:
        until(lambda: server.get("/cache/stats").json["tiers"]["pages_backed_up"] >= 16)
    assert server.stop() == 0
    said = [line for line in server.lines if "could not be written" in line]
    assert len(said) == bool(pages)
    if pages:
        size = pages * 16 * 8
        assert f"store faulty+file://{tmp_path}/store: {pages} pages ({size} bytes) could not be written" in said[0]


class _EndingChild(EngineChild):
    """A process that is no engine, and that ends when it is asked to, or not at all."""

    def __init__(self, ends: bool) -> None:
        code = "import signal as s; asked = [s.SIGUSR1]; s.pthread_sigmask(s.SIG_BLOCK, asked); print(flush=True); "
        code += "s.sigwait(asked)" if ends else "s.pause()"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self._pidfd = os.pidfd_open(self.process.pid)
        assert self.process.stdout is not None and self.process.stdout.readline()

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self._pidfd)


@pytest.mark.parametrize("ends", [True, False])
def test_m09_an_engine_has_the_time_it_asks_for_to_end(monkeypatch, ends):
    """With a store's patience of minutes it may write for minutes: it is not killed before, and then it is.

    Mutation: `EngineClient.close` waits for a fixed number of seconds.
    """
    waited: list[float] = []

    async def wait_for(ended: asyncio.Future[int], seconds: float) -> int:
        waited.append(seconds)
        if ends:
            return await ended
        raise TimeoutError

    monkeypatch.setattr("sapwood.server.process.engine_child.asyncio.wait_for", wait_for)
    link = EngineClient(lambda: None, lambda why: None)  # type: ignore[arg-type,return-value]
    link.ready = Ready("", 100, 2000, [2], 16, {}, {}, closes_within=3000.0)
    link._child = child = _EndingChild(ends)
    asyncio.run(link.close())
    assert child.process.returncode == (0 if ends else -signal.SIGKILL)
    assert len(waited) == 1 and 3000 < waited[0] < 3060


def test_an_engine_says_how_long_it_takes_to_end(monkeypatch):
    """Mutation: `_opened` leaves `closes_within` out of what it says when it is ready."""
    monkeypatch.setattr("sapwood.engine.request_table.RequestTable.closes_within", 120.0)
    flags = json.loads(paced_flags()[3])
    said: list[Any] = []
    engine, *_ = _opened(Settings("sapwood.bench.paced:paced", flags, os.getpid(), "text", "info", None), said.append)
    engine.close()
    assert [each.closes_within for each in said if isinstance(each, Ready)] == [120.0]
