"""`sapwood bench` on the command line: arguments, one bench, its table and its file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sapwood.engine.arguments import add_engine_arguments, engine_config, given_flags, parsed
from sapwood.engine.loading.weights import check_start

from . import cache, calibrate, latency, profile, serve, throughput
from .tables import BenchReport, as_json, as_text, differences, read_json

BENCHES: dict[str, Any] = {  # each with an engine of its own
    "latency": latency,
    "throughput": throughput,
    "cache": cache,
    "calibrate": calibrate,
    "profile": profile,
}
SERVER_BENCHES: dict[str, Any] = {"serve": serve}  # with a server that runs already
_NOT_WRITTEN = {"bench", "output_json", "compare", "api_key", "header", "progress"}


def main(arguments: Sequence[str]) -> int:
    asked = parsed(parser(), _spelled(arguments))
    try:
        older = None if asked.compare is None else read_json(asked.compare, asked.bench)
        if asked.output_json is not None and not Path(asked.output_json).absolute().parent.is_dir():
            raise ValueError(f"--output-json: the folder of {asked.output_json} is not there")
        report = _measure(asked)._replace(settings=_settings(asked))
        if asked.output_json is not None:
            Path(asked.output_json).write_text(json.dumps(as_json(report), indent=1) + "\n")
    except (ValueError, OSError) as problem:
        return _complain(asked.bench, problem, 2)
    except RuntimeError as problem:
        return _complain(asked.bench, problem, 1)
    sys.stdout.write(as_text(report, None if older is None else older["figures"]))
    if older is not None:
        sys.stdout.writelines(f"{line}\n" for line in differences(report, older))
    return 0


def _spelled(arguments: Sequence[str]) -> list[str]:
    """`--profile` instead of a bench's name is that bench."""
    others = [each for each in arguments if each != "--profile"]
    if len(others) == len(arguments):
        return others
    if others and others[0] in {**BENCHES, **SERVER_BENCHES}:
        parser().error(f"--profile is a bench of its own: leave out {others[0]!r}")
    return ["profile", *others]


def _measure(asked: argparse.Namespace) -> BenchReport:
    found: BenchReport
    if asked.bench in SERVER_BENCHES:
        found = SERVER_BENCHES[asked.bench].measure(asked)
    else:
        config = engine_config(asked)
        check_start(config)
        found = BENCHES[asked.bench].measure(asked, config)
    return found


def _complain(bench: str, problem: Exception, status: int) -> int:
    sys.stderr.write(f"sapwood bench {bench}: {problem}\n")
    return status


def _settings(asked: argparse.Namespace) -> dict[str, Any]:
    """What was asked for: flags of the engine that were given, and all numbers of the bench; no secrets."""
    named = {**given_flags(asked), **vars(asked)}
    return {name: value for name, value in named.items() if name not in _NOT_WRITTEN}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sapwood bench", description="Measure a model on this machine, or a server.")
    help = "the same as the bench `profile`"
    parser.add_argument("--profile", action="store_true", default=argparse.SUPPRESS, help=help)
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, bench in {**BENCHES, **SERVER_BENCHES}.items():
        one = benches.add_parser(name, help=bench.HELP, description=bench.HELP, allow_abbrev=False)
        bench.add_arguments(one)
        one.add_argument("--output-json", metavar="FILE", help="write the figures there, to compare another run with")
        one.add_argument("--compare", metavar="FILE", help="show ratios to the figures of an older run beside")
        if name in BENCHES:
            add_engine_arguments(one)
    return parser
