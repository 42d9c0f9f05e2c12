"""Kernels by class, adapters, sampling and transfers on a GPU, checked and measured:
`PYTHONPATH=src python -m tests.models.gpu_kernels [names of checks or figures]`.

A check returns what is wrong, as lines; a figure prints a line of a table. `make gpu-check` runs the checks too. What
kernels compute is in tests/engine/test_triton_kernels.py, which runs on the card as well.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sapwood.cache import CacheGroup
from sapwood.engine import PageLayout, PagePart
from sapwood.engine.executor.sampling import Sampler
from sapwood.engine.loading.weights import find_model, load_model
from sapwood.engine.lora.adapters import Adapter, Adapters, ReadRouting
from sapwood.engine.lora.layers import LoraPair
from sapwood.engine.models.patches import patch_for
from sapwood.engine.params import SamplingParams
from sapwood.engine.transfer.torch_mover import PinnedArena, TorchArena, TorchMover

from ..gpu.kit import say
from ..gpu.shapes import QWEN3_8B, write_adapter
from .gpu import wide

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3")
ROWS, VOCABULARY = 64, 151_936
ATTENTION_MS = 1.46  # of a decode step at 64 and context 576, which is left out here
RANK, LORAS = 16, 4


@contextlib.contextmanager
def qwen3_8b(layers: int | None = None) -> Iterator[Any]:
    """Its shape, with random weights, and attention that costs nothing."""
    from transformers import AttentionInterface

    def nothing(module: Any, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> Any:
        return v.transpose(1, 2).repeat_interleave(q.shape[1] // v.shape[1], 2) + q.transpose(1, 2), None

    config = QWEN3_8B if layers is None else {**QWEN3_8B, "num_hidden_layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model: Any = load_model(find_model(folder, load_format="dummy"), dtype="auto", device="cuda")
    AttentionInterface.register("nothing", nothing)
    model.set_attn_implementation("nothing")
    yield model
    del model
    torch.cuda.empty_cache()


def captured(model: Any, tokens: int = ROWS) -> tuple[Callable[[], None], Any]:
    """A step of so many tokens as a graph, and its logits."""
    ids = torch.randint(0, 1000, (1, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    positions = torch.arange(tokens, device="cuda")[None] + 500

    def step() -> Any:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits

    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()

    def replay(read: Any = (ids, positions)) -> None:  # what the graph reads lives as long as it does
        graph.replay()

    return replay, logits


def milliseconds(run: Callable[[], Any], times: int = 20, ahead: bool = False) -> float:
    """Of the device, median. `ahead`: the host has issued all before the device begins, as in an engine one step
    ahead."""
    for _ in range(3):
        run()
    taken = []
    for _ in range(times):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if ahead:
            torch.cuda._sleep(4_000_000)  # about 2 ms
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        taken.append(first.elapsed_time(last))
    return statistics.median(taken)


def wall_milliseconds(run: Callable[[], Any], times: int = 20) -> float:
    for _ in range(3):
        run()
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(taken)


# ---- checks


def check_patched_models() -> list[str]:
    """A patched model gives the logits of the unpatched one in float32, and in bf16 is no further from them than the
    unpatched one is; a norm's weight that is off is seen."""
    wrong = []
    ids = torch.randint(0, 4096, (1, 300), generator=torch.Generator().manual_seed(3)).cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in FAMILIES:
        with torch.inference_mode():
            right = wide(name).float()(ids, use_cache=False).logits
            noise = _off(wide(name)(ids, use_cache=False).logits, right)
            found = []
            for dtype in (torch.float32, torch.bfloat16):
                model = wide(name).to(dtype)
                patched = patch_for(model, torch.device("cuda"))
                found.append(_off(model(ids, use_cache=False).logits, right))
            model.get_submodule("model.norm").weight[::2] += 0.5
            control = _off(model(ids, use_cache=False).logits, right)
        modules = ", ".join(f"{kind} {n}" for kind, n in patched.items())
        off = f"float32 {found[0]:.1e}, bf16 {found[1]:.4f} (unpatched {noise:.4f}, wrong {control:.3f})"
        say(f"{name:9} {off}; {modules}")
        if not found[0] < 1e-5 or not found[1] < 1.1 * noise or not control > 2 * noise or len(patched) != 3:
            wrong.append(f"{name}: off by {found}, noise {noise}, control {control}, patched {patched}")
    return wrong


