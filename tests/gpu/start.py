"""How long an engine of Qwen3-8B's shape takes to start on a GPU: `make gpu-start`, or `python -m tests.gpu.start`.
Each start is a process of its own: with Triton's cache empty, with it filled, and with an empty one and kernels
compiled one after the other."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any

_SAID = "start: "
_BARS = {"graphs": "3", "ready": "15 cold, 6 warm"}


def child(layers: int, one_by_one: bool) -> None:
    """One start, and what it was made of, as a line of JSON."""
    begin = time.perf_counter()
    from .shapes import QWEN3_8B, opened  # torch is imported here

    imports = time.perf_counter() - begin
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if one_by_one:
        from sapwood.engine.kernels import launch

        launch.compiling = lambda *_: nullcontext()
    config = {**QWEN3_8B, "num_hidden_layers": layers}
    with opened(config, max_model_len=40960, max_num_seqs=72) as llm:
        engine: Any = llm.engine
        start = {"import torch": imports, **engine.start}
        start["MiB of graphs"] = engine.executor.graphs.mebibytes
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": list(range(1, 1000))}], use_tqdm=False)
        start["first answer"] = time.perf_counter() - begin
    sys.stdout.write(f"{_SAID}{json.dumps(start)}\n")


def started(cache: str, *flags: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.gpu.start", "--child", *flags]
    begin = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found = next(line for line in done.stdout.splitlines() if line.startswith(_SAID))
    start: dict[str, float] = json.loads(found.removeprefix(_SAID))
    start["ready"] = start["total"] - start["imports"] - start["weights"]  # after imports and weights
    start["whole process"] = time.perf_counter() - begin
    return start


def main(layers: int) -> None:
    of = ("--layers", str(layers))
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as other:
        started(cache, "--layers", "1")  # files of packages into memory; nothing of this is counted
        columns: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory() as empty:
            columns["cold"] = started(empty, *of)
            columns["warm"] = started(empty, *of)
        columns["one by one"] = started(other, *of, "--one-by-one")
    sys.stdout.write(f"{'seconds':16}{''.join(f'{name:>14}' for name in columns)}  bar\n")
    for name in columns["cold"]:
        values = "".join(f"{column[name]:14.2f}" for column in columns.values())
        sys.stdout.write(f"{name:16}{values}  {_BARS.get(name, '')}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--child", action="store_true", help="one start in this process")
    parser.add_argument("--one-by-one", action="store_true")
    asked = parser.parse_args()
    if asked.child:
        child(asked.layers, asked.one_by_one)
    else:
        main(asked.layers)
