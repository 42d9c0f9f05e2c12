"""Small configs of every architecture of transformers: what the sweep (sweep.py) builds its models from.

A type's own default config is taken and its sizes are lowered by the names of their fields; of lists that say something
of every layer, so many layers are kept that every kind of layer stays. What that cannot know is in OVERRIDES. VARIANTS
are what real checkpoints set beyond the defaults: text-only use of models that take images or sound, shared K and V,
other ropes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128
POSITIONS = 512
LAYERS = 4
WINDOW = 24
_SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size",
    POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length "
    "model_max_length max_sequence_length",
    96: "intermediate_size decoder_ffn_dim ffn_dim n_inner dff dim_ff d_inner feed_forward_size ffn_hidden_size "
    "intermediate_size_mlp dense_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size encoder_ffn_dim",
    64: "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim input_embedding_size "
    "output_embedding_size lru_width attention_hidden_size pronunciation_embed_dim shape_embed_dim mamba_d_ssm "
    "dim_model_base",
    32: "moe_intermediate_size expert_ffn_hidden_size kv_channels hidden_size_per_layer_input prompt_mid_dim "
    "qk_head_dim router_hidden_size o_lora_rank",
    24: "q_lora_rank sliding_window window_size attention_window_size sliding_window_size",
    16: "head_dim d_head kv_lora_rank qk_nope_head_dim v_head_dim qk_rope_head_dim linear_key_head_dim dim_head "
    "linear_value_head_dim mamba_d_head mamba_head_dim linear_head_dim mamba_d_state state_size ssm_state_size "
    "attention_head_size rotary_dim swa_head_dim index_head_dim query_pre_attn_scalar adapter_rank laurel_rank "
    "time_step_rank mamba_dt_rank keep_window_size local_attention index_topk hc_lowrank gated_norm_rank num_centroids",
    8: "mamba_chunk_size chunk_size mamba_n_heads mamba_num_heads position_bias_num_buckets num_buckets d_rel "
    "rel_extent index_block_size",
    LAYERS: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts num_hidden_layers n_layer n_layers num_layers decoder_layers "
    "encoder_layers num_encoder_layers num_decoder_layers num_blocks linear_num_value_heads index_n_heads "
    "linear_num_heads zero_expert_num",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok "
    "num_experts_per_token moe_topk moe_k index_topk_blocks num_query_groups "
    "centroid_intermediate_top_k num_local_blocks",
    1: "n_group topk_group n_groups mamba_n_groups num_expert_group",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
# A tower for images or sound is never run: as small as it can be.
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
    "layers",
)
_TOWER = (
    _SMALL
    | dict.fromkeys(_DEPTHS, 1)
    | {"hidden_size": 32, "embed_dim": 32, "out_hidden_size": 64, "intermediate_size": 32, "head_dim": 8, "mlp_dim": 32}
)
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
_TOKENS |= {"cls_token_id": 1, "sep_token_id": 2}
_EVEN_NONE = ("num_key_value_heads", "head_dim")  # None by default: made of others, which may be None as well
_ANY = {"tie_word_embeddings": False, "is_decoder": True, "use_cache": True}
_LATENT = {"num_key_value_heads": 4}


class Case(NamedTuple):
    """One model of the sweep. `loader`: the Auto class of transformers that builds it."""

    name: str
    kind: str
    fields: dict[str, Any]
    loader: str


_LINEAR_FULL = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_SLIDING_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA_3N: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    "intermediate_size": 96,
    "num_kv_shared_layers": 2,
}
_GEMMA_4 = {"global_head_dim": 32, "num_global_key_value_heads": 1}
_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, **_GEMMA_4}
_INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16}
_DYNAMIC = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5]}
_LONG |= {"long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0], "original_max_position_embeddings": 256}

# Models that take images or sound too, with all of their weights, and asked for text alone.
_IMAGES = {"loader": "AutoModelForImageTextToText"}
_WITH_IMAGES = (
    "aya_vision",
    "deepseek_vl",
    "idefics3",
    "internvl",
    "kimi_k25",
    "lfm2_vl",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "ovis2",
    "paligemma",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)
_SOUND = {"loader": "AutoModelForMultimodalLM"}
_WITH_SOUND = ("granite_speech", "qwen2_audio", "voxtral")
_WITH_SECTIONS = ("glm4v", "qwen2_5_vl", "qwen2_vl")
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

# What the names of fields do not tell: by type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA_2},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "layer_types": _SLIDING_FULL,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "ctrl": {"n_positions": POSITIONS},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon_h1": {**_MAMBA_2, "mamba_d_ssm": 128},
    "gemma3n": {"text_config": _GEMMA_3N},
    "gemma3n_text": _GEMMA_3N,
    "gemma4": {"text_config": _GEMMA_4},
    "gemma4_text": _GEMMA_4,
    "gemma4_unified": {"text_config": _GEMMA_4},
    "gemma4_unified_text": _GEMMA_4,
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma4_unified_assistant": {"text_config": _GEMMA_4},
    "granitemoehybrid": {"layer_types": _LINEAR_FULL, **_MAMBA_2},
    "hunyuan_v1_dense": {"rope_parameters": _DYNAMIC},
    "hunyuan_v1_moe": {"rope_parameters": _DYNAMIC},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "moe_latent_size": None},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 32), "num_attention_heads": 2},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"num_key_value_heads": 4, "attention_head_dim": 32, "attention_hidden_size": 128},
    "zaya": {"num_experts_per_tok": 1},
}

# What checkpoints set beyond the defaults: name -> (type, its fields; "loader": the class that has all weights).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon with alibi": ("falcon", {"alibi": True}),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma4_text, shared K/V": ("gemma4_text", {**_GEMMA_4, "layer_types": _SLIDING_FULL, "num_kv_shared_layers": 2}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "phi3, longrope": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 256}),
    **{kind: (kind, _IMAGES) for kind in _WITH_IMAGES},
    **{kind: (kind, _SOUND) for kind in _WITH_SOUND},
    **{kind: (kind, {**_IMAGES, "text_config": {"rope_parameters": _SECTIONS}}) for kind in _WITH_SECTIONS},
}


def types() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def cases() -> dict[str, Case]:
    """Every type, then every variant, by name."""
    found = {kind: Case(kind, kind, OVERRIDES.get(kind, {}), "AutoModelForCausalLM") for kind in types()}
    for name, (kind, fields) in VARIANTS.items():
        loader = fields.get("loader", "AutoModelForCausalLM")
        fields = {key: value for key, value in fields.items() if key != "loader"}
        found[name] = Case(name, kind, merged(OVERRIDES.get(kind, {}), fields), loader)
    return found


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Fields of both, the second's before the first's, also inside of configs in a config."""
    both = dict(first)
    for key, value in second.items():
        inside = key.endswith("_config") and isinstance(both.get(key), dict) and isinstance(value, dict)
        both[key] = merged(both[key], value) if inside else value
    return both


