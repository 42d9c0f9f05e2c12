"""The API's side of the engine process: starts it, watches it, submits, and hands each step's tokens to their streams.

    submit --> EngineJob (one request) --> Lane (one sample each): pending tokens, and one future that waits for them

The kernel reports the engine's end (pidfd): then every stream ends with an error, and `down` says why. One event loop
calls all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from sapwood.engine.lora.process import SECONDS
from sapwood.engine.params import SamplingParams
from sapwood.engine.stops import TextStream

from ..errors import ApiError, Disconnected, engine_down, without_paths
from .engine_child import EngineChild
from .grammars import GrammarSpec
from .messages import (
    MAX_UNACKED_STEPS,
    REFUSED_STATUS,
    Acknowledged,
    Drop,
    End,
    EngineQuery,
    Likely,
    Progress,
    QueryAnswer,
    Ready,
    SampleBegun,
    Settings,
    StartFailed,
    StepOutput,
    Submit,
    decode_to_api,
)

log = logging.getLogger(__name__)
LAG_SECONDS = 0.02  # seconds after which this process counts as behind, and tokens of a stream go out together
ACK_EVERY_STEPS = MAX_UNACKED_STEPS // 2  # steps after which the engine hears that they were taken
_UNREAD_TOKENS = 64  # tokens that came without a reader waiting: after so many, their memory is counted again
_TOKEN, _LIKELY = 40, 200  # bytes of a token that waits, and of a log-probability beside it, as measured
_MAX_UNREAD_BYTES = 64 << 10  # bytes
_QUERY_SECONDS = 30.0  # seconds that a question may take
_CLOSE_SECONDS = 10.0  # seconds that an engine may take to end, beside those in which backups go to its store
# What an error is for a client, if it is more than a wrong argument: status, code, field, and when to try again.
_PROBLEMS: Mapping[str, tuple[int, str, str | None, dict[str, str]]] = {
    "no_adapter": (404, "no_adapter", "lora_path", {}),
    "adapters_busy": (503, "adapters_busy", None, {"Retry-After": "5"}),
    "adapter_timeout": (504, "adapter_timeout", "lora_path", {}),
}


class EngineRefused(ValueError):
    """A model or a flag that was asked for cannot be served."""


class Lane:
    """One sample: the tokens that no reader has taken yet, its text so far, and its end."""

    __slots__ = ("begun", "end", "job", "last", "likely", "over", "prompt", "text", "tokens")

    def __init__(self, job: EngineJob) -> None:
        self.job = job
        self.tokens: list[int] = []
        self.likely: list[Likely] = []
        self.begun: SampleBegun | None = None
        self.prompt: list[Likely | None] | None = None
        self.end: End | None = None
        self.text: TextStream | None = None  # of the tokens that were taken; None: no text is made
        self.last = 0.0  # when tokens were last taken
        self.over = False  # its reader has all that is wanted

    def leave(self) -> None:
        """Its job is closed."""
        self.tokens, self.likely = [], []
        with contextlib.suppress(AttributeError):  # closed before
            del self.job


class EngineJob:
    """One request in the engine. `news`: a lane has tokens or an end, the client has left (`gone`), or nothing has come
    for long (`idle`).

    `render` belongs to the reader of the job: it turns news into what the reader writes. `wake` calls it, for all
    requests of a step before any reader runs, so that all writes of a step follow each other: a write that finds its
    client awake costs a fraction of one that wakes it."""

    __slots__ = (
        *("_future", "_waiter", "first", "gone", "idle", "lanes", "link", "news", "numbers", "render", "since"),
        *("_kept", "_missed", "_reported", "holds", "tenant"),
    )

    def __init__(self, link: EngineClient, first: int, n: int, tenant: str) -> None:
        self.link = link
        self.first = first
        self.tenant = tenant
        self.numbers = range(first, first + n)
        self.lanes = [Lane(self) for _ in range(n)]
        self.gone = False
        self.idle = False
        self.news = False
        self.since = time.monotonic()  # when tokens last came
        self.render: Callable[[], Any] = lambda: None
        self.holds: Callable[[int], None] = lambda bytes: None  # called with the memory that the answer holds
        self._kept = 0  # bytes of the part that was read; unread tokens are added to them
        self._missed = 0  # news that no reader waited for
        self._reported = 0  # bytes, in the last call of `holds`
        self._future = asyncio.get_running_loop().create_future
        self._waiter: asyncio.Future[Any] | None = None

    def rendered(self) -> asyncio.Future[Any]:
        """What `render` returns or raises, as soon as there is news."""
        self._waiter = waiter = self._future()
        self._missed = 0
        if self._reported > _MAX_UNREAD_BYTES:
            self._report()
        if self.news:
            self.wake()
        return waiter

    def wake(self) -> None:
        self.news = True
        waiter = self._waiter
        if waiter is None or waiter.done():  # they are read later; a cancelled one must not hurt other requests
            self._missed += 1
            if self._missed * len(self.lanes) >= _UNREAD_TOKENS:
                self._missed = 0
                self._report()
            return
        try:
            waiter.set_result(self.render())
        except (ApiError, Disconnected) as error:  # frames in a traceback would hold the waiter, which holds the error
            waiter.set_exception(error.with_traceback(None))
        except Exception as error:
            waiter.set_exception(error)

    def keeps(self, more: int) -> None:
        """So many more bytes of what was read are kept."""
        self._kept += more
        if self._kept > self._reported + _MAX_UNREAD_BYTES:
            self._report()

    def _report(self) -> None:
        """Call `holds` if the memory has changed by much."""
        tokens = sum(len(lane.tokens) for lane in self.lanes)
        likely = sum(len(lane.likely) * len(lane.likely[0]) for lane in self.lanes if lane.likely)
        kept = self._kept + tokens * _TOKEN + likely * _LIKELY
        if not self._reported * 0.8 <= kept <= self._reported + _MAX_UNREAD_BYTES:
            self._reported = kept
            self.holds(kept)

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.wake()

    def over(self, index: int) -> None:
        """All that is wanted of a sample has come."""
        self.link.drop([self.first + index], finished=True)

    def close(self) -> None:
        """There is no reader any more: samples that still run are aborted. Unread tokens are freed at once and the job
        with its last reference: memory must not wait for the garbage collector."""
        self.link.drop([number for number in self.numbers if number in self.link.lanes], finished=False)
        self._waiter = None
        for lane in self.lanes:
            lane.leave()


class EngineClient:
    """`settings` start the engine; `on_down(why)` is called when it has died."""

    def __init__(self, settings: Callable[[], Settings], on_down: Callable[[str], None]) -> None:
        self.settings = settings
        self.on_down = on_down
        self.ready: Ready | None = None  # of the last engine that was ready, also while another takes its place
        self.up = False  # it takes requests and questions
        self.doing = "starting"
        self.spent: dict[str, float] = {}  # seconds for each part of the start
        self._doing_since = time.monotonic()
        self.down: str | None = None  # why no request can be served any more
        self.lanes: dict[int, Lane] = {}
        self.lag = 0.0  # how late the last step was
        self.generated = 0  # tokens, since the start
        self.heard = time.monotonic()  # when the engine last sent anything
        self._number = 1
        self._news: dict[EngineJob, None] = {}  # jobs that the messages just taken are for
        self._acknowledged = 0  # the last step of which the engine knows that it was taken
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._failed = ""
        self._child: EngineChild | None = None
        self._starting: asyncio.Future[Ready] | None = None

    # ---- its life

    async def start(self) -> Ready:
        """Start an engine process. Returns when it is ready; ValueError with its own words if it cannot start,
        EngineRefused if a model or a flag is the reason."""
        self.up, self.down, self._failed, self._acknowledged = False, None, "", 0
        self.doing, self.spent, self._doing_since = "starting", {}, time.monotonic()
        self._starting = asyncio.get_running_loop().create_future()
        try:
            self._child = EngineChild(self.settings(), self._readable, self._died)
        except ValueError as error:
            self.down = str(error)
            raise
        self._readable()
        return await self._starting

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    def _died(self) -> None:
        assert self._child is not None
        self._readable()  # messages from before its end
        ending, code = self._child.ending(), self._child.process.returncode
        self._child.close()
        why = self._failed or f"the engine process has ended ({ending})"
        self.down = without_paths(why)  # clients see it
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(EngineRefused(why) if code == REFUSED_STATUS else ValueError(why))
            return
        lanes, self.lanes = self.lanes, {}
        for number, lane in lanes.items():
            lane.end = End(number, "error", None, 0, why)
            lane.job.wake()
        for query in self._queries.values():
            if not query.done():
                query.set_exception(engine_down(self.down))
        self._queries.clear()
        self.on_down(why)

    async def close(self) -> None:
        """End the engine. It writes its backups to the store first, within the time that it named when it was ready."""
        child = self._child
        if child is None or not child.running:
            return
        self.on_down = lambda why: None
        seconds = _CLOSE_SECONDS + (self.ready.closes_within if self.ready is not None else 0.0)
        if not await child.stop(seconds):
            log.warning("the engine has not ended within %.0f s: what it still owed its store is not written", seconds)
        child.close()

    def cut(self, why: str) -> None:
        """End every stream with an error, and abort its samples."""
        lanes, numbers = dict(self.lanes), list(self.lanes)
        self.drop(numbers, finished=False)
        for number, lane in lanes.items():
            lane.end = End(number, "abort", None, 0, why)
            lane.job.wake()

    def expire(self, job: EngineJob, seconds: float) -> None:
        """So many seconds have passed since a request came: if it has no token yet, it waits no longer."""
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
        if self._child is not None:
            self._child.kill()

    def discard(self, why: str) -> None:
        """End an engine at once that is of no use, because another part of the start has failed. `on_down` is not
        called."""
        if self.down is None:
            self.kill()
            if self._child is not None:
                self._child.close()
            self.down = why

    @property
    def waiting(self) -> int:
        """Samples without a token, as far as is known here."""
        return sum(lane.begun is None for lane in self.lanes.values())

    @property
    def hangs(self) -> float:
        """Seconds since the engine was last heard, while requests or questions wait for it."""
        return time.monotonic() - self.heard if self.lanes or self._queries else 0.0

    # ---- requests

    def live(self, tenant: str) -> int:
        """Samples of a tenant that wait or run."""
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
        """Load an adapter; returns its digest. `root`: the folder in which `path` must be, and stay. No file of it is
        opened in this process: a file system may hang."""
        seconds = _QUERY_SECONDS + (self.ready.facts.get("lora_seconds", SECONDS) if self.ready is not None else 0.0)
        digest: bytes = await self._query("load_adapter", seconds, {"name": name, "path": path, "root": root})
        return digest

    async def ask(self, name: str, /, **arguments: Any) -> Any:
        """The engine's answer to a question of `EngineQueries`; ApiError if it refuses."""
        return await self._query(name, _QUERY_SECONDS, arguments)

    async def _query(self, name: str, seconds: float, arguments: dict[str, Any]) -> Any:
        if self.down is not None or not self.up:
            raise engine_down(self.down or "the engine is not ready yet")
        number, self._number = self._number, self._number + 1
        query = self._queries[number] = asyncio.get_running_loop().create_future()
        self._send(EngineQuery(number, name, arguments))
        try:
            return await asyncio.wait_for(query, seconds)
        except TimeoutError:
            raise ApiError(503, "the engine does not answer", "service_unavailable") from None
        finally:
            self._queries.pop(number, None)

    def _send(self, message: Any) -> None:
        assert self._child is not None
        self._child.send(message)

    # ---- what comes back

    def _readable(self) -> None:
        """The socket's file shows changes only: all messages are taken."""
        assert self._child is not None
        taken, receive = 0, self._child.inward.recv
        try:
            while True:
                message = decode_to_api(receive(zmq.NOBLOCK))
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
        if taken - self._acknowledged >= ACK_EVERY_STEPS:
            self._acknowledged = taken
            self._send(Acknowledged(taken))
        self._wake_readers()

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

    def _wake_readers(self) -> None:
        for job in self._news:
            job.wake()
        self._news.clear()

    def does(self, doing: str) -> None:
        """The start begins another part, which /health shows; the seconds of the part before are counted."""
        self._end_part()
        self.doing = doing

    def _end_part(self) -> None:
        now = time.monotonic()
        self.spent[self.doing] = self.spent.get(self.doing, 0.0) + now - self._doing_since
        self._doing_since = now

    def _other(self, message: Any) -> None:
        if isinstance(message, QueryAnswer):
            query = self._queries.get(message.number)
            if query is not None and not query.done():
                if message.problem:
                    status, code, param, headers = _PROBLEMS[message.problem]
                    query.set_exception(ApiError(status, message.error, code, param, headers))
                elif message.error:
                    query.set_exception(ApiError(400, message.error))
                else:
                    query.set_result(message.value)
        elif isinstance(message, Progress):
            self.does(message.doing)
            log.debug("engine: %s", message.doing)
        elif isinstance(message, Ready):
            self._end_part()
            self.ready, self.up = message, True
            if self._starting is not None and not self._starting.done():
                self._starting.set_result(message)
        elif isinstance(message, StartFailed):
            self._failed = message.why
