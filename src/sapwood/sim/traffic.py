"""Random traffic from one seed: which requests come, and when. Of a scheduler it knows only what a request looks
like."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sapwood.cache import Namespace
from sapwood.scheduler import RequestSpec

_ADAPTERS = [hashlib.sha256(f"adapter {i}".encode()).digest() for i in range(4)]
_SPACES = (
    Namespace(),
    Namespace(adapter=_ADAPTERS[0]),
    Namespace(adapter=_ADAPTERS[1]),
    Namespace(salt="tenant"),
    Namespace(adapter=_ADAPTERS[2]),
    Namespace(adapter=_ADAPTERS[0], salt="tenant"),
    Namespace(version=1),
    Namespace(adapter=_ADAPTERS[1], version=1),
    Namespace(adapter=_ADAPTERS[3]),
)


@dataclass
class _Session:
    """A chat: its next turn is the whole conversation so far and something new."""

    namespace: Namespace
    tokens: list[int]
    turns: int


@dataclass
class Traffic:
    """Requests of all kinds that prefix caches meet: chats, bursts of equal prompts, shared system prompts, prompts
    that part in the middle, and the same tokens in many namespaces.

    page        where lengths are interesting
    longest     prompt and generated tokens (less one) a request may have and still fit
    vocabulary  of what is generated: tokens of `eos` are drawn from it
    growing     short prompts with long answers: they come in together and then need more than there is
    """

    seed: int
    page: int
    longest: int
    vocabulary: int
    growing: bool
    count: int = 0
    bodies: list[list[int]] = field(default_factory=list)
    sessions: list[_Session] = field(default_factory=list)
    used: list[str] = field(default_factory=list)  # ids that can be used again

    def __post_init__(self) -> None:
        rng = self.random = random.Random(self.seed)
        self.alphabet = rng.choice([2, 3, 50, 2**31])
        self.spaces = _SPACES[: rng.choice([1, 2, 3, 5, len(_SPACES)])]
        self.chatty = rng.choice([0.0, 0.3, 0.8])  # how often a request begins a chat
        page, much = self.page, max(2, min(self.longest // 2, 100))
        kinds = [(page // 2 + 1, much), (page, much)] if self.growing else [(3 * page, 2), (6 * page, page + 1)]
        self.wordy, self.talkative = rng.choice([*kinds, (page, 3 * page + 1)])  # tokens of a new prompt, generated
        self.laconic = rng.choice([0, 0, 1, 12])  # tokens of `eos`
        self.ranks = rng.choice([1, 1, 3])  # priorities
        self.choosy = rng.choice([0.0, 0.2])  # requests that read or write nothing
        self.systems = [self._words(rng.randint(1, self.wordy)) for _ in range(3)]
        self.alike = 0.75  # prompts that begin as others did
        self.turns: dict[str, _Session] = {}

    def repeats(self) -> None:
        """From now on prompts are longer and more alike, in few namespaces: what a store is for."""
        self.spaces, self.wordy = self.spaces[:2], max(self.wordy, 6 * self.page)
        self.systems = [self._words(self.random.randint(self.page, self.wordy)) for _ in range(2)]
        self.alike = 0.95

    # ---- what arrives

    def arrivals(self) -> list[RequestSpec]:
        """Some requests that come together: one, or a burst."""
        rng = self.random
        if self.sessions and rng.random() < 0.6:
            session = self.sessions.pop(rng.randrange(len(self.sessions)))
            return [self._turn(session)]
        if rng.random() < 0.75:
            space = rng.choice(self.spaces)
            tokens = self._prompt()
            spec = self._spec(tokens, space)
            if rng.random() < self.chatty:
                self.turns[spec.id] = _Session(space, [], rng.randint(1, 5))
            return [spec]
        tokens, space = self._prompt(), rng.choice(self.spaces)
        several = rng.random() < 0.3
        specs = []
        for _ in range(rng.randint(2, 6)):
            tail = self._words(rng.randint(1, 3)) if rng.random() < 0.2 else []
            specs.append(self._spec((tokens + tail)[: self.longest], rng.choice(self.spaces) if several else space))
        return specs

    def ended(self, spec: RequestSpec, tokens: list[int], wanted: bool) -> None:
        """A request is over, with these tokens; its chat goes on if the answer was `wanted`."""
        self.used.append(spec.id)
        self.bodies.append(tokens)
        del self.bodies[:-12]
        session = self.turns.pop(spec.id, None)
        if session is not None and wanted and session.turns:
            self.sessions.append(_Session(session.namespace, tokens, session.turns - 1))

    def refusable(self, live: list[str], most: int) -> dict[str, Any]:
        """The fields of a request that must be refused. `most`: the fewest positions that can never fit, 0 = none."""
        rng = self.random
        fields: dict[str, Any] = {"id": f"bad{rng.randrange(1000)}", "tokens": self._words(3), "max_tokens": 2}
        kinds: list[dict[str, Any]] = [
            {"tokens": []},
            {"tokens": [1, -1]},
            {"tokens": b"12345"},
            {"max_tokens": 0},
            {"max_tokens": -5},
            {"min_tokens": -1},
            {"min_tokens": 3},
            {"eos": [-1]},
            {"id": ""},
        ]
        if most:
            kinds += [{"tokens": self._words(most)[:most], "max_tokens": 1}, {"max_tokens": most - 2}]
        if live:
            kinds += [{"id": rng.choice(live)}] * 3
        return {**fields, **rng.choice(kinds)}

    # ---- what it is made of

    def _turn(self, session: _Session) -> RequestSpec:
        rng = self.random
        tokens = session.tokens + self._words(rng.randint(1, self.page))
        if len(tokens) > self.longest:
            tokens = self._prompt()
        spec = self._spec(tokens, session.namespace)
        self.turns[spec.id] = session
        return spec

    def _words(self, n: int) -> list[int]:
        return [self.random.randrange(self.alphabet) for _ in range(n)]

    def _prompt(self) -> list[int]:
        rng = self.random
        head: list[int] = []
        pick = rng.random()
        if pick < 0.25:
            head = rng.choice(self.systems)
        elif pick < self.alike and self.bodies:
            head = rng.choice(self.bodies)
            cut = rng.random()
            if cut < 0.4:
                head = head[: rng.randint(0, len(head))]
            elif cut < 0.6:
                head = head[: len(head) // self.page * self.page]
        if not head or rng.random() < 0.8:
            head = head + self._words(rng.randint(1, rng.choice([3, self.wordy])))
        return self._fitted(head)

    def _fitted(self, tokens: list[int]) -> list[int]:
        """A prompt that can fit, and often ends where a page does, or one token before or after."""
        tokens = tokens[: self.longest]
        if len(tokens) > self.page and self.random.random() < 0.4:
            tokens = tokens[: len(tokens) // self.page * self.page + self.random.choice([-1, 0, 0, 1])]
        return tokens

    def _spec(self, tokens: list[int], space: Namespace) -> RequestSpec:
        rng = self.random
        most = rng.randint(1, rng.choice([1, 3, self.talkative, self.talkative]))
        most = max(1, min(most, self.longest - len(tokens) + 1))
        eos = [rng.randrange(self.vocabulary) for _ in range(rng.choice([0, self.laconic]))]
        return RequestSpec(
            id=self._id(),
            tokens=self._as_given(tokens),
            max_tokens=most,
            namespace=space,
            priority=rng.randrange(self.ranks),
            eos=tuple(eos),
            min_tokens=rng.randint(0, most) if rng.random() < 0.3 else 0,
            reads_cache=rng.random() >= self.choosy,
            writes_cache=rng.random() >= self.choosy,
        )

    def _as_given(self, tokens: list[int]) -> Any:
        """A list, an array or a buffer: callers have all of them."""
        form = self.random.randrange(3)
        if form == 0:
            return tokens
        array = np.array(tokens, np.int32)
        return array if form == 1 else array.tobytes()

    def _id(self) -> str:
        if self.used and self.random.random() < 0.15:
            return self.used.pop(self.random.randrange(len(self.used)))
        self.count += 1
        return f"r{self.count}"
