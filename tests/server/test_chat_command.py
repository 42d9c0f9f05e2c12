"""`sapwood chat` with a server that says what a test tells it."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from sapwood.cli import main

from .fake import Fake, Reply

FOUND = {"prompt_tokens": 5, "cached_tokens": 42, "device": 30, "host": 12, "store": 0, "shared": 0, "miss": None}


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(autouse=True)
def interrupts_kept():
    """The command takes Ctrl-C for itself, also where it was ignored, as in a shell's background."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def chat(monkeypatch, capsys):
    """Runs `sapwood chat` with lines typed into it: its status, and what it shows."""

    def run(fake: Fake, lines: str, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = main(["chat", "--url", fake.url, *options])
        return status, capsys.readouterr().out

    return run


def test_a_conversation(chat):
    """Answers are shown, and the next question brings all that was said before. Below each a line of figures: tokens
    from `usage`, tiers from the server's report.

    Mutation: `_turn` does not keep the answer; `report` counts what `take` was called with.
    """
    begin = time.monotonic()
    with Fake(lambda *_: Reply(wait=0.05, gap=0.05, tokens=31, cached=42, cache=FOUND)) as fake:
        status, said = chat(fake, "who are you\nand now\n", "--system", "be brief", "--temperature", "0.5")
    took = time.monotonic() - begin
    assert status == 0
    first, figures, second, again = said.splitlines()
    assert first == second == "Hello, you"
    assert figures.startswith("42 of 5 prompt tokens cached (device 30, host 12), first token ")
    assert 0.05 <= float(figures.split("first token ")[1].split()[0]) <= took
    assert ", 31 tokens at " in figures
    assert round(30 / took) <= float(again.rsplit(" ", 1)[1].removesuffix("/s")) <= 310
    assert [message["role"] for message in fake.seen[1].body["messages"]] == ["system", "user", "assistant", "user"]
    assert fake.seen[1].body["messages"][2]["content"] == "Hello, you"
    body = fake.seen[0].body
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who are you"}]
    assert (body["model"], body["temperature"], body["stream"]) == ("fake", 0.5, True)
    assert body["stream_options"] == {"include_usage": True} and body["cache_report"] is True
    assert "max_tokens" not in body, "what is not given is the server's"


def test_commands(chat, tmp_path):
    """/system, /reset, /save and /help do what they say and ask the server nothing; /quit ends.

    Mutation: `_reset` forgets the system prompt too; `_save` opens with "w"; `run` sends what it does not know.
    """
    file = tmp_path / "chat.json"
    lines = f"one\n/save {file}\n/save {file}\n/save\n/system be kind\n/reset\ntwo\n/nonsense\n/help\n\n/quit\nthree\n"
    with Fake() as fake:
        status, said = chat(fake, lines)
    assert status == 0 and len(fake.seen) == 2
    assert fake.seen[1].body["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "two"},
    ]
    saved = json.loads(file.read_text())
    assert saved["model"] == "fake" and saved["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello, you"},
    ]
    for part in (
        f"2 messages in {file}",
        "cannot be written: File exists",
        "/save needs a FILE",
        "forgotten",
        "system: be kind",
        "/nonsense is no command",
        "Ctrl-C stops an answer",
    ):
        assert part in said


def test_a_line_with_a_space_before_it_is_no_command(chat):
    """Somebody asks about /etc.

    Mutation: `run` strips a line before it looks for "/".
    """
    with Fake() as fake:
        chat(fake, " /etc is what\n")
    assert fake.seen[0].body["messages"] == [{"role": "user", "content": "/etc is what"}]