def _off(one: Any, other: Any) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def random_adapter(adapters: Adapters, seed: int, rank: int) -> Adapter:
    """On all projections."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pairs = {}
    for name, wrapped in adapters._wrapped.items():
        (n_out, n_in), like = wrapped.shape, wrapped.a
        a = torch.randn(rank, n_in, device="cuda", generator=generator) / n_in**0.5
        b = torch.randn(n_out, rank, device="cuda", generator=generator) * 0.3
        pairs[name] = LoraPair(*(each.to(like.dtype).cpu().pin_memory() for each in (a, b)))
    return Adapter(bytes([seed]) * 32, pairs)


def check_adapters() -> list[str]:
    """Rows of the base model and of adapters of several ranks in one graph: as one by one with torch, within bf16; base
    rows bit for bit; another routing in the same graph; rows alone."""
    wrong = []
    with qwen3_8b(layers=3) as model, torch.inference_mode():
        patch_for(model, torch.device("cuda"))
        plain, plain_logits = captured(model)
        plain()
        base = plain_logits.clone()
        adapters = Adapters(model, max_loras=LORAS, max_rank=64)
        for seed, rank in enumerate((8, 16, 33, 64), 1):
            adapters.add(f"a{seed}", random_adapter(adapters, seed, rank))
        digests = [None, *adapters.names().values()]
        slots = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
        if not adapters.capturable:
            return ["adapters cannot be captured"]
        with adapters.applied(ReadRouting(slots)):
            replay, logits = captured(model)
        rng = random.Random(0)
        for _ in range(4):
            rows = [rng.choice(digests) for _ in range(ROWS)]
            routing = adapters.begin(rows, [1] * ROWS)
            assert routing is not None
            slots.copy_(routing.on_device)
            logits.fill_(torch.nan)
            replay()
            grouped = logits.clone()
            kernels = [stack._kernels for stack in adapters._stacks]
            for stack in adapters._stacks:
                stack._kernels = None
            ids = torch.randint(0, 1000, (1, ROWS), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
            with torch.inference_mode(), adapters.applied(routing):
                positions = torch.arange(ROWS, device="cuda")[None] + 500
                one_by_one = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            for stack, each in zip(adapters._stacks, kernels, strict=True):
                stack._kernels = each
            adapters.end(routing)
            of_base = torch.tensor([row is None for row in rows], device="cuda")
            off, moved = _off(grouped, one_by_one), _off(base[:, ~of_base], one_by_one[:, ~of_base])
            if not off < 0.02 or not moved > 0.1:
                wrong.append(f"grouped adapters are off by {off:.4f}; what they change is {moved:.3f}")
            if not torch.equal(grouped[:, of_base], base[:, of_base]):
                wrong.append("rows of the base model change beside adapters")
        say(f"adapters: off by {off:.4f} from torch's one by one, where they change {moved:.2f}")
    return wrong


def check_served_adapters() -> list[str]:
    """Requests of the base model and of adapters together through an engine, with graphs: the same tokens as without
    graphs, and as each request alone. In float32, where tokens can be promised."""
    from sapwood import LLM, LoRARequest

    rng = random.Random(5)
    prompts = [[rng.randrange(1, 4000) for _ in range(rng.randint(3, 90))] for _ in range(14)]
    config = {**QWEN3_8B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 4096}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "dtype": "float32"}
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        names = ["sql", "poems", "code"]
        for seed, name in enumerate(names):
            write_adapter(f"{folder}/{name}", config, 4 + 6 * seed, seed, 0.15)
        loras = [
            None if i % 4 == 3 else LoRARequest(names[i % 4], i % 4 + 1, f"{folder}/{names[i % 4]}") for i in range(14)
        ]
        flags: dict[str, Any] = {"load_format": "dummy", "max_model_len": 512, "max_num_seqs": 16, "dtype": "float32"}
        flags |= {"device_cache": "256MiB", "host_cache": "0", "progress": False, "enable_prefix_caching": False}
        for kind in ("graphs", "no graphs"):
            lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
            with LLM(folder, enforce_eager=kind == "no graphs", **lora, **flags) as llm:
                asked = [{"prompt_token_ids": each} for each in prompts]
                outs = llm.generate(asked, greedy, lora_request=loras, use_tqdm=False)
                answers[kind] = [out.outputs[0].token_ids for out in outs]
                captured_sizes = llm.engine.executor.adapted_graphs.sizes
                if kind == "graphs":
                    alone = [
                        llm.generate([one], greedy, lora_request=[lora_of], use_tqdm=False)[0].outputs[0].token_ids
                        for one, lora_of in zip(asked, loras, strict=True)
                    ]
                    bases = [out.outputs[0].token_ids for out in llm.generate(asked, greedy, use_tqdm=False)]
                if bool(captured_sizes) != (kind == "graphs"):
                    return [f"{kind}: graphs with adapters are {captured_sizes}"]
    wrong = [
        f"row {i}: with and without graphs differ" for i in range(14) if answers["graphs"][i] != answers["no graphs"][i]
    ]
    wrong += [f"row {i}: mixed and alone differ" for i in range(14) if answers["graphs"][i] != alone[i]]
    changed = sum(answers["graphs"][i] != bases[i] for i in range(14) if loras[i])
    wrong += [f"row {i}: a base row changes" for i in range(14) if not loras[i] and answers["graphs"][i] != bases[i]]
    say(
        f"served adapters: {changed} of {sum(map(bool, loras))} rows with adapters answer otherwise than the base model"
    )
    return wrong if changed > 8 else [*wrong, "adapters change almost nothing: this proves nothing"]


# ---- figures


def figure_layers() -> None:
    """A decode step at 64 without attention: transformers' modules, then patched; and what patching takes."""
    with qwen3_8b() as model:
        replay, _ = captured(model)
        before = milliseconds(replay)
        del replay
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0]
        begin = time.perf_counter()
        patch_for(model, torch.device("cuda"))
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        peak, after = torch.cuda.max_memory_allocated() - held, torch.cuda.memory_allocated() - held
        lost = free - torch.cuda.mem_get_info()[0]
        begin = time.perf_counter()
        replay, _ = captured(model)
        capture = time.perf_counter() - begin
        now = milliseconds(replay)
        say(f"| decode step at 64 without attention, ms | as they are {before:.2f} | patched {now:.2f} |")
        say(
            f"| patching | {took:.2f} s, capture {capture:.2f} s | at most {peak / 1e6:.0f} MB more, "
            f"{after / 1e6:.0f} MB after, {lost / 1e6:.0f} MB less free |"
        )
        _adapters(model, now)


