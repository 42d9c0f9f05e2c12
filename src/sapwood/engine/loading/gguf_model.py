"""GGUF models of known architectures as folders that transformers loads: config, tensors, tokenizer. What is not known
is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .gguf import Floats, GGUFFile, GGUFTensor
from .model_files import WHOLE, ModelError, StreamedTensor, write_safetensors

VERSION = 1  # of what is written; a folder that was made by another version is made anew

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_INNER = {
    **{name: f"self_attn.{ours}" for name, ours in _ATTENTION.items()},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "attn_norm": "input_layernorm",
}
_LLAMA = _INNER | {"ffn_norm": "post_attention_layernorm"}
_GEMMA3 = _INNER | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def convert(source: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors, generation_config.json and the tokenizer's files into a folder."""
    file = GGUFFile(source)
    model = _Model(file)
    config = model.config()
    write_tokenizer(file.metadata, config["max_position_embeddings"], source, folder)
    _write(folder / "config.json", config)
    roles = {"bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id")}
    keys = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom")]
    ends = {file.metadata[key] for key in keys if key in file.metadata}
    _write(folder / "generation_config.json", roles | {"eos_token_id": sorted(ends)})
    write_safetensors(folder / WHOLE, model.tensors())


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))


class _Model:
    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.kind = file.metadata.get("general.architecture")
        if self.kind not in ("llama", "gemma3"):
            raise ModelError(
                f"{file.path}: GGUF models of architecture {self.kind!r:.40} are not supported (only llama and "
                "gemma3); a folder with safetensors of the same model may be"
            )
        for key in ("rope.scaling.type", "rope.scaling.factor", "expert_count"):
            if self.get(key, 0) not in (0, "none"):
                raise ModelError(f"{file.path}: {self.kind}.{key} is not supported in GGUF models")

    def get(self, key: str, otherwise: Any = None) -> Any:
        found = self.file.metadata.get(f"{self.kind}.{key}", otherwise)
        if found is None:
            raise ModelError(f"{self.file.path}: {self.kind}.{key} is missing")
        return found

    def whole(self, key: str, otherwise: int | None = None) -> int:
        found = self.get(key, otherwise)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 2**31:
            raise ModelError(f"{self.file.path}: {self.kind}.{key} must be a positive integer, got {found!r:.60}")
        return found

    @property
    def heads(self) -> tuple[int, int]:
        heads = self.whole("attention.head_count")
        return heads, self.whole("attention.head_count_kv", heads)

    @property
    def head_dim(self) -> int:
        return self.whole("attention.key_length", self.whole("embedding_length") // self.heads[0])

    def config(self) -> dict[str, Any]:
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{self.file.path}: tensor token_embd.weight is missing")
        for key in ("rope.dimension_count", "attention.value_length"):
            if self.get(key, self.head_dim) != self.head_dim:
                raise ModelError(f"{self.file.path}: {self.kind}.{key} other than the head's {self.head_dim} values")
        ids = {f"{role}_token_id": self.file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
        common = {
            "vocab_size": embedding.shape[0],
            "hidden_size": self.whole("embedding_length"),
            "intermediate_size": self.whole("feed_forward_length"),
            "num_hidden_layers": self.whole("block_count"),
            "num_attention_heads": self.heads[0],
            "num_key_value_heads": self.heads[1],
            "head_dim": self.head_dim,
            "max_position_embeddings": self.whole("context_length"),
            "rms_norm_eps": _shortest(self.get("attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "dtype": "bfloat16",  # what to compute in on a GPU; on disk is every value as it dequantises
            **ids,
            "pad_token_id": self.file.metadata.get("tokenizer.ggml.padding_token_id"),
        }
        return common | (self._llama() if self.kind == "llama" else self._gemma3())

    def _llama(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rope_parameters": self._rope(self.get("rope.freq_base", 10000.0)),
        }

    def _gemma3(self) -> dict[str, Any]:
        layers = range(1, self.whole("block_count") + 1)
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.whole("attention.sliding_window"),
            "layer_types": ["full_attention" if layer % 6 == 0 else "sliding_attention" for layer in layers],
            "rope_parameters": {
                "full_attention": self._rope(self.get("rope.freq_base", 1000000.0)),
                "sliding_attention": self._rope(10000.0),
            },
        }

    def _rope(self, base: float) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": base}

    def tensors(self) -> Iterator[StreamedTensor]:
        for tensor in self.file.tensors.values():
            change = self._change(tensor)
            yield StreamedTensor(
                self._name(tensor.name), tensor.dtype, tensor.shape, partial(self._read, tensor, change)
            )

    def _name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if suffix == "weight" and stem in _OUTER:
            return f"{_OUTER[stem]}.weight"
        block, number, inner = (*stem.split(".", 2), "", "")[:3]
        ours = (_LLAMA if self.kind == "llama" else _GEMMA3).get(inner)
        if suffix != "weight" or block != "blk" or not number.isdecimal() or ours is None:
            raise ModelError(f"{self.file.path}: tensor {name} is not known in a {self.kind} model")
        return f"model.layers.{number}.{ours}.weight"

    def _change(self, tensor: GGUFTensor) -> Callable[[Floats], Floats] | None:
        """What GGUF stores otherwise than transformers does."""
        stem = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if self.kind == "llama" and stem in ("attn_q", "attn_k"):
            return partial(_rows_in_halves, heads=self.heads[stem == "attn_k"])
        if self.kind == "gemma3" and stem.endswith("_norm"):
            if tensor.dtype != "F32":
                raise ModelError(f"{self.file.path}: tensor {tensor.name} of a gemma3 model must be F32")
            return lambda values: values - np.float32(1)  # GGUF has 1 + w, transformers w
        return None

    def _read(self, tensor: GGUFTensor, change: Callable[[Floats], Floats] | None) -> Floats:
        values = self.file.read(tensor)
        return values if change is None else change(values)


def _rows_in_halves(values: Floats, heads: int) -> Floats:
    """Rotary pairs of a head as neighbours (GGUF's llama) become rows of its first and second half (transformers)."""
    if values.shape[0] % (2 * heads):
        raise ModelError(f"{values.shape[0]} rows of Q or K do not divide into {heads} heads")
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _shortest(value: float) -> float:
    """The shortest decimal number that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


# ---- the tokenizer, as tokenizer.json and tokenizer_config.json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens; 5 is unused, 6 a byte
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def write_tokenizer(metadata: Mapping[str, Any], context: int, source: Path, folder: Path) -> None:
    data = _TokenizerMetadata(metadata, source)
    tokenizer = _byte_level(data) if data.model == "gpt2" else _sentencepiece(data)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    config |= {f"{role}_token": data.tokens[token] for role, token in data.roles.items()}
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


class _TokenizerMetadata:
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


def _byte_level(data: _TokenizerMetadata) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    kind = data.get("pre", "default")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splits = {
        "gpt-2": words,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]),
    }
    if kind not in splits:
        raise ModelError(
            f"{data.source}: tokenizer.ggml.pre {kind!r:.40} is not supported (only {' and '.join(splits)})"
        )
    merges = [tuple(merge.split(" ")) for merge in data.get("merges", [])]
    tokenizer = Tokenizer(_bpe(data, models.BPE, merges))
    tokenizer.pre_tokenizer = splits[kind]
    tokenizer.decoder = decoders.ByteLevel()
    return data.finish(tokenizer)


def _sentencepiece(data: _TokenizerMetadata) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = data.tokens[data.roles["unk"]] if "unk" in data.roles else None
    options = {"unk_token": unknown, "byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer(_bpe(data, models.BPE, _merges_by_score(data), **options))
    spaces = normalizers.Replace(" ", "▁")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if data.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        back.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(back)
    return data.finish(tokenizer)


def _merges_by_score(data: _TokenizerMetadata) -> list[tuple[str, str]]:
    """Sentencepiece joins the two neighbours whose union has the best score: every way to halve a token is a merge."""
    scores: Sequence[float] = data.get("scores", [])
    if len(scores) != len(data.tokens):
        raise ModelError(f"{data.source}: tokenizer.ggml.scores has {len(scores)} entries, not {len(data.tokens)}")
    normal = {data.tokens[i] for i in data.of_type(NORMAL)}
    found = []
    for number in sorted(data.of_type(NORMAL), key=lambda number: -scores[number]):
        token = data.tokens[number]
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found += [(left, right) for left, right in halves if left in normal and right in normal]
    return found


def _bpe(data: _TokenizerMetadata, model: Any, merges: list[Any], **options: Any) -> Any:
    try:
        return model(data.ids, merges, **options)
    except Exception as problem:  # the library raises nothing more special
        raise ModelError(f"{data.source}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({problem})") from None
