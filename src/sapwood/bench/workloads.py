"""What a server is asked, and when: prompts and arrivals, the same ones for the same seed. No HTTP here.

A prompt is an array of token ids from a range that every vocabulary of use has. `/v1/completions` takes them as they
are, so that a prompt has exactly the length it should have. Where text is wanted, each id stands for a common word,
which is one token in most vocabularies: lengths are about right, and the server reports what they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.sim.trace import BLOCK, TraceRequest

Tokens = npt.NDArray[np.int32]
_NONE = np.zeros(0, np.int32)
_BLOCKS_KEPT = 4096  # of a trace; the others are made again
_TEXT = """
the of and to in is for that on with as by at from this are be or an was it not have can will which one all has more
new their but you we they also other time if may first its about what some any there when out been use who only up two
than people into these would like year make over work know just most see such now after many where then well part
should could way those how used life our long each good world between being right under same both very through last
even back while number day must off own great home school still place high against state house small again head room
end left show city point large water early power form order line group money side story women different family best
body set kind history level main until name young white open free social local problem important country business
company program service system question case week hand area fact night book eye job word though student child member
law car door health art war party result change morning reason research girl moment teacher
"""
_WORDS = tuple(_TEXT.split())


class Turn(NamedTuple):
    text: Tokens
    output: int  # tokens of the answer
    think: float = 0.0  # seconds before it is asked


class Session(NamedTuple):
    """What one user asks, a turn after the other. All that is no chat has one turn."""

    due: float  # seconds after the beginning
    turns: Sequence[Turn]
    system: Tokens = _NONE  # before everything


class Mix(NamedTuple):
    """What all requests of a workload are drawn from."""

    input: int  # tokens of a prompt, and
    output: int  # of an answer; each uniform,
    ratio: float  # up to this part more or less
    rate: float | None  # arrivals a second; None: all at once
    burstiness: float  # 1: a Poisson process; less: in bursts; more: more even
    low: int  # token ids from this
    high: int  # to this
    seed: int

    def random(self, *what: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *what])

    def tokens(self, count: int, random: np.random.Generator) -> Tokens:
        return random.integers(self.low, self.high, count, np.int32, endpoint=True)

    def turn(self, random: np.random.Generator, think: float = 0.0) -> Turn:
        length, output = (
            int(random.integers(max(1, round(each * (1 - self.ratio))), round(each * (1 + self.ratio)), endpoint=True))
            for each in (self.input, self.output)
        )
        return Turn(self.tokens(length, random), output, think)

    def arrivals(self, count: int) -> list[float]:
        """The first one comes at once."""
        if self.rate is None:
            return [0.0] * count
        gaps = self.random(0).gamma(self.burstiness, 1 / (self.rate * self.burstiness), count)
        gaps[:1] = 0
        return [float(due) for due in np.cumsum(gaps)]


def random_prompts(mix: Mix, count: int) -> Iterator[Session]:
    """Prompts that share nothing."""
    random = mix.random(1)
    for due in mix.arrivals(count):
        yield Session(due, [mix.turn(random)])


def shared_prefixes(mix: Mix, count: int, groups: int, prefix: int) -> Iterator[Session]:
    """The same behind one of some prefixes: as many behind each, in random order."""
    random = mix.random(2)
    prefixes = [mix.tokens(prefix, random) for _ in range(groups)]
    order = random.permutation(np.arange(count) % groups).tolist()
    for session, group in zip(random_prompts(mix, count), order, strict=True):
        yield session._replace(system=prefixes[group])


def chats(mix: Mix, users: int, turns: int, think: float, groups: int, prefix: int) -> Iterator[Session]:
    """Users ask, read the answer, think for a while (`think` seconds in the mean, exponentially), and ask again."""
    random = mix.random(3)
    systems = [mix.tokens(prefix, random) for _ in range(groups)]
    for user, due in enumerate(mix.arrivals(users)):
        pauses = [0.0, *random.exponential(think, turns - 1).tolist()]
        yield Session(due, [mix.turn(random, pause) for pause in pauses], systems[user % groups])


def replayed(mix: Mix, asked: Sequence[TraceRequest], speed: float) -> Iterator[Session]:
    """The requests of a trace at its times, divided by `speed`. Equal hash ids become equal tokens."""

    @lru_cache(_BLOCKS_KEPT)
    def block(hash_id: int) -> Tokens:
        return mix.tokens(BLOCK, mix.random(4, hash_id))

    for one in asked:
        text = np.concatenate([block(hash_id) for hash_id in one.blocks])[: one.length]
        yield Session(one.seconds / speed, [Turn(text, one.output)])


def as_words(tokens: Tokens) -> str:
    """Text of about so many tokens, the same for the same ids."""
    return " ".join([_WORDS[token % len(_WORDS)] for token in tokens.tolist()])
