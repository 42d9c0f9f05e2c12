"""Traces through the scheduler: what is read, what is counted, and what the command line says."""

from __future__ import annotations

import json

import pytest

from sapwood.commands.replay import main
from sapwood.sim.trace import BLOCK, TraceRequest, read_trace, replay_trace, unlimited_rate


def write(path, lines: list[dict[str, object]]):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(at: float, length: int, output: int, *blocks: int) -> dict[str, object]:
    return {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": list(blocks)}


CHATS = [
    line(0, 1000, 5, 0, 1),
    line(60_000, 2000, 5, 0, 1, 2, 3),
    line(120_000, 1000, 0, 0, 7),
    line(180_000, 2000, 5, 0, 1, 2, 3),
]


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    """Blocks become tokens, equal where ids are equal; the last block is cut to the length of the input.

    Mutation: `TraceRequest.tokens` does not cut, or `read_trace` does not sort.
    """
    asked = read_trace(write(tmp_path / "t.jsonl", [CHATS[1], CHATS[0]]))
    assert [one.seconds for one in asked] == [0.0, 60.0]
    first, second = asked[0].tokens(), asked[1].tokens()
    assert len(first) == 1000 and len(second) == 2000
    assert (first[:1000] == second[:1000]).all() and first[BLOCK] != first[0]
    assert len(read_trace(tmp_path / "t.jsonl", 1)) == 1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 1: not a request"),
        (json.dumps({"timestamp": 0}), "line 1: not a request"),
        (json.dumps(line(0, 1000, 5, 1)), "got 1000 tokens and 1 ids"),
        (json.dumps(line(-1, 10, 5, 1)), "a timestamp from 0 on"),
        (json.dumps(line(0, 10, 5, -1)), "hash ids must be from 0"),
        ("", "has no requests"),
    ],
)
def test_a_bad_trace_says_which_line(tmp_path, bad, says):
    """Mutation: `_read_line` lets the line through."""
    path = tmp_path / "bad.jsonl"
    path.write_text(bad + "\n")
    with pytest.raises(ValueError, match=says):
        read_trace(path)
    assert main([str(path)]) == 2
    assert main([str(tmp_path / "missing.jsonl")]) == 2


def test_what_cannot_be_replayed_is_said_before_anything_else(tmp_path, capsys):
    """A trace that is not there, a store without host memory before it: one line, and no table.

    Mutation: `main` prints its head before it looks at the sizes.
    """
    trace = str(write(tmp_path / "t.jsonl", CHATS))
    assert main([trace, "--store-pages", "100"]) == 2
    assert capsys.readouterr() == ("", f"{NAME}: --store-pages needs --host-pages, through which pages come\n")
    assert main([f"{trace}.gz"]) == 2
    assert capsys.readouterr() == ("", f"{NAME}: {trace}.gz: No such file or directory\n")


NAME = "sapwood replay"


def test_the_bound_counts_blocks_seen_before():
    """Mutation: `unlimited_rate` adds a request's blocks before it counts them."""
    asked = [TraceRequest(0, 1024, 1, (0, 1)), TraceRequest(1, 1536, 1, (0, 1, 2)), TraceRequest(2, 512, 1, (5,))]
    assert unlimited_rate(asked) == 2 / 6


def test_hits_are_what_a_roomy_cache_must_have(tmp_path):
    """With room for everything each request finds the whole pages of the longest prefix seen before; the last repeats a
    prompt and computes one token.

    Mutation: `TraceReplay._close` sums `computed` as cached.
    """
    asked = read_trace(write(tmp_path / "t.jsonl", CHATS))
    done = replay_trace(asked, device_pages=4096)
    assert (done.requests, done.refused, done.retractions) == (4, 0, 0)
    assert done.prompt_tokens == 6000 and done.cached_tokens == 1000 // 16 * 16 + 512 + 1999
    assert done.computed_tokens == done.prompt_tokens - done.cached_tokens
    assert done.host_tokens == done.recomputed_tokens == 0
    assert done.blocks == 12 and done.cached_blocks == 1 + 1 + 3
    assert 180 < done.seconds < 181 and 0 < done.first_token[0] < 0.1 and done.queueing[1] < 0.01


def test_host_pages_serve_what_the_device_has_lost(tmp_path):
    """The device holds one prompt: without host the repeated one is computed again, with host it is loaded. A prompt
    that can never fit is refused and counted.

    Mutation: `TraceReplay.run` does not start the loads of a plan.
    """
    chats = [line(at, 2000, 4, *ids) for at, ids in ((0, (0, 1, 2, 3)), (60e3, (4, 5, 6, 7)), (120e3, (0, 1, 2, 3)))]
    asked = read_trace(write(tmp_path / "t.jsonl", [*chats, line(130e3, 5000, 4, *range(10))]))
    without = replay_trace(asked, device_pages=126)
    assert without.refused == 1 and without.requests == 3
    assert without.cached_tokens == 0 and without.host_tokens == 0
    with_host = replay_trace(asked, device_pages=126, host_pages=1000)
    assert with_host.host_tokens == with_host.cached_tokens == 1999
    assert with_host.computed_tokens < without.computed_tokens


def test_a_store_serves_what_host_has_lost(tmp_path):
    """Device and host hold two prompts each: the first of five comes back from the store, through host, and no token of
    its whole pages is computed again.

    Mutation: `_Link.ask_store` puts nothing into the store; or answers every lookup with 0.
    """
    blocks = [tuple(range(4 * n, 4 * n + 4)) for n in range(5)]
    chats = [line(60e3 * at, 2000, 4, *ids) for at, ids in enumerate([*blocks, blocks[0]])]
    asked = read_trace(write(tmp_path / "t.jsonl", chats))
    without = replay_trace(asked, device_pages=260, host_pages=260)
    assert without.cached_tokens == 0
    stored = replay_trace(asked, device_pages=260, host_pages=260, store_pages=10_000)
    assert stored.cached_tokens == stored.store_tokens == stored.host_tokens == 1999
    small = replay_trace(asked, device_pages=260, host_pages=260, store_pages=100)
    assert small.cached_tokens == 0


def test_the_command_prints_a_line_for_each_size(tmp_path, capsys):
    """Mutation: `main` runs the first size only."""
    path = write(tmp_path / "t.jsonl", CHATS)
    assert main([str(path), "--device-pages", "512", "4096", "--host-pages", "0", "1024"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("4 requests") and "0.583" in out[0]
    assert main([str(path), "--store-pages", "100"]) == 2
    assert [row.split()[:2] for row in out[2:]] == [["512", "0"], ["512", "1024"], ["4096", "0"], ["4096", "1024"]]