def _adapters(model: Any, base: float) -> None:
    """The same with adapters."""
    adapters = Adapters(model, max_loras=LORAS, max_rank=RANK)
    seeds = range(1, LORAS + 1)
    digests = [adapters.add(f"a{seed}", random_adapter(adapters, seed, RANK)) for seed in seeds]
    begin = time.perf_counter()
    routing = adapters.begin([digests[i % LORAS] for i in range(ROWS)], [1] * ROWS)
    torch.cuda.synchronize()
    upload = time.perf_counter() - begin
    assert routing is not None
    slots = routing.on_device.clone()
    with adapters.applied(ReadRouting(slots)):
        replay, _ = captured(model)
    mixed = milliseconds(replay)
    slots.zero_()
    idle = milliseconds(replay)
    slots.copy_(routing.on_device)
    slots[1:] = 0
    one = milliseconds(replay)
    with adapters.applied(None):
        bare = milliseconds(captured(model)[0])

    def ratio(ms: float) -> str:
        return f"{ms:.2f} = {(ms + ATTENTION_MS) / (base + ATTENTION_MS):.2f}"

    say(
        f"| {LORAS} adapters of rank {RANK} on all projections, ms and against base with attention of {ATTENTION_MS} | "
        f"mixed {ratio(mixed)} | one row {ratio(one)} | base rows {ratio(idle)} | not applied {ratio(bare)} | "
        f"upload of {LORAS} {1e3 * upload:.0f} ms |"
    )


def figure_memory() -> None:
    """What patching leaves of the card's memory, for weights that came from a file: transformers puts them side by side
    into one piece of memory, in which fused ones find no room."""
    with tempfile.TemporaryDirectory() as folder:
        with qwen3_8b(layers=6) as model:
            model.save_pretrained(folder, max_shard_size="20GB")
        del model
        torch.cuda.empty_cache()
        whole, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        loaded = load_model(find_model(folder, load_format="auto"), dtype="auto", device="cuda")
        torch.cuda.empty_cache()
        before = whole - torch.cuda.mem_get_info()[0]
        patched = patch_for(loaded, torch.device("cuda"))
        after, used = whole - torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated() - held
        assert patched
        taken = [f"{each / 1e6:.0f}" for each in (before, after, used)]
        say(f"| 6 layers from a file, MB taken | {taken[0]} | patched {taken[1]} | used {taken[2]} |")


