"""Adapters whose files hang, as on a network file system that is gone: the process that reads a folder with a FIFO
called `hangs` in it waits there until somebody has written to it."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from sapwood.engine.lora import process as lora_process
from sapwood.engine.lora.process import Reader

PATIENCE = 240.0  # seconds after which something hangs: in a test that passes, no machine is as slow as that
CODE = lora_process._CODE.replace(
    "main()\n",
    """
from sapwood.engine.lora import reader as lora_reader
read = lora_reader.read

def hanging(ask, *more):
    fifo = os.path.join(ask.root or "/", ask.path, "hangs")
    if os.path.exists(fifo):
        with open(fifo) as file:
            file.read()
    return read(ask, *more)

lora_reader.read = hanging
main()
""",
)


def hanging_reader(seconds: float = PATIENCE) -> Reader:
    return Reader(seconds, code=CODE)


class Hung:
    """A folder that hangs whoever reads it, until `go_on`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fifo = folder / "hangs"
        folder.mkdir(exist_ok=True)
        os.mkfifo(self.fifo)
        self.end = -1

    def reached(self) -> int:
        """Wait until somebody reads; returns the end that keeps it waiting."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return os.open(self.fifo, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                assert error.errno == errno.ENXIO and time.monotonic() < end, "nobody reads it"
                time.sleep(0.005)