class Watched(io.StringIO):
    """Somewhere to write, which tells when something is there."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.Condition()

    def write(self, text: str) -> int:
        with self._written:
            self._written.notify_all()
            return super().write(text)

    def wait_for(self, text: str, seconds: float) -> bool:
        with self._written:
            return self._written.wait_for(lambda: text in self.getvalue(), seconds)


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(monkeypatch):
    """The server learns that nobody listens any more; the next question has what had been said.

    Mutation: `run` does not catch KeyboardInterrupt; `_turn` keeps nothing of an answer that was stopped.
    """
    out = Watched()
    monkeypatch.setattr(sys, "stdin", io.StringIO("tell me all\ngo on\n"))
    monkeypatch.setattr(sys, "stdout", out)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press() -> None:
        """While the chat waits for more, of which nobody is told; a signal just before is seen when something comes,
        which is never here, so that it is pressed once more if nothing happens."""
        assert out.wait_for("Hello", 240)
        time.sleep(0.05)
        for _ in range(3):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if out.wait_for("(stopped)", 5):
                break

    with Fake(lambda number, _: Reply(hangs_after=1) if not number else Reply()) as fake:
        user = threading.Thread(target=press)
        user.start()
        try:
            assert main(["chat", "--url", fake.url]) == 0
        finally:
            user.join()
            signal.signal(signal.SIGINT, before)
        assert fake.gone.wait(10)
    assert out.getvalue().startswith("Hello\n(stopped)\nHello, you\n")
    assert [message["content"] for message in fake.seen[1].body["messages"]] == ["tell me all", "Hello", "go on"]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(status=429, message="the queue is full"), "the server refuses with status 429: the queue is full"),
        (Reply(status=401, message="no"), "--api-key or OPENAI_API_KEY"),
        (Reply(error_after=0, message="the engine died"), "the server says: the engine died"),
        (Reply(broken_after=0), "the server broke off"),
        (Reply(hangs_after=0), "the server says nothing for 8 s"),
        (Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ndata: x\n"), "what is no event"),
        (Reply(raw=b"nonsense\r\n\r\n"), "the server broke off"),
    ],
)
def test_what_fails_is_said_and_the_chat_goes_on(chat, reply, says):
    """The question that failed is not in the conversation; whoever pipes lines into it gets a status.

    Mutation: `_turn` keeps a question without an answer; `run` ends at Trouble.
    """
    with Fake(lambda number, _: Reply() if number else reply) as fake:
        status, said = chat(fake, "one\ntwo\n", "--timeout", "8")
    assert status == 1 and says in said.splitlines()[0]
    assert "Hello, you" in said and fake.seen[1].body["messages"] == [{"role": "user", "content": "two"}]


def test_half_an_answer_stays(chat):
    """A server that breaks off has said something.

    Mutation: `_turn` keeps an answer only if nothing was raised.
    """
    with Fake(lambda number, _: Reply() if number else Reply(broken_after=2)) as fake:
        status, said = chat(fake, "one\ntwo\n")
    assert status == 1 and said.startswith("Hello,\nthe server broke off in the middle of the answer\n")
    assert [message["content"] for message in fake.seen[1].body["messages"]] == ["one", "Hello,", "two"]


def test_nobody_there(capsys):
    """What to do is said in a line.

    Mutation: `_opened` lets OSError through.
    """
    with Fake() as fake:
        pass
    assert main(["chat", "--url", fake.url]) == 1
    said = capsys.readouterr()
    assert f"no server answers at {fake.url}" in said.err and "start one with `sapwood serve`" in said.err
    assert len(said.err.splitlines()) == 1 and not said.out


def test_a_server_that_knows_no_report(chat):
    """It is asked again without, and from then on.

    Mutation: `_listen` does not look at `refused.message`; it keeps `cache_report` in the fields.
    """

    def reply(_: int, body: dict[str, Any]) -> Reply:
        return Reply(status=400, message="unknown field cache_report") if "cache_report" in body else Reply()

    with Fake(reply) as fake:
        status, said = chat(fake, "one\ntwo\n")
    assert status == 0 and said.count("Hello, you") == 2
    assert ["cache_report" in seen.body for seen in fake.seen] == [True, False, False]


def test_terminals_are_safe_from_answers(chat):
    """A model that says what would move the cursor, or name the window, does not get it there; its thoughts are shown
    and not kept.

    Mutation: `say` does not translate `_CONTROLS`; `take` adds what was thought to `text`.
    """
    with Fake(lambda *_: Reply(pieces=("a\x1b]0;x\x07b\r", "\u009bc\n", "\td"), reasoning="well. ")) as fake:
        _, said = chat(fake, "one\ntwo\n")
    assert said.startswith("well. a]0;xbc\n\td\n") and "\x1b" not in said
    assert fake.seen[1].body["messages"][1]["content"].startswith("a\x1b]0;x")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--temperature -1", "--temperature: must be a number from 0 to 100, got '-1'"),
        ("--max-tokens 1.5", "--max-tokens: must be a whole number from 1"),
        ("--url nonsense://x", "--url must be like http://127.0.0.1:8000, got 'nonsense://x'"),
        ("--api-key \u00e4", "the API key must be printable ASCII"),
    ],
)
def test_options_are_checked(options, says, capsys):
    """Before anybody is asked.

    Mutation: `_number` ignores `low`.
    """
    try:
        status = main(["chat", *options.split()])
    except SystemExit as end:
        status = end.code
    assert status == 2 and says in capsys.readouterr().err


def test_it_is_there_at_once():
    """Nothing heavy is imported for it, not even numpy.

    Mutation: commands/chat.py imports something of `sapwood.engine`.
    """
    code = """
import sys
import sapwood.commands.chat
print(sorted({"torch", "numpy", "rich", "msgspec", "zmq", "starlette", "httptools"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
