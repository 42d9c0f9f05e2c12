"""What travels between the API process and the engine process: msgpack over two ZMQ sockets of one folder.

    API     Submit, Drop, Ask, Taken   --> engine
    engine  Progress, Ready, Failed    --> API, at the start
            Tokens, one for each step  --> API
            Answer, Alive              --> API

Samples have numbers that the API counts out and never gives twice: those of one request follow each other. They travel
as bytes of int64, as there may be more of them than 31 bits hold; prompts and a step's tokens are bytes of int32.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood.engine.cache_report import CacheReport
from sapwood.engine.params import Likely, SamplingParams

from .grammars import GrammarSpec


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


# ---- API to engine


class Submit(_Message):
    """A request of `params.n` samples, numbered from `number` on. What only text can tell (stop strings, bad words) is
    taken out of `params` before."""

    number: int
    tokens: bytes
    params: SamplingParams
    adapter: bytes | None = None
    reads_cache: bool = True
    writes_cache: bool = True
    bad_words: list[tuple[int, ...]] = []
    grammar: GrammarSpec | None = None
    arrived: float = 0.0  # on the monotonic clock
    tenant: str = ""  # who shares what there is with others: a key's number, never the key


class Drop(_Message):
    """These samples are over for the API: nobody wants more of them. `finished`: all that was wanted has come."""

    numbers: list[int]
    finished: bool


class EngineQuery(_Message):
    """A question that `QueryAnswer` answers under the same number."""

    number: int
    what: str
    arguments: dict[str, Any]


class Acknowledged(_Message):
    """The API has dispatched all messages up to this step. Told every few steps."""

    step: int


# ---- engine to API


class Progress(_Message):
    """What the engine does before it is ready."""

    what: str


class Ready(_Message):
    """The engine serves."""

    model: str  # the folder of the model's files
    vocabulary: int
    max_model_len: int
    eos: list[int]
    page_size: int
    adapters: dict[str, bytes]  # name -> digest
    facts: dict[str, Any]  # what was chosen, for logs and metrics
    closes_within: float = 5.0  # seconds that it takes at most, at its end, to write what a store is owed


class StartFailed(_Message):
    """The engine cannot start, and why, for whoever started it."""

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
    """The engine steps, and has nothing to tell."""


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
