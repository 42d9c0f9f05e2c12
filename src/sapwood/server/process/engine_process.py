"""The engine process: takes requests from the API process, steps, and sends one message for each step.

    receiver thread --> inbox --> the step loop: take, step, send, rest
                          |
                          +-- wake

Its life belongs to the kernel: it dies with the process that started it, however that ends (pdeathsig). Started as
`python -m sapwood.server.process.engine_process FOLDER`, with its settings as JSON on stdin.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from sapwood.cache import held_events
from sapwood.engine.params import Likely
from sapwood.engine.request_table import RequestTable
from sapwood.engine.samples import Sample

from ..observe.logs import set_up
from .engine_queries import EngineQueries
from .grammars import Grammars, GrammarsBusy
from .kv_events import KVEventPublisher
from .kv_events_config import KVEventsConfig
from .loaded_model import ServedEngine
from .messages import (
    Acknowledged,
    Alive,
    Drop,
    End,
    EngineQuery,
    Progress,
    QueryAnswer,
    Ready,
    SampleBegun,
    StartFailed,
    StepOutput,
    Submit,
    ToApi,
    decode_to_engine,
    encode,
)

log = logging.getLogger(__name__)
MAX_UNACKED_STEPS = 8  # steps that are sent before the API must have taken the first of them
_MAX_REST_SECONDS = 1.0  # seconds at most
_GC_SECONDS = 30.0  # seconds without rest after which the youngest garbage is collected all the same
_ALIVE_SECONDS = 1.0  # seconds after which the API hears that the engine lives
_PR_SET_PDEATHSIG = 1


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """What an engine process is started with. `factory`: "module:function", which gets `flags` and a `Progress`
    function, and returns what `LoadedModel` says."""

    factory: str
    flags: dict[str, Any]
    parent: int
    log_format: str = "text"
    log_level: str = "info"
    kv_events: dict[str, Any] | None = None


class EngineSide:
    """`engine`: the requests of the engine that is served."""

    def __init__(
        self, engine: RequestTable, send: Any, grammars: Grammars | None, events: KVEventPublisher | None
    ) -> None:
        self.engine = engine
        self.answers = EngineQueries(engine, self._answer)
        self.inbox: deque[Any] = deque()
        self.stopping = False
        self._send = send
        self._grammars = grammars
        self._events = events
        self._live: dict[int, _Live] = {}
        self._compiling: dict[int, tuple[Submit, Any]] = {}  # requests whose grammars are being made
        self._step = self._taken = 0
        self._sent = time.monotonic()
        self._ends: list[End] = []  # of those that never came to a step

    def receives(self, message: bytes) -> None:
        """Called by the receiver's thread."""
        self.inbox.append(decode_to_engine(message))
        self.engine.wake()

    def run(self) -> None:
        """Until `stopping`."""
        engine = self.engine
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection would be in the middle of a step; there is time for it when nothing runs
        resting, collected = False, time.monotonic()
        while not self.stopping:
            while self.inbox:
                self._take(self.inbox.popleft())
            if (
                self._step - self._taken >= MAX_UNACKED_STEPS
            ):  # the API cannot keep up: more tokens would only pile up there
                engine.loop.tiers.wait(0.05)
                continue
            if self._compiling:
                self._compiled()
            changed = engine.step()
            if changed or self._ends:
                self._tell(changed)
                resting = False
            elif not engine.samples and not resting:
                gc.collect(1)
                resting = True
            if not resting and time.monotonic() - collected > _GC_SECONDS:  # somebody always runs
                gc.collect(0)
                collected = time.monotonic()
            if self._events is not None:
                self._publish(self._events)
            self.answers.poll()
            if time.monotonic() - self._sent > _ALIVE_SECONDS:
                self._send(Alive())
                self._sent = time.monotonic()
            engine.rest(0.002 if self._compiling else _MAX_REST_SECONDS)

    # ---- in

    def _take(self, message: Any) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Drop):
            self._drop(message)
        elif isinstance(message, Acknowledged):
            self._taken = message.step
        elif isinstance(message, EngineQuery):
            self.answers.take(message)

    def _submit(self, message: Submit) -> None:
        if message.grammar is None:
            self._enter(message, ())
        elif self._grammars is None:
            self._refuse(message, "structured output needs a tokenizer, and this server has none")
        else:
            grammars = self._grammars.compile(message.grammar, message.params.n, message.tenant)
            self._compiling[message.number] = message, grammars

    def _compiled(self) -> None:
        for number, (message, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[number]
                error = future.exception()
                if error is not None:
                    self._refuse(message, str(error), "busy" if isinstance(error, GrammarsBusy) else "refused")
                else:
                    self._enter(message, future.result())

    def _enter(self, message: Submit, grammars: Any) -> None:
        tokens = np.frombuffer(message.tokens, np.int32)
        try:
            samples = self.engine.submit(
                str(message.number),
                tokens,
                message.params,
                message.adapter,
                reads_cache=message.reads_cache,
                writes_cache=message.writes_cache,
                grammars=grammars,
                bad_words=message.bad_words,
            )
        except (ValueError, KeyError) as error:  # refused; an adapter that was unloaded meanwhile
            self._refuse(message, getattr(error, "reason", None) or str(error))
            return
        for sample in samples:
            number = message.number + sample.index
            self._live[number] = _Live(number, sample, message.arrived or time.monotonic())

    def _refuse(self, message: Submit, why: str, reason: str = "refused") -> None:
        self._ends += [End(message.number + index, reason, None, 0, why) for index in range(message.params.n)]

    def _drop(self, message: Drop) -> None:
        for number in message.numbers if self._compiling else ():
            compiling = self._compiling.pop(number, None)
            if compiling is not None and self._grammars is not None:
                self._grammars.cancel(compiling[1])
        live = [self._live.pop(number) for number in message.numbers if number in self._live]
        samples = [each.sample for each in live if each.sample.finish_reason is None]
        begun = [sample for sample in samples if sample.token_ids] if message.finished else []
        self.engine.finish(begun)
        self.engine.abort([sample for sample in samples if sample not in begun])

    # ---- out

    def _tell(self, changed: list[Sample]) -> None:
        numbers: list[int] = []
        tokens: list[int] = []
        begun: list[SampleBegun] = []
        ends, self._ends = self._ends, []
        likely: dict[int, Likely] = {}
        prompts: dict[int, list[Likely | None]] = {}
        for sample in changed:
            live = self._live.get(int(sample.request) + sample.index)
            if live is None:  # dropped
                continue
            number, ids = live.number, sample.token_ids
            if len(ids) > live.sent:
                if not live.sent:
                    begun.append(live.begun())
                    if sample.scores_prompt:
                        prompts[number] = [None if each is None else _plain(each) for each in sample.prompt_logprobs]
                if sample.logprobs:
                    likely[number] = _plain(sample.logprobs[-1])
                numbers.append(number)
                tokens.append(ids[-1])
                live.sent = len(ids)
            if sample.finish_reason is not None:
                stop = sample.stop_reason if isinstance(sample.stop_reason, int) else None
                ends.append(End(number, sample.finish_reason, stop, sample.cache.cached, sample.error))
                del self._live[number]
        if not numbers and not ends:
            return
        self._step += 1
        self._sent = time.monotonic()
        self._send(
            StepOutput(
                self._step,
                self._sent,
                np.array(numbers, np.int64).tobytes(),
                np.array(tokens, np.int32).tobytes(),
                begun,
                ends,
                likely,
                prompts,
            )
        )

    def _answer(self, answer: QueryAnswer) -> None:
        self._send(answer)

    def _publish(self, events: KVEventPublisher) -> None:
        told = self.engine.scheduler.drain_events()
        if told:
            events.publish(told)
        if events.wants_snapshot:
            events.give_snapshot(held_events(self.engine.scheduler.cache))


class _Live:
    """A sample that the API waits for."""

    __slots__ = ("arrived", "number", "sample", "sent")

    def __init__(self, number: int, sample: Sample, arrived: float) -> None:
        self.number = number
        self.sample = sample
        self.arrived = arrived
        self.sent = 0  # tokens

    def begun(self) -> SampleBegun:
        sample = self.sample
        queued = max(0.0, (sample.seated or time.monotonic()) - self.arrived)
        return SampleBegun(self.number, queued, sample.cache)


def _plain(likely: Any) -> Likely:
    return {token: (each.logprob, each.rank) for token, each in likely.items()}


# ---- the process

STOP = signal.SIGUSR1  # how the API ends it
IGNORED = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C and systemd's stop reach both processes: the API decides
REFUSED = 2  # the status to exit with if what was asked for cannot be: a model, or a flag


def main() -> int:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    _die_with(settings.parent)
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    set_up(settings.log_format, settings.log_level)
    folder = Path(sys.argv[1])
    context = zmq.Context()
    outward = context.socket(zmq.PUSH)
    outward.set_hwm(0)
    outward.connect(f"ipc://{folder}/api")
    inward = context.socket(zmq.PULL)
    inward.set_hwm(0)
    inward.connect(f"ipc://{folder}/engine")

    def send(message: ToApi) -> None:
        outward.send(encode(message))

    try:
        engine, grammars, events = _opened(settings, send)
    except Exception as error:
        log.debug("the engine cannot start", exc_info=True)
        known = isinstance(error, (ValueError, OSError, ImportError, MemoryError, RuntimeError))
        send(StartFailed(str(error) if known and str(error) else repr(error)))
        if not known:
            log.exception("the engine cannot start")
        context.destroy(linger=1000)
        return REFUSED if isinstance(error, ValueError) else 1
    side = EngineSide(engine.requests, send, grammars, events)

    def stop(*_: object) -> None:
        side.stopping = True
        engine.requests.wake()

    signal.signal(STOP, stop)
    threading.Thread(target=_receive, args=(inward, side), daemon=True).start()
    side.run()
    engine.close()
    if events is not None:
        events.close()
    outward.close(linger=1000)
    context.term()  # the receiver's thread hears of it and closes its socket: no other may
    return 0


def _opened(settings: Settings, send: Any) -> tuple[ServedEngine, Grammars | None, KVEventPublisher | None]:
    module, _, function = settings.factory.partition(":")
    config = None if settings.kv_events is None else KVEventsConfig.of(settings.kv_events)
    send(Progress("importing"))
    opened = getattr(import_module(module), function)(
        settings.flags, lambda what: send(Progress(what)), config is not None and config.active
    )
    engine: ServedEngine = opened.engine
    requests = engine.requests
    grammars = None
    if opened.tokenizer is not None:
        grammars = Grammars(opened.tokenizer, requests.vocabulary, requests.eos)
        engine.masks.fill = grammars.fill
    events = None
    if config is not None and config.active:
        adapters: Any = requests.adapters

        def name_of(digest: bytes) -> str | None:
            known = {} if adapters is None else adapters.names()
            return next((name for name, each in known.items() if each == digest), None)

        events = KVEventPublisher(config, name_of, requests.wake)
    send(
        Ready(
            opened.folder,
            requests.vocabulary,
            requests.max_model_len,
            list(requests.eos),
            requests.scheduler.config.page_size,
            {} if requests.adapters is None else requests.adapters.names(),
            {**opened.facts, "store": (requests.loop.tiers.stats()["store"] or {}).get("uri")},
            requests.closes_within,
        )
    )
    return engine, grammars, events


def _receive(inward: zmq.Socket[bytes], side: EngineSide) -> None:
    try:
        while True:
            side.receives(inward.recv())
    except zmq.ContextTerminated:
        pass
    finally:
        inward.close(0)


def _die_with(parent: int) -> None:
    """When the process that started this one ends, so does this one: the kernel sees to it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
