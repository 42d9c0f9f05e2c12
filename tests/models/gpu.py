"""Models on a GPU in bf16, held against transformers' own noise: `PYTHONPATH=src python -m tests.models.gpu`.

bf16 logits of two right implementations differ. How much they may, transformers tells itself: how far its own in bf16
are from its own in float32. Ours in bf16 must be no further from those, and attention that leaves out the last key or
the last page must be seen to be wrong. `--figures`: then how fast an engine of Qwen3-8B's shape is, with random
weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from sapwood import LLM, SamplingParams
from sapwood.cache import CacheGroup
from sapwood.engine import EngineLoop, Tiers
from sapwood.engine.attention import Asked, Chunk, Decodes, FoldedAttention, Rows
from sapwood.engine.model import ServedModel
from sapwood.engine.steps import Greedy, ModelExecutor
from sapwood.engine.transfer_torch import TorchArena
from sapwood.scheduler import RequestSpec, Scheduler, SchedulerConfig

from .zoo import CONFIGS

PAGE = 16
LENGTHS = (700, 333, 64)
CHUNK = 512
WIDER: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
CARD = os.environ.get("SAPWOOD_DEVICE", "cuda")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def wide(name: str) -> Any:
    """A model of the zoo, wide enough for bf16 to be what it is in large ones."""
    kind, fields = CONFIGS[name]
    base = {} if kind.startswith("Mamba") else {**WIDER, "num_hidden_layers": 6}
    given = {**base, "pad_token_id": 0, "tie_word_embeddings": False, **fields}
    if kind.startswith("Mamba"):
        given |= {"vocab_size": 4096, "num_hidden_layers": 4}
    if "head_dim" in given and not kind.startswith("Mamba"):
        given["head_dim"] = 64
    if "sliding_window" in given:
        given["sliding_window"] = 128
    if name == "qwen3-next":
        given["mlp_only_layers"] = list(range(given["num_hidden_layers"]))  # where experts are chosen, bf16 drowns it
    if name == "bamba":
        given |= {"mamba_n_heads": 16, "mamba_d_head": 64}
    if name == "gemma2":
        given["attn_logit_softcapping"] = 20.0
    if name == "deepseek-v3":
        given |= {"num_key_value_heads": 8, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
        given |= {"v_head_dim": 64, "q_lora_rank": 192}
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**given), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.9 / parameter.shape[-1] ** 0.5)
    return model.to(torch.bfloat16).to(CARD).eval()


class Blind(FoldedAttention):
    """Leaves out the last `keys` keys that each token should see (but for the first of all)."""

    def __init__(self, keys: int) -> None:
        self.keys = keys

    def attend(self, q: Any, k_pages: Any, v_pages: Any, rows: Rows, asked: Asked) -> Any:
        decodes = [Decodes(d.tokens, d.table, self._less(d.seen)) for d in rows.decodes]
        chunks = []
        for chunk in rows.chunks:
            seen = chunk.seen
            if seen is None:
                n, keys = chunk.last - chunk.first, len(chunk.table) * k_pages.shape[1]
                seen = torch.arange(keys, device=q.device) <= torch.arange(n, device=q.device)[:, None]
            chunks.append(Chunk(chunk.first, chunk.last, chunk.table, self._less(seen), chunk.keys))
        return super().attend(q, k_pages, v_pages, rows._replace(decodes=decodes, chunks=chunks), asked)

    def _less(self, seen: Any) -> Any:
        rank = seen.flip(-1).cumsum(-1).flip(-1)  # 1 for the last key seen
        left = seen & (rank > self.keys)
        return left | (seen & (seen.cumsum(-1) == 1))


class Every(Greedy):
    """The logits of every position of a prompt are wanted."""

    def __init__(self, prompts: dict[str, np.ndarray]) -> None:
        self.prompts = prompts

    def scored(self, plan: Any) -> dict[int, Any]:
        batch = plan.batch
        found = {}
        for row, id in enumerate(batch.ids):
            start, n = int(batch.starts[row]), int(batch.lengths[row])
            if start < len(self.prompts[id]):
                found[row] = self.prompts[id][start : start + n]
        return found


def ours(model: Any, prompts: list[np.ndarray], attention: Any = None) -> list[torch.Tensor]:
    """The logits of every prompt's positions, computed together in chunks over pages."""
    served = ServedModel(model, PAGE, attention)
    pages = {"state": 16}
    groups = [
        CacheGroup(g.name, g.family, pages.get(g.family, 400), 0, g.window, g.layout.page_bytes) for g in served.groups
    ]
    arena = TorchArena.allocate(groups, {group.name: group.layout for group in served.groups}, device=CARD)
    for rows in arena.rows.values():
        rows.fill_(0xFF)
    scheduler = Scheduler(SchedulerConfig(PAGE, groups, CHUNK, 8, prefix_caching=False))
    named = {f"r{n}": tokens for n, tokens in enumerate(prompts)}
    executor = ModelExecutor(served, arena, 8, Every(named))
    found: dict[str, list[torch.Tensor]] = {id: [] for id in named}
    taken: list[Any] = []
    logits, run = served.logits, executor._run

    def keep(flat: Any) -> Any:
        taken.append(logits(flat))
        return taken[-1]

    def noted(plan: Any) -> Any:
        taken.clear()
        ran = run(plan)
        (got,) = taken
        rest = got[int(plan.batch.samples.sum()) :]
        for row, tokens in executor.hooks.scored(plan).items():
            found[plan.batch.ids[row]].append(rest[: len(tokens)].float())
            rest = rest[len(tokens) :]
        return ran

    served.logits, executor._run = keep, noted  # type: ignore[method-assign]
    loop = EngineLoop(scheduler, executor, Tiers(scheduler))
    loop.submit([RequestSpec(id, tokens, 1) for id, tokens in named.items()])
    while loop.live:
        loop.step()
    return [torch.cat(found[id]) for id in named]


