"""Ctrl-C while a command imports or loads: one line, status 130, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .kit import PATIENCE, Running, alive, paced_flags, until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("life")]

# A module that takes for ever to import, and makes of an interrupt what a library in C may make of it.
HANGS = """
import sys, time
try:
    sys.stderr.write("importing\\n")
    sys.stderr.flush()
    time.sleep(10000)
except BaseException as error:
    raise ImportError("a part of this library cannot be imported") from error
"""
# The engine's process stands still where Python begins.
BEGINS = """
import sys, time
if "sapwood.server.process.engine_process" in sys.orig_argv:
    sys.stderr.write("the engine begins\\n")
    sys.stderr.flush()
    time.sleep(10000)
"""


@pytest.fixture(autouse=True)
def interruptible():
    """Who is started where interrupts are ignored ignores them too: not in these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("serve", "uvloop"),
        ("serve", "starlette"),
        ("bench latency --load-format dummy --model {}/model", "torch"),
        ("bench serve", "httptools"),
        ("chat", "ssl"),
    ],
)
def test_ctrl_c_while_a_command_imports(command: str, module: str, tmp_path: Path):
    """Wherever it is in that, the program says so and ends: no traceback, no other error that an import makes of it.

    Mutation: `main` of cli.py does not take SIGINT.
    """
    (tmp_path / f"{module}.py").write_text(HANGS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    process = subprocess.Popen(
        [sys.executable, "-m", "sapwood", *command.format(tmp_path).split()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "")},
    )
    assert process.stdout is not None
    said = [process.stdout.readline()]
    while said[-1] not in (b"importing\n", b""):
        said.append(process.stdout.readline())
    assert said[-1] == b"importing\n", b"".join(said)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=PATIENCE)[0]
    assert rest == b"\nsapwood: interrupted\n" and process.returncode == 130


@pytest.mark.parametrize("stage", ["its first line", "loading"])
def test_ctrl_c_while_the_engine_loads(stage: str, tmp_path: Path):
    """At a terminal it comes to both processes. The server says so in one line and ends; the engine says nothing, from
    the first moment of its life on, and is gone.

    Mutation: `start` of link.py does not block SIGINT; `_signal` drains a server that was never ready.
    """
    loading, flags = stage == "loading", {"until": str(tmp_path / "never")}
    (tmp_path / "sitecustomize.py").write_text("" if loading else BEGINS)
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    server = Running(*paced_flags(**flags), "--factory", "tests.server.late:late", environment={"PYTHONPATH": path})
    try:
        if loading:
            until(lambda: "waiting for the test" in server.get("/health").error["message"])
        else:
            server.said("the engine begins")
        engine, before = server.engine(), len(server.lines)
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.ended() == 130
        until(lambda: not alive(engine))
    finally:
        server.kill()
    (line,) = server.lines[before:]
    assert "interrupted before the server was ready" in line


def test_help_for_whoever_says_nothing():
    """`sapwood` alone says what there is; that is no mistake.

    Mutation: `_main` parses no words.
    """
    done = subprocess.run([sys.executable, "-m", "sapwood"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: sapwood") and "serve a model" in done.stdout
