"""How fast the kernels of recurrent layers are, beside functions of transformers: `python -m tests.gpu.tune_states`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from sapwood.engine.kernels import states as state_kernels
from sapwood.engine.models.recurrent import Runs

HEADS, WIDE = 32, 128  # of Qwen3-Next; Bamba's are 128 of 64, with states of 128


def milliseconds(run: Callable[[], Any], times: int = 5) -> float:
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / times


def runs(lengths: list[int]) -> Runs:
    whose = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    first = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    rows = torch.stack([first, torch.tensor(lengths), torch.arange(1, len(lengths) + 1)], 1).int()
    return Runs(whose.cuda(), rows.cuda())


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def measured(lengths: list[int]) -> str:
    tokens, given = sum(lengths), runs(lengths)
    q, k, v = (some(tokens, 1, HEADS, WIDE) for _ in range(3))
    g, beta = -some(tokens, 1, HEADS, dtype=torch.float32).abs(), some(tokens, 1, HEADS).sigmoid()
    state = some(65, HEADS, WIDE, WIDE, dtype=torch.float32)
    conv, weight, x = some(65, 8192, 4), some(8192, 4), some(tokens, 8192, 1)
    x2, state2 = some(tokens, 128, 64), some(65, 128, 64, 128, dtype=torch.float32)
    dt, b, c = some(tokens, 128, 1).expand(-1, -1, 64), some(tokens, 1, 128), some(tokens, 1, 128)
    a = -some(128, dtype=torch.float32).abs()[:, None, None].expand(-1, 64, 128)
    d = some(128)[:, None].expand(-1, 64)
    delta_rule = partial(state_kernels.delta_rule, use_qk_l2norm_in_kernel=True)
    scan = partial(state_kernels.scan, D=d, dt_bias=d, dt_softplus=True)
    told = [
        milliseconds(lambda: delta_rule(given, q, k, v, g, beta, state)),
        milliseconds(lambda: state_kernels.conv(given, x, conv, weight, None, "silu")),
        milliseconds(lambda: scan(given, state2, x2, dt, a, b, c)),
    ]
    line = f"{len(lengths)} rows, {tokens} tokens: "
    line += f"delta rule {told[0]:.3f} ms, convolution {told[1]:.3f}, scan {told[2]:.3f}"
    if len(lengths) > 1:
        return line
    one = [each.transpose(0, 1).contiguous() for each in (q, k, v, g, beta)]
    kept = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": state[:1]}
    rule = partial(qwen.torch_chunk_gated_delta_rule, g=one[3], beta=one[4], **kept)
    more = {"chunk_size": 256, "D": d[:, 0], "initial_states": state2[:1], "return_final_states": True}
    chunks = partial(bamba.mamba2_chunk_scan, dt_bias=d[:, 0], dt_softplus=True, **more)
    flat = (x2[None], dt[None, ..., 0], a[:, 0, 0], b[None], c[None])
    theirs = milliseconds(lambda: rule(*one[:3]), 2), milliseconds(lambda: chunks(*flat), 2)
    return f"{line}; theirs {theirs[0]:.1f}, -, {theirs[1]:.1f}"


def main() -> None:
    for lengths in ([1] * 64, [1] * 63 + [449], [512] * 16, [8192]):
        sys.stdout.write(measured(lengths) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
