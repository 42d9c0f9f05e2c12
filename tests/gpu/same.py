"""Two ways to one answer, on a GPU: with graphs and without, one step ahead and step by step, cached and cold, with
masks that follow what was said, and with weights that have come later."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from sapwood import LLM, LoRARequest, SamplingParams
from sapwood.engine.loading.updates import tensors_of

from ..models.gpu import wide_config
from ..models.zoo import CONFIGS
from .kit import must, one_of_many, say
from .shapes import EXACT, QWEN3_8B, opened, write_adapter

SMALL = {**QWEN3_8B, "num_hidden_layers": 4, "vocab_size": 32000}
FLOAT = {"dtype": "float32", "device_cache": "1GiB", "max_model_len": 4096}
FEW = {"max_num_batched_tokens": 128}  # so that few sizes are captured, and prompts come in several steps
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def mixes(seed: int, count: int, vocabulary: int, longest: int = 600) -> list[Any]:
    """Prompts of all lengths, of which every other one begins like others."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, vocabulary, longest).tolist()
    return [
        {
            "prompt_token_ids": shared[: int(rng.integers(0, longest)) * (n % 2)]
            + rng.integers(1, vocabulary, m).tolist()
        }
        for n, m in enumerate(rng.integers(1, longest, count).tolist())
    ]


def of_zoo(name: str) -> dict[str, Any]:
    return {**json.loads(wide_config(name).to_json_string(use_diff=False)), "dtype": "bfloat16"}


def said(llm: LLM, prompts: Sequence[Any], params: Any, loras: Any = None) -> list[list[int]]:
    outputs = llm.generate(list(prompts), params, use_tqdm=False, lora_request=loras)
    failed = [output.error for output in outputs if output.error]
    must(not failed, f"requests fail: {failed[:3]}")
    return [output.outputs[0].token_ids for output in outputs]


# ---- graphs


def graphs() -> None:
    """A graph's logits and pages, and the same step's without it: bit for bit. Also of models with states, and with
    adapters."""
    flags: dict[str, Any] = {"overlap": 0, "max_num_seqs": 80, "max_mixed_tokens": 512, "device_cache": "1GiB"}
    _bit_for_bit("qwen3", SMALL, {**flags, "max_model_len": 4096}, mixes(1, 90, 30000))
    for name in ("qwen3-next", "bamba"):
        some = mixes(1, 24, 4000, 120)
        _bit_for_bit(name, of_zoo(name), {**flags, **FEW, "max_num_seqs": 16, "max_model_len": 512}, some)
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
    with tempfile.TemporaryDirectory() as folder:
        loras: list[LoRARequest | None] = [None]
        for at in range(1, 4):
            write_adapter(f"{folder}/{at}", SMALL, 4 * at, at)
            loras.append(LoRARequest(str(at), at, f"{folder}/{at}"))
        each = [loras[n % 4] for n in range(60)]
        given = {**flags, **FEW, **lora, "max_model_len": 2048}
        _bit_for_bit("adapters", SMALL, given, mixes(5, 60, 30000, 200), each)


def _bit_for_bit(name: str, config: Any, flags: dict[str, Any], some: list[Any], loras: Any = None) -> None:
    with opened(config, **flags) as llm:
        executor: Any = llm.engine.executor
        counts = {"steps": 0, "several": 0, "different": 0}
        for each in (executor.graphs, executor.adapted_graphs):
            each.run = _both(executor, each, each.run, counts)
        must(bool((executor.adapted_graphs if loras else executor.graphs).sizes), f"{name}: there are no graphs")
        for rows in executor.arena.rows.values():
            rows.fill_(0xFF)  # NaN
        said(llm, some, GREEDY, loras)
        words = f"{counts['steps']} steps, {counts['several']} of several tokens a row, {counts['different']} different"
        say(f"graph = no graph, {name}: {words}")
        must(counts["steps"] > 30 and not counts["different"], f"graphs, {name}: {counts}")


