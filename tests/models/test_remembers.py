"""What a model remembers, by its config and by its dry forward; and models that are refused, by name and reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sapwood.cache import CacheGroup
from sapwood.engine.models.kv_groups import ProbedLayer, Unsupported, config_window, longest_context, refuse, remembered
from sapwood.engine.models.model import ServedModel
from sapwood.engine.transfer.torch_mover import TorchArena

from .zoo import build, config_of, torch, transformers

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised .gptq."),
    "an encoder": ({"is_encoder_decoder": True}, "an encoder"),
    "chunked attention": ({"layer_types": ["chunked_attention"]}, "chunked attention"),
    "an unknown layer": ({"layer_types": ["full_attention", "telepathy"]}, "unknown kinds: telepathy"),
    "dynamic rotary": ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type .dynamic."),
    "longrope by layer": ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope type .longrope."),
    "longrope, as it was written": ({"rope_scaling": {"type": "longrope"}}, "rope type .longrope."),
    "alibi": ({"alibi": True}, "alibi"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_p13_models_that_cannot_be_served_are_refused_by_name(what):
    """Mutation: the check it is named after is left out of `refuse`."""
    fields, says = REFUSED[what]
    with pytest.raises(Unsupported, match=f"toy cannot be served yet: .*{says}"):
        refuse(SimpleNamespace(model_type="toy", **fields))
    refuse(SimpleNamespace(model_type="toy", rope_parameters={"rope_type": "yarn"}))


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama", [("full", "full", None)]),
        ("mistral", [("window9", "window", 9)]),
        ("gemma3", [("full", "full", None), ("window9", "window", 9)]),
        ("bamba", [("full", "full", None), ("state", "state", None)]),
        ("mamba2", [("state", "state", None)]),
    ],
)
def test_p07_groups_are_read_from_the_model(name, groups):
    """Mutation: `Probe.attend` does not note the window."""
    served = ServedModel(build(name), 4)
    assert [(group.name, group.family, group.window) for group in served.groups] == groups


def test_p07_the_window_is_read_wherever_it_stands():
    """Mutation: `config_window` does not look at `use_sliding_window`."""
    assert config_window(config_of("mistral")) == 9
    assert config_window(SimpleNamespace(sliding_window=9, use_sliding_window=False)) is None
    assert config_window(SimpleNamespace(sliding_window=None)) is None


def test_config_and_dry_forward_must_agree():
    """Mutation: `_agree` looks at one of the two alone."""
    text = SimpleNamespace(layer_types=["full_attention", "sliding_attention"], sliding_window=9)
    seen, other = (ProbedLayer(layer, None, (2, 16), (2, 16), torch.float32, 4, False) for layer in range(2))
    assert len(remembered(text, [seen, other._replace(window=9)], {}, 4)) == 2
    for wrong, says in (
        ([seen, other], "window of None"),
        ([seen._replace(window=9), other._replace(window=9)], "layer 0 is full_attention"),
        ([seen], "layer 1 is sliding_attention .* called no attention"),
    ):
        with pytest.raises(Unsupported, match=says):
            remembered(text, wrong, {}, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scan_that_begins_from_zeros_is_known_in_any_precision(dtype):
    """Mamba 1's chunks do not go on from a state, Mamba 2's do; weights that small states hide behind bf16's rounding,
    and weights so small that states hardly show in what comes out.

    Mutation: `Mixers._chunks_go_on` asks in the model's own dtype; it looks at what comes out alone.
    """
    for name, loops, small in (("mamba", True, 1.0), ("mamba", True, 0.02), ("mamba2", False, 1.0)):
        model = build(name, getattr(torch, dtype), num_hidden_layers=1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(small)
        served = ServedModel(model, 4)
        groups = [CacheGroup(g.name, g.family, 2, 0, g.window, g.layout.page_bytes) for g in served.groups]
        before = [(parameter, parameter.dtype, parameter.data_ptr()) for parameter in served.model.parameters()]
        served.bind(TorchArena.allocate(groups, {group.name: group.layout for group in served.groups}))
        assert list(served.mixers._loops.values()) == [loops], name
        assert [(parameter, parameter.dtype, parameter.data_ptr()) for parameter in served.model.parameters()] == before


def test_a_mixer_is_asked_in_the_dtype_of_its_weights():
    """Some keep a few of their numbers in float32, whatever the model is in.

    Mutation: `_asked` takes the dtype of a mixer's first parameter.
    """
    model = build("qwen3-next")
    mixer = model.model.layers[0].linear_attn
    for number in (mixer.dt_bias, mixer.A_log):
        number.data = number.data.float()
    assert next(mixer.parameters()).dtype is torch.float32 and model.dtype is torch.float64
    served = ServedModel(model, 4)
    groups = [CacheGroup(g.name, g.family, 2, 0, g.window, g.layout.page_bytes) for g in served.groups]
    served.bind(TorchArena.allocate(groups, {group.name: group.layout for group in served.groups}))
    assert list(served.mixers._loops.values()) == [False]


# ---- what is not understood is refused


def small(kind: str, **fields: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **fields)).eval()


def test_f21_attention_without_positions_is_refused():
    """A decoder that counts its positions itself would begin every row at its place in the batch.

    Mutation: `_look` does not ask what the forward takes.
    """
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    with pytest.raises(Unsupported, match=r"bart cannot be served yet: its forward takes no position_ids"):
        ServedModel(small("bart", vocab_size=64, encoder_layers=1, **sizes), 4)


def test_f21_a_mask_of_the_models_own_is_refused():
    """Mutation: `_attend` takes a mask and ignores it."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(Unsupported, match=r"doge cannot be served yet: DogeAttention hands a mask of its own"):
        ServedModel(small("doge", vocab_size=64, **sizes), 4)


