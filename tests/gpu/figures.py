"""Figures of one engine of Qwen3-8B's shape, with room for 256 requests: whole workloads and single steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from sapwood import LLM, SamplingParams

from .kit import Line, Prompts, decoding, greedy, median, rest, step_seconds, timed

PARAMETERS = 8.2e9
# Prefix, tail; bars against a step of decode rows alone, and in ms.
TAILS: tuple[tuple[int, int, float | None, float | None], ...] = (
    (2048, 33, 1.4, None),
    (2048, 65, 1.4, None),
    (2048, 193, None, 12.8),
    (2048, 449, None, 20.0),
    (32768, 33, None, 15.0),
)
SYSTEM, CHATS, TURNS, SAID, ANSWER = 2048, 64, 5, 200, 64  # of a workload of chats


def offline(llm: LLM, totals: dict[str, float]) -> Iterator[Line]:
    prompts = Prompts(1)
    llm.generate(prompts.some(16, 600), greedy(4), use_tqdm=False)

    def total(tokens: int) -> float:
        some = prompts.some(64, 512)
        return timed(lambda: llm.generate(some, greedy(tokens), use_tqdm=False))

    totals["64"] = median(lambda: total(128))
    yield Line("64 x (512 + 128), total", 1.9, totals["64"], "{:.2f} s")
    rate = 2 * PARAMETERS * 64 * 512 / median(lambda: total(1)) / 1e12
    yield Line("prefill in chunks of 8,192", 550, rate, "{:.0f} TFLOP/s", at_least=True)


def many(llm: LLM, totals: dict[str, float]) -> Iterator[Line]:
    some = Prompts(4).some(256, 512)
    totals["256"] = timed(lambda: llm.generate(some, greedy(128), use_tqdm=False))
    yield Line("256 x (512 + 128), total", 6.2, totals["256"], "{:.2f} s")


def decode(llm: LLM) -> Iterator[Line]:
    graphs: Any = getattr(llm.engine.executor, "graphs", None)
    alone = None
    with decoding(llm, Prompts(2).some(64, 512), greedy(300)):
        step_seconds(llm, 40)
        step = step_seconds(llm, 128)
        if graphs is not None and (64, True) in graphs._graphs:
            alone = timed(lambda: [graphs._graphs[64, True][0].replay() for _ in range(128)]) / 128
    yield Line("decode step at 64, context 576, host included", 7.2, 1e3 * step, "{:.2f} ms")
    if alone is None:
        return
    yield Line("one step ahead, against the graph alone", 1.06, step / alone, more=f"{1e3 * alone:.2f} ms")
    yield Line("graphs captured in this process", None, graphs.seconds, "{:.1f} s", more=f"{graphs.mebibytes} MiB")


def _come(llm: LLM, prompts: list[Any]) -> None:
    """A new prompt in every step."""
    for prompt in prompts:
        llm._submit([prompt], greedy(1), None)
        llm.engine.requests.step()


def mixed(llm: LLM) -> Iterator[Line]:
    """63 rows decode, and in each step a prompt comes whose prefix is cached."""
    prompts = Prompts(3)
    for prefix, tail, factor, most in TAILS:
        shared = prompts.tokens(prefix)
        llm.generate([{"prompt_token_ids": shared}], greedy(1), use_tqdm=False)
        with decoding(llm, prompts.some(63, 540), greedy(120)):
            alone = step_seconds(llm, 16)
            tails = [{"prompt_token_ids": shared + prompts.tokens(tail)} for _ in range(20)]
            _come(llm, tails[:4])
            step = timed(partial(_come, llm, tails[4:])) / 16
        work = f"63 decodes + a tail of {tail} over {prefix:,}"
        ms, ratio = f"{1e3 * step:.1f} ms", f"{step / alone:.2f} of a decode step"
        yield (
            Line(f"{work}, of a decode step", factor, step / alone, more=ms)
            if most is None
            else Line(work, most, 1e3 * step, "{:.1f} ms", more=ratio)
        )


def sampled(llm: LLM) -> Iterator[Line]:
    """What sampling takes on the device, and how much longer steps are than greedy ones."""
    prompts, sampler = Prompts(5), llm.engine.sampler
    drawn = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=200, ignore_eos=True)
    steps = []
    for params in (greedy(200), drawn):
        with decoding(llm, prompts.some(64, 512), params):
            step_seconds(llm, 8)
            steps.append(step_seconds(llm, 32))
            spans = _spans(llm, sampler) if params is drawn and torch.cuda.is_available() else []
    more = f"steps are {1e3 * (steps[1] - steps[0]):.2f} ms longer"
    if spans:
        yield Line(
            "temperature, top-k, top-p at 64, on the device", 1.0, float(np.median(spans)), "{:.2f} ms", more=more
        )


def _spans(llm: LLM, sampler: Any) -> list[float]:
    """Milliseconds from the first to the last of what sampling has the device do, of 32 steps."""
    events: list[tuple[Any, Any]] = []
    sample = sampler.sample

    def between(*given: Any) -> Any:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        found = sample(*given)
        last.record()
        events.append((first, last))
        return found

    sampler.sample = between
    step_seconds(llm, 32)
    sampler.sample = sample
    return [first.elapsed_time(last) for first, last in events]


def chats(llm: LLM) -> float:
    """Seconds of all chats, turn by turn, over one system prompt."""
    prompts = Prompts(6)
    histories = [prompts.tokens(SYSTEM)] * CHATS

    def talk() -> None:
        nonlocal histories
        for _ in range(TURNS):
            asked = [history + prompts.tokens(SAID) for history in histories]
            some: list[Any] = [{"prompt_token_ids": history} for history in asked]
            outputs = llm.generate(some, greedy(ANSWER), use_tqdm=False)
            histories = [ids + out.outputs[0].token_ids for ids, out in zip(asked, outputs, strict=True)]

    return timed(talk)


def staggered(llm: LLM) -> Iterator[Line]:
    """Chats whose turns begin at any time, as a server has them: how long who streams waits for a token, against a step
    of decode rows."""
    engine, planner = llm.engine, llm.engine.scheduler._planner
    before, planner.mixed_tokens = planner.mixed_tokens, min(512, llm.engine.scheduler.config.max_batch_tokens)
    waits, steps = _stagger(llm)
    planner.mixed_tokens = before
    longest = SYSTEM + TURNS * (SAID + ANSWER) // 2
    with decoding(llm, Prompts(9).some(CHATS, longest), greedy(60)):
        alone = step_seconds(llm, 16)
    assert not engine.requests.samples
    p50, p99 = (1e3 * float(each) for each in np.percentile(waits, [50, 99]))
    more = f"{p99:.1f} ms, p50 {p50:.1f}, most {1e3 * max(waits):.0f}; {steps} steps; a decode step {1e3 * alone:.1f}"
    yield Line(f"{CHATS} staggered chats: p99 between tokens, of a decode step", 3, p99 / 1e3 / alone, more=more)


def _stagger(llm: LLM) -> tuple[list[float], int]:
    prompts, engine, rng = Prompts(8), llm.engine, np.random.default_rng(8)
    system = prompts.tokens(SYSTEM)
    histories = [list(system) for _ in range(CHATS)]
    llm.generate([{"prompt_token_ids": system}], greedy(1), use_tqdm=False)
    live: dict[int, tuple[Any, int, float]] = {}
    waits: list[float] = []
    turns, steps = [0] * CHATS, 0
    while min(turns) < TURNS or live:
        idle = [chat for chat, turn in enumerate(turns) if turn < TURNS and chat not in live]
        if idle and rng.random() < 0.5:
            chat = int(rng.choice(idle))
            histories[chat] += prompts.tokens(SAID)
            (sample,) = engine.requests.submit(f"chat {chat}.{turns[chat]}", histories[chat], greedy(ANSWER))
            live[chat] = (sample, 0, 0.0)
        engine.requests.step()
        steps += 1
        now = time.perf_counter()
        for chat, (sample, count, last) in list(live.items()):
            if len(sample.token_ids) > count:
                if count:
                    waits.append(now - last)
                live[chat] = (sample, len(sample.token_ids), now)
            if sample.finish_reason is not None:
                assert sample.finish_reason == "length", sample.error
                histories[chat] += sample.token_ids
                turns[chat] += 1
                del live[chat]
    rest(llm)
    return waits, steps
