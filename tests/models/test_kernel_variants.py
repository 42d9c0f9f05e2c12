"""Kernels as Triton compiles them for an H200, where there is none: which variants of them steps need, and that all are
compiled ahead. Nothing is launched: a driver of our own stands in for the card's. (test_interpreted.py runs this.)"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("these are not interpreted", allow_module_level=True)
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

if torch.cuda.is_available():
    pytest.skip("on a GPU this is for `make gpu-check`", allow_module_level=True)
if not hasattr(triton, "AsyncCompileMode"):
    pytest.skip("this Triton compiles one kernel after the other", allow_module_level=True)

from sapwood.engine import engine as engine_module
from sapwood.engine.executor import sampling
from sapwood.engine.kernels import launch as launch_module
from sapwood.engine.kernels import steps as step_kernels
from sapwood.engine.kernels.launch import compiling, launch
from sapwood.engine.kernels.sampling import choose
from sapwood.engine.llm import LLM
from sapwood.engine.models import patches
from sapwood.engine.params import SamplingParams

from .zoo import build

FLAGS: dict[str, Any] = {"dtype": "float32", "device_cache": "4MiB", "max_num_seqs": 80, "page_size": 8}
FLAGS |= {"max_model_len": 700, "max_num_batched_tokens": 600, "progress": False, "device": "cpu"}
FLAGS["skip_self_check"] = True  # no kernel runs here
PARAMS = [
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
]


class Launcher:
    made: list[str] = []  # noqa: RUF012
    launched: list[str] = []  # noqa: RUF012

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = source.name
        self.made.append(source.name)

    def __call__(self, *_: Any, **__: Any) -> None:
        self.launched.append(self.name)


class Utils:
    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return object(), 0, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Driver:
    utils, launcher_cls = Utils(), Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def no_card(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(step_kernels._change, "device_caches", defaultdict(step_kernels._change.create_binder))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "triton"))
    Launcher.made.clear()
    Launcher.launched.clear()


@contextmanager
def noted() -> Iterator[set[tuple[str, str]]]:
    """The variants of kernels that are asked for in here. None is compiled, and none runs."""
    found: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found.add((fn.name.rpartition(".")[2], key))
        return True  # it is not compiled

    before = launch_module._ahead.set(launch_module._Ahead())
    knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = None
        launch_module._ahead.reset(before)


def change() -> tuple[Any, ...]:
    numbers = torch.zeros(64, dtype=torch.int32)
    return step_kernels._change, (1,), numbers, numbers, numbers


def test_compiled_ahead_and_launched_once_it_is():
    """Inside `compiling` nothing is launched; behind it everything is there, and found on disk by the next process.

    Mutation: `launch` runs kernels inside `compiling`; `_compiled` leaves the launcher for the first launch; `_Ahead`
    asks about every launch.
    """
    caches = step_kernels._change.device_caches
    asked = []
    knobs.runtime.jit_cache_hook = lambda **asks: asked.append(asks["key"]) and False
    try:
        with compiling():
            for _ in range(36):
                assert not launch(*change(), MOST=32, BLOCK=32)
                assert not launch(*change(), MOST=16, BLOCK=16)
            assert not Launcher.launched
        assert len(caches[0][0]) == 2 and Launcher.made == ["_change"] * 2
        assert not Launcher.launched and len(asked) == 2
        assert launch(*change(), MOST=32, BLOCK=32)
        assert Launcher.launched == ["_change"] and Launcher.made == ["_change"] * 2 and len(asked) == 2
    finally:
        knobs.runtime.jit_cache_hook = None
    hits = []
    knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    try:
        caches.clear()
        launch(*change(), MOST=32, BLOCK=32)
    finally:
        knobs.compilation.listener = None
    assert hits == [True]


def test_what_cannot_be_compiled_says_so_when_it_is_launched():
    """Mutation: `compiling` lets an error of one kernel through, or hides it for good."""
    with compiling():
        launch(*change(), MOST=32, BLOCK=24)  # no power of two
        launch(*change(), MOST=32, BLOCK=32)
    assert launch(*change(), MOST=32, BLOCK=32)
    with pytest.raises(triton.CompilationError):
        launch(*change(), MOST=32, BLOCK=24)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt-oss", "bamba", "deepseek-v3"])
def test_steps_need_no_kernel_that_was_not_compiled_ahead(name, tmp_path, monkeypatch):
    """Whatever sizes steps have, with whatever sampling: a kernel that is compiled in the middle of serving stalls
    everybody. Nothing is compiled here: what is asked for is noted.

    Mutation: `_widen` or `_end` without `do_not_specialize`; `_steady` copies nothing; `warm` without the largest
    tiles, or without the tokens that were drawn.
    """
    build(name, torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr(engine_module, "has_kernels", lambda device, dtype: True)
    monkeypatch.setattr(patches._Question, "stays_the_same", lambda self: True)
    monkeypatch.setattr(
        engine_module, "patch_for", lambda model, device: patches.patch(model, patches.triton_kernels())
    )
    monkeypatch.setattr(sampling, "_kernel", lambda device: choose)
    with noted() as ahead:
        llm = LLM(str(tmp_path), **FLAGS)
        engine: Any = llm.engine
        engine.sampler.warm()
        engine.executor.warm()
    with llm, noted() as needed:
        rng = np.random.default_rng(1)
        for lengths in ((1,), (16, 16), (7,) * 70, (33, 600), (599,), (300, 100, 1), (15,), (129,)):
            prompts: list[Any] = [{"prompt_token_ids": rng.integers(1, 90, length).tolist()} for length in lengths]
            for params in PARAMS:
                llm.generate(prompts, params, use_tqdm=False)
    assert {"_attend", "_merge", "_write", "_widen", "_end", "_choose_kernel"} <= {kernel for kernel, _ in needed}
    assert not needed - ahead