def test_f21_a_tensor_that_attention_does_not_know_is_refused():
    """Mutation: `_attend` swallows what it does not know."""
    model = build("llama")
    attention = model.model.layers[1].self_attn
    inner = attention.forward
    attention.forward = lambda *args, **more: inner(*args, **more, position_bias=torch.zeros(1))
    with pytest.raises(Unsupported, match=r"llama cannot be served yet: LlamaAttention hands position_bias"):
        ServedModel(model, 4)


def test_f21_attention_to_later_tokens_is_refused():
    """An encoder that nobody has told to be a decoder.

    Mutation: `_attend` does not look at `is_causal`.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(Unsupported, match=r"bert cannot be served yet: BertSelfAttention attends to later tokens"):
        ServedModel(small("bert", vocab_size=64, is_decoder=False, **sizes), 4)
    assert ServedModel(small("bert", vocab_size=64, is_decoder=True, **sizes), 4).groups


def test_f21_a_layer_that_attends_twice_keeps_both():
    """Mutation: what a call keeps is known by its layer's number."""
    served = ServedModel(build("diffllama"), 4)
    (group,) = served.groups
    assert [part.layer for part in group.layout.parts if part.name == "k"] == [0, 1, 2, 3]
    assert served.model.config.num_hidden_layers == 2


def test_f21_a_block_of_several_layers_keeps_each():
    """Mutation: a block's calls are known by the number it was made with."""
    served = ServedModel(build("zamba2"), 4)
    attention = next(group for group in served.groups if group.family == "full")
    attends = [module for module in served.model.modules() if type(module).__name__ == "Zamba2Attention"]
    assert {module.layer_idx for module in attends} == {-1}, "they have no number"
    assert [part.layer for part in attention.layout.parts if part.name == "k"] == [0, 1]


def test_f21_an_error_of_the_dry_forward_is_a_refusal():
    """Whatever the model raises, in one line and by name; but for memory, which is not its fault.

    Mutation: `_refusing` lets through what it does not know.
    """
    model = build("llama")

    def fails(error: BaseException) -> Any:
        def forward(input_ids: Any = None, position_ids: Any = None, **_: Any) -> Any:
            raise error

        return forward

    model.forward = fails(AttributeError("'Config' object has no attribute 'layers'\nand more of it"))
    with pytest.raises(Unsupported, match=r"llama cannot be served yet: .* \('Config' .* 'layers'\)$") as told:
        ServedModel(model, 4)
    assert isinstance(told.value, ValueError)
    model.forward = fails(MemoryError())
    with pytest.raises(MemoryError):
        ServedModel(model, 4)


def test_f21_a_config_that_lacks_something_is_a_refusal(monkeypatch):
    """Mutation: `ServedModel` reads the vocabulary's size outside of `_refusing`."""
    model = build("llama")
    monkeypatch.setattr("sapwood.engine.models.model.text_config", lambda config: SimpleNamespace())
    with pytest.raises(Unsupported, match=r"llama cannot be served yet: .* 'vocab_size'"):
        ServedModel(model, 4)


def test_f21_windows_by_place_in_the_batch_are_refused():
    """GPT-Neo attends by itself and cuts its windows out of a buffer: by where keys stand, which here are those of all
    rows. Its rows alone would be right, and rows together wrong, however short those of a self-check are.

    Mutation: `_found` does not look at the buffers.
    """
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
    with pytest.raises(Unsupported, match=r"gpt_neo cannot be served yet: transformer.h.0.attn.* is a mask of its own"):
        ServedModel(small("gpt_neo", vocab_size=64, window_size=256, **sizes), 4)


# ---- what is not too careful


def test_f21_models_that_attend_by_themselves_are_gathered():
    """Mutation: `_found` looks at calls of attention alone."""
    served = ServedModel(build("gptj"), 4)
    assert served.gathers and [group.name for group in served.groups] == ["full"]
    assert not ServedModel(build("llama"), 4).gathers


def test_ropes_that_change_with_the_length_have_a_limit():
    """longrope up to the length it was first trained for; dynamic with a fixed alpha (Hunyuan) without one.

    Mutation: `_rope_limit` does not look at alpha; it takes the whole context of a longrope.
    """
    long = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    for fields, limit in (
        ({"rope_parameters": long, "max_position_embeddings": 131072}, 4096),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 2048}, 2048),
        ({"rope_parameters": {"full_attention": long, "sliding_attention": {"rope_type": "default"}}}, 4096),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 512}, 512),
        ({"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0}, "max_position_embeddings": 512}, None),
        ({"rope_parameters": {"rope_type": "yarn"}}, None),
    ):
        text = SimpleNamespace(model_type="toy", **fields)
        refuse(text)
        found = longest_context(text)
        assert (found and found[0]) == limit, fields
