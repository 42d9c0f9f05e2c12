"""A trace that a server has recorded predicts what that server had in its cache."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from sapwood.sim.trace import read_trace, replay_trace

from .kit import Running, paced_flags

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("replayed")]

DEVICE, HOST = 800, 700  # pages


def test_a_replay_is_within_three_points_of_the_server(tmp_path):
    """Chats of twelve users at once, with system prompts that they share, in pages too few for all of them on device
    and host together: the simulator, with as many pages, gives the server's own hit rate.

    Mutation: `TraceRecorder` leaves out requests; `_line` numbers a block by itself, without what is before it.
    """
    path = tmp_path / "trace.jsonl"
    server = Running(
        *paced_flags(step_ms=2, token_us=20, device_pages=DEVICE, host_pages=HOST), "--record-trace", str(path)
    ).ready()
    random = np.random.default_rng(11)
    systems = [random.integers(300, 40_000, 700).tolist() for _ in range(3)]
    seeds = random.integers(0, 1 << 30, 12).tolist()
    told: list[dict[str, int]] = []

    def user(seed: int) -> None:
        own = np.random.default_rng(seed)
        for _ in range(3):
            chat = [*systems[own.integers(3)]]
            for _ in range(5):
                chat += own.integers(300, 40_000, int(own.integers(40, 400))).tolist()
                answer = server.post("/v1/completions", {"prompt": chat, "max_tokens": 20, "ignore_eos": True})
                assert answer.status == 200, answer.body
                usage = answer.json["usage"]
                told.append({"prompt": usage["prompt_tokens"], **usage["prompt_tokens_details"]})

    users = [threading.Thread(target=user, args=(seed,)) for seed in seeds]
    for each in users:
        each.start()
    for each in users:
        each.join()
    evicted = server.get("/cache/stats").json["cache"]["evicted"]["full"]
    assert server.stop() == 0
    assert len(told) == 12 * 3 * 5 and evicted["host"] > 100 and evicted["device"] > 100
    had = sum(each["cached_tokens"] for each in told) / sum(each["prompt"] for each in told)
    replayed = replay_trace(read_trace(path), DEVICE, HOST)
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == len(told)
    assert 0.3 < had < 0.9
    assert abs(replayed.cached_tokens / replayed.prompt_tokens - had) < 0.03, (replayed, had)
