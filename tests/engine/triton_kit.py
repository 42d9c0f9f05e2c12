"""Kernels of our own for tests: on a GPU where there is one, else under Triton's interpreter. Where there is neither,
whoever imports this is skipped."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    pytest.importorskip("triton", reason="no GPU and no Triton, whose interpreter would stand in for one")
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("Triton's interpreter needs numpy before 2.4", allow_module_level=True)
from sapwood.engine.kernels import attention as attention_kernels  # noqa: E402
from sapwood.engine.kernels import elementwise as elementwise_kernels  # noqa: E402
from sapwood.engine.kernels import lora as lora_kernels  # noqa: E402
from sapwood.engine.kernels import sampling as sampling_kernels  # noqa: E402
from sapwood.engine.kernels import states as state_kernels  # noqa: E402
from sapwood.engine.kernels import steps as step_kernels  # noqa: E402

__all__ = ["CARD", "DEVICE", "QUIET", "attention_kernels", "elementwise_kernels", "lora_kernels", "sampling_kernels"]
__all__ += ["state_kernels", "step_kernels"]
DEVICE = "cuda" if CARD else "cpu"
QUIET = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of the interpreter
