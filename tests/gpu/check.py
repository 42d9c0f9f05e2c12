"""Whether an engine on a GPU computes what it should: `make gpu-check`.

kernels     against the formula, on random shapes with NaN where nobody may look (tests/engine/test_triton_*.py)
parity      logits of many architectures in bf16, against transformers' own in float32: no further off than
            transformers' own in bf16, and what is wrong on purpose is seen
graphs      a graph's logits and the same step's without it, bit for bit, over random mixes
ahead       one step ahead and step by step: the same tokens
every       each architecture as an engine: with graphs, if it can be captured, and without; the same tokens
cached      an answer with its prompt in the cache: as far from the cold one as bf16 is from itself
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sapwood import SamplingParams
from sapwood.cache import CacheGroup
from sapwood.engine import EngineLoop, Tiers, gpu_steps
from sapwood.engine.gpu_steps import GpuExecutor
from sapwood.engine.model import ServedModel
from sapwood.engine.patches import patch_for
from sapwood.engine.transfer_torch import TorchArena
from sapwood.engine.work_list import WorkList, work_list
from sapwood.scheduler import RequestSpec, Scheduler, SchedulerConfig

from ..models.gpu import LENGTHS, PAGE, Every, far, stepped, theirs, wide
from ..models.zoo import CONFIGS
from .shapes import EXACT, QWEN3_8B, opened

SMALL = {**QWEN3_8B, "num_hidden_layers": 4, "vocab_size": 32000}
_BEGAN = time.perf_counter()
_WRONG: list[str] = []


def say(text: str) -> None:
    sys.stdout.write(f"[{time.perf_counter() - _BEGAN:5.0f} s] {text}\n")
    sys.stdout.flush()


def must(holds: bool, what: str) -> None:
    if not holds:
        _WRONG.append(what)
        say(f"WRONG {what}")


# ---- logits against transformers


class Noting(GpuExecutor):
    """Keeps the logits of prompts."""

    found: dict[int, list[torch.Tensor]]

    def _score(self, row: int, first: int, tokens: Any, logits: Any) -> Any:
        self.found.setdefault(row, []).append(logits.float().clone())
        return iter(())


def ours(name: str, prompts: list[Any], tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The logits of every prompt's positions, computed on pages in steps of so many tokens."""
    model = wide(name).to(dtype)
    patch_for(model, torch.device("cuda"))
    served = ServedModel(model, PAGE)
    pages = {"state": 16}
    groups = [
        CacheGroup(g.name, g.family, pages.get(g.family, 400), 0, g.window, g.layout.page_bytes) for g in served.groups
    ]
    layouts = {group.name: group.layout for group in served.groups}
    arena = TorchArena.allocate(groups, layouts, device=torch.device("cuda"))
    for rows in arena.rows.values():
        rows.fill_(0xFF)  # NaN
    found = []
    for prompt in prompts:
        scheduler = Scheduler(SchedulerConfig(PAGE, groups, tokens, 8, prefix_caching=False, max_columns=64))
        executor = Noting(served, arena, 8, Every({"r": prompt}), columns=64, most_tokens=tokens)
        executor.found = {}
        loop = EngineLoop(scheduler, executor, Tiers(scheduler))
        loop.submit([RequestSpec("r", prompt, 1)])
        while loop.live:
            loop.step()
        found.append(torch.cat(executor.found[0]))
    return found


@contextmanager
def blind(keys: int) -> Iterator[None]:
    """Every query leaves out its last keys."""

    def less(*given: Any) -> WorkList:
        items, merges, parts = work_list(*given)
        items = items.copy()
        can = items[:, 3] >= keys
        items[can, 3] -= keys
        items[:, 5] = np.maximum(items[:, 4] + 1, np.where(can, items[:, 5] - keys, items[:, 5]))
        return WorkList(items, merges, parts)

    gpu_steps.work_list = less  # type: ignore[attr-defined]
    try:
        yield
    finally:
        gpu_steps.work_list = work_list  # type: ignore[attr-defined]


