"""Random traffic on a GPU for some minutes: `make gpu-soak`. Prompts that share prefixes come and go, some are aborted,
the cache is too small for all of them, pages go to host memory and come back, and steps fail. Answers are those of
quiet times, whatever happened beside them, and memory stays as it is."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import torch

from sapwood import LLM, SamplingParams

from .shapes import EXACT, opened

FLAGS = {"dtype": "float32", "max_model_len": 4096, "max_num_seqs": 24, "device_cache": "32MiB", "host_cache": "256MiB"}
SEED = 7
_DRAIN = 30  # seconds in which whoever is left must end


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def prompts(rng: Any, count: int) -> list[list[int]]:
    roots = [rng.integers(1, 8000, int(n)).tolist() for n in rng.integers(100, 900, 5)]
    return [
        roots[int(rng.integers(0, 5))][: int(rng.integers(20, 900))]
        + rng.integers(1, 8000, int(rng.integers(1, 200))).tolist()
        for _ in range(count)
    ]


def params(n: int) -> SamplingParams:
    if n % 4 == 3:
        return SamplingParams(temperature=0.7, top_p=0.9, seed=n, max_tokens=5 + n * 37 % 190, ignore_eos=True)
    return SamplingParams(temperature=0, max_tokens=5 + n * 37 % 190, ignore_eos=True)


def fails(llm: LLM, rng: Any) -> dict[str, int]:
    """Make some steps fail, before they have begun or as if their logits were no numbers."""
    counts = {"begin": 0}
    executor = llm.engine.executor
    begin = executor.begin

    def sometimes(plan: Any) -> None:
        if rng.random() < 0.01:
            counts["begin"] += 1
            raise RuntimeError("a step that fails on purpose")
        begin(plan)

    executor.begin = sometimes  # type: ignore[method-assign]
    return counts


def main(seconds: float) -> None:
    rng = np.random.default_rng(SEED)
    some = prompts(rng, 60)
    with opened(EXACT, **{**FLAGS, "device_cache": "1GiB", "host_cache": "0"}) as llm:
        every: list[Any] = [{"prompt_token_ids": ids} for ids in some]
        outputs = llm.generate(every, [params(n) for n in range(len(some))], use_tqdm=False)
        right = [output.outputs[0].token_ids for output in outputs]
    with opened(EXACT, **FLAGS) as llm:
        engine = llm.engine
        failed = fails(llm, np.random.default_rng(SEED + 1))
        live: dict[str, tuple[int, Any]] = {}
        counts = {"done": 0, "aborted": 0, "different": 0, "errors": 0, "cached": 0}
        memory: list[int] = []
        begin, number, next_look = time.monotonic(), 0, 0.0
        while (spent := time.monotonic() - begin) < seconds or live:
            if spent > seconds + _DRAIN:
                say(f"WRONG: {len(live)} requests do not end: {sorted(live)[:5]}, {llm.stats()}")
                sys.exit(1)
            while spent < seconds and len(live) < 40 and rng.random() < 0.5:
                which = int(rng.integers(0, len(some)))
                (sample,) = engine.submit(str(number), some[which], params(which))
                live[sample.request] = (which, sample)
                number += 1
            if live and rng.random() < 0.02:
                _, sample = live[list(live)[int(rng.integers(0, len(live)))]]
                engine.abort([sample])
                counts["aborted"] += 1
            engine.step()
            engine.rest(0.1)
            for id, (which, sample) in list(live.items()):
                if sample.finish_reason is None:
                    continue
                del live[id]
                if sample.finish_reason == "error":
                    counts["errors"] += 1
                    say(f"ERROR {sample.error}")
                elif sample.finish_reason != "abort":
                    counts["done"] += 1
                    counts["cached"] += sample.cached
                    counts["different"] += sample.token_ids != right[which]
            if spent > next_look:
                next_look += seconds / 10
                engine.scheduler.cache.check()
                memory.append(torch.cuda.memory_allocated())
                say(f"{spent:.0f} s: {counts}, {len(live)} live")
        stats = llm.stats()
        say(f"{counts}, failing steps {failed['begin']}, retractions {stats['retractions']}, tiers {stats['tiers']}")
        say(f"memory, MiB: {[each >> 20 for each in memory]}")
        engine.scheduler.cache.check()
    wrong = []
    if counts["errors"] or counts["different"] > 0.02 * counts["done"]:
        wrong.append("answers")
    if max(memory[2:]) > memory[2] + (16 << 20):
        wrong.append("memory grows")
    say("right" if not wrong else f"WRONG: {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240)
    main(parser.parse_args().seconds)
