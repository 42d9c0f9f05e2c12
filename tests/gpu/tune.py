"""How fast the attention kernels are, by their sizes of tile: `python -m tests.gpu.tune`. For who changes kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
import triton

from sapwood.engine.executor.attention import ScoreOptions
from sapwood.engine.executor.work_list import work_list
from sapwood.engine.kernels import attention as kernels
from sapwood.engine.kernels.attention import Tuned

SHAPE = kernels.HeadShape(8, 4, 128, 128)
PAGES = 12000


def microseconds(tuned: Tuned, starts: Sequence[int], lengths: Sequence[int]) -> float:
    memory = torch.randn(PAGES + 1, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    built = kernels.build(SHAPE, tuned, kernels.Processor.of(torch.device("cuda")), 2)
    first, length = np.array(starts), np.array(lengths)
    columns = int((first + length).max()) // 16 + 2
    table = torch.randint(1, PAGES, (len(first), columns), device="cuda", dtype=torch.int32)
    work = work_list(first, length, np.arange(len(first)), None, built.tiles)
    tokens = int(length.sum())
    items = torch.zeros(built.tiles.most_items(len(first), tokens), 8, dtype=torch.int32)
    merges = torch.zeros(built.tiles.most_parts() // 2, 4, dtype=torch.int32)
    items[: len(work.items)] = torch.from_numpy(work.items)
    merges[: len(work.merges)] = torch.from_numpy(work.merges)
    scratch = kernels.Scratch(*kernels.Scratch.sizes(built), "cuda")
    q = torch.randn(tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    given = (items.cuda(), merges.cuda(), scratch, None, ScoreOptions(128**-0.5, None, None))

    def run() -> None:
        kernels.attend(built, q, memory[:, 0], memory[:, 1], table, *given)

    return 1e3 * float(triton.testing.do_bench_cudagraph(run, rep=20))


def main() -> None:
    def say(what: str, tuned: Tuned, measure: object) -> None:
        try:
            told = measure()  # type: ignore[operator]
        except Exception as error:
            told = f"failed: {str(error).strip().splitlines()[0]:.80}"
        sys.stdout.write(f"{what} {tuned} {told}\n")
        sys.stdout.flush()

    def decode(tuned: Tuned) -> list[int]:
        rows = ([575] * 64, [8191] * 8, [64 * n for n in range(1, 65)], [575] * 256)
        return [round(microseconds(tuned, row, [1] * len(row))) for row in rows]

    def mixed(tuned: Tuned) -> list[int]:
        tails = ((2048, 33), (2048, 193), (2048, 449), (32768, 33))
        return [round(microseconds(tuned, [575] * 63 + [start], [1] * 63 + [n])) for start, n in tails]

    def prefill(tuned: Tuned) -> list[int]:
        """TFLOP/s of causal work."""
        each = 4 * 32 * 128 / 1e6
        return [
            round(each * 16 * 512 * 513 / 2 / microseconds(tuned, [0] * 16, [512] * 16)),
            round(each * 8192 * 8193 / 2 / microseconds(tuned, [0], [8192])),
            round(each * 2048 * (6144 + 1024) / microseconds(tuned, [6144], [2048])),
        ]

    for keys, warps, stages in ((64, 4, 2), (64, 4, 3), (32, 4, 3), (32, 2, 4), (64, 2, 3), (128, 4, 2), (128, 8, 2)):
        tuned = Tuned(16, keys, warps, stages)
        say("decode 64 x 576, 8 x 8K, 64 x mixed, 256 x 576, us:", tuned, lambda tuned=tuned: decode(tuned))
    for keys, warps, stages in ((64, 4, 2), (64, 4, 3), (32, 4, 3), (128, 8, 2), (128, 4, 2)):
        tuned = Tuned(64, keys, warps, stages)
        say("mixed 33, 193, 449, 33 over 32K, us:", tuned, lambda tuned=tuned: (mixed(tuned), decode(tuned)))
    for keys, warps, stages in ((64, 8, 2), (64, 8, 3), (64, 4, 3), (128, 8, 2), (32, 8, 4), (32, 4, 3)):
        tuned = Tuned(128, keys, warps, stages)
        say("prefill 16 x 512, 8K, 2K on 6K, TFLOP/s:", tuned, lambda tuned=tuned: prefill(tuned))


if __name__ == "__main__":
    main()