def small_config(case: Case) -> Any:
    return _small(transformers.CONFIG_MAPPING[case.kind], case.fields, _SMALL)


def _small(kind: Any, fields: dict[str, Any], sizes: dict[str, int]) -> Any:
    """A config of this class, its sizes lowered; `fields` as they are, those of configs in it for these."""
    return kind(**_fields(kind, fields, sizes))


def _fields(kind: Any, fields: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    default = _default(kind, fields)
    told = default.to_dict()
    inner = {name: getattr(default, name, None) for name in getattr(kind, "sub_configs", {})}
    made: dict[str, Any] = {}
    for name, value in told.items():
        if name in inner:
            continue
        if name in sizes and (name in _EVEN_NONE or isinstance(value, int)) and not isinstance(value, bool):
            made[name] = sizes[name]
        elif name in _ANY or (name in _TOKENS and value is not None):
            made[name] = {**_TOKENS, **_ANY}[name]
    made |= _layers(told, made)
    if made.get("kv_lora_rank"):
        made |= {name: 4 for name in _LATENT if name in told}
    for name, config in inner.items():
        if config is None and not isinstance(fields.get(name), dict):
            continue
        if name in fields and fields[name] is None:
            continue
        tower = sizes if name in ("text_config", "decoder", "language_config", "llm_config") else _TOWER
        more = fields.get(name) or {}
        sub = type(config) if config is not None else transformers.CONFIG_MAPPING[more["model_type"]]
        if "model_type" in more:
            sub = transformers.CONFIG_MAPPING[more["model_type"]]
        more = {key: value for key, value in more.items() if key != "model_type"}
        made[name] = {**_fields(sub, more, tower), "model_type": sub.model_type}
    for name, value in fields.items():
        if name not in inner or value is None:
            made[name] = value
    return made


def _default(kind: Any, fields: dict[str, Any]) -> Any:
    try:
        return kind()
    except Exception:  # some have no valid default
        return kind(**fields)


def _layers(told: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer, cut so that every kind of layer is there at least once, and four layers."""
    count = next((told[name] for name in _COUNTS if isinstance(told.get(name), int)), 0)
    lists = {
        name: value
        for name, value in told.items()
        if isinstance(value, list) and 3 < len(value) == count and 2 * len(set(map(str, value))) <= count
    }
    if not lists:
        return {}
    rows = list(zip(*(map(str, value) for value in lists.values()), strict=True))
    keep = [at for at, row in enumerate(rows) if row not in rows[:at]]
    keep = sorted({*keep, *[at for at in range(count) if at not in keep][: max(0, LAYERS - len(keep))]})
    cut = {name: [value[at] for at in keep] for name, value in lists.items()}
    return {**cut, **{name: len(keep) for name in _COUNTS if name in made}}


_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
