"""`sapwood bench serve` beside a server that does what a test tells it: the figures are what that server did."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood.bench.client import Client, Failure, Stream, place_of
from sapwood.bench.workloads import Mix, as_words, chats, random_prompts, replayed, shared_prefixes
from sapwood.cli import main
from sapwood.sim.trace import TraceRequest

from .fake import Fake, Reply
from .kit import Running, paced_flags

MIX = Mix(input=20, output=8, ratio=0.5, rate=None, burstiness=1.0, low=1000, high=30000, seed=3)


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(fake: Fake, folder: Path, options: str) -> dict[str, Any]:
    """What a run has written."""
    file = folder / "figures.json"
    own = ["--base-url", fake.url, "--no-progress", "--output-json", str(file)]
    assert main(["bench", "serve", *own, *options.split()]) == 0
    return json.loads(file.read_text())


def test_tokens_are_those_of_usage(tmp_path, capsys):
    """Three pieces of text are seven tokens if the server says so; prompts have exactly the length that was asked for,
    as token ids, and what was cached is what the server says.

    Mutation: `_figures` sums `len(each.times)`; `Sender.first` sends words to completions.
    """
    with Fake() as fake:
        read = bench(fake, tmp_path, "--num-prompts 10 --input-len 20 --output-len 9 --warmup 0 --ignore-eos")
    figures = read["figures"]
    assert [figures[row]["in all"] for row in ("requests", "failed", "prompt tokens", "output tokens")] == [
        10,
        0,
        200,
        70,
    ]
    assert figures["of these cached"] == {"in all": 30, "share": 0.15}
    assert figures["all tokens"]["a second"] == pytest.approx(270 / read["seconds"])
    assert "0.43 pieces of text a token" in read["notes"][0]
    assert len({tuple(seen.body["prompt"]) for seen in fake.seen}) == 10
    for seen in fake.seen:
        assert seen.path == "/v1/completions" and len(seen.body.pop("prompt")) == 20
        assert seen.body == {
            "model": "fake",
            "max_tokens": 9,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    said = capsys.readouterr().out
    assert "first token" in said and "15.0%" in said


def test_a_server_without_text_is_asked_for_token_ids(tmp_path, capsys):
    """Its warm-up says tokens and shows none: from then on requests ask for their ids, which is what is timed. Servers
    that do have text never see that field; who has neither is told.

    Mutation: `_run` sends return_token_ids to everybody; `says_something` does not look at `token_ids`.
    """
    with Fake(lambda _, body: Reply(ids=True) if body.get("return_token_ids") else Reply(pieces=())) as fake:
        read = bench(fake, tmp_path, "--num-prompts 4 --input-len 5 --warmup 2")
    assert [seen.body.get("return_token_ids") for seen in fake.seen] == [None] * 2 + [True] * 6
    assert read["figures"]["requests"]["in all"] == 4 and "between tokens" in read["figures"]
    assert "tokens were told apart by their ids" in read["notes"][-1]
    with Fake() as fake:
        bench(fake, tmp_path, "--num-prompts 4 --input-len 5 --warmup 2")
    assert not any("return_token_ids" in seen.body for seen in fake.seen)
    stream = Stream()
    stream.receive(b'data: {"choices": [{"text": "", "token_ids": [5], "finish_reason": "length"}]}\n', 1.0)
    assert stream.times.tolist() == [1.0], "an answer of one token"
    with Fake(lambda *_: Reply(pieces=())) as fake:
        assert main(["bench", "serve", "--url", fake.url, "--num-prompts", "2", "--no-progress"]) == 1
    assert "nothing said (7 tokens, and no text)" in capsys.readouterr().err


@pytest.mark.server
@pytest.mark.xdist_group("http")
def test_our_own_server_without_a_tokenizer(tmp_path):
    """A server of ours with --skip-tokenizer-init takes token ids and is measured like any other: as many tokens as
    were asked for, and prompts as long as they should be.

    Mutation: `piece` of the completions drops what has no text though its ids were asked for.
    """
    running, file = Running(*paced_flags(tokenizer=None, step_ms=5)), tmp_path / "figures.json"
    try:
        asked = ["--url", f"http://127.0.0.1:{running.ready().port}", "--no-progress", "--output-json", str(file)]
        assert main(["bench", "serve", *asked, "--num-prompts", "3", "--input-len", "64", "--output-len", "9"]) == 0
    finally:
        running.kill()
    read = json.loads(file.read_text())
    assert read["figures"]["output tokens"]["in all"] == 27 and read["figures"]["prompt tokens"]["in all"] == 192
    assert read["failures"] == {}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_times_are_those_of_the_server(endpoint, tmp_path):
    """The first token comes after the wait, not with the role that a chat begins with; then one piece a gap. The time
    per output token is that between first and last piece, by the tokens of `usage`.

    Mutation: `_Choice.says_something` is true for a role; `_figures` divides by the number of pieces.
    """
    with Fake(lambda *_: Reply(wait=0.1, gap=0.03, tokens=7)) as fake:
        figures = bench(fake, tmp_path, f"--num-prompts 4 --input-len 5 --warmup 0 --endpoint {endpoint}")["figures"]
    assert 100 <= figures["first token"]["median"] < 1000
    assert figures["between tokens"]["median"] >= 25
    assert figures["whole request"]["median"] >= 160
    assert figures["per output token"]["mean"] == pytest.approx(figures["between tokens"]["mean"] * 2 / 6)
    assert figures["first token"]["p99"] >= figures["first token"]["p90"] >= figures["first token"]["median"]


def test_failures_are_counted_by_kind(tmp_path, capsys):
    """Each way to fail has a name, and what fails is in no other figure.

    Mutation: `Stream.close` does not look for [DONE]; `_watch` never fails; `ask` does not look at the status.
    """
    faults = {
        0: Reply(status=429, message="too many"),
        1: Reply(status=500),
        2: Reply(broken_after=1),
        3: Reply(error_after=2, message="the engine died"),
        4: Reply(usage=False),
        5: Reply(hangs_after=1),
        6: Reply(raw=b"what is this\r\n\r\n"),
        7: Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndata: {\n\n"),
        8: Reply(status=429),
    }
    with Fake(lambda number, _: faults.get(number, Reply())) as fake:
        options = "--num-prompts 12 --input-len 5 --warmup 0 --max-concurrency 1 --timeout 8"
        read = bench(fake, tmp_path, options)
    assert read["failures"] == {
        "status 429": 2,
        "status 500": 1,
        "broken": 1,
        "error in the stream": 1,
        "no usage": 1,
        "timeout": 1,
        "not HTTP": 1,
        "not understood": 1,
    }
    assert fake.gone.is_set(), "the server is told that nobody waits any more"
    assert read["figures"]["requests"]["in all"] == 3 and read["figures"]["output tokens"]["in all"] == 21
    assert read["figures"]["failed"] == {"in all": 9, "share": 0.75}
    said = capsys.readouterr().out
    assert "2 x status 429 (too many)" in said and "1 x error in the stream (the engine died)" in said


def test_nothing_measured_is_an_error(tmp_path, capsys):
    """If every request fails there is no table; a warm-up that fails, such as for a key, ends it before it begins; and
    so does a server that is not there.

    Mutation: `_run` does not look at `warm.failed`; `_first_model` lets Failure through.
    """
    with Fake(lambda *_: Reply(status=500, message="no memory")) as fake:
        own = ["bench", "serve", "--base-url", fake.url, "--no-progress"]
        assert main([*own, "--num-prompts", "3", "--warmup", "0"]) == 1
        assert "all 3 requests failed: 3 x status 500 (no memory)" in capsys.readouterr().err
        fake.seen.clear()
        assert main([*own, "--num-prompts", "3"]) == 1
        assert "before anything was measured: 1 x status 500" in capsys.readouterr().err and len(fake.seen) == 1
    assert main(own) == 1
    said = capsys.readouterr().err
    assert f"no server answers at {fake.url}" in said and "`sapwood serve`" in said


def test_the_warm_up_is_not_counted(tmp_path):
    """Its prompts are as long as the others, and nobody else's.

    Mutation: `_run` puts `first` into the warm-up; `_like` uses the generator of `random_prompts`.
    """
    with Fake() as fake:
        read = bench(fake, tmp_path, "--num-prompts 3 --warmup 2 --input-len 30")
    assert read["figures"]["requests"]["in all"] == 3 and len(fake.seen) == 5
    prompts = [tuple(seen.body["prompt"]) for seen in fake.seen]
    assert {len(prompt) for prompt in prompts} == {30} and len({*prompts}) == 5


def test_connections_are_used_again(tmp_path):
    """So many requests at a time, on so many connections; one that the server has closed in between is no failure.

    Mutation: `_request` puts no connection into `_free`; a connection that was closed while free is not tried anew.
    """
    with Fake(lambda *_: Reply(gap=0.005)) as fake:
        bench(fake, tmp_path, "--num-prompts 20 --input-len 5 --warmup 0 --max-concurrency 4")
        assert fake.most == 4 and fake.connections == 4 and len(fake.seen) == 20
    with Fake(lambda *_: Reply(close=True)) as fake:
        read = bench(fake, tmp_path, "--num-prompts 20 --input-len 5 --warmup 0 --max-concurrency 4")
        assert not read["failures"] and fake.connections >= 20


def test_arrivals_follow_the_rate(tmp_path):
    """Requests come at their times whether others have been answered or not; the same times for the same seed, and a
    limit that holds them back is told.

    Mutation: `drive` does not wait for `due`; `Mix.arrivals` takes no seed.
    """
    mix = MIX._replace(rate=50.0)
    due = mix.arrivals(2000)
    assert due == mix.arrivals(2000) != mix._replace(seed=4).arrivals(2000)
    assert due[0] == 0 and np.diff(due).mean() == pytest.approx(1 / 50, rel=0.1)
    assert np.diff(due).std() == pytest.approx(1 / 50, rel=0.1), "a Poisson process"
    assert np.diff(mix._replace(burstiness=100.0).arrivals(2000)).std() < 1 / 300
    with Fake(lambda *_: Reply(wait=0.5)) as fake:
        options = "--num-prompts 8 --input-len 5 --warmup 0 --request-rate 50 --seed 3"
        began = time.perf_counter()
        bench(fake, tmp_path, options)
        came = np.array([seen.at for seen in fake.seen]) - began
        assert fake.most > 2 and (came >= np.array(mix.arrivals(8))).all(), "nobody comes before its time"
        read = bench(fake, tmp_path, options + " --max-concurrency 1")
        assert any("after their time" in note for note in read["notes"])


def test_prompts_are_the_same_for_a_seed():
    """Lengths stay within the ratio, ids within their range; another seed has other prompts.

    Mutation: `Mix.turn` ignores `ratio`; `Mix.random` ignores `seed`.
    """
    some = [session.turns[0] for session in random_prompts(MIX, 300)]
    again = [session.turns[0] for session in random_prompts(MIX, 300)]
    assert all((a.text == b.text).all() and a.output == b.output for a, b in zip(some, again, strict=True))
    other = next(random_prompts(MIX._replace(seed=4), 1)).turns[0].text
    assert not np.array_equal(some[0].text, other)
    assert {len(turn.text) for turn in some} == {*range(10, 31)} and {turn.output for turn in some} == {*range(4, 13)}
    ids = np.concatenate([turn.text for turn in some])
    assert ids.min() >= 1000 and ids.max() <= 30000 and len(np.unique(ids)) > 4000


def test_groups_share_their_prefix():
    """As many prompts behind each of the prefixes, which differ.

    Mutation: `shared_prefixes` has one prefix for all; the permutation is left out.
    """
    sessions = [*shared_prefixes(MIX, 40, groups=4, prefix=16)]
    prefixes = [tuple(session.system.tolist()) for session in sessions]
    assert {prefixes.count(prefix) for prefix in prefixes} == {10} and len({*prefixes}) == 4
    assert prefixes[:8] != prefixes[4:12], "not in turn"
    assert all(len(prefix) == 16 for prefix in prefixes)


def test_equal_hash_ids_are_equal_tokens():
    """Two requests of a trace share exactly the blocks whose ids are the same, and come at their times.

    Mutation: `block` draws from one generator for all; `replayed` multiplies by `speed`.
    """
    lines = [
        TraceRequest(1.0, 1200, 5, (7, 8, 9)),
        TraceRequest(3.0, 1100, 6, (7, 8, 10)),
        TraceRequest(4.0, 512, 1, (8,)),
    ]
    first, second, third = (session for session in replayed(MIX, lines, 2.0))
    assert [session.due for session in (first, second, third)] == [0.5, 1.5, 2.0]
    a, b, c = (session.turns[0].text for session in (first, second, third))
    assert (len(a), len(b), len(c), second.turns[0].output) == (1200, 1100, 512, 6)
    assert (a[:1024] == b[:1024]).all() and (a[1024:1100] != b[1024:]).any() and (a[512:1024] == c).all()
    assert as_words(a[:600]) == as_words(b[:600]) and len(as_words(a).split()) == 1200


def test_a_trace_is_replayed(tmp_path):
    """From a file, at its times, faster if asked; no more of it than asked for.

    Mutation: `_workload` does not give `count` to `read_trace`; `Mix.tokens` is asked for a block's id as its length.
    """
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 400 * at, "input_length": 600, "output_length": at + 1, "hash_ids": [0, at]} for at in range(9)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Fake() as fake:
        bench(fake, tmp_path, f"--trace {file} --speed 2 --num-prompts 4 --warmup 0")
    assert [seen.body["max_tokens"] for seen in fake.seen] == [1, 2, 3, 4]
    assert len({tuple(seen.body["prompt"][:512]) for seen in fake.seen}) == 1
    assert len({tuple(seen.body["prompt"]) for seen in fake.seen}) == 4
    assert fake.seen[3].at - fake.seen[0].at >= 0.4  # 0.6, less what the first was late


def test_chats_go_on(tmp_path):
    """Every turn brings all that was said before, the answers as the server gave them; users of one group begin with
    the same system prompt. A turn that fails is the last of its chat.

    Mutation: `talk` does not append the answer; `_fail` does not count what is left.
    """
    with Fake() as fake:
        options = "--dataset-name multi-turn --users 2 --turns 3 --input-len 4 --prefix-len 6 --groups 1 --warmup 0"
        read = bench(fake, tmp_path, options)
    assert read["figures"]["requests"]["in all"] == 6 and read["settings"]["endpoint"] == "chat"
    longest = [seen.body["messages"] for seen in fake.seen if len(seen.body["messages"]) == 6]
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    for messages in longest:
        assert [message["role"] for message in messages] == roles
        assert messages[2]["content"] == "Hello, you" and len(messages[1]["content"].split()) == 4
        assert messages[:4] in [seen.body["messages"] for seen in fake.seen]
    assert len(longest) == 2 and longest[0][0] == longest[1][0] and longest[0][1] != longest[1][1]

    with Fake(lambda number, _: Reply(status=500) if number == 1 else Reply()) as fake:
        options = "--dataset-name multi-turn --users 1 --turns 5 --input-len 4 --warmup 0"
        assert bench(fake, tmp_path, options)["failures"] == {"status 500": 1, "not asked": 3}


def test_users_think():
    """Between turns, not before the first; for as long as asked in the mean.

    Mutation: `chats` has a pause before the first turn.
    """
    pauses = [[turn.think for turn in session.turns] for session in chats(MIX, 200, 6, 2.0, 1, 0)]
    assert all(each[0] == 0 and min(each[1:]) > 0 for each in pauses)
    assert np.mean([each[1:] for each in pauses]) == pytest.approx(2.0, rel=0.1)


def test_keys_are_sent_and_not_written(tmp_path, monkeypatch):
    """By option or environment; headers too. The file of figures has neither.

    Mutation: `_NOT_WRITTEN` lacks "api_key"; `headers` does not look into the environment.
    """
    with Fake() as fake:
        bench(fake, tmp_path, "--num-prompts 1 --warmup 0 --api-key secret-1 --header X-Team=secret-2")
        assert "secret" not in (tmp_path / "figures.json").read_text()
        monkeypatch.setenv("OPENAI_API_KEY", "secret-3")
        bench(fake, tmp_path, "--num-prompts 1 --warmup 0")
    assert fake.seen[0].headers["authorization"] == "Bearer secret-1" and fake.seen[0].headers["x-team"] == "secret-2"
    assert fake.seen[1].headers["authorization"] == "Bearer secret-3"
    assert json.loads((tmp_path / "figures.json").read_text())["settings"]["model"] == "fake"


def test_a_run_is_compared_with_an_older_one(tmp_path, capsys):
    """Also one of another server.

    Mutation: `parser` of bench/command.py gives --compare to benches with an engine only.
    """
    with Fake() as fake:
        bench(fake, tmp_path, "--num-prompts 2 --warmup 0")
        older = tmp_path / "older.json"
        (tmp_path / "figures.json").rename(older)
        capsys.readouterr()
        bench(fake, tmp_path, f"--num-prompts 4 --warmup 0 --compare {older}")
    said = capsys.readouterr().out
    assert "/ older" in said and "2.00 x" in said and "num_prompts: 4 now, 2 in the older run" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--num-prompts 0", "--num-prompts: must be a whole number from 1"),
        ("--request-rate 0", "--request-rate: must be requests a second, more than 0, or inf"),
        ("--request-rate nan", "--request-rate: must be requests a second"),
        ("--range-ratio 1", "--range-ratio/--random-range-ratio: must be a number from 0"),
        ("--temperature nan", "--temperature: must be a number from 0"),
        ("--token-ids 5", "--token-ids: must be like 1000-30000, got '5'"),
        ("--extra-body []", "--extra-body: must be a JSON object"),
        ("--header nothing", "--header must be like X-Name=value"),
        ("--header X=\u00e4", "must be printable ASCII"),
        ("--base-url ftp://x", "must be like http://127.0.0.1:8000, got 'ftp://x'"),
        ("--base-url http://x:99999", "must be like http://127.0.0.1:8000"),
        ("--prefix-len 5", "--prefix-len means nothing with --dataset-name random"),
        ("--dataset-name trace", "--dataset-name trace needs --trace FILE"),
        ("--trace nowhere.jsonl", "nowhere.jsonl"),
        ("--trace x --request-rate 3", "--request-rate means nothing with --dataset-name trace"),
        ("--dataset-name multi-turn --num-prompts 3", "--num-prompts means nothing"),
        ("--dataset-name multi-turn --endpoint completions", "--endpoint must be chat"),
        ("--max-num-seqs 3", "unrecognized arguments: --max-num-seqs"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked(options, says, capsys):
    """Every number has bounds, and an error names the option.

    Mutation: `settle` lets `prefix_len` pass with random prompts; `checked` compares so that nan passes.
    """
    with Fake() as fake:
        try:
            status = main(["bench", "serve", "--base-url", fake.url, *options.split()])
        except SystemExit as end:
            status = end.code
        assert status == 2 and says in capsys.readouterr().err and not fake.connections


# ---- the client


def stream_in(sizes: list[int], text: bytes) -> Stream:
    stream, at = Stream(), 0
    for number, size in enumerate(sizes):
        stream.receive(text[at : at + size], float(number))
        at += size
    stream.receive(text[at:], float(len(sizes)))
    return stream


def test_events_may_be_cut_anywhere():
    """Also within a line; carriage returns and comments are no harm. A piece counts when its line is complete.

    Mutation: `Stream.receive` forgets `_rest`.
    """
    text = (
        b': hello\r\n\r\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
        b'data:{"choices":[{"delta":{"content":"a"}}],"usage":null}\n\nevent: x\n'
        b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":9}}\n\ndata: [DONE]\n\n'
    )
    for cut in range(1, len(text)):
        stream = stream_in([cut], text)
        usage = stream.close()
        assert (usage.prompt_tokens, usage.completion_tokens, stream.text) == (4, 9, ["a", "b"])
        assert list(stream.times) in ([0, 0], [0, 1], [1, 1])
    assert stream_in([1] * len(text), text).text == ["a", "b"]
    with pytest.raises(Failure, match=r"without \[DONE\]"):
        stream_in([], text[:-8]).close()
    with pytest.raises(Failure, match="not understood"):
        stream_in([], b'data: {"choices":[{"text":5}]}\n\n')
    with pytest.raises(Failure, match="not understood"):
        stream_in([], b'data: {"usage":{"prompt_tokens":-1}}\n\n')


def get(fake: Fake, raw: bytes) -> Any:
    """The answer to a request that is answered with these bytes."""
    fake.reply = lambda *_: Reply(raw=raw)

    async def run() -> Any:
        client = Client(place_of(fake.url), {}, 2.0)
        try:
            return await client.post("/x", b"{}")
        finally:
            client.close()

    return asyncio.run(run())


def test_bodies_end_as_http_says():
    """By length, by chunks, or with the connection; what comes before the answer is none; a body that is cut is an
    error.

    Mutation: `connection_lost` takes every end for one; `on_message_complete` takes "100 Continue" for the answer.
    """
    with Fake() as fake:
        assert get(fake, b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc") == (200, b"abc")
        assert get(fake, b"HTTP/1.1 404 X\r\n\r\nuntil the end") == (404, b"until the end")
        assert get(fake, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 X\r\nContent-Length: 1\r\n\r\nz") == (201, b"z")
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
        assert get(fake, chunked + b"2;x=y\r\nbc\r\n0\r\n\r\n") == (200, b"abc")
        for cut in (chunked, b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", b"HTTP/1.1 200 OK\r\nCont", b""):
            with pytest.raises(Failure, match="broken"):
                get(fake, cut)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes no certificate without openssl")
def test_tls(tmp_path, capsys):
    """A certificate that nobody has signed is refused, unless it is said not to matter.

    Mutation: `place_of` ignores `insecure`, or always acts as if it were given.
    """
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    what = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x -keyout"
    subprocess.run(["openssl", *what.split(), key, "-out", cert], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with Fake(tls=context) as fake:
        read = bench(fake, tmp_path, "--num-prompts 3 --warmup 0 --insecure")
        assert read["figures"]["output tokens"]["in all"] == 21
        assert main(["bench", "serve", "--base-url", fake.url, "--num-prompts", "1"]) == 1
        assert "certificate" in capsys.readouterr().err
