"""`sapwood bench serve`: what users of a running server see, whichever it is, as long as it speaks OpenAI's HTTP."""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from sapwood.sim.trace import read_trace

from .arguments import ENDPOINTS, add_serve_arguments, headers, settle
from .run import progress
from .tables import BenchReport
from .workloads import Mix, Session, Turn, chats, random_prompts, replayed, shared_prefixes

if TYPE_CHECKING:  # these need what `sapwood[server]` brings, and help does not
    from .client import Client
    from .load import LoadResult

add_arguments = add_serve_arguments
HELP = "a running server over HTTP: time to first token, between tokens, throughput, cached tokens"
_FORMS = {
    **dict.fromkeys(("median", "mean", "p90", "p99"), "{:,.1f} ms"),
    "in all": "{:,.0f}",
    "a second": "{:,.2f}",
    "share": "{:.1%}",
}
_LATE_SECONDS = 0.1  # seconds after its time at which a request is worth a word
_BUSY_SHARE = 0.8  # of a core, at which this client may be what is slow


def measure(asked: argparse.Namespace) -> BenchReport:
    """Fills in what `asked` leaves open. Raises ValueError for what cannot be asked, RuntimeError if nothing could be
    measured."""
    settle(asked)
    asked.by_ids = False
    mix = Mix(
        *(asked.input_len, asked.output_len, asked.range_ratio),
        *(asked.request_rate, asked.burstiness),
        *(*asked.token_ids, asked.seed),
    )
    requests, sessions = _workload(asked, mix)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        run = runner.run(_run(asked, mix, requests, sessions))
    if not run.heard:
        raise RuntimeError(f"all {run.failed.total()} requests failed: {_failures(run)}")
    notes = _notes(run)
    if asked.by_ids:
        notes.append("answers have no text: tokens were told apart by their ids (return_token_ids)")
    more = {"failures": dict(run.failed), "seconds": run.seconds, "client_busy": run.busy}
    return BenchReport("serve", _FORMS, _figures(run), notes, more)


def _workload(asked: argparse.Namespace, mix: Mix) -> tuple[int, Iterator[Session]]:
    """How many requests, and all of them. They are made when their time comes: those of a trace would fill memory."""
    count, groups, prefix = asked.num_prompts, asked.groups, asked.prefix_len
    if asked.dataset_name == "trace":
        lines = read_trace(asked.trace, count)
        return len(lines), replayed(mix, lines, asked.speed)
    if asked.dataset_name == "multi-turn":
        return count, chats(mix, asked.users, asked.turns, asked.think_time, groups, prefix)
    if asked.dataset_name == "shared-prefix":
        return count, shared_prefixes(mix, count, groups, prefix)
    return count, random_prompts(mix, count)


