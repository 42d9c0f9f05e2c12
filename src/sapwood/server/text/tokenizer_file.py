"""tokenizer.json of a model, which the API process reads without transformers; made from other forms, once, in the
user's cache folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sapwood.engine.loading.model_files import ModelError
from sapwood.engine.loading.usercache import cache_folder, made_once

_OTHER_FORMS = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")


def tokenizer_file(folder: str) -> str | None:
    """The path of tokenizer.json; None if there is no tokenizer in the folder."""
    where = Path(folder).expanduser()
    if where.is_file() and where.suffix == ".json":
        return str(where)
    if (where / "tokenizer.json").is_file():
        return str(where / "tokenizer.json")
    sources = [where / name for name in (*_OTHER_FORMS, *_BESIDE) if (where / name).is_file()]
    if not any(path.name in _OTHER_FORMS for path in sources):
        if not where.is_dir():
            raise ModelError(f"the tokenizer in {folder} is not there: give a folder or a tokenizer.json")
        return None
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:24]

    def convert(target: Path) -> None:
        from transformers import AutoTokenizer

        try:
            made = AutoTokenizer.from_pretrained(str(where), trust_remote_code=False, local_files_only=True)
            made.backend_tokenizer.save(str(target / "tokenizer.json"))
        except (OSError, ValueError, AttributeError, ImportError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"the tokenizer in {folder} cannot be read: {why}") from error

    return str(made_once(cache_folder("tokenizers") / content, convert) / "tokenizer.json")