def parity(names: list[str]) -> None:
    generator = np.random.default_rng(1)
    say(f"{'':14}{'theirs bf16':>16}{'ours, steps of 1024':>20}{'of 48':>16}{'last key out':>16}{'last page out':>16}")
    for name in names:
        prompts = [generator.integers(0, 4096, n, np.int32) for n in LENGTHS]
        model = wide(name)
        right = theirs(model.float(), prompts)
        model = model.to(torch.bfloat16)
        noise = far((stepped if name == "mamba" else theirs)(model, prompts), right)
        told = [noise, far(ours(name, prompts, 1024), right), far(ours(name, prompts, 48), right)]
        if any(hasattr(module, "q_proj") or hasattr(module, "q_b_proj") for module in model.modules()):
            for keys in (1, PAGE):
                with blind(keys):
                    told.append(far(ours(name, prompts, 1024), right))
        say(f"{name:14}" + "".join(f"{f'{d:.4f} ({same:.3f})':>18}" for d, same in told))
        for got in told[1:3]:
            must(got[0] <= 1.05 * noise[0], f"{name}: {got[0]:.4f} off, and transformers itself {noise[0]:.4f}")
        floor, seen = noise[0], [each[0] for each in told[3:]]
        if floor > 0.1 and seen:  # bf16 alone is so far off that nothing else is seen
            floor, _ = far(ours(name, prompts, 1024, torch.float32), right)
            seen = []
            for keys in (1, PAGE):
                with blind(keys):
                    seen.append(far(ours(name, prompts, 1024, torch.float32), right)[0])
            say(f"{name:14} in float32: {floor:.5f}, last key out {seen[0]:.5f}, last page out {seen[1]:.5f}")
            must(floor < 0.01, f"{name}: {floor:.4f} off in float32")
        wrong = f"{name}: what is wrong on purpose is not seen: {seen} against {floor}"
        must(min(seen, default=1.0) > 1.1 * floor, wrong)
        del model


# ---- graphs, one ahead, cached


def mixes(seed: int, count: int, vocabulary: int = 30000) -> list[Any]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, vocabulary, 700).tolist()
    return [
        {"prompt_token_ids": shared[: int(rng.integers(0, 700)) * (n % 2)] + rng.integers(1, vocabulary, m).tolist()}
        for n, m in enumerate(rng.integers(1, 600, count).tolist())
    ]


def graphs() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    flags = {"overlap": 0, "max_num_seqs": 80, "max_mixed_tokens": 512}
    with opened(SMALL, max_model_len=4096, device_cache="1GiB", **flags) as llm:
        executor: Any = llm.engine.executor
        must(bool(executor.graphs.sizes), "there are no graphs")
        counts = {"steps": 0, "different": 0}
        run = executor.graphs.run

        def both(size: Any, step: Any) -> Any:
            kept = {name: rows.clone() for name, rows in executor.arena.rows.items()}
            last = executor._last.clone()
            executor.graphs.enabled = False
            without = run(size, step).clone()
            plain = {name: rows.clone() for name, rows in executor.arena.rows.items()}
            for name, rows in executor.arena.rows.items():
                rows.copy_(kept[name])
            executor._last.copy_(last)
            executor.graphs.enabled = True
            answer = run(size, step)
            targets = executor._buffer.device.targets[: len(answer)]
            n = int((targets != executor._slots).sum())  # the rest is padding
            counts["steps"] += 1
            same = torch.equal(answer[:n].view(torch.int16), without[:n].view(torch.int16))
            pages = all(torch.equal(plain[name][1:], rows[1:]) for name, rows in executor.arena.rows.items())
            counts["different"] += not (same and pages)
            return answer

        executor.graphs.run = both
        for rows in executor.arena.rows.values():
            rows.fill_(0xFF)
        llm.generate(mixes(1, 90), params, use_tqdm=False)
        say(f"graph = no graph: {counts['steps']} steps, {counts['different']} different")
        must(counts["steps"] > 50 and not counts["different"], f"graphs: {counts}")


