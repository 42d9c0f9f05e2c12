"""A tokenizer from the metadata of a GGUF file, as tokenizer.json and tokenizer_config.json. Others are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .model_files import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens; 5 is unused, 6 a byte
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def write_tokenizer(metadata: Mapping[str, Any], context: int, source: Path, folder: Path) -> None:
    told = _Told(metadata, source)
    tokenizer = _byte_level(told) if told.model == "gpt2" else _sentencepiece(told)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    config |= {f"{role}_token": told.tokens[token] for role, token in told.roles.items()}
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


class _Told:
    """What the metadata says, checked."""

    def __init__(self, metadata: Mapping[str, Any], source: Path) -> None:
        self.metadata, self.source = metadata, source
        self.model = self.get("model", "")
        self.tokens: list[str] = self.get("tokens", [])
        self.types: list[int] = self.get("token_type", [NORMAL] * len(self.tokens))
        if self.model not in ("gpt2", "llama"):
            raise ModelError(
                f"{source}: tokenizer.ggml.model {self.model!r:.40} is not supported (only gpt2 and llama)"
            )
        if not self.tokens or len(self.types) != len(self.tokens) or len(set(self.tokens)) != len(self.tokens):
            raise ModelError(f"{source}: tokenizer.ggml.tokens and tokenizer.ggml.token_type do not fit")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        keys = {role: f"tokenizer.ggml.{key}_token_id" for role, key in _ROLES.items()}
        self.roles = {role: metadata[key] for role, key in keys.items() if key in metadata}
        for role, token in self.roles.items():
            if not isinstance(token, int) or not 0 <= token < len(self.tokens):
                raise ModelError(f"{source}: the {role} token is {token!r:.40}, of {len(self.tokens)} tokens")

    def get(self, key: str, otherwise: Any) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", otherwise)

    def finish(self, tokenizer: Any) -> Any:
        """Tokens that are matched before anything else, and the token in front of every text."""
        from tokenizers import AddedToken, processors

        tokenizer.add_special_tokens(
            [AddedToken(self.tokens[i], normalized=False, special=True) for i in self.of_type(UNKNOWN, CONTROL)]
        )
        tokenizer.add_tokens([AddedToken(self.tokens[i], normalized=False) for i in self.of_type(USER_DEFINED)])
        if self.get("add_bos_token", self.model == "llama") and "bos" in self.roles:
            bos = self.tokens[self.roles["bos"]]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, self.roles["bos"])]
            )
        return tokenizer

    def of_type(self, *types: int) -> list[int]:
        return [number for number, kind in enumerate(self.types) if kind in types]


def _byte_level(told: _Told) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    kind = told.get("pre", "default")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splits = {
        "gpt-2": words,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]),
    }
    if kind not in splits:
        raise ModelError(
            f"{told.source}: tokenizer.ggml.pre {kind!r:.40} is not supported (only {' and '.join(splits)})"
        )
    merges = [tuple(merge.split(" ")) for merge in told.get("merges", [])]
    tokenizer = Tokenizer(_bpe(told, models.BPE, merges))
    tokenizer.pre_tokenizer = splits[kind]
    tokenizer.decoder = decoders.ByteLevel()
    return told.finish(tokenizer)


def _sentencepiece(told: _Told) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = told.tokens[told.roles["unk"]] if "unk" in told.roles else None
    options = {"unk_token": unknown, "byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer(_bpe(told, models.BPE, _merges_by_score(told), **options))
    spaces = normalizers.Replace(" ", "▁")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if told.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        back.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(back)
    return told.finish(tokenizer)


def _merges_by_score(told: _Told) -> list[tuple[str, str]]:
    """Sentencepiece joins the two neighbours whose union has the best score: every way to halve a token is a merge."""
    scores: Sequence[float] = told.get("scores", [])
    if len(scores) != len(told.tokens):
        raise ModelError(f"{told.source}: tokenizer.ggml.scores has {len(scores)} entries, not {len(told.tokens)}")
    normal = {told.tokens[i] for i in told.of_type(NORMAL)}
    found = []
    for number in sorted(told.of_type(NORMAL), key=lambda number: -scores[number]):
        token = told.tokens[number]
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found += [(left, right) for left, right in halves if left in normal and right in normal]
    return found


def _bpe(told: _Told, model: Any, merges: list[Any], **options: Any) -> Any:
    try:
        return model(told.ids, merges, **options)
    except Exception as problem:  # the library raises nothing more special
        raise ModelError(f"{told.source}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({problem})") from None
