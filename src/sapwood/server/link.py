"""The API's side of the engine process: starts it, watches it, submits, and hands each step's tokens to their streams.

    submit --> Job (one request) --> Lane (one sample each): tokens pending, and one future that waits for any of them

The engine's end is seen by the kernel (pidfd): every stream ends with an error, and `down` says why. One event loop
calls all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from sapwood.engine.params import SamplingParams

from .engine_side import AHEAD, Settings
from .errors import ApiError, engine_down
from .grammars import GrammarSpec
from .messages import (
    Alive,
    Answer,
    Ask,
    Begun,
    Drop,
    End,
    Failed,
    Likely,
    Progress,
    Ready,
    Submit,
    Taken,
    Tokens,
    decode_to_api,
    encode,
)

log = logging.getLogger(__name__)
LAG = 0.02  # seconds after which this process counts as behind, and tokens of a stream go out together
TOLD = AHEAD // 2  # steps after which the engine hears that they were taken
_CONNECTS = 1000  # milliseconds that a message waits for an engine that has just begun
_ANSWERS = 30.0  # seconds that a question may take


class Lane:
    """One sample: tokens that nobody has taken yet, and its end."""

    __slots__ = ("begun", "end", "job", "likely", "over", "prompt", "tokens")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tokens: list[int] = []
        self.likely: list[Likely] = []
        self.begun: Begun | None = None
        self.prompt: list[Likely | None] | None = None
        self.end: End | None = None
        self.over = False  # whoever reads it has all that is wanted


class Job:
    """One request in the engine. `news`: a lane has tokens or an end, the client has left (`gone`), or nothing has come
    for long (`idle`).

    While somebody waits for news, `reads` makes of them what it is to get, at once and for all requests of a step
    before any of them writes: writes one after the other find the clients awake, which costs a fraction."""

    __slots__ = ("_future", "_waiter", "first", "gone", "idle", "lanes", "link", "news", "numbers", "reads", "since")

    def __init__(self, link: EngineLink, first: int, n: int) -> None:
        self.link = link
        self.first = first
        self.numbers = range(first, first + n)
        self.lanes = [Lane(self) for _ in range(n)]
        self.gone = False
        self.idle = False
        self.news = False
        self.since = time.monotonic()  # when tokens last came
        self.reads: Callable[[], Any] = lambda: None
        self._future = asyncio.get_running_loop().create_future
        self._waiter: asyncio.Future[Any] | None = None

    def more(self) -> asyncio.Future[Any]:
        """What `reads` returns or raises, when there are news."""
        self._waiter = waiter = self._future()
        if self.news:
            self.wake()
        return waiter

    def wake(self) -> None:
        self.news = True
        waiter = self._waiter
        if waiter is None or waiter.done():  # they are read later; and a cancelled one must not hurt the others
            return
        try:
            waiter.set_result(self.reads())
        except Exception as error:
            waiter.set_exception(error)

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.wake()

    def over(self, index: int) -> None:
        """All that is wanted of a sample has come."""
        self.link.drop([self.first + index], finished=True)

    def close(self) -> None:
        """Nobody reads this any more: what still runs is aborted."""
        self.link.drop([number for number in self.numbers if number in self.link.lanes], finished=False)


class EngineLink:
    """`settings` start the engine; `on_down(why)` is called when it has died."""

    def __init__(self, settings: Callable[[], Settings], on_down: Callable[[str], None]) -> None:
        self.settings = settings
        self.on_down = on_down
        self.ready: Ready | None = None
        self.doing = "starting"
        self.spent: dict[str, float] = {}  # seconds for each thing it did at the start
        self._doing_since = time.monotonic()
        self.down: str | None = None  # why it serves nobody any more
        self.lanes: dict[int, Lane] = {}
        self.lag = 0.0  # how late the last step was
        self.generated = 0  # tokens, since the start
        self.heard = time.monotonic()  # when the engine last sent anything
        self._number = 1
        self._news: dict[Job, None] = {}  # whom the messages that were just taken are for
        self._told = 0  # the last step that the engine knows to be taken
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._failed = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: asyncio.Future[Ready] | None = None

    # ---- its life

    async def start(self) -> Ready:
        """Start an engine process. Returns when it is ready; ValueError with its own words if it cannot."""
        loop = asyncio.get_running_loop()
        self._folder = Path(tempfile.mkdtemp(prefix="sapwood-"))  # mode 0700
        self._context = zmq.Context()
        self._inward, self._outward = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket, name in ((self._inward, "api"), (self._outward, "engine")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.SNDTIMEO, _CONNECTS)
            socket.bind(f"ipc://{self._folder}/{name}")
        self.ready, self.down, self._failed, self._told = None, None, "", 0
        self.doing, self.spent, self._doing_since = "starting", {}, time.monotonic()
        self._waiting = loop.create_future()
        settings = msgspec.json.encode(self.settings()) + b"\n"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sapwood.server.engine_side", str(self._folder)], stdin=subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._died)
        loop.add_reader(self._inward.fileno(), self._readable)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(settings)
            self._process.stdin.close()
        self._readable()
        return await self._waiting

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _died(self) -> None:
        assert self._process is not None
        self._readable()  # what it has sent before
        code = self._process.wait()
        self._close_sockets()
        why = self._failed or f"the engine process has ended ({_ending(code)})"
        self.down = why
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ValueError(why))
            return
        lanes, self.lanes = self.lanes, {}
        for number, lane in lanes.items():
            lane.end = End(number, "error", None, 0, why)
            lane.job.wake()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(engine_down(why))
        self._questions.clear()
        self.on_down(why)

    def _close_sockets(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        loop.remove_reader(self._inward.fileno())
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def close(self, seconds: float) -> None:
        """End the engine: what it owes a store is written first, for so long at most."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        self.on_down = lambda why: None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, OSError):
            loop.remove_reader(self._pidfd)
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(loop.run_in_executor(None, process.wait), seconds)
        except TimeoutError:
            process.kill()
            await loop.run_in_executor(None, process.wait)
        self._close_sockets_quietly()

    def _close_sockets_quietly(self) -> None:
        with contextlib.suppress(ValueError, OSError, zmq.ZMQError):
            self._close_sockets()

    def cut(self, why: str) -> None:
        """End every stream with an error, and abort what they waited for."""
        lanes, numbers = dict(self.lanes), list(self.lanes)
        self.drop(numbers, finished=False)
        for number, lane in lanes.items():
            lane.end = End(number, "abort", None, 0, why)
            lane.job.wake()

    def expire(self, job: Job, seconds: float) -> None:
        """A request has waited for its first token for so long: it waits no longer."""
        if any(lane.begun is not None for lane in job.lanes):
            return
        waiting = [number for number in job.numbers if number in self.lanes]
        self.drop(waiting, finished=False)
        for number in waiting:
            lane = job.lanes[number - job.first]
            lane.end = End(number, "timeout", None, 0, f"it waited for {seconds:g} seconds: the server is busy")
        job.wake()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def waiting(self) -> int:
        """Samples that nothing was computed for yet, as far as is known here."""
        return sum(lane.begun is None for lane in self.lanes.values())

    @property
    def hangs(self) -> float:
        """Seconds since the engine was last heard, while somebody waits for it."""
        return time.monotonic() - self.heard if self.lanes or self._questions else 0.0

    # ---- requests

    def job(self, lanes: int) -> Job:
        """A request of so many samples, to be submitted prompt by prompt."""
        if self.down is not None or self.ready is None:
            raise engine_down(self.down or "the engine is not ready yet")
        job = Job(self, self._number, lanes)
        self._number += lanes
        self.lanes.update(zip(job.numbers, job.lanes, strict=True))
        return job

    def submit(
        self,
        job: Job,
        at: int,
        tokens: bytes,
        params: SamplingParams,
        *,
        adapter: bytes | None,
        reads_cache: bool,
        writes_cache: bool,
        bad_words: list[tuple[int, ...]],
        grammar: GrammarSpec | None,
    ) -> None:
        """A prompt of a job, whose samples are the lanes from `at` on."""
        params = replace(params, stop=None, bad_words=None, detokenize=False)
        now = time.monotonic()
        self._send(Submit(job.first + at, tokens, params, adapter, reads_cache, writes_cache, bad_words, grammar, now))

    def drop(self, numbers: list[int], finished: bool) -> None:
        known = [number for number in numbers if self.lanes.pop(number, None) is not None]
        if known and self.down is None:
            self._send(Drop(known, finished))

    async def ask(self, what: str, **arguments: Any) -> Any:
        """What the engine answers; ApiError if it says no."""
        if self.down is not None or self.ready is None:
            raise engine_down(self.down or "the engine is not ready yet")
        number, self._number = self._number, self._number + 1
        question = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, what, arguments))
        try:
            return await asyncio.wait_for(question, _ANSWERS)
        except TimeoutError:
            raise ApiError(503, "the engine does not answer", "service_unavailable") from None
        finally:
            self._questions.pop(number, None)

    def _send(self, message: Any) -> None:
        raw = encode(message)
        try:
            self._outward.send(raw, zmq.NOBLOCK)
        except zmq.Again:  # nobody is connected: it has just begun, or it is dead and that is not told yet
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(zmq.Again):
                    self._outward.send(raw)

    # ---- what comes back

    def _readable(self) -> None:
        """The socket's file tells of a change only: everything is taken."""
        taken = 0
        try:
            while True:
                message = decode_to_api(self._inward.recv(zmq.NOBLOCK))
                if isinstance(message, Tokens):
                    self._dispatch(message)
                    taken = message.step
                else:
                    self._other(message)
        except zmq.Again:
            pass
        except zmq.ZMQError:  # closed
            return
        self.heard = time.monotonic()
        if taken - self._told >= TOLD:
            self._told = taken
            self._send(Taken(taken))
        self._tell()

    def _dispatch(self, message: Tokens) -> None:
        now = time.monotonic()
        self.lag = now - message.sent
        lanes, news = self.lanes, self._news
        for begun in message.begun:
            lane = lanes.get(begun.number)
            if lane is not None:
                lane.begun = begun
                lane.prompt = message.prompts.get(begun.number)
        likely = message.likely
        numbers = np.frombuffer(message.numbers, np.int32).tolist()
        self.generated += len(numbers)
        for number, token in zip(numbers, np.frombuffer(message.tokens, np.int32).tolist(), strict=True):
            lane = lanes.get(number)
            if lane is None:
                continue
            lane.tokens.append(token)
            if likely and number in likely:
                lane.likely.append(likely[number])
            job = lane.job
            job.since = now
            news[job] = None
        for end in message.ends:
            lane = lanes.pop(end.number, None)
            if lane is not None:
                lane.end = end
                news[lane.job] = None

    def _tell(self) -> None:
        """Whoever waits for what was dispatched."""
        for job in self._news:
            job.wake()
        self._news.clear()

    def _spend(self) -> None:
        """What the engine has done until now took so long."""
        now = time.monotonic()
        self.spent[self.doing] = self.spent.get(self.doing, 0.0) + now - self._doing_since
        self._doing_since = now

    def _other(self, message: Any) -> None:
        if isinstance(message, Answer):
            question = self._questions.get(message.number)
            if question is not None and not question.done():
                if message.error:
                    question.set_exception(ApiError(400, message.error))
                else:
                    question.set_result(message.value)
        elif isinstance(message, Progress):
            self._spend()
            self.doing = message.what
            log.debug("engine: %s", message.what)
        elif isinstance(message, Ready):
            self._spend()
            self.ready = message
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(message)
        elif isinstance(message, Alive):
            pass
        elif isinstance(message, Failed):
            self._failed = message.why


def _ending(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"
