"""Servers for tests: `sapwood serve` as a process, with the paced engine or a real model, and a small HTTP client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sapwood.engine.loading.default_model import default_model

PATIENCE = 240.0  # seconds after which something hangs: in a test that passes, no machine is as slow as that


def model_folder() -> Path:
    return default_model()


def paced_flags(**flags: Any) -> list[str]:
    """Arguments of a server whose engine computes nothing."""
    folder = str(model_folder())
    given = {"step_ms": 1, "tokenizer": f"{folder}/tokenizer.json", "folder": folder, "max_model_len": 20000, **flags}
    return ["--factory", "sapwood.bench.paced:paced", "--factory-flags", json.dumps(given)]


class Running:
    """A server process. Its log is in `lines`."""

    def __init__(
        self, *arguments: str, environment: dict[str, str] | None = None, program: Sequence[str] = ("sapwood",)
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *program, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def said(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """The first line of the log that matches; waits for it."""
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                for line in self.lines:
                    if found := re.search(pattern, line):
                        return found
                left = until - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._changed.wait(0.2)):
                    raise AssertionError(f"{pattern!r} was not said:\n" + "\n".join(self.lines[-50:]))
                self._changed.wait(min(left, 0.2))

    @property
    def port(self) -> int:
        return int(self.said(r"listening on https?://[^ ]*:(\d+)")[1])

    def ready(self) -> Running:
        self.said(r"ready in ")
        return self

    def engine(self) -> int:
        """The process of the engine."""
        found = child_of(self.process.pid, "engine_process")
        assert found, "there is no engine process"
        return found

    def store(self) -> int:
        """The process of the engine's store; 0 if there is none just now."""
        return child_of(self.engine(), "sapwood.store.worker")

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, seconds: float = PATIENCE
    ) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def get(self, path: str, **more: Any) -> Answer:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any, **more: Any) -> Answer:
        return self.request("POST", path, body, **more)

    def stream(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Stream:
        return Stream(self.port, path, {"stream": True, **body}, headers or {})

    def stream_later(self, path: str, body: Any) -> Later:
        return Later(self, path, body)

    def stop(self, signal_: int = signal.SIGTERM, seconds: float = PATIENCE) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal_)
        status = self.ended(seconds)
        for words in ("Assertion failed", "the engine has not ended"):
            assert not any(words in line for line in self.lines), "\n".join(self.lines[-50:])
        return status

    def ended(self, seconds: float = PATIENCE) -> int:
        """Its exit status, once all of its log is here."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("the server does not end:\n" + "\n".join(self.lines[-50:])) from None
        self._reader.join(seconds)
        return status

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Stream:
    """A stream of events, read as it comes."""

    def __init__(self, port: int, path: str, body: Any, headers: dict[str, str]) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        self.response = self.connection.getresponse()
        self.status = self.response.status
        self.comments = 0

    def events(self) -> Iterator[Any]:
        """Each event; "[DONE]" as it is."""
        for line in self.response:
            if line.startswith(b":"):
                self.comments += 1
            if line.startswith(b"data: "):
                text = line[6:].decode().strip()
                yield text if text == "[DONE]" else json.loads(text)

    def text(self) -> str:
        found = []
        for event in self.events():
            if event != "[DONE]" and event.get("choices"):
                choice = event["choices"][0]
                found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return "".join(found)

    def close(self) -> None:
        self.connection.close()


class Later:
    """A request that is sent now, and whose answer is awaited later."""

    def __init__(self, server: Running, path: str, body: Any) -> None:
        self._found: list[Answer] = []
        self._thread = threading.Thread(target=lambda: self._found.append(server.post(path, body)), daemon=True)
        self._thread.start()

    def answer(self) -> Answer:
        self._thread.join(PATIENCE)
        return self._found[0]


def child_of(parent: int, words: str) -> int:
    """The child of a process that has these words in its command line, or 0."""
    for file in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in file.read_text().split():
            with contextlib.suppress(OSError):
                if words in Path(f"/proc/{child}/cmdline").read_text(errors="replace"):
                    return int(child)
    return 0


def until(condition: Any, seconds: float = PATIENCE) -> Any:
    """What `condition` says once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def spent(pid: int) -> float:
    """Seconds of processors that a process has had, and those of its children that are over."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
