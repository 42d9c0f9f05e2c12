"""What cannot work, found before torch is imported and anything large is read: whoever starts an engine learns at once
what he has mistyped. EngineConfig has checked by then what a flag says by itself."""

from __future__ import annotations

from pathlib import Path

from ..flags import EngineConfig
from .model_files import ModelError, config_in, files_in
from .weights import place_of


def check_start(config: EngineConfig) -> Path | None:
    """The model's folder, if it is one here. ValueError if model or tokenizer are not there, or are none. What a hub
    would say is not asked."""
    place = place_of(config.model, config.load_format)
    if place is None:
        pass
    elif place.is_file():
        _check_gguf(place)
    elif config.load_format == "dummy":
        config_in(place)
    else:
        files_in(place, str(config.model))
    if config.tokenizer is not None and not config.skip_tokenizer_init:
        path = Path(config.tokenizer).expanduser()
        if not path.exists() and (path.is_absolute() or path.suffix):
            raise ModelError(f"the tokenizer in {config.tokenizer} is not there: give a folder or a tokenizer.json")
    return place if place is not None and place.is_dir() else None


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            begins = file.read(4)
    except OSError as problem:
        raise ModelError(f"{path}: {problem}") from None
    if begins != b"GGUF":
        raise ModelError(f"{path} is no GGUF file: it begins with {begins!r}")
