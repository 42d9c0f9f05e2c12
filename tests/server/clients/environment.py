"""Environments for clients that do not install beside us, or beside each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_INSTALL = 600  # seconds


def python_with(package: str, folder: Path) -> Path | str:
    """A Python that has a package, in an environment below `folder`, made if need be; or why there is none."""
    home = folder / package.replace("==", "-")
    python, done = home / "bin" / "python", home / "installed"
    if done.exists():
        return python
    try:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True, timeout=_INSTALL)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=_INSTALL)
    except subprocess.CalledProcessError as error:
        said = error.stderr if isinstance(error.stderr, str) else (error.stderr or b"").decode(errors="replace")
        return f"{package} cannot be installed: {(said.strip().splitlines() or ['no word why'])[-1]:.200}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{package} cannot be installed: {error!s:.200}"
    done.touch()
    return python


def run(python: Path, script: str, url: str) -> str:
    """What a script of this folder prints. AssertionError with its last words if it fails."""
    done = subprocess.run([str(python), str(HERE / script), url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout
