"""The parts of `make gpu-check`, by name (check.py says what each is about)."""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

from ..models import gpu_kernels
from ..models.zoo import CONFIGS
from . import same
from .checked import checked
from .kit import WRONG, must, say
from .parity import parity

# What must be there, first.
FIRST = ("llama", "qwen3", "gemma3", "gpt-oss", "mistral", "bamba", "qwen3-next")
ORDER = (*FIRST, *(name for name in CONFIGS if name not in FIRST))


def adapters() -> None:
    for check in gpu_kernels.CHECKS:
        for problem in check():
            must(False, problem)


def kernels() -> None:
    files = ["tests/engine/test_triton_attention.py", "tests/engine/test_triton_kernels.py"]
    options = ["-q", "-p", "no:cacheprovider", "--noconftest"]
    ran = subprocess.run([sys.executable, "-m", "pytest", *options, *files], capture_output=True, text=True)
    say("kernels: " + (ran.stdout.strip().splitlines() or ["nothing"])[-1])
    must(ran.returncode == 0, "kernels: " + (ran.stdout + ran.stderr)[-3000:])


def check(names: list[str]) -> int:
    """These parts, or, of some architectures, their parity. How much was wrong."""
    some = [name for name in ORDER if name in names]
    parts: dict[str, Callable[[], None]] = {
        **{name: getattr(same, name) for name in ("graphs", "ahead", "masked", "updated", "cached")},
        "checked": partial(checked, some),
        "adapters": adapters,
        "parity": partial(parity, some or list(ORDER)),
        "every": partial(same.every, some or list(ORDER)),
        "kernels": kernels,
    }
    unknown = set(names) - set(parts) - set(CONFIGS)
    must(not unknown, f"there are no parts {sorted(unknown)}")
    wanted = [name for name in parts if name in names] or (["parity"] if some else list(parts))
    for name in wanted:
        begin = time.perf_counter()
        try:
            parts[name]()
        except Exception as error:
            traceback.print_exc()
            must(False, f"{name}: {type(error).__name__}: {error}")
        say(f"-- {name}: {time.perf_counter() - begin:.0f} s")
    return len(WRONG)
