"""What a model remembers, by its config and by its dry forward; and models that are refused, by name and reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sapwood.cache import CacheGroup
from sapwood.engine.model import ServedModel
from sapwood.engine.remembers import Seen, Unsupported, config_window, refuse, remembered
from sapwood.engine.transfer_torch import TorchArena

from .zoo import build, config_of, torch

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised .gptq."),
    "an encoder": ({"is_encoder_decoder": True}, "an encoder"),
    "pictures": ({"vision_config": object()}, "multimodal input .vision_config."),
    "shared K and V": ({"num_kv_shared_layers": 3}, "3 of its layers share K and V"),
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
    seen = Seen(None, (2, 16), (2, 16), torch.float32, 4)
    assert len(remembered(text, {0: seen, 1: seen._replace(window=9)}, {}, 4)) == 2
    for wrong, says in (
        ({0: seen, 1: seen}, "window of None"),
        ({0: seen._replace(window=9), 1: seen._replace(window=9)}, "layer 0 is full_attention"),
        ({0: seen}, "layer 1 is sliding_attention .* called no attention"),
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
