"""What the API process and the engine process have in common: how an engine is started, what both send, how it ends.

    API     Submit, Drop, EngineQuery, Acknowledged  --> engine
    engine  Progress, Ready, StartFailed             --> API, at the start
            StepOutput, one for each step            --> API
            QueryAnswer, Alive                       --> API

Messages are msgpack over two ZMQ sockets in one folder. Samples have numbers that the API counts out and never gives
twice; those of one request follow each other. They travel as bytes of int64, as there may be more of them than 31 bits
hold; prompts and the tokens of a step are bytes of int32.
"""

from __future__ import annotations

import signal
from typing import Any

import msgspec

from sapwood.engine.cache_report import CacheReport
from sapwood.engine.params import SamplingParams

from .grammars import GrammarSpec

MAX_UNACKED_STEPS = 8  # steps that the engine sends before the API must have taken the first of them
STOP_SIGNAL = signal.SIGUSR1  # the API ends the engine with it
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C and systemd's stop reach both processes: the API decides
REFUSED_STATUS = 2  # the engine's exit status if a model or a flag cannot be served
Likely = dict[int, tuple[float, int]]  # token -> log-probability, and its rank from 1


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """What an engine process is started with, as JSON on stdin. `factory`: "module:function"; the function gets
    `flags`, a function that reports progress and whether KV events are wanted, and returns a `LoadedModel`."""

    factory: str
    flags: dict[str, Any]
    parent: int
    log_format: str = "text"
    log_level: str = "info"
    kv_events: dict[str, Any] | None = None


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


# ---- API to engine


class Submit(_Message):
    """A request of `params.n` samples, numbered from `number` on. Its `params` have no stop strings and no bad words:
    these are found in text, in the API process."""

    number: int
    tokens: bytes
    params: SamplingParams
    adapter: bytes | None = None
    reads_cache: bool = True
    writes_cache: bool = True
    bad_words: list[tuple[int, ...]] = []
    grammar: GrammarSpec | None = None
    arrived: float = 0.0  # on the monotonic clock
    tenant: str = ""  # the client that shared queues count it for: the number of a key, never the key


class Drop(_Message):
    """The API wants no more of these samples. `finished`: all that the client asked for has come."""

    numbers: list[int]
    finished: bool


class EngineQuery(_Message):
    """A question about the cache, or a change of adapters. `QueryAnswer` answers it under the same number."""

    number: int
    name: str  # one of `EngineQueries`
    arguments: dict[str, Any]


class Acknowledged(_Message):
    """The API has dispatched all messages up to this step. Sent every few steps."""

    step: int


# ---- engine to API


class Progress(_Message):
    """What the engine does before it is ready."""

    doing: str


class Ready(_Message):
    """The engine serves."""

    model: str  # the folder of the model's files
    vocabulary: int
    max_model_len: int
    eos: list[int]
    page_size: int
    adapters: dict[str, bytes]  # name -> digest
    facts: dict[str, Any]  # what was chosen, for logs and metrics
    closes_within: float = 5.0  # seconds that its end takes at most, while backups are written to a store


class StartFailed(_Message):
    """The engine cannot start, and why, for the person who started it."""

    why: str


class SampleBegun(_Message):
    """A sample has its first token."""

    number: int
    queued: float  # seconds until it was first computed
    cache: CacheReport


class End(_Message):
    number: int
    reason: str  # stop, length, abort, error; refused or busy before it ran
    stop: int | None  # the token that ended it, unless it is the model's own
    cached: int
    error: str


class StepOutput(_Message):
    """What a step has brought. `ends` hold no tokens: a sample's last token comes in the same message or before."""

    step: int
    sent: float  # on the monotonic clock
    numbers: bytes
    tokens: bytes
    begun: list[SampleBegun]
    ends: list[End]
    likely: dict[int, Likely]
    prompts: dict[int, list[Likely | None]]  # log-probabilities of prompts


class Alive(_Message):
    """The engine steps, and has no output."""


class QueryAnswer(_Message):
    """`problem`: a word for an error that is more than a wrong argument."""

    number: int
    value: Any
    error: str
    problem: str = ""


ToEngine = Submit | Drop | EngineQuery | Acknowledged
ToApi = StepOutput | QueryAnswer | Alive | Progress | Ready | StartFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_api = msgspec.msgpack.Decoder(ToApi).decode
