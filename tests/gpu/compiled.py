"""Layers that torch compiles, on a GPU: `python -m tests.gpu.compiled`, or with the names of some parts.

speed       an engine of Qwen3-8B's shape: how long it takes to start, 64 x (512 + 128), a decode step; first patched,
            then compiled
agree       architectures without patches in bf16: compiled they are no further off float32 than as they are, their
            graphs compute what the same steps do without, and nothing is compiled once the engine has started
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

from sapwood import LLM, SamplingParams
from sapwood.engine.models.compiled import counters

from ..models.gpu import wide
from .figures import decode, offline
from .kit import WRONG, must, say
from .shapes import QWEN3_8B, opened

NAMES = ("gpt-oss", "qwen3-next", "bamba", "deepseek-v3")
FLAGS: dict[str, Any] = {"max_model_len": 512, "device_cache": "512MiB", "max_num_seqs": 8, "progress": False}


def made() -> int:
    """Pieces that were compiled so far."""
    return int(counters["stats"]["unique_graphs"])


def speed() -> None:
    for compile in (False, True):
        begin, before = time.perf_counter(), made()
        with opened(QWEN3_8B, max_model_len=16384, max_num_seqs=64, compile=compile) as llm:
            say(f"{'compiled' if compile else 'patched'}: started in {time.perf_counter() - begin:.1f} s")
            started = made()
            for line in (*offline(llm, {}), *decode(llm)):
                say("    " + " | ".join(line.cells))
            must(made() == started, f"{made() - started} pieces were compiled while serving")
            must((started > before) == compile, f"compile={compile}, and {started - before} pieces were compiled")


def scores(llm: LLM, prompts: list[Any]) -> Any:
    """The log-probability of every token of the prompts."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    found = []
    for asked, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        must(not output.error, str(output.error))
        for token, likely in zip(asked["prompt_token_ids"][1:], (output.prompt_logprobs or [])[1:], strict=True):
            found.append(likely[token].logprob)
    return np.array(found)


def tokens(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def agree(name: str) -> None:
    rng = np.random.default_rng(4)
    some: list[Any] = [{"prompt_token_ids": rng.integers(1, 4000, n).tolist()} for n in (300, 70, 5, 130, 41, 260)]
    with tempfile.TemporaryDirectory() as folder:
        wide(name).save_pretrained(folder)
        with LLM(folder, dtype="float32", enforce_eager=True, **FLAGS) as llm:
            right = scores(llm, some)
        with LLM(folder, dtype="bfloat16", enforce_eager=True, **FLAGS) as llm:
            noise = float(np.abs(scores(llm, some) - right).mean())
        found = {}
        for eager in (False, True):
            before = made()
            with LLM(folder, dtype="bfloat16", compile=True, enforce_eager=eager, **FLAGS) as llm:
                executor: Any = llm.engine.executor
                started, sizes = made(), len(executor.graphs.sizes) if torch.cuda.is_available() else 0
                off = float(np.abs(scores(llm, some) - right).mean())
                found[eager] = tokens(llm, some)
                must(made() == started, f"{name}: {made() - started} pieces were compiled while serving")
            if not eager:
                say(f"{name}: {started - before} pieces, {sizes} sizes captured")
                must(started > before, f"{name}: nothing was compiled")
                must(sizes > 0 or not torch.cuda.is_available(), f"{name}: there are no graphs")
    same = sum(a == b for a, b in zip(found[False], found[True], strict=True))
    say(f"{name}: log-probabilities off by {off:.4f}, as it is by {noise:.4f}; {same} of {len(some)} as without graphs")
    must(off <= 1.2 * noise, f"{name}: compiled {off:.4f} off, as they are {noise:.4f}")
    must(same == len(some), f"{name}: {same} of {len(some)} answers are the same with graphs")


def main(names: list[str]) -> None:
    if not names or "speed" in names:
        speed()
    for name in NAMES:
        if not names or "agree" in names or name in names:
            agree(name)
    say("right" if not WRONG else f"{len(WRONG)} WRONG")
    sys.exit(bool(WRONG))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    main(parser.parse_args().names)