def _both(executor: Any, graphs: Any, run: Callable[..., Any], counts: dict[str, int]) -> Callable[..., Any]:
    def both(size: Any, step: Any) -> Any:
        if size not in graphs._graphs:
            return run(size, step)
        kept = {name: rows.clone() for name, rows in executor.arena.rows.items()}
        last = executor._last.clone()
        graphs.enabled = False
        without = run(size, step).clone()
        plain = {name: rows.clone() for name, rows in executor.arena.rows.items()}
        for name, rows in executor.arena.rows.items():
            rows.copy_(kept[name])
        executor._last.copy_(last)
        graphs.enabled = True
        answer = run(size, step)
        targets = executor._buffer.device.targets[: len(answer)]
        n = int((targets != executor._slots).sum())  # the rest is padding
        counts["steps"] += 1
        counts["several"] += not size[1]
        same = torch.equal(answer[:n].view(torch.int16), without[:n].view(torch.int16))
        pages = all(torch.equal(plain[name][1:], rows[1:]) for name, rows in executor.arena.rows.items())
        counts["different"] += not (same and pages)
        return answer

    return both


def every(names: Sequence[str] = ()) -> None:
    """Which architectures can be captured, and that their graphs compute what they should."""
    rng = np.random.default_rng(4)
    some: list[Any] = [{"prompt_token_ids": rng.integers(1, 4000, n).tolist()} for n in (300, 70, 5, 130, 41, 260)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    flags: dict[str, Any] = {"max_model_len": 512, "device_cache": "512MiB", "max_num_seqs": 8, **FEW}
    for name in names or CONFIGS:
        with one_of_many(f"every, {name}"):
            found = {}
            for eager in (False, True):
                with opened(of_zoo(name), enforce_eager=eager, **flags) as llm:
                    executor: Any = llm.engine.executor
                    graphs = getattr(executor, "graphs", None)  # none in a model that attends by itself
                    found[eager] = said(llm, some, params), graphs.sizes if graphs else ()
            (ours, sizes), (right, _) = found[False], found[True]
            same = sum(a == b for a, b in zip(ours, right, strict=True))
            kinds = sum(len(set(tokens)) for tokens in right)
            say(
                f"{name:14} {len(sizes)} sizes captured; {same} of {len(some)} as without graphs "
                f"({kinds} different tokens)"
            )
            must(same == len(some), f"{name}: {same} of {len(some)} answers are the same with graphs")


# ---- one ahead


def ahead() -> None:
    """In float32: rows have other company one step ahead, and in bf16 that alone changes tokens now and then."""
    params = [
        SamplingParams(temperature=0.8 * (n % 3 == 0), top_p=0.9, seed=n, max_tokens=10 + n % 30, ignore_eos=True)
        for n in range(120)
    ]
    for mixed in (0, 512):
        found = []
        for overlap in (0, 1):
            flags = {**FLOAT, "overlap": overlap, "max_mixed_tokens": mixed, "enable_prefix_caching": False}
            with opened(EXACT, **flags) as llm:
                found.append(said(llm, mixes(2, 120, 8000), params))
        same = sum(a == b for a, b in zip(*found, strict=True))
        say(f"one ahead = step by step, max_mixed_tokens={mixed}: {same} of {len(params)}")
        must(same == len(params), f"one ahead, max_mixed_tokens={mixed}: {same} of {len(params)} are the same")


class Follows:
    """A grammar: each token is one more than the one before, by the rest of a division."""

    REST = 5

    def __init__(self, vocabulary: int) -> None:
        self._said: list[int] = []
        self._of = np.arange(-(-vocabulary // 32) * 32) % self.REST

    def accept(self, token: int) -> None:
        self._said.append(token)

    def rollback(self, tokens: int) -> None:
        del self._said[len(self._said) - tokens :]

    def allowed(self) -> Any:
        wanted = (self._said[-1] + 1) % self.REST if self._said else 0
        return np.packbits(self._of == wanted, bitorder="little").view(np.int32)

    @classmethod
    def obeyed(cls, tokens: Sequence[int]) -> bool:
        return [token % cls.REST for token in tokens] == [at % cls.REST for at in range(len(tokens))]


def masked() -> None:
    """Rows with grammars, with allowed tokens, and with neither, in the same steps, some of which fail: all obey
    theirs, and say the same one step ahead as step by step."""
    found = []
    for overlap in (0, 1):
        with opened(EXACT, **{**FLOAT, **FEW, "overlap": overlap, "max_num_seqs": 32}) as llm:
            answers, free = _under_masks(llm)
            found.append(answers)
            masks = [Follows.obeyed(tokens) for tokens in answers[::3]]
            must(all(masks), f"{masks.count(False)} of {len(masks)} grammars are not obeyed, overlap={overlap}")
            allowed = [all(token < 100 for token in tokens) for tokens in answers[1::3]]
            must(all(allowed), f"{allowed.count(False)} answers have tokens that are not allowed, overlap={overlap}")
            must(not any(Follows.obeyed(tokens) for tokens in free), "everybody obeys: this proves nothing")
    same = sum(a == b for a, b in zip(*found, strict=True))
    say(f"masks: {len(found[0])} answers, {same} the same one ahead")
    must(same == len(found[0]), f"masks: {same} of {len(found[0])} answers are the same one ahead")


def _under_masks(llm: LLM) -> tuple[list[list[int]], list[list[int]]]:
    """All answers, and of these the ones without a mask."""
    engine: Any = llm.engine
    begin, steps = engine.executor.begin, iter(range(10**6))

    def sometimes(plan: Any) -> None:
        if next(steps) in (3, 9, 10, 21):
            raise RuntimeError("on purpose")
        begin(plan)

    engine.executor.begin = sometimes
    samples = []
    for n, prompt in enumerate(mixes(6, 36, 8000, 100)):
        params = SamplingParams(
            temperature=0.9 * (n % 2), top_k=20, seed=n, max_tokens=24, ignore_eos=True,
            allowed_token_ids=list(range(100)) if n % 3 == 1 else None,
        )  # fmt: skip
        grammars = [Follows(engine.requests.vocabulary)] if n % 3 == 0 else []
        samples += engine.requests.submit(str(n), prompt["prompt_token_ids"], params, grammars=grammars)
    while not all(sample.finish_reason for sample in samples):
        engine.requests.step()
    failed = [sample.error for sample in samples if sample.error]
    must(not failed, f"requests fail: {failed[:3]}")
    answers = [list(sample.token_ids) for sample in samples]
    return answers, answers[2::3]


# ---- the cache, other weights


def cached() -> None:
    """The same prompts again: their logprobs move no more than from one company to another."""
    with opened(SMALL, max_model_len=4096, device_cache="1GiB") as llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1)
        some = mixes(3, 60, 30000)

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


def updated() -> None:
    """Weights that have come later, under graphs that were captured before: as an engine that was begun with them."""
    some = mixes(7, 40, 8000, 200)
    with tempfile.TemporaryDirectory() as folder:
        with opened(EXACT, **FLOAT, **FEW, seed=1) as llm:
            right = said(llm, some, GREEDY)
            tensors = {
                name: each.cpu().clone().contiguous() for name, each in tensors_of(llm.engine.served.model).items()
            }
            save_file(tensors, f"{folder}/model.safetensors")
        with opened(EXACT, **FLOAT, **FEW) as llm:
            before = said(llm, some, GREEDY)
            with _still_captured(llm):
                llm.update_weights(f"{folder}/model.safetensors")
            after = said(llm, some, GREEDY)
    old, same = (sum(a == b for a, b in zip(each, right, strict=True)) for each in (before, after))
    say(f"other weights: {same} of {len(some)} answers are those of an engine begun with them, {old} before")
    must(same == len(some) and old < len(some) // 2, f"other weights: {same} the same, {old} before of {len(some)}")


@contextmanager
def _still_captured(llm: LLM) -> Iterator[None]:
    """What is captured is what was captured before."""
    graphs: Any = llm.engine.executor.graphs  # type: ignore[attr-defined]
    captured = dict(graphs._graphs)
    yield
    must(all(graphs._graphs.get(size) is each for size, each in captured.items()), "graphs were captured anew")
