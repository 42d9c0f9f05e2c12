"""Figures of the engine on a CPU, with the default model: time to the first token by where its prefix is, throughput
beside transformers' own, and what a decode step costs besides the model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from .timing import Figure

OUTPUT = 64
REQUESTS = 16


def figures(quick: bool) -> Iterator[Figure]:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401

        from sapwood.engine.loading.default_model import default_model

        default_model()
    except (ImportError, ValueError) as missing:
        print(f"the engine is not measured: {missing}")
        return
    yield from first_tokens(3 if quick else 5)
    yield from throughput("unrelated prompts of 128", 128, 0, 3.0, 1 if quick else 3)
    yield from throughput("prompts of 512 shared + 128 own", 640, 512, 5.0, 1)
    yield from beside_the_model()


def config(**more: Any) -> Any:
    from sapwood.engine.flags import EngineConfig

    return EngineConfig(device="cpu", device_cache="1GiB", max_num_seqs=REQUESTS, progress=False, **more)


def first_tokens(repeats: int) -> Iterator[Figure]:
    from sapwood.bench import cache

    report = cache.measure(argparse.Namespace(input_len=1500, repeats=repeats), config())
    cold = report.figures["cold"]["first token"]
    for stage, bar in (("device", 0.05), ("host", 0.07), ("store", 0.12)):
        found = report.figures[stage]
        beside = f"{found['first token']:.0f} / {cold:.0f} ms, {found['cached tokens']:.0f} tokens cached"
        yield Figure(f"first token of 1,500, {stage} / cold", found["of cold"], "ratio", bar, beside)


def throughput(what: str, length: int, shared: int, bar: float, repeats: int) -> Iterator[Figure]:
    """Ours, one static batch, and `generate_batch` as one calls it, in turns."""
    import torch
    import transformers

    from sapwood.bench.run import Prompts, opened, run
    from sapwood.engine.loading.weights import find_model, load_model

    transformers.utils.logging.set_verbosity_error()
    model: Any = load_model(find_model(None, load_format="auto"), dtype="auto", device="cpu")
    asked = transformers.GenerationConfig(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
    spent: dict[str, list[float]] = {"ours": [], "generate": [], "generate_batch": []}

    def clocked(name: str, generate: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        generate()
        spent[name].append(time.perf_counter() - begin)

    with opened(config()) as engine:
        random = Prompts(engine, 1)
        run(engine, [random.one(length)], [2])
        head = random.one(shared)
        prompts = [np.concatenate([head, each]) for each in random.some(REQUESTS, length - shared)]
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
        listed = [prompt.tolist() for prompt in prompts]
        for at in range(repeats):
            clocked("ours", lambda salt=str(at): run(engine, prompts, [OUTPUT] * REQUESTS, salt))
            model.set_attn_implementation("sdpa")
            clocked(
                "generate",
                lambda: model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked),
            )
            if not at:
                clocked("generate_batch", lambda: model.generate_batch(listed, generation_config=asked))
    taken = {name: median(seconds) for name, seconds in spent.items()}
    tokens = {name: f"{name} {REQUESTS * OUTPUT / seconds:.0f}" for name, seconds in taken.items()}
    told = f"tokens/s: {', '.join(tokens.values())}"
    yield Figure(f"{what}: ours / generate_batch", taken["generate_batch"] / taken["ours"], "times", bar, told, ">=")
    least = 1.0 if not shared else None
    yield Figure("  ours / generate, one static batch", taken["generate"] / taken["ours"], "times", least, "", ">=")


def beside_the_model() -> Iterator[Figure]:
    """A decode step of 16 rows: what the scheduler and the loop take, and with them preparing and sampling."""
    from sapwood.bench.run import Prompts, opened
    from sapwood.engine.params import SamplingParams

    with opened(config()) as engine:
        spent = {"model": 0.0, "executor": 0.0}

        def timed(owner: Any, method: str, name: str) -> None:
            inner = getattr(owner, method)

            def outer(*args: Any) -> Any:
                begin = time.perf_counter()
                found = inner(*args)
                spent[name] += time.perf_counter() - begin
                return found

            setattr(owner, method, outer)

        timed(engine.served, "logits", "model")
        timed(engine.executor, "begin", "executor")
        timed(engine.executor, "finish", "executor")
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        for at, prompt in enumerate(Prompts(engine, 2).some(REQUESTS, 128)):
            engine.requests.submit(str(at), prompt, params)
        for _ in range(8):
            engine.requests.step()
        loops, others, whole = [], [], []
        while len(engine.requests.samples) == REQUESTS:
            spent.update(model=0.0, executor=0.0)
            begin = time.perf_counter()
            engine.requests.step()
            step = time.perf_counter() - begin
            loops.append((step - spent["executor"]) / step)
            others.append((step - spent["model"]) / step)
            whole.append(step)
        beside = f"of {1e3 * median(whole):.0f} ms"
        yield Figure("decode step of 16, scheduler and loop", 100 * median(loops), "%", 0.5, beside)
        yield Figure("  with preparing and sampling", 100 * median(others), "%", 1.5, beside)
