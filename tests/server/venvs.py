"""Environments for programs that do not install beside us, or beside each other: each is made once by pip, and found
again by what it was to hold. They lie below $SAPWOOD_TEST_VENVS, or in the cache folder of the tests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from sapwood.engine.loading.usercache import cache_folder

CLIENTS = Path(__file__).parent / "clients"
_INSTALL = 900  # seconds
_FOREIGN = (  # what would lead a client elsewhere
    *("OPENAI_", "ANTHROPIC_", "LITELLM_", "HF_", "PYTHONPATH"),
    *("LANGCHAIN_", "LANGSMITH_", "LOGFIRE_", "OTEL_"),
)


def folder() -> Path:
    given = os.environ.get("SAPWOOD_TEST_VENVS")
    if not given:
        return cache_folder("test-venvs")
    Path(given).mkdir(parents=True, exist_ok=True)
    return Path(given).resolve()


@cache
def python_with(*requirements: str) -> Path | str:
    """A Python that has these packages; or why there is none. Whoever wants the same meanwhile waits for it."""
    told = "\n".join((*requirements, *map(str, sys.version_info[:2])))
    name = re.sub(r"[^\w.-]+", "-", requirements[0])
    home = folder() / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:10]}"
    python, done = home / "bin" / "python", home / "installed"
    with open(f"{home}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return python
        try:
            _command(sys.executable, "-m", "venv", "--clear", str(home))
            _command(str(python), "-m", "pip", "install", "--quiet", "--prefer-binary", *requirements)
        except subprocess.CalledProcessError as error:
            said = [line for line in error.stderr.splitlines() if line.startswith("ERROR:")] or ["no word why"]
            return f"{', '.join(requirements)} cannot be installed: {' '.join(said)[-500:]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{', '.join(requirements)} cannot be installed: {error!s:.200}"
        done.touch()
    return python


def _command(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=_INSTALL)


def run(python: Path, script: str, *arguments: str, seconds: float = 600.0, **variables: str) -> str:
    """What a script of clients/ prints. AssertionError with its last words if it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    environment = {**kept, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **variables}
    done = subprocess.run(
        [str(python), str(CLIENTS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
