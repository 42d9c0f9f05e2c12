"""Lines of the log: what they say, and what nobody can make them say."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable

import pytest

from sapwood.server.observe.logs import TEXT, Interval, Recent, RequestLog, set_up, status_line

from ..engine.machine import PROMPT, Machine
from .over import over, prompt, stats_of

# Whatever a client may have in a name: ends of lines for one reader or another, colours, a line of the log, halves.
NASTY = 'a\n2026-01-31 12:00:00.000 INFO forged\r\x1b[31m\x00\x85\u2028\u202e\ud800 b="c" \x7f\ufeff'
UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff\ufeff]")


@pytest.fixture
def logged(logging_kept: None) -> Callable[..., Callable[[], list[str]]]:
    """`logged(format, level)` sets the log up; what it returns tells the lines so far."""

    def begin(format: str = "text", level: str = "info") -> Callable[[], list[str]]:
        stream = io.StringIO()
        set_up(format, level, stream)
        return lambda: stream.getvalue().removesuffix("\n").split("\n") if stream.getvalue() else []

    return begin


DONE = over(
    prompt(800, 700, "diverged", host=200, store=100, shared=50, queued=0.0041),
    prompt(12, 11, "hit", shared=8, queued=0.0021),
    generated=20,
    reasons=["stop", "length", "stop"],
)


def test_a_request_is_one_line(logged):
    """With all that was known of it, in an order and under names that do not change.

    Mutation: `_fields` takes the tiers of the first prompt only; or the reasons of every sample.
    """
    lines = logged()
    RequestLog().finished(DONE)
    (line,) = lines()
    when, said = line[:23], line[24:]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", when)
    assert said == (
        'INFO    request id=req-1 path=/v1/chat/completions status=200 model="a model" prompt_tokens=812 '
        "cached_tokens=711 cached_device=353 cached_host=200 cached_store=100 cached_shared=58 generated_tokens=20 "
        "reason=stop,length queue_seconds=0.0041 first_seconds=0.1 total_seconds=2.0 tokens_per_second=10.5"
    )


def test_a_request_is_one_object(logged):
    """The same in JSON, with numbers as numbers.

    Mutation: `_Json` puts the fields into the message.
    """
    lines = logged("json")
    RequestLog().finished(DONE._replace(adapter="sql", status=500, error="it broke"))
    (line,) = lines()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {
        "level": "warning",
        "logger": "sapwood.requests",
        "message": "request",
        "id": "req-1",
        "path": "/v1/chat/completions",
        "status": 500,
        "model": "sql",
        "prompt_tokens": 812,
        "cached_tokens": 711,
        "cached_device": 353,
        "cached_host": 200,
        "cached_store": 100,
        "cached_shared": 58,
        "generated_tokens": 20,
        "reason": "stop,length",
        "queue_seconds": 0.0041,
        "first_seconds": 0.1,
        "total_seconds": 2.0,
        "tokens_per_second": 10.5,
        "error": "it broke",
    }


def test_a_request_that_came_to_nothing(logged):
    """No token, no prompt: nothing is divided by nothing, and times that there are not are not told.

    Mutation: `_fields` does not look whether there was a first token.
    """
    lines = logged("json")
    RequestLog().finished(over(generated=0, reasons=["abort"], first=None, status=499, error="the client has left"))
    found = json.loads(lines()[0])
    assert (found["prompt_tokens"], found["cached_device"], found["queue_seconds"]) == (0, 0, 0)
    assert "first_seconds" not in found and "tokens_per_second" not in found and found["level"] == "info"


@pytest.mark.parametrize("format", ["text", "json"])
def test_prompts_are_logged_only_where_that_is_asked_for(logged, format):
    """And then their first 2,000 characters.

    Mutation: `_fields` does not cut the text, or shows what it has of the prompt.
    """
    lines = logged(format)
    RequestLog().finished(over(prompt(30)))
    RequestLog().finished(over(prompt(30), text="x\ty" + "z" * 9999))
    without, with_text = lines()
    assert "text" not in without
    assert with_text.count("z") == TEXT - 3 and "x\\ty" in with_text


@pytest.mark.parametrize("format", ["text", "json"])
def test_nobody_can_forge_a_line(logged, format):
    """Newlines and control characters of a client are escaped wherever they come in: as an id or a name, in an error,
    filled into a message, in an exception, and in what other packages say. They can be read back from JSON.

    Mutation: `_word` returns a string as it is; `_message` leaves `args` as they are; `_Text` adds `exc_info` as it is.
    """
    lines = logged(format)
    RequestLog().finished(over(prompt(3), id=NASTY, path=NASTY, model=NASTY, error=NASTY, text=NASTY, reasons=[NASTY]))
    log = logging.getLogger("sapwood.server")
    log.info("a message with %s", NASTY)
    log.info("one with %(this)s", {"this": NASTY})
    log.warning("one with %r, and %d of %.1f", ValueError(NASTY), 3, 2.5)
    logging.getLogger("uvicorn.error").warning(f"said by others: {NASTY}")
    try:
        raise ValueError(NASTY)
    except ValueError:
        log.exception("request %s failed", NASTY)
    said = lines()
    assert not [line for line in said if UNSAFE.search(line)]
    if format == "text":
        begin = re.compile(r"\d{4}-\d\d-\d\d .* (INFO|WARNING|ERROR) +(request|a message|one|said)")
        assert len(said) > 6 and all(begin.match(line) or line.startswith("  | ") for line in said)
        assert sum(line.startswith("  | ") for line in said) == len(said) - 6
    else:
        found = [json.loads(line) for line in said]
        assert len(found) == 6 and found[0]["id"] == NASTY and found[1]["message"] == f"a message with {NASTY}"
        assert f"ValueError: {NASTY}" in found[5]["exception"]


def test_names_are_cut(logged):
    """Mutation: `_fields` takes a name however long it is."""
    lines = logged()
    RequestLog().finished(over(prompt(3), id="i" * 9999, model="m" * 9999, error="e" * 9999))
    assert len(lines()[0]) < 1500


def test_our_own_lines_may_be_several(logged):
    """What to try next is told as it is to be typed.

    Mutation: `_message` escapes the whole message.
    """
    lines = logged()
    logging.getLogger("sapwood").info("try:\n\n  curl %s\n", "http://127.0.0.1:1")
    assert lines()[1:] == ["", "  curl http://127.0.0.1:1", ""]


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("debug", ["debug", "info", "warning", "error", "their warning", "their error"]),
        ("info", ["info", "warning", "error", "their warning", "their error"]),
        ("warning", ["warning", "error", "their warning", "their error"]),
        ("error", ["error", "their error"]),
    ],
)
def test_levels(logged, level, heard):
    """Ours from the level on; of others what they warn of. Setting it up again takes the place of what was before.

    Mutation: `set_up` adds its handler to those there are; or gives the level to everybody.
    """
    before = logged("json", "debug")
    lines = logged("json", level)
    for name in ("debug", "info", "warning", "error"):
        logging.getLogger("sapwood.x").log(getattr(logging, name.upper()), name)
        logging.getLogger("httpx").log(getattr(logging, name.upper()), "their %s", name)
    RequestLog().finished(over(prompt(3), status=503))
    said = [json.loads(line)["message"] for line in lines()]
    assert before() == []
    assert [each for each in said if each != "request"] == sorted(heard, key=said.index)
    assert ("request" in said) == (level != "error") and set(heard) == {*said} - {"request"}


@pytest.mark.parametrize(("format", "level", "says"), [("yaml", "info", "log_format"), ("text", "loud", "log_level")])
def test_what_cannot_be_set_up_is_said(logged, format, level, says):
    """Mutation: `set_up` takes any level."""
    with pytest.raises(ValueError, match=f"{says} must be "):
        logged(format, level)


# ---- the line of status


def test_the_line_of_status():
    """Who runs and waits, pages, and what was done since the last line.

    Mutation: `status_line` does not divide by the seconds; or takes cached tokens for prompts.
    """
    machine = Machine()
    machine.serve("one", PROMPT)
    interval = Interval(10.0, 20_000, 7_000, 1_500)
    said = status_line(stats_of(machine), 3, 4, interval)
    assert said == (
        "running 3, waiting 4, pages 15% used, 0% needed, host 15% used, hit rate 35.0%, 2000 tokens/s in, 150 out"
    )
    assert status_line(None, 0, 1, Interval(0.0, 0, 0, 0)) == (
        "running 0, waiting 1, the engine does not answer, hit rate -, 0 tokens/s in, 0 out"
    )
    machine.close()


def test_what_was_done_since_the_last_look(monkeypatch):
    """Each look tells what was done since the one before, also of an engine that was started again meanwhile.

    Mutation: `Recent.take` does not begin anew; it does not look whether the counts went back.
    """
    clock = [100.0]
    monkeypatch.setattr("sapwood.server.observe.logs.time.monotonic", lambda: clock[0])
    recent = Recent()
    machine = Machine()
    machine.serve("one", PROMPT)
    machine.serve("two", PROMPT)
    stats = stats_of(machine)
    prompts, cached = 2 * len(PROMPT), stats["cache"]["cached_tokens"]
    assert cached > 0
    clock[0] = 104.0
    assert recent.take(stats, 21) == Interval(4.0, prompts, cached, 21)
    clock[0] = 105.0
    assert recent.take(stats, 25) == Interval(1.0, 0, 0, 4)
    machine.close()
    machine = Machine()
    machine.serve("one", PROMPT)
    assert recent.take(stats_of(machine), 30) == Interval(0.0, len(PROMPT), 0, 5)
    machine.close()
