"""Figures of the server: what streams cost beside a bare server, how long tokens are under way from the engine to a
client alone and beside prompts that arrive, how soon aborts and faults are known, and the time to a first token.

The API process is on one core, the engine and the clients on another; an engine without a model makes the tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

from .served import Bare, Paced, Process, Sapwood, pin
from .stream_client import Clients, Stream, Times, post
from .timing import LOOP_SECONDS, Figure, alternate, clock, loop_seconds, no_gc

STREAMS = 64
STEP_MS = 5.0
LONGEST = 30_000  # tokens: no stream ends by itself
_WARM = 0.5  # seconds before streams count
T = TypeVar("T")
_seeds = itertools.count(1)  # a stream's name in the engine's log


def figures(quick: bool) -> Iterator[Figure]:
    try:
        import uvicorn  # noqa: F401
        import uvloop  # noqa: F401

        from sapwood.engine.loading.default_model import default_model

        folder = default_model()
    except (ImportError, ValueError) as missing:
        print(f"the server is not measured: {missing}")
        return
    words = Words(folder)
    repeats = 2 if quick else 5
    seconds = 1.5 if quick else 3.0
    with pinned(), no_gc():
        with Bare() as bare:
            pin(bare.pid, CORES[0])
            with Paced(folder, words.ids, 0.0) as ours:
                yield from flat_out(ours, bare, repeats, seconds)
            with Paced(folder, words.ids, STEP_MS) as ours:
                yield from paced(ours, bare, repeats, seconds)
        with Paced(folder, words.ids, STEP_MS) as ours:
            settle(ours)
            yield from many(ours, repeats, 2 * seconds)
            yield from beside_prompts(ours, words, 2_000, 102.0, 15.0, repeats, seconds)
            yield from beside_prompts(ours, words, 32_000, 4.0, 20.0, repeats, seconds)
            yield from disconnects(ours, repeats)
        yield from engine_killed(folder, words, repeats)
    yield from stop_strings(words, 3 if quick else 9)
    yield from first_tokens(words, repeats)
    yield from start(1 if quick else 3)


# ---- where it runs

CORES = sorted(os.sched_getaffinity(0))[:2]  # the API's, and that of the engine and the clients
if len(CORES) < 2:
    CORES *= 2


@contextmanager
def pinned() -> Iterator[None]:
    """The clients, which are here."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def settle(server: Sapwood) -> None:
    """Everything that is made with the first requests is there, and each process on its core."""
    clients = Clients(server.port)
    for _ in range(4):
        clients.begin(chat(f"hello {next(_seeds)}", 8))
    clients.read(time.monotonic() + 10)
    clients.close()
    pin(server.pid, CORES[0])
    pin(server.engine, CORES[1])


# ---- what is asked


