"""Servers that have run for years (case S16): samples, questions, steps and KV events past what 31 and 32 bits hold."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sapwood.engine.params import SamplingParams
from sapwood.server.process.engine_client import EngineClient, EngineJob
from sapwood.server.process.messages import Acknowledged, Settings, StepOutput, decode_to_api, decode_to_engine, encode

from ..ages import LIMITS
from .kit import Running, paced_flags

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("life")]
PROMPT = np.arange(300, 340, dtype=np.int32).tobytes()


def linked(at: int) -> tuple[EngineClient, asyncio.Event]:
    """A link whose engine begins to count at `at`, as it does itself; and whether the engine is dead."""
    died = asyncio.Event()
    settings = Settings("tests.server.aged:aged", {"at": at, "max_loras": 1}, os.getpid())
    link = EngineClient(lambda: settings, lambda why: died.set())
    link._number = max(1, at)
    return link, died


async def answer(link: EngineClient, n: int) -> list[list[int]]:
    """What all samples of a request say."""
    job: EngineJob = link.job(n, "")
    params = SamplingParams(n=n, max_tokens=5, seed=1, logprobs=1)
    link.submit(job, 0, PROMPT, params, adapter=None, reads_cache=True, writes_cache=True, bad_words=[], grammar=None)
    while any(lane.end is None for lane in job.lanes):
        await job.rendered()
        job.news = False
    assert {lane.end.reason for lane in job.lanes if lane.end} == {"length"}
    assert all(len(lane.likely) == 5 and lane.begun is not None for lane in job.lanes)
    return [lane.tokens for lane in job.lanes]


@pytest.mark.parametrize("limit", LIMITS)
def test_S16_samples_past_31_bits_are_answered_also_after_a_restart(limit: int):
    """Requests whose samples have numbers below, across and beyond a limit all get their own tokens, those that a young
    server gives; questions are answered; what is dropped is dropped. The numbers go on after the engine was killed.

    Mutation: `EngineSide._send_step` sends numbers as int32; `_dispatch` reads them as int32.
    """

    async def story(at: int) -> list[list[list[int]]]:
        link, died = linked(at)
        await link.start()
        said = [await answer(link, 4) for _ in range(3)]
        left = link.job(1, "")
        params = SamplingParams(max_tokens=10_000, ignore_eos=True)
        more: dict[str, Any] = {"adapter": None, "reads_cache": True, "writes_cache": True, "bad_words": []}
        link.submit(left, 0, PROMPT, params, **more, grammar=None)
        await left.more()
        left.close()
        while (await link.ask("stats"))["decoding"]:
            pass
        os.kill(link.pid or 0, signal.SIGKILL)
        await died.wait()
        link.down = None
        await link.start()
        said += [await answer(link, 4) for _ in range(2)]
        assert link._number > at + 20
        await link.close()
        return said

    young, old = (asyncio.run(asyncio.wait_for(story(at), 240)) for at in (0, limit - 6))
    assert old == young and len({tuple(tokens) for samples in old for tokens in samples}) == 4


@pytest.mark.parametrize("number", [2**31, 2**32, 2**53 + 1, 2**63 - 1])
def test_S16_numbers_on_the_wire(number: int):
    """What travels between the two processes keeps every bit of its numbers.

    Mutation: `Acknowledged.step` is a float.
    """
    message = StepOutput(number, 0.5, np.array([number], np.int64).tobytes(), b"", [], [], {}, {})
    assert decode_to_api(encode(message)) == message
    assert decode_to_engine(encode(Acknowledged(number))) == Acknowledged(number)


@pytest.fixture(scope="module", params=LIMITS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    flags = paced_flags(host_pages=500, at=request.param - 3)
    flags[flags.index("sapwood.bench.paced:paced")] = "tests.server.aged:aged"
    running = Running(*flags)
    try:
        yield running.ready()
    finally:
        running.kill()


def test_S16_what_a_server_tells_of_an_old_engine(server: Running):
    """Streams, usage, figures, metrics and the tree of an engine whose counters pass a limit meanwhile.

    Mutation: `DecodeRows.shown` adds `np.int32(self.planned)`.
    """
    body = {"messages": [{"role": "user", "content": "tell me " * 30}], "max_tokens": 30, "seed": 1}
    texts = {server.stream("/v1/chat/completions", body).text() for _ in range(3)}
    assert len(texts) == 1
    told = server.post("/v1/chat/completions", body).json
    assert told["usage"]["completion_tokens"] == 30 and told["choices"][0]["message"]["content"] in texts
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    stats = server.get("/cache/stats").json
    assert stats["steps"] > 2**31
    shown = server.get("/metrics").body.decode()
    steps = [float(line.split()[-1]) for line in shown.splitlines() if line.startswith("sapwood:steps_total")]
    assert steps == [pytest.approx(stats["steps"], abs=5)]
    assert server.post("/cache/explain", {"prompt": "tell me"}).status == 200
