"""Whether an engine on a GPU computes what it should: `make gpu-check`, or `python -m tests.gpu.check` with the names
of some parts, or of architectures.

graphs      a graph's logits and pages, and the same step's without it, bit for bit, over random mixes
ahead       one step ahead and step by step: the same tokens
masked      grammars and allowed tokens are obeyed one step ahead, also where steps fail
updated     other weights take effect under graphs that were captured before
cached      an answer with its prompt in the cache: as far from the cold one as bf16 is from itself
checked     the self-check of a start: no architecture is refused by chance
adapters    patched models and adapters, mixed and alone (tests/models/gpu_kernels.py)
parity      logits of many architectures in bf16, against transformers' own in float32: no further off than
            transformers' own in bf16, and what is wrong on purpose is seen
every       each architecture as an engine: with graphs, if it can be captured, and without; the same tokens
kernels     against the formula, on random shapes with NaN where nobody may look (tests/engine/test_triton_*.py)

Without names, five processes share the parts: much of the time is spent on a CPU, to start and to compile.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import subprocess
import sys
import time

SHARES = (
    ["graphs", "ahead", "masked", "updated", "cached"],
    ["parity"],
    ["every"],
    ["checked"],
    ["adapters", "kernels"],
)
_MOST = 7.5 * 60  # seconds


def share() -> int:
    """All parts, in processes beside each other. How many of these have found something wrong."""
    until = time.monotonic() + _MOST
    running = {" ".join(some): subprocess.Popen([sys.executable, "-m", "tests.gpu.check", *some]) for some in SHARES}
    wrong = 0
    for name, process in running.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
            sys.stdout.write(f"WRONG {name}: no time was left\n")
        wrong += process.returncode != 0
    return wrong


def main(names: list[str]) -> None:
    begin = time.monotonic()
    if names:
        from .parts import check  # what it imports takes long, and whoever only shares the parts needs none of it

        logging.getLogger("sapwood").setLevel(logging.CRITICAL)  # of every step that fails on purpose a line is written
        wrong = check(names)
    else:
        wrong = share()
    found = "right" if not wrong else f"{wrong} WRONG"
    sys.stdout.write(f"{' '.join(names) or 'all'}: {found}, {time.monotonic() - begin:.0f} s\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    main(parser.parse_args().names)