class Words:
    """Tokens that are a space and four letters: a text of them has as many tokens as words."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        known = {id: text for text, id in self.tokenizer.get_vocab().items()}
        plain = [id for id, text in known.items() if len(text) == 5 and text[0] == "\u0120" and _plain(text[1:])]
        self.ids = sorted(plain)[:512]
        self.texts = [" " + known[id][1:] for id in self.ids]
        self._random = np.random.default_rng(15)

    def text(self, count: int) -> str:
        """A prompt that no request has sent before."""
        return "".join([self.texts[at] for at in self._random.integers(0, len(self.texts), count)])


def _plain(text: str) -> bool:
    return text.isascii() and text.isalpha() and text.islower()


def chat(text: str, tokens: int, **more: object) -> bytes:
    messages = [{"role": "user", "content": text}]
    return post("/v1/chat/completions", {"messages": messages, "max_tokens": tokens, **more})


def stream(seed: int, step_ms: float = 0.0) -> bytes:
    return chat(f"stream {seed}", LONGEST, stream=True, seed=seed, step_ms=step_ms)


# ---- streams for a while


class Window(NamedTuple):
    """What came of some streams between two times."""

    begin: float
    end: float
    cpu: float  # seconds that the server took
    streams: list[Stream]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def inside(self, times: Times) -> int:
        return int(((times > self.begin) & (times <= self.end)).sum())


def window(
    server: Process, count: int, step_ms: float, seconds: float, arriving: list[tuple[float, bytes]] | None = None
) -> tuple[Window, list[Stream]]:
    """`arriving`: when and what else is asked meanwhile. Returns the streams, and those others."""
    clients = Clients(server.port)
    streams = []
    for _ in range(count):
        seed = next(_seeds)
        streams.append(clients.begin(stream(seed, step_ms), seed))
    now = time.monotonic()
    clients.begin_at((now + when, request) for when, request in arriving or ())
    until = now + 10
    while any(len(each.data) < 3 for each in streams) and time.monotonic() < until:
        clients.read(time.monotonic() + 0.02)
    begin = clients.read(time.monotonic() + _WARM)
    cpu = server.cpu()
    end = clients.read(begin + seconds)
    cpu = server.cpu() - cpu
    clients.close()
    time.sleep(0.3)  # all of them are aborted
    broken = [each for each in streams if each.ended is not None or b" 200 OK" not in each.data[0]]
    if broken:
        raise RuntimeError(f"{len(broken)} of {count} streams ended: {broken[0].body[-500:]!r}")
    return Window(begin, end, cpu, streams), clients.streams[count:]


def pairs(repeats: int, ours: Paced, bare: Bare, run: Callable[[Process], T]) -> list[tuple[T, T]]:
    """One after the other; each is first in turn."""
    found = []
    for at in range(repeats):
        theirs = run(bare) if at % 2 else None
        mine = run(ours)
        found.append((mine, run(bare) if theirs is None else theirs))
    return found


# ---- as fast as it goes


class Rate(NamedTuple):
    tokens: float  # a second
    events: float  # a token
    cpu: float  # us a token


def rate(server: Process, seconds: float) -> Rate:
    found, _ = window(server, STREAMS, 0.0, seconds)
    chunks = [each.chunks() for each in found.streams]
    tokens = sum(found.inside(each.came) for each in chunks)
    events = sum(found.inside(each.events) for each in chunks)
    return Rate(tokens / found.seconds, events / tokens, found.cpu / tokens * 1e6)


def flat_out(ours: Paced, bare: Bare, repeats: int, seconds: float) -> Iterator[Figure]:
    settle(ours)
    rates = pairs(repeats, ours, bare, lambda server: rate(server, seconds))
    mine, theirs = zip(*rates, strict=True)
    speed = median(mine.tokens / theirs.tokens for mine, theirs in rates)
    beside = f"{median(each.tokens for each in mine):.0f} / {median(each.tokens for each in theirs):.0f} a second"
    yield Figure(f"{STREAMS} streams flat out, tokens a second / bare", speed, "ratio", 0.5, beside, ">=")
    yield Figure("  chunks a token", min(each.events for each in mine), "ratio", 0.99, "the least", ">=")
    cpu = median(mine.cpu / theirs.cpu for mine, theirs in rates)
    beside = f"{median(each.cpu for each in mine):.1f} / {median(each.cpu for each in theirs):.1f} us"
    yield Figure("  CPU of the API process a token / bare", cpu, "ratio", 2.0, beside)


# ---- from the engine to the client


def delays(server: Process, found: Window) -> tuple[Times, Times]:
    """Of each token made within the window: when, and how many ms it was under way. The last half second is left out:
    what was made then may not have come yet. What was made before and has not come is as late as that."""
    rows = server.rows() if isinstance(server, Paced) else np.empty((0, 3))
    rows = rows[rows[:, 1] > 0]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    made, came = [], []
    for each in found.streams:
        chunks = each.chunks()
        sent, there = chunks.made, chunks.came
        if len(rows):
            begin, end = np.searchsorted(rows[:, 0], [each.name, each.name + 1])
            sent = rows[begin:end, 2]
            if (rows[begin:end, 1] != np.arange(1, len(sent) + 1)).any():
                raise RuntimeError("the engine's log does not tell of every token")
            there = np.full(len(sent), found.end)
            there[: len(chunks.came)] = chunks.came
        inside = (sent >= found.begin) & (sent < found.end - 0.5)
        made.append(sent[inside])
        came.append(there[inside])
    when = np.concatenate(made)
    return when, (np.concatenate(came) - when) * 1e3


def p99(values: Times) -> float:
    return float(np.percentile(values, 99))


def paced(ours: Paced, bare: Bare, repeats: int, seconds: float) -> Iterator[Figure]:
    settle(ours)

    def run(server: Process) -> float:
        return p99(delays(server, window(server, STREAMS, STEP_MS, seconds)[0])[1])

    found = pairs(repeats, ours, bare, run)
    beside = f"p99 {median(mine for mine, _ in found):.2f} / {median(theirs for _, theirs in found):.2f} ms"
    ratio = median(mine / theirs for mine, theirs in found)
    yield Figure(f"{STREAMS} streams at {STEP_MS:g} ms steps, engine to client / bare", ratio, "ratio", 2.0, beside)


def many(ours: Paced, repeats: int, seconds: float) -> Iterator[Figure]:
    whole, growth, events = [], [], []
    for _ in range(repeats):
        found, _ = window(ours, 256, STEP_MS, seconds)
        when, late = delays(ours, found)
        third = (when.max() - when.min()) / 3
        whole.append(p99(late))
        growth.append(p99(late[when > when.max() - third]) / p99(late[when < when.min() + third]))
        chunks = [each.chunks() for each in found.streams]
        events.append(sum(len(each.events) for each in chunks) / sum(len(each.came) for each in chunks))
    beside = f"{median(events):.2f} chunks a token"
    yield Figure(f"256 streams at {STEP_MS:g} ms steps, p99 engine to client", median(whole), "ms", 100.0, beside)
    yield Figure("  last third / first third", median(growth), "ratio", 1.5)


def beside_prompts(
    ours: Paced, words: Words, tokens: int, frequency: float, bar: float, repeats: int, seconds: float
) -> Iterator[Figure]:
    """Prompts that are new arrive all the time beside streams."""
    late, answered = [], []
    for _ in range(repeats):
        count = int(frequency * (seconds + _WARM + 1))
        arriving = [(at / frequency, chat(words.text(tokens), 1, seed=next(_seeds))) for at in range(count)]
        found, others = window(ours, STREAMS, STEP_MS, seconds, arriving)
        late.append(p99(delays(ours, found)[1]))
        wrong = [each for each in others if each.data and b" 200 OK" not in each.data[0]]
        if wrong:
            raise RuntimeError(f"a prompt was not answered: {wrong[0].body[:500]!r}")
        answered.append(found.inside(np.array([each.ended or np.inf for each in others])) / found.seconds)
    beside = f"p99 engine to client; {median(answered):.1f} prompts answered a second"
    what = f"{STREAMS} streams beside prompts of {tokens:,}, {frequency:.0f} a second"
    yield Figure(what, median(late), "ms", bar, beside)
    if frequency > 100:
        yield Figure("  prompts answered", median(answered), "a second", 100.0, "", ">=")


# ---- ends


def disconnects(ours: Paced, repeats: int) -> Iterator[Figure]:
    """From a client's leaving until the engine has dropped its request."""
    clients = Clients(ours.port)
    for _ in range(STREAMS):
        seed = next(_seeds)
        clients.begin(stream(seed), seed)
    clients.read(time.monotonic() + 1)
    taken = []
    for each in clients.streams[: 10 * repeats]:
        clients.hang_up(each)
        clients.read(time.monotonic() + 0.017)
    time.sleep(0.3)
    rows = ours.rows()
    dropped = {int(seed): when for seed, tokens, when in rows[rows[:, 1] < 0]}
    for each in clients.streams[: 10 * repeats]:
        assert each.closed is not None
        taken.append((dropped.get(each.name, np.inf) - each.closed) * 1e3)
    clients.close()
    beside = f"the longest of {len(taken)}; median {median(taken):.1f} ms; a step takes {STEP_MS:g}"
    yield Figure("a client leaves: aborted in the engine after", max(taken), "ms", 50.0, beside)


