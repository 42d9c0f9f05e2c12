"""Clients of every kind against one server: those that read to the end, leave in the middle or before the first token,
stop reading, or send nonsense. Afterwards nothing may be left of any of them.

    python -m tests.server.soak --seconds 300 --streams 256 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .kit import PATIENCE, Running, paced_flags, until

WORDS = [
    "root",
    "stem",
    "leaf",
    "bark",
    "twig",
    "seed",
    "sap",
    "ring",
    "branch",
    "crown",
    "bud",
    "cone",
    "resin",
    "moss",
]


class Soak:
    def __init__(self, server: Running, streams: int, seed: int) -> None:
        self.server = server
        self.streams = streams
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.least = 0
        self.waits: Callable[[], bool] = lambda: False
        self.heads = [" ".join(self.rng.choices(WORDS, k=self.rng.randrange(50, 400))) for _ in range(20)]

    async def run(self, seconds: float, least: int = 0, waits: Callable[[], bool] = lambda: False) -> None:
        """For so long, until so many requests are over, and as long as somebody waits for what they do."""
        until_, self.least, self.waits = time.monotonic() + seconds, least, waits
        await asyncio.gather(*(self._client(random.Random(self.rng.random()), until_) for _ in range(self.streams)))

    async def _client(self, rng: random.Random, until_: float) -> None:
        kinds = {"reads": 10, "leaves": 4, "leaves early": 2, "stalls": 1, "whole": 3, "nonsense": 1}
        while time.monotonic() < until_ or self.counts.total() < self.least or self.waits():
            kind = rng.choices([*kinds], [*kinds.values()])[0]
            try:
                await asyncio.wait_for(getattr(self, "_" + kind.replace(" ", "_"))(rng), PATIENCE)
                self.counts[kind] += 1
            except TimeoutError:
                self.wrong.append(f"{kind}: no end after {PATIENCE:.0f} s")
            except (OSError, asyncio.IncompleteReadError) as error:
                self.wrong.append(f"{kind}: {error!r}")

    def _body(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        text = rng.choice(self.heads) + " " + " ".join(rng.choices(WORDS, k=rng.randrange(1, 60)))
        return {"prompt": text, "max_tokens": rng.randrange(1, 120), "priority": rng.randrange(3), **more}

    async def _sent(self, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(raw)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + raw)
        return reader, writer

    async def _ended(self, reader: asyncio.StreamReader, kind: str) -> bytes:
        answer = await reader.read()
        if b" 200 OK" not in answer[:20] or b'{"error"' in answer:
            at = max(0, answer.find(b'{"error"'))
            self.wrong.append(f"{kind}: {answer[:20]!r} {answer[at : at + 400]!r}")
        return answer

    async def _reads(self, rng: random.Random) -> None:
        reader, writer = await self._sent(self._body(rng, stream=True, n=rng.choice([1, 1, 1, 2])))
        answer = await self._ended(reader, "reads")
        if b"[DONE]" not in answer:
            self.wrong.append(f"reads: it does not end: {answer[-200:]!r}")
        writer.close()

    async def _whole(self, rng: random.Random) -> None:
        reader, writer = await self._sent(self._body(rng))
        await self._ended(reader, "whole")
        writer.close()

    async def _leaves(self, rng: random.Random) -> None:
        reader, writer = await self._sent(self._body(rng, stream=True, max_tokens=5000))
        for _ in range(rng.randrange(1, 30)):
            await reader.readline()
        writer.transport.abort()

    async def _leaves_early(self, rng: random.Random) -> None:
        _, writer = await self._sent(self._body(rng, stream=True))
        await asyncio.sleep(rng.random() * 0.01)
        writer.transport.abort()

    async def _stalls(self, rng: random.Random) -> None:
        """It stops reading: the kernel's buffers fill, and then those of the server."""
        reader, writer = await self._sent(self._body(rng, stream=True, max_tokens=8000, logprobs=5))
        await reader.readline()
        writer.transport.pause_reading()
        await asyncio.sleep(1 + 3 * rng.random())
        writer.transport.abort()

    async def _nonsense(self, rng: random.Random) -> None:
        bodies = [b"{", b"\xff" * 100, b'{"prompt": 5}', b'{"prompt": "x", "n": -1}', b"[" * 5000, b'{"prompt": ""}']
        reader, writer = await self._sent(rng.choice(bodies))
        if b" 400 " not in (await reader.read())[:20]:
            self.wrong.append("nonsense: it was not refused")
        writer.close()


def handles(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> int:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20


def at_rest(server: Running) -> dict[str, Any]:
    """The engine's figures once nobody runs any more."""

    def idle() -> Any:
        stats = server.get("/cache/stats").json
        busy = any(stats[name] for name in ("waiting", "fetching", "loading", "prefilling", "decoding"))
        return None if busy else stats

    return dict(until(idle))


def soak(
    seconds: float, streams: int, seed: int, during: Callable[[Running], None] = lambda server: None, **flags: Any
) -> dict[str, Any]:
    """One soak. `during` is called in its middle, and clients come as long as it takes. AssertionError with what is
    wrong."""
    given = {"step_ms": 2, "host_pages": 3000, "device_pages": 6000, "max_num_seqs": 128, "fails": 97, **flags}
    server = Running(*paced_flags(**given), "--write-seconds", "2", "--max-queue", "4096").ready()
    try:
        warm = Soak(server, streams, seed)
        asyncio.run(warm.run(min(20.0, seconds / 3)))
        at_rest(server)
        engine, api = server.engine(), server.process.pid
        before = {"api": (handles(api), resident(api)), "engine": (handles(engine), resident(engine))}
        run = Soak(server, streams, seed + 1)
        with ThreadPoolExecutor(1) as thread:
            fault = thread.submit(lambda: (time.sleep(seconds / 3), during(server)))
            asyncio.run(run.run(seconds, int(10 * seconds) + 1, lambda: not fault.done()))
            fault.result()
        stats = at_rest(server)
        until(lambda: handles(api) <= before["api"][0] + 8)
        after = {"api": (handles(api), resident(api)), "engine": (handles(engine), resident(engine))}
        assert not warm.wrong and not run.wrong, (len(run.wrong), (warm.wrong + run.wrong)[:5])
        pages = stats["cache"]["pages"]["full"]["device"]
        assert pages["leases"] == pages["flight"] == 0, pages
        assert pages["free"] + pages["tree"] == pages["capacity"], pages
        assert server.get("/health").status == 200
        told = [line for line in server.lines if "Traceback" in line]  # that of a step that was to fail, once
        assert len(told) <= 1, "\n".join(server.lines[-50:])
        for name, (files, size) in after.items():
            assert files <= before[name][0] + 8, (name, before, after)
            assert size <= before[name][1] * 1.25 + 40, (name, before, after)
        assert server.stop() == 0
        return {
            "requests": dict(run.counts),
            "before": before,
            "after": after,
            "failed steps": stats["steps_failed"],
            "store": stats["tiers"],
            "log": server.lines,
        }
    finally:
        server.kill()


if __name__ == "__main__":
    asked = argparse.ArgumentParser()
    asked.add_argument("--seconds", type=float, default=300)
    asked.add_argument("--streams", type=int, default=256)
    asked.add_argument("--seed", type=int, default=1)
    found = asked.parse_args()
    print(json.dumps(soak(found.seconds, found.streams, found.seed), indent=1))  # noqa: T201
