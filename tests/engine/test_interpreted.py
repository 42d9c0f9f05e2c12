"""The tests of GPU kernels, where there is no GPU: in a process that has Triton and the numpy it needs (`make env` puts
them beside the other packages), under Triton's interpreter, or compiled for a card that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = Path(sys.prefix) / "interpreter"


pytestmark = pytest.mark.skipif(
    not (BESIDE / "triton").is_dir(), reason="Triton is not installed, and `make` could not install it"
)


@pytest.mark.parametrize(
    "file",
    [
        "engine/test_triton_attention.py",
        "engine/test_triton_kernels.py",
        "models/test_gpu_steps.py",
        "models/test_ragged.py",
    ],
)
def test_under_the_interpreter(file):
    """All tests of the file run there, and pass.

    Mutation: those that the notes of these files name.
    """
    passes(file, interpret=True)


def test_compiled():
    """Those of what Triton compiles, and when.

    Mutation: those that the notes of the file name.
    """
    passes("models/test_kernel_variants.py", interpret=False)


def passes(file: str, interpret: bool) -> None:
    path = os.pathsep.join([str(BESIDE), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", f"tests/{file}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and " passed" in said, said[-4000:]
