"""Figures of an engine with host memory behind the device's: a restore to the first token, and steps beside one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import fmean, median
from typing import Any

from sapwood import LLM

from .kit import Line, Prompts, decoding, greedy, rest, step_seconds, timed
from .shapes import QWEN3_8B, opened

LONG, TIMES = 32768, 3  # a prompt's tokens, and how often
ROWS, SHORT, ANSWER = 63, 512, 400  # that decode beside it
FLAGS: dict[str, Any] = {"device_cache": "12GiB", "host_cache": "28GiB", "max_model_len": 40960, "max_num_seqs": 72}


def hosted() -> Iterator[Line]:
    """The device holds between two and three of the long prompts, host memory all of them."""
    prompts, one = Prompts(7), greedy(1)
    with opened(QWEN3_8B, **FLAGS) as llm:
        prompt, *others = prompts.some(4, LONG)
        computed = [timed(partial(llm.generate, [each], one, False)) for each in (prompt, *others)]
        restored = []
        for _ in range(TIMES):
            _forget(llm, others)
            restored.append(timed(partial(llm.generate, [prompt], one, False)))
        loads = llm.stats()["tiers"]["loads"]
        assert loads >= TIMES, f"{loads} loads"
        more = f"computed: {1e3 * median(computed):.0f} ms"
        work = f"restore of {LONG:,} tokens from host, to first token"
        yield Line(work, 120, 1e3 * median(restored), "{:.0f} ms", more=more)
        yield _beside(llm, prompts, prompt, others)


def _forget(llm: LLM, others: list[Any]) -> None:
    """Have the device hold other prompts."""
    for prompt in others:
        llm.generate([prompt], greedy(1), use_tqdm=False)
    rest(llm)


def _beside(llm: LLM, prompts: Prompts, prompt: Any, others: list[Any]) -> Line:
    """Steps of decode rows while a long prompt comes from host, against those just before."""
    before, during, steps, longest = [], [], 0, 0.0
    for _ in range(TIMES):
        _forget(llm, others)
        with decoding(llm, prompts.some(ROWS, SHORT), greedy(ANSWER)):
            step_seconds(llm, 8)
            before.append(step_seconds(llm, 24))
            (job,) = llm._submit([prompt], greedy(1), None)
            taken = []
            loading = False
            while not job.over:
                begin, before_it = time.perf_counter(), loading
                llm.engine.requests.step()
                loading = _loading(llm)
                if loading or before_it:  # also a step that the end of the load waited for, or that waited for it
                    taken.append(time.perf_counter() - begin)
            longest = max(longest, *taken)
            cache = job.samples[0].cache
            loaded = cache.host + cache.store
            assert loaded > LONG // 2 and taken, f"{loaded} tokens were loaded, beside {len(taken)} steps"
            during.append(fmean(taken))
            steps += len(taken)
    more = f"{1e3 * median(before):.2f} ms, beside a load {1e3 * median(during):.2f} ms "
    more += f"({steps} steps, the longest {1e3 * longest:.1f})"
    slower = median(late / early - 1 for early, late in zip(before, during, strict=True))
    return Line("decode at 64 slowed by a load beside it", 0.1, slower, "{:.1%}", more=more)


def _loading(llm: LLM) -> bool:
    return "load" in llm.engine.loop.tiers._moves.values()
