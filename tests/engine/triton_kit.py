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
from sapwood.engine.kernels import attention as triton_attention  # noqa: E402
from sapwood.engine.kernels import elementwise as triton_elementwise  # noqa: E402
from sapwood.engine.kernels import lora as triton_lora  # noqa: E402
from sapwood.engine.kernels import sampling as triton_sampling  # noqa: E402
from sapwood.engine.kernels import states as triton_states  # noqa: E402
from sapwood.engine.kernels import steps as triton_steps  # noqa: E402

__all__ = ["CARD", "DEVICE", "QUIET", "triton_attention", "triton_elementwise", "triton_lora", "triton_sampling"]
__all__ += ["triton_states", "triton_steps"]
DEVICE = "cuda" if CARD else "cpu"
QUIET = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of the interpreter