def engine_killed(folder: Path, words: Words, repeats: int) -> Iterator[Figure]:
    taken = []
    for _ in range(repeats):
        with Paced(folder, words.ids, STEP_MS) as ours:
            settle(ours)
            clients = Clients(ours.port)
            for _ in range(STREAMS):
                seed = next(_seeds)
                clients.begin(stream(seed), seed)
            clients.read(time.monotonic() + 1)
            killed = ours.kill_engine()
            clients.read(killed + 10)
            ends = [each.ended if b'"error":' in each.body else None for each in clients.streams]
            taken.append(max((each or np.inf) - killed for each in ends) * 1e3)
            clients.close()
    beside = f"the longest of {repeats}, {STREAMS} streams, each with an error; median {median(taken):.0f} ms"
    yield Figure("the engine is killed: all streams ended after", max(taken), "ms", 200.0, beside)


# ---- stop strings


def stop_strings(words: Words, repeats: int) -> Iterator[Figure]:
    from sapwood.engine.detokenize import Detokenizer
    from sapwood.engine.params import SamplingParams
    from sapwood.engine.stops import TextStream

    detokenizer = Detokenizer(words.tokenizer)
    tokens = [words.ids[at] for at in np.random.default_rng(7).integers(0, len(words.ids), 20_000)]

    def run(stop: list[str] | None) -> Callable[[], float]:
        def once() -> float:
            text = TextStream(detokenizer, SamplingParams(stop=stop), [])
            push = text.push
            begin = clock()
            for token in tokens:
                push(token)
            return (clock() - begin) / len(tokens)

        return once

    stops = ["\n\nUser:", "<|im_end|>", "Observation:", "###"]
    taken = alternate(repeats, with_stops=run(stops), without=run(None))
    with_stops, without = taken["with_stops"], taken["without"]
    beside = f"{with_stops.us:.2f} with, {without.us:.2f} without: token to text"
    yield Figure("looking for 4 stop strings, a token", with_stops.us - without.us, "scaled us", 1.0, beside)


