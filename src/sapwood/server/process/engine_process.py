"""The engine process: takes requests from the API process, steps, and sends one message for each step.

    receiver thread --> inbox --> the step loop: take, step, send, rest
                          |
                          +-- wake

The kernel kills it when the process that started it ends, however that ends (pdeathsig). engine_child.py starts it as
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
from sapwood.engine.request_table import RequestTable
from sapwood.engine.samples import Sample

from ..observe.logs import set_up
from .engine_queries import EngineQueries
from .grammars import Grammars, GrammarsBusy
from .kv_events import KVEventPublisher
from .kv_events_config import KVEventsConfig
from .loaded_model import LoadedModel, ServedEngine
from .messages import (
    IGNORED_SIGNALS,
    MAX_UNACKED_STEPS,
    REFUSED_STATUS,
    STOP_SIGNAL,
    Acknowledged,
    Alive,
    Drop,
    End,
    EngineQuery,
    Likely,
    Progress,
    Ready,
    SampleBegun,
    Settings,
    StartFailed,
    StepOutput,
    Submit,
    ToApi,
    decode_to_engine,
    encode,
)

log = logging.getLogger(__name__)
_MAX_REST_SECONDS = 1.0  # seconds
_GC_SECONDS = 30.0  # seconds without rest after which the youngest garbage is collected all the same
_ALIVE_SECONDS = 1.0  # seconds after which the API hears that the engine lives
_PR_SET_PDEATHSIG = 1


class EngineSide:
    """The step loop of the engine process: takes the API's messages, steps, and sends the output of each step."""

    def __init__(
        self, requests: RequestTable, send: Any, grammars: Grammars | None, events: KVEventPublisher | None
    ) -> None:
        self.requests = requests
        self.queries = EngineQueries(requests, send)
        self.inbox: deque[Any] = deque()
        self.stopping = False
        self._send = send
        self._grammars = grammars
        self._events = events
        self._samples: dict[int, Sample] = {}  # that the API waits for, by number
        self._compiling: dict[int, tuple[Submit, Any]] = {}  # requests whose grammars are being made
        self._step = self._acknowledged = 0
        self._sent = time.monotonic()
        self._ends: list[End] = []  # of samples that never came to a step

    def receives(self, message: bytes) -> None:
        """Called by the receiver's thread."""
        self.inbox.append(decode_to_engine(message))
        self.requests.wake()

    def run(self) -> None:
        """Until `stopping`."""
        requests = self.requests
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection would be in the middle of a step; there is time for it when nothing runs
        resting, collected = False, time.monotonic()
        while not self.stopping:
            while self.inbox:
                self._take(self.inbox.popleft())
            if self._step - self._acknowledged >= MAX_UNACKED_STEPS:  # more tokens would only pile up in the API
                requests.loop.tiers.wait(0.05)
                continue
            if self._compiling:
                self._compiled()
            changed = requests.step()
            if changed or self._ends:
                self._send_step(changed)
                resting = False
            elif not requests.samples and not resting:
                gc.collect(1)
                resting = True
            if not resting and time.monotonic() - collected > _GC_SECONDS:  # requests run all the time
                gc.collect(0)
                collected = time.monotonic()
            if self._events is not None:
                self._publish(self._events)
            self.queries.poll()
            if time.monotonic() - self._sent > _ALIVE_SECONDS:
                self._send(Alive())
                self._sent = time.monotonic()
            requests.rest(0.002 if self._compiling else _MAX_REST_SECONDS)

    # ---- in

    def _take(self, message: Any) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Drop):
            self._drop(message)
        elif isinstance(message, Acknowledged):
            self._acknowledged = message.step
        elif isinstance(message, EngineQuery):
            self.queries.take(message)

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
            samples = self.requests.submit(
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
            sample.arrived = message.arrived or time.monotonic()
            self._samples[message.number + sample.index] = sample

    def _refuse(self, message: Submit, why: str, reason: str = "refused") -> None:
        self._ends += [End(message.number + index, reason, None, 0, why) for index in range(message.params.n)]

    def _drop(self, message: Drop) -> None:
        for number in message.numbers if self._compiling else ():
            compiling = self._compiling.pop(number, None)
            if compiling is not None and self._grammars is not None:
                self._grammars.cancel(compiling[1])
        dropped = [self._samples.pop(number) for number in message.numbers if number in self._samples]
        samples = [sample for sample in dropped if sample.finish_reason is None]
        begun = [sample for sample in samples if sample.token_ids] if message.finished else []
        self.requests.finish(begun)
        self.requests.abort([sample for sample in samples if sample not in begun])

    # ---- out

    def _send_step(self, changed: list[Sample]) -> None:
        numbers: list[int] = []
        tokens: list[int] = []
        begun: list[SampleBegun] = []
        ends, self._ends = self._ends, []
        likely: dict[int, Likely] = {}
        prompts: dict[int, list[Likely | None]] = {}
        for sample in changed:
            number, ids = int(sample.request) + sample.index, sample.token_ids
            if number not in self._samples:  # dropped
                continue
            if len(ids) > sample.sent:
                if not sample.sent:
                    queued = max(0.0, (sample.seated or time.monotonic()) - sample.arrived)
                    begun.append(SampleBegun(number, queued, sample.cache))
                    if sample.scores_prompt:
                        prompts[number] = [None if each is None else _plain(each) for each in sample.prompt_logprobs]
                if sample.logprobs:
                    likely[number] = _plain(sample.logprobs[-1])
                numbers.append(number)
                tokens.append(ids[-1])
                sample.sent = len(ids)
            if sample.finish_reason is not None:
                stop = sample.stop_reason if isinstance(sample.stop_reason, int) else None
                ends.append(End(number, sample.finish_reason, stop, sample.cache.cached, sample.error))
                del self._samples[number]
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

    def _publish(self, publisher: KVEventPublisher) -> None:
        events = self.requests.scheduler.drain_events()
        if events:
            publisher.publish(events)
        if publisher.wants_snapshot:
            publisher.give_snapshot(held_events(self.requests.scheduler.cache))


def _plain(likely: Any) -> Likely:
    return {token: (each.logprob, each.rank) for token, each in likely.items()}


# ---- the process


def main() -> int:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    _die_with(settings.parent)
    for each in IGNORED_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
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
        return REFUSED_STATUS if isinstance(error, ValueError) else 1
    side = EngineSide(engine.requests, send, grammars, events)

    def stop(*_: object) -> None:
        side.stopping = True
        engine.requests.wake()

    signal.signal(STOP_SIGNAL, stop)
    threading.Thread(target=_receive, args=(inward, side), daemon=True).start()
    side.run()
    engine.close()
    if events is not None:
        events.close()
    outward.close(linger=1000)
    context.term()  # wakes the receiver's thread, which alone may close its socket
    return 0


def _opened(settings: Settings, send: Any) -> tuple[ServedEngine, Grammars | None, KVEventPublisher | None]:
    module, _, function = settings.factory.partition(":")
    config = None if settings.kv_events is None else KVEventsConfig.of(settings.kv_events)
    send(Progress("importing"))
    loaded: LoadedModel = getattr(import_module(module), function)(
        settings.flags, lambda doing: send(Progress(doing)), config is not None and config.active
    )
    engine, requests = loaded.engine, loaded.engine.requests
    grammars = None
    if loaded.tokenizer is not None:
        grammars = Grammars(loaded.tokenizer, requests.vocabulary, requests.eos)
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
            loaded.folder,
            requests.vocabulary,
            requests.max_model_len,
            list(requests.eos),
            requests.scheduler.config.page_size,
            {} if requests.adapters is None else requests.adapters.names(),
            {**loaded.facts, "store": (requests.loop.tiers.stats()["store"] or {}).get("uri")},
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
    """The kernel ends this process when the one that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
