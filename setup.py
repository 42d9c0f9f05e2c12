"""How sapwood is built: as the Python it is; or, with SAPWOOD_COMPILE=1, with the inner rooms of cache and scheduler
compiled.

mypyc turns them, unchanged, into an extension, with which the cache costs a sixth to a third less; it needs a C
compiler. What callers speak to directly stays Python: it answers a wrong type with a clear error, and mypyc with a bare
TypeError.
"""

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

OUTSIDE = {
    "cache": {"__init__", "check", "events", "explain", "facade", "group", "held", "namespace", "outline", "tokens"},
    "scheduler": {"__init__", "config", "events", "outcome", "plan", "policy", "prefetch", "request", "scheduler"},
}
WANTED = os.environ.get("SAPWOOD_COMPILE", "0") == "1"


def compiled() -> list[Any]:
    if not WANTED or not {"bdist_wheel", "build_ext"} & set(sys.argv):  # asked what it is or needs: nothing to build
        return []
    from mypyc.build import mypycify

    rooms = [
        str(path)
        for package, outside in OUTSIDE.items()
        for path in sorted(Path("src/sapwood", package).glob("*.py"))
        if path.stem not in outside
    ]
    return list(mypycify(["--strict", "--always-false=ENGINE", *rooms], opt_level="3", debug_level="0"))


setup(ext_modules=compiled(), setup_requires=["mypy>=1.11", "numpy>=1.26,<3"] if WANTED else [])