def ahead() -> None:
    """In float32: rows have other company one step ahead, and in bf16 that alone changes tokens now and then."""
    params = [
        SamplingParams(temperature=0.8 * (n % 3 == 0), top_p=0.9, seed=n, max_tokens=10 + n % 30, ignore_eos=True)
        for n in range(120)
    ]
    for mixed in (0, 512):
        found = {}
        for overlap in (0, 1):
            flags = {"overlap": overlap, "max_mixed_tokens": mixed, "enable_prefix_caching": False}
            with opened(EXACT, dtype="float32", max_model_len=4096, device_cache="1GiB", **flags) as llm:
                outputs = llm.generate(mixes(2, 120, 8000), params, use_tqdm=False)
                found[overlap] = [output.outputs[0].token_ids for output in outputs]
        same = sum(a == b for a, b in zip(found[0], found[1], strict=True))
        say(f"one ahead = step by step, max_mixed_tokens={mixed}: {same} of {len(params)}")
        must(same == len(params), f"one ahead, max_mixed_tokens={mixed}: {same} of {len(params)} are the same")


def cached() -> None:
    """The same prompts again: their logprobs move no more than from one company to another."""
    with opened(SMALL, max_model_len=4096, device_cache="1GiB") as llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1)
        some = mixes(3, 60)

        def likely(prompts: list[Any]) -> Any:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            cached = sum(output.num_cached_tokens for output in outputs)
            return np.array([output.outputs[0].cumulative_logprob for output in outputs]), cached

        cold, _ = likely(some)
        llm.engine.scheduler.flush()
        alone = np.concatenate([likely([each])[0] for each in some])
        warm, tokens = likely(some)
        floor, off = (float(np.abs(each - cold).max()) for each in (alone, warm))
        say(f"cached = cold: off by {off:.4f} with {tokens} tokens cached; another company by {floor:.4f}")
        must(off <= 2 * floor + 1e-3 and tokens > 5000, f"cached answers are off by {off}, the floor is {floor}")


def every() -> None:
    """Which architectures can be captured, and that their graphs compute what they should."""
    rng = np.random.default_rng(4)
    some: list[Any] = [{"prompt_token_ids": rng.integers(1, 4000, n).tolist()} for n in (300, 70, 5, 130, 41, 260)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name in CONFIGS:
        config = {**json.loads(wide(name).config.to_json_string(use_diff=False)), "dtype": "bfloat16"}
        found = {}
        for eager in (False, True):
            flags = {"max_model_len": 512, "device_cache": "512MiB", "max_num_seqs": 8, "enforce_eager": eager}
            with opened(config, **flags) as llm:
                executor: Any = llm.engine.executor
                outputs = llm.generate(some, params, use_tqdm=False)
                found[eager] = [output.outputs[0].token_ids for output in outputs], executor.graphs.sizes
                must(not any(output.error for output in outputs), f"{name}: {[o.error for o in outputs if o.error]}")
        same = sum(a == b for a, b in zip(found[False][0], found[True][0], strict=True))
        kinds = sum(len(set(tokens)) for tokens in found[True][0])
        sizes = len(found[False][1])
        say(f"{name:14} {sizes} sizes captured; {same} of {len(some)} as without graphs ({kinds} different tokens)")
        must(same == len(some), f"{name}: {same} of {len(some)} answers are the same with graphs")


def kernels() -> None:
    files = ["tests/engine/test_triton_attention.py", "tests/engine/test_triton_kernels.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], capture_output=True, text=True
    )
    say("kernels: " + (ran.stdout.strip().splitlines() or ["nothing"])[-1])
    must(ran.returncode == 0, "kernels: " + ran.stdout[-3000:])


def main(names: list[str]) -> None:
    checks: dict[str, Any] = {"graphs": graphs, "ahead": ahead, "cached": cached, "every": every, "kernels": kernels}
    for name in names or checks:
        if name in checks:
            checks[name]()
    if not names or "parity" in names:
        parity([name for name in CONFIGS if name in names] or list(CONFIGS))
    say("right" if not _WRONG else f"{len(_WRONG)} WRONG")
    sys.exit(bool(_WRONG))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    main(parser.parse_args().names)
