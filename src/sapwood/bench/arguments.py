"""Options of the benches: numbers with their bounds, and all that `sapwood bench serve` can be asked for. Its names are
those of `vllm bench serve` where that has the same."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

MOST_TOKENS = 1 << 24  # of a prompt or an answer; what a model can read is checked when it is there
DATASETS = ("random", "shared-prefix", "multi-turn", "trace")
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_MOST = 10**6
_HOUR = 3600.0


def number(group: Any, names: str | Sequence[str], default: float | None, low: float, high: float, what: str) -> None:
    """A whole number if its bounds are whole numbers, else a decimal one. Where the default is None, `what` says what
    that means."""
    kind: Callable[[str], float] = int if isinstance(low, int) else float

    def checked(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            form = "a whole number" if kind is int else "a number"
            bounds = f"{low} to {high}" if kind is int else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"must be {form} from {bounds}, got {text!r:.60}")
        return value

    shown = "" if default is None else f" (default {default:g})" if kind is float else f" (default {default})"
    given = [names] if isinstance(names, str) else names
    group.add_argument(*given, type=checked, default=default, metavar="N", help=what + shown)


# ---- sapwood bench serve


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    url = "http://127.0.0.1:8000"
    server.add_argument("--base-url", "--url", default=url, metavar="URL", help="(default %(default)s)")
    server.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first that it lists)")
    server.add_argument("--api-key", metavar="KEY", help="(default: $OPENAI_API_KEY)")
    server.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="sent besides; repeatable")
    server.add_argument("--insecure", action="store_true", help="take any certificate of an https server")
    server.add_argument("--endpoint", choices=ENDPOINTS, help="(default completions; multi-turn: chat)")
    number(server, ["--timeout"], 600.0, 0.001, 24 * _HOUR, "seconds without a byte after which a request has failed")

    load = parser.add_argument_group("load")
    number(load, ["--num-prompts"], None, 1, _MOST, "requests (default 100; trace: all of it)")
    load.add_argument(
        "--request-rate",
        type=_rate,
        metavar="N",
        help="a second, by a Poisson process; inf: all at once (default inf)",
    )
    number(load, ["--burstiness"], 1.0, 0.001, 1e6, "of arrivals: below 1 in bursts, above 1 more even")
    number(load, ["--max-concurrency"], None, 1, 65536, "requests at a time (default: no limit)")
    number(load, ["--warmup", "--num-warmups"], 1, 0, _MOST, "requests before that are not counted")
    number(load, ["--seed"], 0, 0, 2**32 - 1, "of prompts and arrivals")

    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--dataset-name", choices=DATASETS, help="(default random; with --trace: trace)")
    number(prompts, ["--input-len", "--random-input-len"], 1024, 1, MOST_TOKENS, "tokens of a prompt or a turn")
    number(prompts, ["--output-len", "--random-output-len"], 128, 1, MOST_TOKENS, "tokens of an answer, at most")
    number(prompts, ["--range-ratio", "--random-range-ratio"], 0.0, 0.0, 0.999, "both uniform, up to this part off")
    names = ["--prefix-len", "--prefix-repetition-prefix-len"]
    number(prompts, names, None, 0, MOST_TOKENS, "shared tokens before (default 1024; multi-turn: 0)")
    number(prompts, ["--groups", "--prefix-repetition-num-prefixes"], 8, 1, 65536, "different prefixes")
    number(prompts, ["--users"], 8, 1, 65536, "of multi-turn chats")
    number(prompts, ["--turns"], 4, 1, 10**4, "of each of them")
    number(prompts, ["--think-time"], 0.0, 0.0, _HOUR, "seconds before each further turn, in the mean")
    what = "requests to replay, as JSON lines: timestamp (ms), input_length, output_length, hash_ids"
    prompts.add_argument("--trace", "--dataset-path", metavar="FILE", help=what)
    number(prompts, ["--speed"], 1.0, 1e-3, 1e6, "of a trace's time")
    what = "what prompts are drawn from (default 1000-30000)"
    prompts.add_argument("--token-ids", type=_range, default=(1000, 30000), metavar="LOW-HIGH", help=what)

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--ignore-eos", action="store_true", help="answers have exactly the length asked for")
    number(sampling, ["--temperature"], 0.0, 0.0, 100.0, "of sampling")
    sampling.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of each request")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="a bar")


def settle(asked: argparse.Namespace) -> None:
    """Fill in the defaults that hang on each other. ValueError for what does not go together."""
    dataset = asked.dataset_name = asked.dataset_name or ("random" if asked.trace is None else "trace")
    refused = {
        "random": ["trace", "prefix_len"],
        "shared-prefix": ["trace"],
        "multi-turn": ["trace", "num_prompts"],
        "trace": ["prefix_len", "request_rate"],
    }[dataset]
    for name in refused:
        if getattr(asked, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} means nothing with --dataset-name {dataset}")
    if dataset == "trace" and asked.trace is None:
        raise ValueError("--dataset-name trace needs --trace FILE")
    asked.endpoint = asked.endpoint or ("chat" if dataset == "multi-turn" else "completions")
    if dataset == "multi-turn" and asked.endpoint != "chat":
        raise ValueError(f"--endpoint must be chat with --dataset-name multi-turn, got {asked.endpoint}")
    if asked.prefix_len is None:
        asked.prefix_len = 1024 if dataset == "shared-prefix" else 0
    if asked.num_prompts is None and dataset != "trace":
        asked.num_prompts = asked.users * asked.turns if dataset == "multi-turn" else 100


def headers(asked: argparse.Namespace) -> dict[str, str]:
    """What is sent with every request. ValueError if one is no header."""
    key = asked.api_key or os.environ.get("OPENAI_API_KEY")
    found = {"Authorization": f"Bearer {key}"} if key else {}
    for given in asked.header:
        name, equals, value = given.partition("=")
        if not equals or not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"--header must be like X-Name=value, got {name!r:.60}")
        found[name] = value.strip()
    return found


def _rate(text: str) -> float | None:
    """None: all at once."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 1e-6:
        raise argparse.ArgumentTypeError(f"must be requests a second, more than 0, or inf, got {text!r:.60}")
    return None if math.isinf(value) else value


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) < 2**31):
        raise argparse.ArgumentTypeError(f"must be like 1000-30000, got {text!r:.60}")
    return int(low), int(high)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r:.60}")
    return value
