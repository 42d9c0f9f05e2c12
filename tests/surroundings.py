"""What is the same for the tests on every machine: their own folders for caches, and nothing of the user's environment
that would change what is tested. Imported before anything that reads it, by conftest.py.

What is costly to make, the default model from its GGUF file, compiled kernels, environments of clients, stays from one
run to the next in build/tests, or where that cannot be written to, goes with the run. $SAPWOOD_TEST_VENVS and
$SAPWOOD_DEVICE are meant for tests, and stay.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_OURS = {"SAPWOOD_TEST_VENVS", "SAPWOOD_DEVICE", "SAPWOOD_TEST_CACHE", "TRITON_INTERPRET"}
_FOREIGN = (
    *("SAPWOOD_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TRITON_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_"),
    *("OPENAI_", "ANTHROPIC_", "LITELLM_", "REDIS_", "MC_", "MOONCAKE_", "LLGUIDANCE_", "LC_", "XDG_"),
)
_ALSO = {"LANG", "LANGUAGE", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONHASHSEED", "PYTHONWARNINGS", "TZ"}


def settle() -> None:
    """Once in each process of a run; processes that it starts inherit all of it."""
    environ = os.environ
    for name in list(environ):
        if name not in _OURS and (name.startswith(_FOREIGN) or name in _ALSO):
            del environ[name]
    cache = environ.setdefault("SAPWOOD_TEST_CACHE", str(_folder()))  # one for all workers
    environ["XDG_CACHE_HOME"] = cache
    environ["XDG_CONFIG_HOME"] = environ["XDG_DATA_HOME"] = f"{cache}/config"
    environ["HF_HOME"] = f"{cache}/huggingface"
    environ["HF_HUB_OFFLINE"] = "1"
    environ["TRITON_HOME"] = cache
    environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/inductor"
    environ["LC_ALL"] = "C.UTF-8"
    environ["OMP_NUM_THREADS"] = "1"  # many processes share few processors: threads of each would wait, spinning
    if "SAPWOOD_DEVICE" not in environ:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("NO_PROXY", "no_proxy"):
        environ[name] = ",".join(filter(None, (environ.get(name), "127.0.0.1", "localhost", "::1")))
    if "PYTHONPATH" in environ:  # also for processes in another folder
        environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, environ["PYTHONPATH"].split(os.pathsep)))
    os.umask(0o022)


def _folder() -> Path:
    kept = ROOT / "build" / "tests"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=kept):
            return kept
    except OSError:
        gone = tempfile.mkdtemp(prefix="sapwood-tests-")
        atexit.register(shutil.rmtree, gone, ignore_errors=True)
        return Path(gone)


assert "torch" not in sys.modules and "sapwood" not in sys.modules, "too late: they have read what is there"
settle()