@torch.inference_mode()
def theirs(model: Any, prompts: list[np.ndarray]) -> list[torch.Tensor]:
    model.set_attn_implementation("eager")  # which has soft-caps and sinks in every version
    return [model(torch.from_numpy(tokens).long()[None].to(CARD)).logits[0].float() for tokens in prompts]


@torch.inference_mode()
def stepped(model: Any, prompts: list[np.ndarray]) -> list[torch.Tensor]:
    """Token by token, as `generate` goes on. Mamba 1 is run so here, since its scan does not go on from a state."""
    found = []
    for tokens in prompts:
        cache, logits = transformers.DynamicCache(config=model.config), []
        for token in torch.from_numpy(tokens).long().to(CARD):
            out = model(token[None, None], cache_params=cache, use_cache=True)
            logits.append(out.logits[0].float())
        found.append(torch.cat(logits))
    return found


def far(one: list[torch.Tensor], other: list[torch.Tensor]) -> tuple[float, float]:
    """How far apart, relative, and how often the likeliest token is the same."""
    a, b = torch.cat(one), torch.cat(other)
    return float((a - b).norm() / b.norm()), float((a.argmax(-1) == b.argmax(-1)).float().mean())


def parity() -> list[str]:
    generator = np.random.default_rng(1)
    wrong = []
    say(f"{'':14}{'theirs bf16':>16}{'ours bf16':>16}{'last key out':>16}{'last page out':>16}   off float32 (argmax)")
    for name in CONFIGS:
        prompts = [generator.integers(0, 4096, n, np.int32) for n in LENGTHS]
        model = wide(name)
        right = theirs(model.float(), prompts)
        model = model.to(torch.bfloat16)
        noise = far((stepped if name == "mamba" else theirs)(model, prompts), right)
        got = far(ours(model, prompts), right)
        told = [noise, got]
        attends = any(hasattr(module, "q_proj") or hasattr(module, "q_b_proj") for module in model.modules())
        if attends:
            told += [far(ours(wide(name), prompts, Blind(keys)), right) for keys in (1, PAGE)]
        say(f"{name:14}" + "".join(f"{f'{d:.4f} ({same:.3f})':>16}" for d, same in told))
        if not got[0] <= 1.05 * noise[0]:
            wrong.append(f"{name}: {got[0]:.4f} off, and transformers itself {noise[0]:.4f}")
        # Where bf16 alone is far off, a single key is less than that; a page is not.
        seen = (max if noise[0] > 0.1 else min)([each[0] for each in told[2:]], default=1.0)
        if not seen > 1.1 * noise[0]:
            wrong.append(f"{name}: what is wrong on purpose is not seen: {told[2:]} against {got}")
    return wrong


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 0,
}


def figures() -> None:
    rng = np.random.default_rng(2)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_8B))
        flags = {"load_format": "dummy", "max_model_len": 16384, "max_num_seqs": 64, "progress": False}
        one = SamplingParams(temperature=0, max_tokens=1)
        with LLM(folder, **flags) as llm:
            many = [{"prompt_token_ids": rng.integers(1, 150000, 512).tolist()} for _ in range(64)]
            params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
            llm.generate(many[:4], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
            begin = time.perf_counter()
            llm.generate(many, params, use_tqdm=False)
            spent = time.perf_counter() - begin
            say(f"64 x (512 + 128): {spent:.2f} s, {64 * 128 / spent:.0f} tokens/s (eager, no special kernels)")
        with LLM(folder, device_cache="8GiB", host_cache="16GiB", **flags) as llm:
            told: dict[str, list[float]] = {"cold": [], "device": [], "host": []}
            for _ in range(5):
                prompt = {"prompt_token_ids": rng.integers(1, 150000, 8000).tolist()}
                for what, times in told.items():
                    if what == "host":  # 8 GiB hold seven of these
                        others = [{"prompt_token_ids": rng.integers(1, 150000, 8000).tolist()} for _ in range(8)]
                        llm.generate(others, one, use_tqdm=False)
                        while llm.engine.loop.tiers.busy:
                            llm.engine.step()
                    loads = llm.stats()["tiers"]["loads"]
                    begin = time.perf_counter()
                    (out,) = llm.generate([prompt], one, use_tqdm=False)
                    times.append(time.perf_counter() - begin)
                    assert (out.num_cached_tokens >= 7984) == (what != "cold"), (what, out.num_cached_tokens)
                    assert (llm.stats()["tiers"]["loads"] > loads) == (what == "host"), what
            for what, times in told.items():
                say(f"first token of 8,000, {what}: {1e3 * sorted(times)[2]:.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", action="store_true")
    arguments = parser.parse_args()
    card = torch.cuda.get_device_name() if CARD == "cuda" else CARD
    say(f"torch {torch.__version__}, transformers {transformers.__version__}, {card}")
    problems = parity()
    for problem in problems:
        say(f"WRONG {problem}")
    if arguments.figures:
        figures()
    sys.exit(bool(problems))