async def _run(asked: argparse.Namespace, mix: Mix, requests: int, sessions: Iterator[Session]) -> LoadResult:
    from .client import SILENT, Client, place_of
    from .load import Sender

    client = Client(place_of(asked.base_url, asked.insecure), headers(asked), asked.timeout)
    try:
        asked.model = asked.model or await _first_model(client, asked.base_url)
        fields = {
            "temperature": asked.temperature,
            **({"ignore_eos": True} if asked.ignore_eos else {}),
            **asked.extra_body,
            "model": asked.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = ENDPOINTS[asked.endpoint]
        sender = Sender(client, path, fields, asked.max_concurrency)
        _allow_connections(min(requests, asked.max_concurrency or requests))
        first = next(sessions)
        with progress(asked.warmup, "warm-up", asked.progress) as bar:
            warm = await sender.drive(_like(first, mix, asked.warmup), bar)
        if set(warm.failed) == {SILENT} and "return_token_ids" not in fields:
            sender = Sender(client, path, {**fields, "return_token_ids": True}, asked.max_concurrency)
            asked.by_ids = True  # a server without a tokenizer has no text: its tokens are seen by their ids
            with progress(asked.warmup, "warm-up", asked.progress) as bar:
                warm = await sender.drive(_like(first, mix, asked.warmup), bar)
        if warm.failed:
            raise RuntimeError(f"a request failed before anything was measured: {_failures(warm)}")
        with progress(requests, "serve", asked.progress) as bar:
            return await sender.drive(chain([first], sessions), bar)
    finally:
        client.close()


def _like(session: Session, mix: Mix, count: int) -> Iterator[Session]:
    """Requests as long as its first one, with nothing in common with any."""
    random = mix.random(9)
    length, output = len(session.system) + len(session.turns[0].text), session.turns[0].output
    for _ in range(count):
        yield Session(0.0, [Turn(mix.tokens(length, random), output)])


async def _first_model(client: Client, url: str) -> str:
    import msgspec

    from .client import Failure, message_of

    try:
        answer = await client.get("/v1/models")
    except Failure as failure:
        raise RuntimeError(f"no server answers at {url} ({failure}): start one with `sapwood serve`") from None
    if answer.status != 200:
        raise RuntimeError(f"{url}: /v1/models has status {answer.status}: {message_of(answer.body)}")
    with suppress(msgspec.DecodeError, LookupError, TypeError):
        return str(msgspec.json.decode(answer.body)["data"][0]["id"])
    raise RuntimeError(f"{url}: /v1/models lists no model: --model must name one")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _allow_connections(count: int) -> None:
    """As many files as that takes, if the system lets us have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# ---- figures


def _figures(run: LoadResult) -> dict[str, dict[str, float]]:
    heard = run.heard
    several = [each for each in heard if each.output > 1 and len(each.times) > 1]
    rows = {"first token": _spread([each.times[0] - each.sent for each in heard])}
    if several:
        rows["between tokens"] = _spread(np.concatenate([np.diff(each.times) for each in several]))
        rows["per output token"] = _spread([(each.times[-1] - each.times[0]) / (each.output - 1) for each in several])
    rows["whole request"] = _spread([each.end - each.sent for each in heard])

    prompt, output = sum(each.prompt for each in heard), sum(each.output for each in heard)
    cached = [each.cached for each in heard if each.cached is not None]
    rows["requests"] = _rate(len(heard), run)
    rows["failed"] = {"in all": run.failed.total(), "share": run.failed.total() / (run.failed.total() + len(heard))}
    rows["prompt tokens"] = _rate(prompt, run)
    if cached:
        rows["of these cached"] = {"in all": sum(cached), "share": sum(cached) / max(1, prompt)}
    rows["output tokens"] = _rate(output, run)
    rows["all tokens"] = _rate(prompt + output, run)
    return rows


def _spread(seconds: Sequence[float] | Any) -> dict[str, float]:
    values = 1000 * np.asarray(seconds)
    p90, p99 = np.percentile(values, [90, 99])
    return {"median": float(np.median(values)), "mean": float(values.mean()), "p90": float(p90), "p99": float(p99)}


def _rate(count: int, run: LoadResult) -> dict[str, float]:
    return {"in all": count, "a second": count / run.seconds}


def _notes(run: LoadResult) -> list[str]:
    heard = run.heard
    at_a_time = sum(each.end - each.sent for each in heard) / run.seconds
    pieces = sum(len(each.times) for each in heard) / max(1, sum(each.output for each in heard))
    notes = [f"{run.seconds:,.1f} s, {at_a_time:,.1f} requests at a time, {pieces:.2f} pieces of text a token"]
    if run.failed:
        notes.append(f"failed: {_failures(run)}")
    if all(each.cached is None for each in heard):
        notes.append("this server does not say how many prompt tokens were cached")
    if run.late > _LATE_SECONDS:
        why = "all places were taken, or this client was busy"
        notes.append(f"requests were sent up to {run.late:,.1f} s after their time: {why}")
    if run.busy > _BUSY_SHARE:
        notes.append(f"this client used {run.busy:.0%} of a core: what is slow may be the client")
    return notes


def _failures(run: LoadResult) -> str:
    failures = ((kind, count, run.details[kind]) for kind, count in run.failed.most_common())
    return "; ".join(f"{count} x {kind}" + (f" ({detail})" if detail else "") for kind, count, detail in failures)
