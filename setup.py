"""How sapwood is built: as the Python it is; or, with SAPWOOD_COMPILE=1, with the inner rooms of the cache compiled.

mypyc turns them, unchanged, into an extension of about twice the speed; it needs mypy and a C compiler. What callers
speak to directly stays Python: it answers a wrong type with a clear error, and mypyc with a bare TypeError.
"""

import os
from pathlib import Path
from typing import Any

from setuptools import setup

CACHE = Path("src/sapwood/cache")
OUTSIDE = {"__init__", "check", "events", "explain", "facade", "group", "namespace", "tokens"}


def compiled() -> list[Any]:
    if os.environ.get("SAPWOOD_COMPILE", "0") != "1":
        return []
    from mypyc.build import mypycify

    rooms = [str(path) for path in sorted(CACHE.glob("*.py")) if path.stem not in OUTSIDE]
    return list(mypycify(["--strict", *rooms], opt_level="3", debug_level="0"))


setup(ext_modules=compiled())