# ---- the first token of a model


def first_tokens(words: Words, repeats: int) -> Iterator[Figure]:
    """Through HTTP and from the engine in a process of its own, in turns; each prompt cold, then again."""
    with (
        Sapwood("--store", "none", "--device-cache", "1GiB") as ours,
        Process(["benchmarks.engine_alone"], r"(?m)^ready$") as alone,
    ):

        def over_http(text: str) -> float:
            body = {"prompt": text, "max_tokens": 1, "temperature": 0, "stream": True}
            clients = Clients(ours.port)
            begin = time.monotonic()
            asked = answered(clients, post("/v1/completions", body))
            return float(asked.when([asked.body.index(b'"choices"')])[0]) - begin

        def by_itself(text: str) -> float:
            assert alone.process.stdin is not None
            before = Path(alone.log.name).read_text().count("took")
            ids = words.tokenizer.encode(text, add_special_tokens=False).ids
            alone.process.stdin.write(json.dumps(ids).encode() + b"\n")
            alone.process.stdin.flush()
            return float(alone.output(rf"(?:took [\d.]+\s+){{{before}}}took ([\d.]+)\n")[1])

        spent: dict[str, list[float]] = {name: [] for name in ("cold", "cached", "cold alone", "cached alone")}
        for at in range(repeats + 1):
            text = words.text(500)
            for run, suffix in ((over_http, ""), (by_itself, " alone"))[:: 1 - at % 2 * 2]:
                for name in ("cold", "cached"):
                    taken = run(text)
                    if at:  # the first of all warms up
                        spent[name + suffix].append(taken * 1e3)
        scaled = 10 * median(loop_seconds() for _ in range(5)) / LOOP_SECONDS
    for name in ("cold", "cached"):
        mine, theirs = median(spent[name]), median(spent[name + " alone"])
        beside = f"the engine alone {theirs:.1f} ms, x 1.1 + {scaled:.1f}"
        yield Figure(f"first token of 500 over HTTP, {name}", mine, "ms", 1.1 * theirs + scaled, beside)


def answered(clients: Clients, request: bytes) -> Stream:
    """A request and its whole answer, which must be a good one."""
    asked = clients.begin(request)
    clients.read(time.monotonic() + 60)
    clients.close()
    if b'"choices"' not in asked.body:
        raise RuntimeError(f"no answer: {asked.body[:500]!r}")
    return asked


def start(repeats: int) -> Iterator[Figure]:
    """`sapwood serve` as one types it, with a store of its own, on a machine that has served before."""
    taken = []
    line = ""
    with tempfile.TemporaryDirectory(prefix="sapwood-bench-") as store:
        for _ in range(repeats):
            with Sapwood("--store", f"file://{store}?size={1 << 30}") as ours:
                answered(Clients(ours.port), chat("What is a prefix tree?", 1))
                taken.append(time.monotonic() - ours.began)
                line = ours.line
    yield Figure("sapwood serve, to the first answer", median(taken), "s", 15.0, line.partition(":")[0])
