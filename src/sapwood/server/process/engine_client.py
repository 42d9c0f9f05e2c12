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
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import zmq

from sapwood.engine.lora.process import SECONDS
from sapwood.engine.params import SamplingParams

from ..errors import ApiError, Disconnected, engine_down, without_paths
from .engine_process import IGNORED, MAX_UNACKED_STEPS, REFUSED, STOP, Settings
from .grammars import GrammarSpec
from .messages import (
    Acknowledged,
    Alive,
    Drop,
    End,
    EngineQuery,
    Likely,
    Progress,
    QueryAnswer,
    Ready,
    SampleBegun,
    StartFailed,
    StepOutput,
    Submit,
    decode_to_api,
    encode,
)
from .private_folder import PrivateFolder

log = logging.getLogger(__name__)
LAG_SECONDS = 0.02  # seconds after which this process counts as behind, and tokens of a stream go out together
ACK_EVERY_STEPS = MAX_UNACKED_STEPS // 2  # steps after which the engine hears that they were taken
_CONNECT_MILLISECONDS = 1000  # milliseconds that a message waits for an engine that has just begun
_UNREAD_TOKENS = 64  # tokens, or more, that nobody waited for when they came: then it is looked how much there is
_TOKEN, _LIKELY = 40, 200  # bytes of a token that waits, and of a likely one told with it, as measured
_MAX_UNREAD_BYTES = 64 << 10  # bytes
_QUERY_SECONDS = 30.0  # seconds that a question may take
_CLOSE_SECONDS = 10.0  # seconds that an engine may take to end, beside those in which it writes what it owes a store
# What an error is for a client, if it is more than a wrong argument: status, code, field, and when to try again.
_PROBLEMS: Mapping[str, tuple[int, str, str | None, dict[str, str]]] = {
    "no_adapter": (404, "no_adapter", "lora_path", {}),
    "adapters_busy": (503, "adapters_busy", None, {"Retry-After": "5"}),
    "adapter_timeout": (504, "adapter_timeout", "lora_path", {}),
}


class EngineRefused(ValueError):
    """The engine cannot be as it was asked to be."""


class Lane:
    """One sample: tokens that nobody has taken yet, and its end."""

    __slots__ = ("begun", "end", "job", "likely", "over", "prompt", "tokens")

    def __init__(self, job: EngineJob) -> None:
        self.job = job
        self.tokens: list[int] = []
        self.likely: list[Likely] = []
        self.begun: SampleBegun | None = None
        self.prompt: list[Likely | None] | None = None
        self.end: End | None = None
        self.over = False  # whoever reads it has all that is wanted

    def leave(self) -> None:
        """Its job is closed."""
        self.tokens, self.likely = [], []
        with contextlib.suppress(AttributeError):  # it was before
            del self.job


class EngineJob:
    """One request in the engine. `news`: a lane has tokens or an end, the client has left (`gone`), or nothing has come
    for long (`idle`).

    `render` belongs to the reader of the job: it turns news into what the reader writes. `wake` calls it, for all
    requests of a step before any reader runs, so that all writes of a step follow each other: a write that finds its
    client awake costs a fraction of one that wakes it."""

    __slots__ = (
        *("_future", "_waiter", "first", "gone", "idle", "lanes", "link", "news", "numbers", "render", "since"),
        *("_kept", "_missed", "_told", "holds", "tenant"),
    )

    def __init__(self, link: EngineLink, first: int, n: int, tenant: str) -> None:
        self.link = link
        self.first = first
        self.tenant = tenant  # whose it is
        self.numbers = range(first, first + n)
        self.lanes = [Lane(self) for _ in range(n)]
        self.gone = False
        self.idle = False
        self.news = False
        self.since = time.monotonic()  # when tokens last came
        self.render: Callable[[], Any] = lambda: None
        self.holds: Callable[[int], None] = lambda bytes: None  # is told of the memory that is kept for an answer:
        self._kept = 0  # bytes of what was read; to which comes what was not
        self._missed = 0  # news that nobody waited for
        self._told = 0
        self._future = asyncio.get_running_loop().create_future
        self._waiter: asyncio.Future[Any] | None = None

    def rendered(self) -> asyncio.Future[Any]:
        """What `render` returns or raises, as soon as there is news."""
        self._waiter = waiter = self._future()
        self._missed = 0
        if self._told > _MAX_UNREAD_BYTES:
            self._tell()
        if self.news:
            self.wake()
        return waiter

    def wake(self) -> None:
        self.news = True
        waiter = self._waiter
        if waiter is None or waiter.done():  # they are read later; and a cancelled one must not hurt the others
            self._missed += 1
            if self._missed * len(self.lanes) >= _UNREAD_TOKENS:
                self._missed = 0
                self._tell()
            return
        try:
            waiter.set_result(self.render())
        except (ApiError, Disconnected) as error:  # frames in a traceback would hold the waiter, which holds the error
            waiter.set_exception(error.with_traceback(None))
        except Exception as error:
            waiter.set_exception(error)

    def keeps(self, more: int) -> None:
        """What was read is kept, in so many bytes."""
        self._kept += more
        if self._kept > self._told + _MAX_UNREAD_BYTES:
            self._tell()

    def _tell(self) -> None:
        """Whoever counts is told what is kept, if that has changed by much."""
        tokens = sum(len(lane.tokens) for lane in self.lanes)
        likely = sum(len(lane.likely) * len(lane.likely[0]) for lane in self.lanes if lane.likely)
        kept = self._kept + tokens * _TOKEN + likely * _LIKELY
        if not self._told * 0.8 <= kept <= self._told + _MAX_UNREAD_BYTES:
            self._told = kept
            self.holds(kept)

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.wake()

    def over(self, index: int) -> None:
        """All that is wanted of a sample has come."""
        self.link.drop([self.first + index], finished=True)

    def close(self) -> None:
        """Nobody reads this any more: what still runs is aborted. What was not read goes at once, and the job as soon
        as nobody looks at what it was: no garbage collector is waited for."""
        self.link.drop([number for number in self.numbers if number in self.link.lanes], finished=False)
        self._waiter = None
        for lane in self.lanes:
            lane.leave()


