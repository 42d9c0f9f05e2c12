"""Every causal architecture of transformers, made small, served and compared with transformers itself:

    python -m tests.models.sweep [NAME...] [--jobs 2] [--limit 900] [--json FILE] [--markdown FILE]

With `--json`, results of earlier runs in that file stand in for those that are not asked for now.

Each in a process of its own, forked from one that has imported torch and transformers. Prints a line for each as it
ends, and how many there are of each outcome:

    equal          the same tokens and log-probabilities in every state of the cache
    refused        by name, with the engine's message
    wrong          other tokens or log-probabilities than transformers has
    crash          an error that is not a refusal
    hang           killed after `--limit` seconds
    contradictory  `generate` of transformers says something else than its own forward, and so do we
    reference      transformers itself cannot build or run it here
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import selectors
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import transformers

from .sweep_case import Result, judge
from .sweep_configs import Case, cases, types

OUTCOMES = ("equal", "refused", "wrong", "crash", "hang", "contradictory", "reference")


def sweep(chosen: list[Case], jobs: int, limit: float) -> Iterator[tuple[Result, float]]:
    """A result for each, as they end, and the seconds it took."""
    waiting, running = list(chosen), {}
    selector = selectors.DefaultSelector()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                child = _Child(waiting.pop(0))
                running[child.read] = child
                selector.register(child.read, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(timeout=0.5)}
            for read, child in list(running.items()):
                seconds = time.monotonic() - child.began
                result = child.result() if read in ready else child.hung(limit) if seconds > limit else None
                if result is None:
                    continue
                selector.unregister(read)
                del running[read]
                child.close()
                yield result, seconds
    finally:
        for child in running.values():
            child.close()


class _Child:
    """A process that judges one case, and a pipe on which its result comes. Its output goes nowhere: what matters of
    it is in the result."""

    def __init__(self, case: Case) -> None:
        self.case, self.began, self._text = case, time.monotonic(), b""
        self.read, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.read)
            _judge_and_leave(case, write)
        os.close(write)

    def result(self) -> Result | None:
        """What it sent, once that is all; an end without a result is a crash."""
        piece = os.read(self.read, 1 << 16)
        if piece:
            self._text += piece
            return None
        if self._text:
            return Result(*pickle.loads(self._text))
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return Result(self.case.name, self.case.kind, "crash", f"the process died (status {status})", {})

    def hung(self, limit: float) -> Result:
        return Result(self.case.name, self.case.kind, "hang", f"nothing after {limit:g} seconds", {})

    def close(self) -> None:
        os.close(self.read)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def _judge_and_leave(case: Case, write: int) -> None:
    """The child's whole life."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        result = judge(case)
    except BaseException:
        result = Result(case.name, case.kind, "crash", traceback.format_exc(limit=-1)[-300:], {})
    with os.fdopen(write, "wb") as pipe:
        pickle.dump(tuple(result), pipe)
    os._exit(0)


# ---- what is told


def line(result: Result, seconds: float) -> str:
    notes = result.notes
    told = [f"{result.name:32} {result.outcome:13} {seconds:5.1f} s"]
    if "off" in notes:
        told.append(f"off {notes['off']:.1e}, {notes['tokens']} tokens")
        told += [f"{notes[name]} {name}" for name in ("retractions", "loads") if name in notes]
    if notes.get("weak"):
        told.append("WEAK")
    return "  ".join([*told, result.why[:160]])


def summary(results: list[Result]) -> str:
    kinds = set(types())
    parts = {"types": [r for r in results if r.name in kinds], "variants": [r for r in results if r.name not in kinds]}
    lines = []
    for part, some in parts.items():
        counts = Counter(result.outcome for result in some)
        told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        if some:
            lines.append(f"{len(some)} {part}: {told}")
    return "\n".join(lines)


HEAD = """# Which architectures are served

Every type of `AutoModelForCausalLM` in transformers {version}, and variants as checkpoints have them, made small with
random weights, each served and compared with transformers itself. `python -m tests.models.sweep` does that, and has
written this page (`--markdown docs/architectures.md`). *Served*: the same tokens and log-probabilities as those of
`generate`, in every state of the cache. [models.md](models.md) says more of what is served and what is refused.

{summary}

| architecture | | |
| --- | --- | --- |
"""
SAID = {"equal": "served", "contradictory": "served", "reference": "not tried"}
WORDS = {
    "equal": "served",
    "contradictory": "served though transformers contradicts itself",
    "reference": "not tried, as transformers cannot run them here",
}
_REFUSED = re.compile(r"^.*? cannot be served(?: yet)?: ")
_CHECKED = re.compile(r"^its answers would not be .*")


def markdown(results: list[Result]) -> str:
    """The page of the documentation."""
    rows = [f"| {result.name} | {SAID.get(result.outcome, result.outcome)} | {remark(result)} |" for result in results]
    told = summary(results).replace("\n", "; ")
    for outcome, words in WORDS.items():
        told = told.replace(f" {outcome}", f" {words}")
    return HEAD.format(version=transformers.__version__, summary=f"{told}.") + "\n".join(rows) + "\n"


def remark(result: Result) -> str:
    """What somebody who wants to serve it should know."""
    if result.outcome == "equal":
        return "it attends by itself: slow where there are many rows" if result.notes.get("gathers") else ""
    if result.outcome == "contradictory":
        return "`generate` of transformers differs from its own forward, which is what is served"
    if result.outcome == "reference":
        return "transformers cannot run it here: " + result.why.partition(": ")[2].rstrip(": ").replace("|", "/")
    why = _CHECKED.sub(
        "the self-check at the start finds other answers than transformers has", _REFUSED.sub("", result.why)
    )
    return why.replace("|", "/")


def merged(old: list[Result], new: list[Result]) -> list[Result]:
    """The newest of each, in the order of the cases."""
    by_name = {result.name: result for result in (*old, *new)}
    return [by_name[name] for name in cases() if name in by_name]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="types or variants; none: all of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which one counts as hanging")
    parser.add_argument("--only", choices=["types", "variants"], help="leave the others out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there; what it has of others stays")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a table for the documentation")
    parser.add_argument("--trace", action="store_true", help="show tracebacks")
    asked = parser.parse_args(arguments)
    known, kinds = cases(), set(types())
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    chosen = [known[name] for name in asked.names or known]
    if asked.only:
        chosen = [case for case in chosen if (case.name in kinds) == (asked.only == "types")]
    results, began = [], time.monotonic()
    for result, seconds in sweep(chosen, asked.jobs, asked.limit):
        results.append(result)
        print(line(result, seconds), flush=True)  # noqa: T201
        if asked.trace and "trace" in result.notes:
            print(result.notes["trace"], flush=True)  # noqa: T201
    print(f"{summary(results)} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201
    failed = any(result.outcome in ("wrong", "crash", "hang") for result in results)
    if asked.json:
        if asked.json.exists():
            results = merged([Result(**each) for each in json.loads(asked.json.read_text())], results)
        asked.json.write_text(json.dumps([result._asdict() for result in results], indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(results))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
