"""Small models of many architectures with seeded random weights, and what transformers itself says with them.

Weights are wide enough that answers differ from token to token, and embeddings are not tied: else one token repeats,
and a test passes whatever is broken. In float64, so that tokens can be promised.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install sapwood[engine]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install sapwood[engine]")

VOCABULARY = 128
_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_PURE_MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}

# name -> (config class, its fields beyond the base)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 1.0}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6}),
    "gpt-oss": (
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1], **_MAMBA}),
    "falcon-h1": ("FalconH1Config", {"mamba_d_ssm": 128, **_MAMBA}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            **_EXPERTS,
        },
    ),
    "lfm2": ("Lfm2Config", {"full_attn_idxs": [1], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}),
    "mamba2": (
        "Mamba2Config",
        {**_PURE_MAMBA, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "mamba": ("MambaConfig", {**_PURE_MAMBA, "state_size": 8}),
    "deepseek-v3": ("DeepseekV3Config", {**_LATENT, **_ROUTED}),
    # a block of attention that stands in several layers, between Mamba 2
    "zamba2": (
        "Zamba2Config",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "num_mem_blocks": 1,
            "num_key_value_heads": 4,
            "attention_head_dim": 32,
            "attention_hidden_size": 128,
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "chunk_size": 8,
            "adapter_rank": 8,
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    # layers that attend twice
    "diffllama": ("DiffLlamaConfig", {"num_hidden_layers": 2, "head_dim": 16}),
    # layers that attend by themselves
    "falcon": ("FalconConfig", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gptj": ("GPTJConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_inner": 96}),
    # layers that read the K and V of others
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 9,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 9,
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    # a model that takes images, for text alone
    "gemma3-vision": (
        "Gemma3Config",
        {
            "text_config": {**_BASE, "head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": False,
        },
    ),
    # other frequencies beyond the context that it was first trained for
    "phi3": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 128,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
                "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0],
                "original_max_position_embeddings": 128,
            },
        },
    ),
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
# Latent attention as others have it: tested in test_latents.py alone.
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3 with yarn": (
        "DeepseekV3Config",
        {**_LATENT, **_ROUTED, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek-v3 without q_lora": ("DeepseekV3Config", {**_LATENT, **_ROUTED, "q_lora_rank": None}),
    "deepseek-v2": ("DeepseekV2Config", {**_LATENT, **_ROUTED, "topk_method": "greedy"}),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", {**_LATENT, **_ROUTED}),
    "longcat-flash": (
        "LongcatFlashConfig",
        {
            **_LATENT,
            "head_dim": 8,
            "num_layers": 2,  # each with two attentions
            "num_hidden_layers": 4,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "minicpm3": ("MiniCPM3Config", {**_LATENT, "dim_model_base": 64}),
    "youtu": ("YoutuConfig", {**_LATENT}),
    "axk1": ("AXK1Config", {**_LATENT, **_ROUTED}),
    "kimi-linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            **_ROUTED,
            "q_lora_rank": None,
            "num_local_experts": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "bailing-hybrid": (
        "BailingHybridConfig",
        {
            **_LATENT,
            **_ROUTED,
            "num_local_experts": 4,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
}
# Kinds of which another stands for all but the plainest tests in `make test`.
LATER = ("nemotron-h", "diffllama", "gptj", "gemma3n", "gemma4", "gemma3-vision", "phi3")
each_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LATER else name for name in CONFIGS]
)
STATEFUL = ("bamba", "falcon-h1", "qwen3-next", "lfm2", "mamba2", "mamba", "zamba2", "nemotron-h")


def config_of(name: str, **more: Any) -> Any:
    kind, fields = {**CONFIGS, **LATENT}[name]
    base = {} if "mamba" in name and "Mamba" in kind else _BASE
    return getattr(transformers, kind)(**{**base, **fields, **more})


def build(name: str, dtype: Any = None, **more: Any) -> Any:
    """A model, the same each time."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.9 / parameter.shape[-1] ** 0.5)
    model = model.to(torch.float64 if dtype is None else dtype).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def model_of(name: str) -> Any:
    """The model that transformers answers with; ours is another object with the same weights. Its eager attention has
    soft-caps and sinks in every version."""
    model = build(name)
    model.set_attn_implementation("eager")
    return model


@functools.cache
def _answer(name: str, tokens: tuple[int, ...], new: int) -> tuple[int, ...]:
    ids = torch.tensor([tokens])
    said = model_of(name).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return tuple(said[0, len(tokens) :].tolist())


def answer(name: str, tokens: list[int], new: int) -> list[int]:
    """What `generate` of transformers says, greedily."""
    return list(_answer(name, tuple(tokens), new))
