"""`sapwood bench --profile`: parts of a step are what they are called, and add up. None of the figures is a bar."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sapwood.bench.profile import PARTS, kernels, part_of, replaced, shortened, traced
from sapwood.bench.run import Prompts, opened, run
from sapwood.cli import main
from sapwood.engine.flags import EngineConfig

from .zoo import config_of

FLAGS = (
    "--load-format dummy --device-cache 8MiB --max-num-seqs 8 --page-size 4 --max-model-len 300 "
    "--max-num-batched-tokens 128 --no-progress"
)
SMALL = "--batch-size 3 --input-len 24 --tail-len 8 --num-iters 5"


@pytest.fixture
def folder(tmp_path, request) -> Path:
    """A model's folder with nothing but its config."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(getattr(request, "param", "llama")).to_dict()))
    return tmp_path


def kind_of(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("matmuls", "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT"),
        ("matmuls", "nvjet_sm90_hss_320x128_64x3_2x1_v_bz_coopB_TNN"),
        (
            "matmuls",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off",
        ),
        (
            "matmuls",
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align8>(Params)",
        ),
        ("matmuls", "ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_nn"),
        ("matmuls", "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>(int)"),
        ("matmuls", "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(cublasSplitKParams)"),
        ("matmuls", "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupProblemShape>>()"),
        ("matmuls", "_shrink_kernel"),
        ("matmuls", "aten::addmm"),
        ("matmuls", "aten::linear"),
        ("matmuls", "aten::baddbmm"),
        ("matmuls", "aten::_grouped_mm"),
        ("attention", "_attend"),
        ("attention", "_write"),
        ("attention", "_merge"),
        ("attention", "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>()"),
        ("attention", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"),
        ("attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("sampling", "_choose_kernel"),
        ("sampling", "_end"),
        (
            "sampling",
            "void at::native::reduce_kernel<512, 1, ReduceOp<c10::BFloat16, at::native::MaxOps<c10::BFloat16>>>",
        ),
        ("rest", "void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::MeanOps<float, float>>>(int)"),
        ("rest", "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>()"),
        ("rest", "_norm_kernel"),
        ("rest", "_rotary_kernel"),
        ("rest", "_gated_kernel"),
        ("rest", "_widen"),
        ("rest", "Memcpy HtoD (Pinned -> Device)"),
        ("rest", "aten::lgamma"),
        ("rest", "aten::mul"),
    ],
)
def test_names_tell_the_part(part, name):
    """Kernels as cuBLAS, CUTLASS, torch and Triton call them, on Hopper and before, and torch's operations.

    Mutation: `_NAMES` has matmuls before attention; leaves "nvjet" out; takes any "mm" for a product.
    """
    assert part_of(name) == part


def test_names_of_our_kernels_are_those_that_are_looked_for():
    """Whoever renames a kernel must tell the profile. Read as text: Triton need not be here.

    Mutation: `_attend` of kernels/attention.py gets another name.
    """
    engine = Path(__file__).parents[2] / "src" / "sapwood" / "engine" / "kernels"
    for file, names in {
        "attention.py": ("_write", "_attend", "_merge"),
        "sampling.py": ("_choose_kernel",),
        "steps.py": ("_end",),
        "lora.py": ("_shrink_kernel", "_expand_kernel"),
    }.items():
        text = (engine / file).read_text()
        assert all(f"def {name}(" in text for name in names)


def test_names_are_shortened():
    """Without namespaces; the operation inside is what tells one from another.

    Mutation: `shortened` cuts at the first "<".
    """
    assert shortened("void cublasLt::splitKreduce_kernel<32, 16>(int)") == "splitKreduce_kernel<32, 16>(int)"
    assert shortened("aten::mm") == "mm"
    long = shortened("void at::native::elementwise_kernel<128, 4, at::native::BinaryFunctor<" + 90 * "x" + ">>")
    assert long.startswith("elementwise_kernel<128, 4, BinaryFunctor<xx") and len(long) == 60 and long.endswith("...")


def kernel(name: str, start: float, end: float, device: str = "CUDA", mark: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
        is_user_annotation=mark,
    )


def test_a_moment_of_the_device_counts_once():
    """A copy beside a product, one within another, waits, marks, and what the host did: only what keeps the device
    busy counts, in microseconds from its beginning, or from the end of what ran before.

    Mutation: `kernels` adds durations; counts what has "Sync" in its name; leaves the order as it comes.
    """
    found = list(
        kernels(
            [
                kernel("Memcpy HtoD (Pinned -> Device)", 8, 14),
                kernel("nvjet_tst_64x8", 0, 10),
                kernel("_attend", 20, 30),
                kernel("_write", 22, 28),
                kernel("Event Sync", 30, 90),
                kernel("cudaGraphLaunch", 0, 50, "CPU"),
                kernel("step", 0, 90, mark=True),
            ]
        )
    )
    assert [(part, name, round(1e6 * seconds)) for part, name, seconds in found] == [
        ("matmuls", "nvjet_tst_64x8", 10),
        ("rest", "Memcpy HtoD (Pinned -> Device)", 4),
        ("attention", "_attend", 10),
        ("attention", "_write", 0),
    ]


def test_on_a_cpu_parts_are_told_by_where_things_are_called(folder):
    """Products within attention belong to it, as does writing K and V; the engine is afterwards what it was.

    Mutation: `operations` looks at an operation's own name first; `_marking_attention` leaves `attend` as it is.
    """
    config = EngineConfig(
        model=str(folder), load_format="dummy", device_cache="8MiB", max_model_len=300, progress=False
    )
    with opened(config) as engine:
        with traced(engine) as ran:
            run(engine, Prompts(engine, 0).some(2, 20), [3, 3])
        assert not {"forward", "draw"} & {*vars(engine.served), *vars(engine)}
    assert {each.part for each in ran.values()} == {*PARTS}
    layers = 3
    steps = ran["sampling: max"].calls if "sampling: max" in ran else ran["sampling: argmax"].calls
    assert ran["attention: index_put_"].calls == 2 * layers * steps, "K and V of every layer"
    assert ran["attention: scaled_dot_product_attention"].calls >= layers * steps
    products = sum(each.calls for name, each in ran.items() if name in ("matmuls: mm", "matmuls: addmm"))
    assert products == (7 * layers + 1) * steps


@pytest.mark.parametrize("folder", ["llama", "gemma3", "bamba", "deepseek-v3"], indirect=True)
def test_parts_add_up(folder, capsys):
    """Each kind of step, in milliseconds and in percent: parts and host are the total. Windows, states and latents.

    Mutation: `split` leaves sampling out; `_begun` submits prompts whose beginning is not cached.
    """
    file = folder / "profile.json"
    assert (
        main(["bench", "--profile", "--model", str(folder), *FLAGS.split(), *SMALL.split(), "--output-json", str(file)])
        == 0
    )
    read = json.loads(file.read_text())
    assert [*read["figures"]] == [f"{kind}, {unit}" for kind in ("decode", "mixed", "prefill") for unit in ("ms", "%")]
    for name, row in read["figures"].items():
        assert sum(row[part] for part in (*PARTS, "host")) == pytest.approx(row["total"]), name
        assert all(row[part] >= 0 for part in row), name
        assert row["python"] == pytest.approx(row["host"]), "on a CPU nothing is hidden"
        assert name.endswith("ms") or row["total"] == pytest.approx(100)
    # Prompts of a model with states end a chunk where a state is kept.
    states = kind_of(folder) == "bamba"
    assert read["notes"][:3] == [
        "decode: 3 rows, contexts from 24 on",
        f"mixed: 3 rows and 8 tokens of {'2 prompts' if states else '1 prompt'}, behind 24 that are cached",
        "prefill: 64 tokens of 8 prompts" if states else "prefill: 128 tokens of 6 prompts",
    ]
    for kind in ("decode", "mixed", "prefill"):
        table = read["tables"][f"{kind}: what takes longest"]
        times = [row["ms"] for row in table.values()]
        assert len(times) == 10 and times == sorted(times, reverse=True)
        assert sum(times) < read["figures"][f"{kind}, ms"]["total"]
        assert all(name.split(": ")[0] in PARTS and row["calls"] > 0 for name, row in table.items())
    said = capsys.readouterr().out
    assert "mixed: what takes longest\n" in said and "attention  sampling" in said


def test_what_does_not_fit_is_refused(folder, capsys):
    """More rows than run at a time; prompts longer than the context; a cache in which rows wait for each other.

    Mutation: `_alike` takes steps as they come.
    """
    start = ["bench", "--profile", "--model", str(folder), *FLAGS.split(), *SMALL.split()]
    assert main([*start, "--batch-size", "9"]) == 2
    assert "max_num_seqs must be 9 or more for these steps, got 8" in capsys.readouterr().err
    assert main([*start, "--input-len", "290"]) == 2
    assert "must fit into the context, which is 300 tokens, got 290" in capsys.readouterr().err
    assert main([*start, "--tail-len", "126"]) == 2
    assert "mixed step, which has 128 tokens (--max-mixed-tokens), got 3 and 126" in capsys.readouterr().err
    little = "--device-cache 256KiB --max-model-len 100 --batch-size 8 --input-len 60"
    assert main([*start, *little.split()]) == 1
    assert "8 rows should have been: more --device-cache" in capsys.readouterr().err


def test_torch_without_a_profiler_says_so(folder, capsys, monkeypatch):
    """One line, no traceback.

    Mutation: `traced` does not ask whether Kineto is there.
    """
    monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
    assert main(["bench", "profile", "--model", str(folder), *FLAGS.split(), *SMALL.split()]) == 1
    assert "sapwood bench profile: torch was built without Kineto for a CPU" in capsys.readouterr().err


def test_a_method_that_is_replaced_comes_back():
    """Also if something is raised meanwhile.

    Mutation: `replaced` has no `finally`.
    """

    class Owner:
        def two(self) -> int:
            return 2

    owner = Owner()
    with pytest.raises(KeyError), replaced(owner, "two", lambda two: lambda: two() + 1):
        assert owner.two() == 3
        raise KeyError
    assert owner.two() == 2 and not vars(owner)
