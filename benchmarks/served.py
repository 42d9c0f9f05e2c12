"""Servers to be measured: processes on cores of their own, what they say, and the CPU time they take."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float64]
_TICK = os.sysconf("SC_CLK_TCK")


class Process:
    """Something that runs, and is ready when its output matches `ready`: `line` is that output."""

    def __init__(self, arguments: list[str], ready: str) -> None:
        self.log = tempfile.NamedTemporaryFile(prefix="sapwood-bench-", suffix=".log")  # noqa: SIM115
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.PIPE
        )
        self.pid = self.process.pid
        try:
            self.line = self.output(ready)[0]
        except RuntimeError:
            self.__exit__()
            raise

    @property
    def port(self) -> int:
        return int(self.output(r"listening on http://127.0.0.1:(\d+)")[1])

    def output(self, pattern: str, seconds: float = 120.0) -> re.Match[str]:
        """What its output has that matches; waits for it."""
        until = time.monotonic() + seconds
        while True:
            text = Path(self.log.name).read_text()
            if found := re.search(pattern, text):
                return found
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"{pattern!r} was not written:\n{text[-3000:]}")
            time.sleep(0.01)

    def cpu(self) -> float:
        """Seconds of CPU that all its threads have taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Bare(Process):
    def __init__(self) -> None:
        super().__init__(["benchmarks.bare_server"], "listening")


class Sapwood(Process):
    def __init__(self, *arguments: str) -> None:
        quiet = ["--status-seconds", "0", "--drain-seconds", "1"]
        super().__init__(["sapwood", "serve", "--port", "0", *quiet, *arguments], r"ready in .*")
        self.engine = self._engine()

    def _engine(self) -> int:
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise RuntimeError("there is no engine process")

    def kill_engine(self) -> float:
        """The time when it was killed."""
        now = time.monotonic()
        os.kill(self.engine, signal.SIGKILL)
        return now


class Paced(Sapwood):
    """A server whose engine computes nothing, in `step_ms`; `says` are the tokens it chooses from."""

    def __init__(self, folder: Path, says: list[int], step_ms: float) -> None:
        self.times = tempfile.NamedTemporaryFile(prefix="sapwood-bench-", suffix=".times")  # noqa: SIM115
        flags: dict[str, Any] = {
            "step_ms": step_ms,
            "says": says,
            "tokenizer": str(folder / "tokenizer.json"),
            "folder": str(folder),
            "device_pages": 65536,
            "log": self.times.name if step_ms else None,
        }
        super().__init__("--factory", "sapwood.bench.paced:paced", "--factory-flags", json.dumps(flags))

    def rows(self) -> Rows:
        """Of all steps until now: seed, tokens (-1: dropped), when."""
        return np.fromfile(self.times.name).reshape(-1, 3)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.times.close()


def pin(pid: int, core: int) -> None:
    """All threads of a process that there are; those to come are where they come from."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})
