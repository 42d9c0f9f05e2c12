"""The executor of a GPU on a CPU, under Triton's interpreter: the same tokens as the other executor's, whatever the
architecture; with chunks, shared prefixes, one step ahead, failing steps, penalties and log-probabilities. Graphs and
speed are for `make gpu-check` and `make gpu-bench`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("Triton's interpreter needs numpy before 2.4", allow_module_level=True)

from sapwood.engine import engine as engine_module
from sapwood.engine.executor import gpu_executor as gpu_steps
from sapwood.engine.executor import packing
from sapwood.engine.executor.gpu_executor import GpuExecutor
from sapwood.engine.executor.graphs import Graphs
from sapwood.engine.executor.packing import Sizes
from sapwood.engine.executor.rows import pieces
from sapwood.engine.llm import LLM
from sapwood.engine.params import SamplingParams

from ..ages import age
from .zoo import build, prompt, torch

if torch.cuda.is_available():
    pytest.skip("on a GPU this is for `make gpu-check`", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of the interpreter
FLAGS: dict[str, Any] = {"dtype": "float32", "device_cache": "1MiB", "max_num_seqs": 4, "page_size": 8}
FLAGS |= {"max_model_len": 96, "max_num_batched_tokens": 24, "progress": False, "device": "cpu"}
SHARED = prompt(1, 20)
PROMPTS = [SHARED + prompt(2, 9), prompt(3, 5), SHARED + prompt(4, 3), SHARED + prompt(2, 9)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4),
    SamplingParams(temperature=0, max_tokens=5, presence_penalty=1.5, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=3),
    SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1),
]


def answers(folder: Any, overlap: int, fails: bool = False, at: int = 0) -> list[Any]:
    """`at`: how far the engine has counted before."""
    with LLM(str(folder), overlap=overlap, **FLAGS) as llm:
        if at:
            age(llm.engine.scheduler, at)
        if fails:
            begin, steps = llm.engine.executor.begin, iter(range(100))

            def sometimes(plan: Any) -> None:
                if next(steps) in (1, 4):
                    raise RuntimeError("on purpose")
                begin(plan)

            llm.engine.executor.begin = sometimes  # type: ignore[method-assign]
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in PROMPTS], PARAMS, use_tqdm=False)
        assert isinstance(llm.engine.executor, GpuExecutor) == engine_module.has_kernels(llm.engine.device, "float32")
    return [
        (
            output.outputs[0].token_ids,
            output.num_cached_tokens,
            [sorted(each) for each in output.outputs[0].logprobs or ()],
            [each and each[token].logprob for each, token in zip(output.prompt_logprobs or (), tokens, strict=False)],
        )
        for output, tokens in zip(outputs, PROMPTS, strict=True)
    ]


def same(one: list[Any], other: list[Any]) -> bool:
    """The same tokens, and log-probabilities of prompts within what float32 rounds off."""
    return all(a[:3] == b[:3] and a[3] == pytest.approx(b[3], abs=1e-3) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt-oss", "bamba", "qwen3-next", "deepseek-v3"])
def test_the_same_as_the_other_executor(name, tmp_path, monkeypatch):
    """Also where a step is computed by two graphs, one after the other.

    Mutation: `Packer.send` forgets `write_from`, the changes of tables, or what -1 stands for; `GpuExecutor._run` sends
    the changes with every piece, or keeps logits that the next graph writes over.
    """
    build(name, torch.float32).save_pretrained(tmp_path)
    right = answers(tmp_path, 1)
    assert len({tuple(tokens) for tokens, *_ in right}) > 2 and len(right[3][3]) == len(PROMPTS[3])
    monkeypatch.setattr(engine_module, "has_kernels", lambda device, dtype: True)
    assert same(answers(tmp_path, 1), right)
    if name == "qwen3":
        assert [tokens for tokens, *_ in answers(tmp_path, 1, fails=True)] == [tokens for tokens, *_ in right]
        steps: list[int] = []
        monkeypatch.setattr(packing, "BUCKET_TOKENS", (8, 16))
        monkeypatch.setattr(Graphs, "captured", True)
        monkeypatch.setattr(gpu_steps, "pieces", lambda *given: steps.append(len(found := pieces(*given))) or found)
        assert [tokens for tokens, *_ in answers(tmp_path, 0)] == [tokens for tokens, *_ in right]
        assert {*steps} == {1, 2}


def test_S16_steps_pass_what_31_bits_hold(tmp_path, monkeypatch):
    """Kernels are given places, slots and tokens, never the number of a step: however many there were before, the
    answers are the same.

    Mutation: `DecodeRows.shown` adds `np.int32(self.planned)`.
    """
    build("qwen3", torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr(engine_module, "has_kernels", lambda device, dtype: True)
    young = answers(tmp_path, 1)
    assert same(answers(tmp_path, 1, at=2**31 - 2), young)


def test_there_is_a_size_for_every_step():
    """Whatever the numbers of slots and tokens: a step that fits a padded size finds it, of single tokens or not.

    Mutation: `Sizes` takes no bucket for none where there are more slots than the largest has tokens.
    """
    for slots, most in ((4, 24), (64, 8192), (600, 8192), (300, 256)):
        sizes = Sizes({}, {}, slots, most, torch.device("cpu"))
        for tokens in range(1, min(most, 512) + 1, 7):
            bucket = sizes.bucket(tokens)
            assert bucket is not None and sizes.known[bucket, False].tokens >= tokens
            assert tokens > slots or sizes.known[bucket, True].runs >= tokens
        assert sizes.bucket(513) is None
