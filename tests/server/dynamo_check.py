"""Whether Dynamo's own indexer, as it is published, agrees with our tree: `python -m tests.server.dynamo_check`.

    random traffic --> our publisher --ZMQ--> python -m dynamo.indexer (an environment of its own) <--HTTP-- this

Its package pins others, so it lives apart. What it holds (`/dump`) and what it finds of a prompt (`/query`) is compared
with what the tree holds, after it came late, after it missed batches that are still buffered, and after it missed more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.cache import Namespace
from sapwood.cache.events import block_hash
from sapwood.server.process.kv_events import salt_key

from ..cache.chaos import SPACES
from .kv_traffic import NAMES, PATIENCE, Publishing, blocks_of, publisher
from .venvs import python_with

PACKAGE = "ai-dynamo-runtime==1.6.1"
INSTANCE = 7
TIERS = {"device": "GPU", "host_pinned": "CPU"}


class Indexer:
    """`python -m dynamo.indexer`, and what can be asked of it."""

    def __init__(self, python: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        environment = {**os.environ, "DYN_KV_INDEXER_TEST_ENDPOINTS": "1"}  # to make it miss batches
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(python), "-m", "dynamo.indexer", "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self.call("/health")
                return
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None, f"no indexer: {log.read_text()[-500:]}"
                time.sleep(0.02)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def call(self, path: str, **fields: Any) -> Any:
        data = json.dumps(fields).encode() if fields else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read()[:300]!r}") from None
        return json.loads(text) if text else None

    def blocks(self) -> dict[str, set[int]]:
        """What it holds, by medium."""
        held: dict[str, set[int]] = {medium: set() for medium in TIERS.values()}
        for each in self.call("/dump")["model:default"]["events"]:
            for block in each["event"]["data"]["stored"]["blocks"]:
                held[TIERS[each["storage_tier"]]].add(block["block_hash"])
        return held

    def finds(self, tokens: list[int], namespace: Namespace) -> tuple[int, int]:
        """Tokens of a prompt on the device, and together with what host has after them."""
        asked: dict[str, Any] = {"token_ids": tokens, "model_name": "model"}
        if namespace.adapter is not None:
            asked["lora_name"] = NAMES[namespace.adapter]
        if namespace.salt is not None:
            asked["cache_salt"] = salt_key(namespace.salt).partition(":")[2]
        found = self.call("/query", **asked)["instances"].get(str(INSTANCE), {"gpu": 0, "cpu": 0})
        return found["gpu"], found["cpu"]


@dataclass
class Report:
    """What was compared."""

    compared: int = 0  # times
    blocks: int = 0
    on_host: int = 0  # of them
    prompts: int = 0
    replays: int = 0
    snapshots: int = 0


def check(python: Path, seed: int, encoding: str = "map", topic: str = "", layout: str = "full") -> Report:
    """AssertionError if they disagree. Everything follows from the seed."""
    rng = random.Random(seed)
    report = Report()
    events = publisher(encoding=encoding, topic=topic, buffer_steps=20)
    traffic = Publishing(layout, events, device=8, host=12, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        indexer = Indexer(python, Path(folder) / "log")
        try:
            traffic.run(rng, 200)  # it comes late, for more than the buffer has
            indexer.call(
                "/register",
                instance_id=INSTANCE,
                endpoint=events.endpoint,
                replay_endpoint=events.replay_endpoint,
                model_name="model",
                block_size=traffic.page,
            )
            for round in range(8):
                traffic.run(rng, 100)
                if round:
                    indexer.call("/test/pause_listener", instance_id=INSTANCE)
                    traffic.run(rng, 10 if round % 2 else 200)  # what is buffered still, and what is not
                    if round == 4:
                        traffic.flush()
                    indexer.call("/test/resume_listener", instance_id=INSTANCE)
                traffic.serves(rng, 20)
                agree(traffic, indexer, rng, report)
            report.replays, report.snapshots = events.stats()["replays"], events.stats()["snapshots"]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{indexer.log.read_text()[-3000:]}") from error
        finally:
            indexer.close()
            events.close()
    return report


def agree(traffic: Publishing, indexer: Indexer, rng: random.Random, report: Report) -> None:
    """Both hold the same, as soon as it has heard of it; it sees what it missed when something more is told."""
    end = time.monotonic() + PATIENCE
    while True:
        traffic.ends_with_an_event(rng)
        for _ in range(40):
            traffic.serve()
            known = blocks_of(traffic.engine.cache)
            held = {medium: {block % 2**64 for where, block in known if where == medium} for medium in TIERS.values()}
            theirs = indexer.blocks()
            if theirs == held:
                break
            time.sleep(0.01)
        if theirs == held:
            break
        assert time.monotonic() < end, "\n".join(
            f"{medium}: {len(theirs[medium] - held[medium])} too many, {len(held[medium] - theirs[medium])} missing"
            for medium in held
        )
    report.compared += 1
    report.blocks += sum(map(len, held.values()))
    report.on_host += len(held["CPU"])
    for tokens in [request.tokens for request in traffic.engine.requests.values()][-40:]:
        for space in SPACES:
            digests = traffic.engine.cache.page_hashes(space, tokens)
            hashes = [block_hash(digest) % 2**64 for digest in digests]
            device = leading(hashes, held["GPU"])
            both = device + leading(hashes[device:], held["CPU"])
            right = (device * traffic.page, both * traffic.page)
            found = indexer.finds(tokens, space)
            assert found == right, f"{len(tokens)} tokens in {space}: it finds {found}, and the tree has {right}"
            report.prompts += right[1] > 0


def leading(hashes: list[int], held: set[int]) -> int:
    """How many of these, from the first on, are there."""
    return next((at for at, block in enumerate(hashes) if block not in held), len(hashes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare Dynamo's indexer with our tree under random traffic.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from --seed on")
    parser.add_argument("--encoding", choices=("map", "array"), default="map")
    parser.add_argument("--topic", default="")
    args = parser.parse_args()
    python = python_with(PACKAGE)
    if isinstance(python, str):
        sys.exit(python)
    for seed in range(args.seed, args.seed + args.count):
        print(seed, check(python, seed, args.encoding, args.topic), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