def figure_sampling() -> None:
    """64 rows with temperature, top_k and top_p: the sampler's whole call, then its kernel alone."""
    from sapwood.engine.kernels import sampling as sampling_kernels

    logits = (torch.randn(ROWS, VOCABULARY, device="cuda") * 3).to(torch.bfloat16)
    kinds: dict[str, dict[str, Any]] = {
        "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
        "top_p 0.9": {"top_p": 0.9},
        "temperature": {},
        "all and penalties": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
    }
    slots, index = np.arange(ROWS), np.zeros(ROWS, np.int64)
    for kind, fields in kinds.items():
        told = []
        for kernel in (sampling_kernels.choose, None):
            sampler = Sampler(ROWS, VOCABULARY, "cuda", random.Random(0))
            sampler._kernel = kernel
            for slot in range(ROWS):
                sampler.seat(slot, SamplingParams(temperature=0.8, seed=slot, **fields), [1, 2], [], [], 0)
            at = iter(range(10_000))

            def run(sampler: Sampler = sampler, at: Any = at) -> Any:
                return sampler.sample(logits, slots, index + next(at))

            told.append(f"{wall_milliseconds(run):.2f} ({milliseconds(run, ahead=True):.2f})")
        say(f"| sampling at 64, {kind}, ms with host (device) | {told[0]} | sorting {told[1]} |")
    weights = ((logits.float() - logits.float().amax(-1, keepdim=True)) / 0.8).exp()
    numbers = torch.tensor([[0.0, 50, 0.9, 0.4]] * ROWS, dtype=torch.float64, device="cuda")
    whole = torch.tensor([[0.0, VOCABULARY, 0.9, 0.4]] * ROWS, dtype=torch.float64, device="cuda")
    told = [f"{milliseconds(lambda n=n: sampling_kernels.choose(weights, n)):.3f}" for n in (numbers, whole)]
    say(f"| the kernel alone, ms | top_k 50, top_p 0.9: {told[0]} | top_p 0.9: {told[1]} |")


def figure_transfers() -> None:
    """32K tokens (4.83 GB) from host, alone and beside a decode step."""
    layout = PageLayout([PagePart(i, kv, (16, 8, 128), torch.bfloat16) for i in range(36) for kv in "kv"])
    n = 2048
    groups = [CacheGroup("full", "full", n, n, None, layout.page_bytes)]
    with qwen3_8b() as model:
        patch_for(model, torch.device("cuda"))
        replay, _ = captured(model)
        arena, host = TorchArena.allocate(groups, {"full": layout}, device="cuda"), PinnedArena(groups)
        mover = TorchMover(arena, host)
        rng, ops = np.random.default_rng(0), iter(range(1000))

        def load() -> int:
            op = next(ops)
            pages = [(rng.permutation(n) + 1).astype(np.int32) for _ in range(2)]
            mover.start("load", op, {"full": (pages[0], pages[1])})
            return op

        def wait(op: int) -> None:
            assert mover.wait(op), mover.reason(op)

        wait(load())
        alone = []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            wait(load())
            alone.append(time.perf_counter() - begin)

        def steps() -> float:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(8):
                replay()
            last.record()
            last.synchronize()
            return first.elapsed_time(last) / 8

        steps()
        quiet = [steps() for _ in range(4)]
        beside = []
        for _ in range(4):
            op = load()
            beside.append(steps())
            assert mover.poll() == [], "the load was over before the steps were"
            wait(op)
        took, gigabytes = statistics.median(alone), n * layout.page_bytes / 1e9
        one, two = statistics.median(quiet), statistics.median(beside)
        say(f"| restore of 32K tokens | {1e3 * took:.0f} ms, {gigabytes / took:.1f} GB/s |")
        say(f"| decode steps beside a load | {one:.2f} -> {two:.2f} ms, {100 * (two / one - 1):.1f} % slower |")
        mover.close()
        host.close()


CHECKS = (check_patched_models, check_adapters, check_served_adapters)
FIGURES = (figure_layers, figure_memory, figure_sampling, figure_transfers)


def main(names: list[str]) -> int:
    torch.cuda.init()
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    problems: list[str] = []
    for each in (*CHECKS, *FIGURES):
        if names and each.__name__ not in names:
            continue
        begin = time.perf_counter()
        try:
            problems += each() or []
        except Exception as error:
            import traceback

            traceback.print_exc()
            problems.append(f"{each.__name__}: {type(error).__name__}: {error}")
        say(f"-- {each.__name__}: {time.perf_counter() - begin:.1f} s")
    for problem in problems:
        say(f"WRONG {problem}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
