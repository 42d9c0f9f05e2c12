"""Modules that are computed in another way: products that are one, with torch in place of kernels. What kernels do is
in tests/engine/test_triton_kernels.py."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sapwood.engine.loading.weights import read_update, tensors_of
from sapwood.engine.lora.adapters import Adapters
from sapwood.engine.models.fused import Fused, FusedPart
from sapwood.engine.models.model import ServedModel
from sapwood.engine.models.patches import TORCH, Kernels, patch, patch_for

from .test_adapters import WORDS, adapter, alone, any_options, close, flat, model_of
from .zoo import build

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft")]
PATCHED = ("llama", "qwen3", "mistral", "gemma2", "gemma3")
IDS = torch.arange(11)[None] * 7 % 97


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("name", PATCHED)
def test_a_patched_model_is_the_model(name):
    """All attention modules and MLPs of the families are patched, and the logits are those of before.

    Mutation: `_joined` puts the weights in another order; `Gated` acts on the second half.
    """
    model = build(name, torch.float32)
    before = logits(model)
    found = patch(model, TORCH)
    layers = model.config.num_hidden_layers
    assert sorted(found.values()) == [layers, layers]
    assert torch.allclose(logits(model), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt-oss", "mamba2", "deepseek-v3"])
def test_others_run_as_they_are(name):
    """Mutation: `_known` takes any class whose name ends so."""
    model = build(name, torch.float32)
    forwards = [module.forward for module in model.modules()]
    assert patch(model, TORCH) == {}
    assert [module.forward for module in model.modules()] == forwards


def test_nothing_is_patched_on_a_cpu():
    """Mutation: `patch_for` does not look at the device."""
    assert patch_for(build("llama"), torch.device("cpu")) == {}


def test_a_class_that_computes_something_else_is_left_alone(monkeypatch):
    """A later version of a class may compute something else: it is asked, and then runs as it is.

    Mutation: `stays_the_same` does not compare; or leaves the patch in place.
    """
    llama = build("llama", torch.float32)
    kind = type(llama.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.up_proj(x)))
    before = logits(llama)
    found = patch(llama, TORCH)
    assert kind.__name__ not in found
    assert torch.allclose(logits(llama), before, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_is_wrong_is_not_used():
    """Mutation: `stays_the_same` compares nothing for a norm, or for rotary positions."""
    llama = build("llama", torch.float32)
    before = logits(llama)
    wrong = Kernels(
        lambda x, weight, eps, plus_one: x * weight,
        lambda q, k, cos, sin: (q * cos, k * cos),
        lambda q, k, cos, sin: True,
        {"SiLUActivation": lambda both: both.chunk(2, -1)[0]},
    )
    patch(llama, wrong)
    assert torch.allclose(logits(llama), before, rtol=1e-5, atol=1e-5)


def test_weights_are_there_once_and_under_their_names(tmp_path):
    """Parts of a product are rows of one matrix. A checkpoint's names are those of before, an update changes what is
    computed, and the end gives all memory back.

    Mutation: `Fused` registers its weights as persistent; `_joined` copies and leaves the parts where they are.
    """
    model, other = build("qwen3", torch.float32), build("qwen3", torch.float32)
    names = set(tensors_of(model))
    patch(model, TORCH)
    assert set(tensors_of(model)) == names
    attention = model.model.layers[1].self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1

    with torch.no_grad():
        for tensor in tensors_of(other).values():
            tensor.mul_(torch.linspace(0.5, 1.5, len(tensor)).reshape(-1, *[1] * (tensor.ndim - 1)))
    save_file({name: tensor.contiguous() for name, tensor in tensors_of(other).items()}, tmp_path / "new.safetensors")
    update = read_update(model, tmp_path / "new.safetensors")
    assert update.whole
    update.apply(model, 1)
    assert torch.allclose(logits(model), logits(other), rtol=1e-5, atol=1e-5)

    fused = next(iter(attention.buffers(recurse=False)))
    ServedModel(model, 16).close()
    assert not sum(each.nbytes for each in (*model.parameters(), *model.buffers())) and fused.numel() == 0


def test_parts_may_be_asked_for_in_any_order():
    """Whoever calls a part with another input gets what belongs to that one, in any order, and twice.

    Mutation: `part` does not compare the input; or gives a part out twice.
    """
    torch.manual_seed(0)
    module = nn.Module()
    for name, size in (("a", 3), ("b", 5), ("c", 2)):
        module.add_module(name, nn.Linear(4, size))
    plain = copy.deepcopy(module)
    fused = Fused(module, "abc")
    products = []
    fused.around = lambda x, product: (products.append(x), product(x))[1]
    rng = random.Random(0)
    inputs = [torch.randn(1, 2, 4) for _ in range(3)]
    for _ in range(200):
        name, x = rng.choice("abc"), rng.choice(inputs)
        assert isinstance(getattr(module, name).forward, FusedPart)
        assert torch.allclose(getattr(module, name)(x), getattr(plain, name)(x))
    products.clear()
    for name in "cab":
        getattr(module, name)(inputs[0])
    assert len(products) == 1, "one product for all parts"
    assert fused._input is None and not fused._waiting, "nothing is kept when all have been asked for"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_are_for_the_parts_of_a_product(family, tmp_path):
    """Adapters on any of the linear layers, in one batch, over products that are one: each row is what PEFT says.

    Mutation: `Wrapped` takes the columns of another part; `around` adds to the first part only.
    """
    rng = random.Random(family)
    model = model_of(family)
    folders = [None, *(adapter(tmp_path / str(i), model, i, **any_options(rng)) for i in range(6))]
    rows = [(folder, [rng.randrange(WORDS) for _ in range(rng.randint(1, 9))]) for folder in folders * 2]
    rng.shuffle(rows)
    expected = [alone(model, folder, tokens) for folder, tokens in rows]

    assert patch(model, TORCH)
    adapters = Adapters(model, max_loras=6, max_rank=8)
    adapters.only_called(lambda: model(IDS))
    digest_of = {folder: folder and adapters.load(folder.name, folder) for folder in folders}
    routing = adapters.begin([digest_of[folder] for folder, _ in rows], [len(tokens) for _, tokens in rows])
    with adapters.applied(routing):
        found = flat(model, [tokens for _, tokens in rows])
    adapters.end(routing)
    assert all(map(close, found, expected))
