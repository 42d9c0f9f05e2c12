"""What an engine of Qwen3-8B's shape does on a GPU, beside the bars: `make gpu-bench`, or `python -m tests.gpu.bench`
with the names of some measurements. Random weights, the real scheduler, prompts of random tokens."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from sapwood import LLM, SamplingParams

from .shapes import QWEN3_8B, opened

PARAMETERS = 8.2e9
_BEGAN = time.perf_counter()


class Line(NamedTuple):
    work: str
    bar: str
    ours: str


def say(text: str) -> None:
    sys.stdout.write(f"[{time.perf_counter() - _BEGAN:5.0f} s] {text}\n")
    sys.stdout.flush()


class Prompts:
    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def tokens(self, length: int) -> list[int]:
        return self._rng.integers(1, QWEN3_8B["vocab_size"] - 1, length).tolist()

    def some(self, count: int, length: int) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": self.tokens(length)} for _ in range(count)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def timed(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def median(run: Callable[[], float], times: int = 3) -> float:
    return sorted(run() for _ in range(times))[times // 2]


# ---- measurements


def offline(llm: LLM) -> Iterator[Line]:
    prompts = Prompts(1)
    llm.generate(prompts.some(16, 600), greedy(4), use_tqdm=False)

    def total() -> float:
        some = prompts.some(64, 512)
        return timed(lambda: llm.generate(some, greedy(128), use_tqdm=False))

    def prefill() -> float:
        some = prompts.some(64, 512)
        return timed(lambda: llm.generate(some, greedy(1), use_tqdm=False))

    yield Line("64 x (512 + 128), total", "1.9 s", f"{median(total):.2f} s")
    rate = 2 * PARAMETERS * 64 * 512 / median(prefill) / 1e12
    yield Line("prefill in chunks of 8,192", "550 TFLOP/s", f"{rate:.0f} TFLOP/s")


def running(llm: LLM, prompts: Prompts, rows: int, length: int, tokens: int) -> list[Any]:
    """Requests that all decode."""
    jobs = llm._submit(prompts.some(rows, length), greedy(tokens), None)
    while not all(len(job.samples[0].token_ids) > 2 for job in jobs):
        llm.engine.step()
    return jobs


def over(llm: LLM, jobs: list[Any]) -> None:
    for job in jobs:
        llm.engine.abort(job.samples)
    while llm.engine.samples or llm.engine.loop._flights:
        llm.engine.step()


def decode(llm: LLM) -> Iterator[Line]:
    prompts, engine = Prompts(2), llm.engine
    jobs = running(llm, prompts, 64, 512, 300)

    def steps(n: int) -> float:
        return timed(lambda: [engine.step() for _ in range(n)]) / n

    steps(40)
    step = steps(64)
    graphs: Any = engine.executor.graphs  # type: ignore[attr-defined]
    alone = timed(lambda: [graphs._graphs[64, True][0].replay() for _ in range(64)]) / 64
    over(llm, jobs)
    yield Line("decode step at 64, context 576, host included", "7.2 ms", f"{1e3 * step:.2f} ms")
    yield Line("one step ahead, against the graph alone", "1.06", f"{step / alone:.2f}")
    yield Line("graphs captured", "3 s, 500 MB", f"{graphs.seconds:.1f} s, {graphs.mebibytes} MiB")


def come(llm: LLM, prompts: list[Any]) -> None:
    """A new prompt in every step."""
    for prompt in prompts:
        llm._submit([prompt], greedy(1), None)
        llm.engine.step()


def mixed(llm: LLM) -> Iterator[Line]:
    """63 rows decode, and in each step a prompt comes whose prefix is cached."""
    prompts, engine = Prompts(3), llm.engine
    told = []
    for prefix, tail in ((2048, 33), (2048, 65), (2048, 193), (2048, 449), (32768, 33)):
        shared = prompts.tokens(prefix)
        llm.generate([{"prompt_token_ids": shared}], greedy(1), use_tqdm=False)
        jobs = running(llm, prompts, 63, 540, 120)
        alone = timed(lambda: [engine.step() for _ in range(16)]) / 16
        tails = [{"prompt_token_ids": shared + prompts.tokens(tail)} for _ in range(20)]

        come(llm, tails[:4])
        step = timed(partial(come, llm, tails[4:])) / 16
        over(llm, jobs)
        told.append((prefix, tail, step, step / alone))
    bars = ("1.4", "1.4", "12.8 ms", "20 ms", "15 ms")
    for (prefix, tail, step, factor), bar in zip(told, bars, strict=True):
        yield Line(f"63 decodes + a tail of {tail} over {prefix:,}", bar, f"{1e3 * step:.1f} ms, {factor:.2f}")


def many(llm: LLM) -> Iterator[Line]:
    prompts = Prompts(4)
    llm.generate(prompts.some(16, 600), greedy(4), use_tqdm=False)
    some = prompts.some(256, 512)
    spent = timed(lambda: llm.generate(some, greedy(128), use_tqdm=False))
    yield Line("256 x (512 + 128), total", "6.2 s", f"{spent:.2f} s")


def sampled(llm: LLM) -> Iterator[Line]:
    """Steps with other sampling, against greedy ones."""
    prompts, engine = Prompts(5), llm.engine
    found = []
    for params in (greedy(200), SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=200, ignore_eos=True)):
        jobs = llm._submit(prompts.some(64, 512), params, None)
        while not all(len(job.samples[0].token_ids) > 2 for job in jobs):
            engine.step()
        [engine.step() for _ in range(8)]
        found.append(timed(lambda: [engine.step() for _ in range(32)]) / 32)
        over(llm, jobs)
    more = 1e3 * (found[1] - found[0])
    yield Line("temperature, top-k, top-p at 64: more than a greedy step", "1.0 ms", f"{more:.2f} ms")


def chats(llm: LLM) -> float:
    """Tokens of answers a second: 64 chats of 5 turns, 200 tokens and 64 of answer each, over one system prompt."""
    prompts = Prompts(6)
    system = prompts.tokens(2048)
    histories = [list(system) for _ in range(64)]

    def talk() -> None:
        for _ in range(5):
            for history in histories:
                history += prompts.tokens(200)
            some: list[Any] = [{"prompt_token_ids": history} for history in histories]
            for history, output in zip(histories, llm.generate(some, greedy(64), use_tqdm=False), strict=True):
                history += output.outputs[0].token_ids

    return 64 * 5 * 64 / timed(talk)


def staggered(llm: LLM) -> Iterator[Line]:
    """Chats whose turns begin at any time: how long who streams waits for a token, against a step of decode rows."""
    prompts, engine, rng = Prompts(8), llm.engine, np.random.default_rng(8)
    system = prompts.tokens(2048)
    histories = [list(system) for _ in range(48)]
    llm.generate([{"prompt_token_ids": system}], greedy(1), use_tqdm=False)
    live: dict[int, tuple[Any, int, float]] = {}
    waits: list[float] = []
    turns = [0] * len(histories)
    while min(turns) < 5 or live:
        idle = [chat for chat, turn in enumerate(turns) if turn < 5 and chat not in live]
        if idle and rng.random() < 0.3:
            chat = int(rng.choice(idle))
            histories[chat] += prompts.tokens(200)
            (sample,) = engine.submit(f"{chat}.{turns[chat]}", histories[chat], greedy(64))
            live[chat] = (sample, 0, 0.0)
        engine.step()
        now = time.perf_counter()
        for chat, (sample, count, before) in list(live.items()):
            if len(sample.token_ids) > count:
                if count:
                    waits.append(now - before)
                live[chat] = (sample, len(sample.token_ids), now)
            if sample.finish_reason is not None:
                histories[chat] += sample.token_ids
                turns[chat] += 1
                del live[chat]
    jobs = running(llm, prompts, 48, 2800, 40)
    alone = timed(lambda: [engine.step() for _ in range(16)]) / 16
    over(llm, jobs)
    p50, p99 = np.percentile(waits, [50, 99])
    told = f"{p99 / alone:.1f} ({1e3 * p99:.1f} ms; p50 {1e3 * p50:.1f})"
    yield Line("staggered chats: p99 between tokens against a decode step", "3", told)


def restored() -> Iterator[Line]:
    """A prompt whose pages are in host memory, against one that is computed."""
    prompts = Prompts(7)
    flags = {"device_cache": "12GiB", "host_cache": "24GiB", "max_num_seqs": 8}
    with opened(QWEN3_8B, max_model_len=40960, **flags) as llm:
        times: dict[str, list[float]] = {"computed": [], "from host": []}
        for _ in range(3):
            (prompt,) = prompts.some(1, 32768)
            for what, found in times.items():
                if what == "from host":
                    llm.generate(prompts.some(3, 32768), greedy(1), use_tqdm=False)  # the device forgets
                    while llm.engine.loop.tiers.busy:
                        llm.engine.step()
                found.append(timed(partial(llm.generate, [prompt], greedy(1), False)))
        host, cold = (1e3 * sorted(times[what])[1] for what in ("from host", "computed"))
    yield Line("restore of 32K tokens from host, to first token", "120 ms", f"{host:.0f} ms (computed: {cold:.0f} ms)")


def main(names: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for noisy in ("transformers", "torch", "filelock"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    wanted = names or ["offline", "decode", "mixed", "sampled", "staggered", "many", "chats", "restored"]
    lines: list[Line] = []

    def note(found: Iterator[Line]) -> None:
        for line in found:
            lines.append(line)
            say(f"{line.work}: {line.ours} (bar {line.bar})")

    begin = time.perf_counter()
    if {"offline", "decode", "mixed", "sampled", "chats"} & set(wanted):
        with opened(QWEN3_8B, max_model_len=40960, max_num_seqs=72) as llm:
            parts = ", ".join(f"{name} {spent:.1f}" for name, spent in llm.engine.start.items())
            say(f"ready after {time.perf_counter() - begin:.1f} s ({parts})")
            for name, measure in (("offline", offline), ("decode", decode), ("mixed", mixed), ("sampled", sampled)):
                if name in wanted:
                    note(measure(llm))
            with_cache = chats(llm) if "chats" in wanted else 0.0
    if "chats" in wanted:
        with opened(QWEN3_8B, max_model_len=40960, max_num_seqs=72, enable_prefix_caching=False) as llm:
            factor = with_cache / chats(llm)
        note(iter([Line("chats, throughput against no cache", "4", f"{factor:.1f} ({with_cache:.0f} tokens/s)")]))
    if "staggered" in wanted:  # as a server has it
        with opened(QWEN3_8B, max_model_len=40960, max_num_seqs=72, max_mixed_tokens=512) as llm:
            note(staggered(llm))
    if "many" in wanted:
        with opened(QWEN3_8B, max_model_len=40960, max_num_seqs=256) as llm:
            note(many(llm))
    if "restored" in wanted:
        note(restored())
    width = max(len(line.work) for line in lines)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    for line in lines:
        sys.stdout.write(f"{line.work:{width}}  {line.bar:>14}  {line.ours:>24}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    main(parser.parse_args().names)