class EngineLink:
    """`settings` start the engine; `on_down(why)` is called when it has died."""

    def __init__(self, settings: Callable[[], Settings], on_down: Callable[[str], None]) -> None:
        self.settings = settings
        self.on_down = on_down
        self.ready: Ready | None = None  # what the engine said when it was; also while another takes its place
        self.up = False  # it takes requests and questions
        self.doing = "starting"
        self.spent: dict[str, float] = {}  # seconds for each thing it did at the start
        self._doing_since = time.monotonic()
        self.down: str | None = None  # why it serves nobody any more
        self.lanes: dict[int, Lane] = {}
        self.lag = 0.0  # how late the last step was
        self.generated = 0  # tokens, since the start
        self.heard = time.monotonic()  # when the engine last sent anything
        self._number = 1
        self._news: dict[EngineJob, None] = {}  # whom the messages that were just taken are for
        self._told = 0  # the last step that the engine knows to be taken
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._failed = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: asyncio.Future[Ready] | None = None

    # ---- its life

    async def start(self) -> Ready:
        """Start an engine process. Returns when it is ready; ValueError with its own words if it cannot, EngineRefused
        if that is for what was asked of it."""
        loop = asyncio.get_running_loop()
        self._folder = PrivateFolder()
        self._context = zmq.Context()
        self._context.linger = 0  # where nobody has closed it, its end waits for nobody either
        self._inward, self._outward = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket, name in ((self._inward, "api"), (self._outward, "engine")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.SNDTIMEO, _CONNECT_MILLISECONDS)
            socket.bind(f"ipc://{self._folder.path}/{name}")
        self.up, self.down, self._failed, self._told = False, None, "", 0
        self.doing, self.spent, self._doing_since = "starting", {}, time.monotonic()
        self._waiting = loop.create_future()
        settings = msgspec.json.encode(self.settings()) + b"\n"
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # as it is in a process made now:
        try:  # Ctrl-C goes to both, and until the engine ignores it, it would be a traceback
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sapwood.server.process.engine_process", str(self._folder.path)],
                stdin=subprocess.PIPE,
            )
        except OSError as error:
            self.down = f"no process for the engine can be started: {error}"
            self._context.destroy(linger=0)
            self._folder.close()
            raise ValueError(self.down) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
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
        self.down = without_paths(why)  # what clients are told
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(EngineRefused(why) if code == REFUSED else ValueError(why))
            return
        lanes, self.lanes = self.lanes, {}
        for number, lane in lanes.items():
            lane.end = End(number, "error", None, 0, why)
            lane.job.wake()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(engine_down(self.down))
        self._questions.clear()
        self.on_down(why)

    def _close_sockets(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        loop.remove_reader(self._inward.fileno())
        self._context.destroy(linger=0)
        self._folder.close()

    async def close(self) -> None:
        """End the engine: what it owes a store is written first, for as long as the engine said when it was ready."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        self.on_down = lambda why: None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, OSError):
            loop.remove_reader(self._pidfd)
        process.send_signal(STOP)
        seconds = _CLOSE_SECONDS + (self.ready.closes_within if self.ready is not None else 0.0)
        try:
            await asyncio.wait_for(loop.run_in_executor(None, process.wait), seconds)
        except TimeoutError:
            log.warning("the engine has not ended within %.0f s: what it still owed its store is not written", seconds)
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

    def expire(self, job: EngineJob, seconds: float) -> None:
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
            self._folder.close()

    def discard(self, why: str) -> None:
        """End it at once, because what is to be beside it could not be had: nobody is told that it has died."""
        if self.down is None:
            self.kill()
            self._close_sockets_quietly()
            self.down = why

    @property
    def waiting(self) -> int:
        """Samples that nothing was computed for yet, as far as is known here."""
        return sum(lane.begun is None for lane in self.lanes.values())

    @property
    def hangs(self) -> float:
        """Seconds since the engine was last heard, while somebody waits for it."""
        return time.monotonic() - self.heard if self.lanes or self._questions else 0.0

    # ---- requests

    def live(self, tenant: str) -> int:
        """Samples of somebody that wait or run."""
        return sum(lane.job.tenant == tenant for lane in self.lanes.values())

    def job(self, lanes: int, tenant: str) -> EngineJob:
        """A request of so many samples, to be submitted prompt by prompt."""
        if self.down is not None or not self.up:
            raise engine_down(self.down or "the engine is not ready yet")
        job = EngineJob(self, self._number, lanes, tenant)
        self._number += lanes
        self.lanes.update(zip(job.numbers, job.lanes, strict=True))
        return job

    def submit(
        self,
        job: EngineJob,
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
        first, shares = job.first + at, (adapter, reads_cache, writes_cache)
        self._send(Submit(first, tokens, params, *shares, bad_words, grammar, now, job.tenant))

    def drop(self, numbers: list[int], finished: bool) -> None:
        known = [number for number in numbers if self.lanes.pop(number, None) is not None]
        if known and self.down is None:
            self._send(Drop(known, finished))

    async def load_adapter(self, name: str, path: str, root: str | None = None) -> bytes:
        """The digest of an adapter that is loaded now. `root`: the folder in which `path` must be, and stay. Nothing of
        it is looked at in this process: a file system may hang."""
        seconds = _QUERY_SECONDS + (self.ready.facts.get("lora_seconds", SECONDS) if self.ready is not None else 0.0)
        digest: bytes = await self._ask("load_adapter", seconds, {"name": name, "path": path, "root": root})
        return digest

    async def ask(self, what: str, **arguments: Any) -> Any:
        """What the engine answers; ApiError if it says no."""
        return await self._ask(what, _QUERY_SECONDS, arguments)

    async def _ask(self, what: str, seconds: float, arguments: dict[str, Any]) -> Any:
        if self.down is not None or not self.up:
            raise engine_down(self.down or "the engine is not ready yet")
        number, self._number = self._number, self._number + 1
        question = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send(EngineQuery(number, what, arguments))
        try:
            return await asyncio.wait_for(question, seconds)
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
                if isinstance(message, StepOutput):
                    self._dispatch(message)
                    taken = message.step
                else:
                    self._other(message)
        except zmq.Again:
            pass
        except zmq.ZMQError:  # closed
            return
        self.heard = time.monotonic()
        if taken - self._told >= ACK_EVERY_STEPS:
            self._told = taken
            self._send(Acknowledged(taken))
        self._tell()

    def _dispatch(self, message: StepOutput) -> None:
        now = time.monotonic()
        self.lag = now - message.sent
        lanes, news = self.lanes, self._news
        for begun in message.begun:
            lane = lanes.get(begun.number)
            if lane is not None:
                lane.begun = begun
                lane.prompt = message.prompts.get(begun.number)
        likely = message.likely
        numbers = np.frombuffer(message.numbers, np.int64).tolist()
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

    def does(self, what: str) -> None:
        """What a start is at now, for whoever asks meanwhile; and what it was at before took so long."""
        self._spend()
        self.doing = what

    def _spend(self) -> None:
        now = time.monotonic()
        self.spent[self.doing] = self.spent.get(self.doing, 0.0) + now - self._doing_since
        self._doing_since = now

    def _other(self, message: Any) -> None:
        if isinstance(message, QueryAnswer):
            question = self._questions.get(message.number)
            if question is not None and not question.done():
                if message.problem:
                    status, code, param, headers = _PROBLEMS[message.problem]
                    question.set_exception(ApiError(status, message.error, code, param, headers))
                elif message.error:
                    question.set_exception(ApiError(400, message.error))
                else:
                    question.set_result(message.value)
        elif isinstance(message, Progress):
            self.does(message.what)
            log.debug("engine: %s", message.what)
        elif isinstance(message, Ready):
            self._spend()
            self.ready, self.up = message, True
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(message)
        elif isinstance(message, Alive):
            pass
        elif isinstance(message, StartFailed):
            self._failed = message.why


def _ending(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"
