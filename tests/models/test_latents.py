"""Latent attention: pages hold latents and a rotary key, and the tokens are those of the heads made from them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import peft
import pytest

from sapwood.cache import CacheGroup
from sapwood.engine.executor.attention import FoldedAttention, rows_of
from sapwood.engine.lora.adapters import Adapters, ReadRouting, Routing
from sapwood.engine.lora.layers import LoraPair
from sapwood.engine.models.latents import page_latents
from sapwood.engine.models.model import Flat, ServedModel
from sapwood.engine.transfer.torch_mover import TorchArena

from . import zoo
from .test_adapters import adapter
from .test_parity import DEVICE, PAGE, PROMPTS, Bed, right
from .zoo import LATENT, answer, build, prompt, torch, transformers

RANK, ROPE = 16, 8  # of the models of the zoo


def parts_of(served: ServedModel) -> list[tuple[str, tuple[int, ...]]]:
    full = next(group for group in served.groups if group.name == "full")
    return [(part.name, part.shape) for part in full.layout.parts]


@pytest.mark.parametrize("name", LATENT)
def test_p07_the_same_tokens_from_latents(name):
    """Every model of transformers with such attention: cold, warm and the next turn, and a page has only latents.

    Mutation: `Latent.query` splits at the rotary part instead of the other; `Latent.values` takes the first columns of
    `kv_b_proj`; `ServedModel.bind` shows all of a latent as values; `page_latents` finds nothing.
    """
    if not hasattr(transformers, LATENT[name][0]):
        pytest.skip(f"transformers {transformers.__version__} has no {LATENT[name][0]}")
    bed = Bed(name)
    assert {*parts_of(bed.served)} == {("latent", (PAGE, 1, RANK + ROPE))}
    assert bed.said(PROMPTS) == right(name, PROMPTS)
    assert bed.said(PROMPTS) == right(name, PROMPTS)
    turns = [[*tokens, *answer(name, tokens, 10), 7, 8] for tokens in PROMPTS]
    assert bed.said(turns) == right(name, turns)


def test_sz_a_token_takes_the_bytes_of_its_latent():
    """DeepSeek-V3's attention as it is (128 heads, narrower around them): 576 numbers a token and layer, where its
    heads would have 40,960. In bf16, so that what checks a module's own heads has to bear bf16.

    Mutation: `_pages` gives a latent a part for values too; `Probe` notes what V has; `_CLOSE` is asked of bf16.
    """
    sizes = {"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    sizes |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_hidden_layers": 2}
    served = ServedModel(build("deepseek-v3", torch.bfloat16, **sizes), 16)
    assert [group.layout.page_bytes for group in served.groups] == [2 * 16 * 576 * 2]


# ---- wrong on purpose: what must show, shows


class Wrong(FoldedAttention):
    def __init__(self, change: Any) -> None:
        self.change = change

    def attend(self, q: Any, k_pages: Any, v_pages: Any, rows: Any, asked: Any) -> Any:
        q, v_pages, asked = self.change(q, k_pages, v_pages, asked)
        return super().attend(q, k_pages, v_pages, rows, asked)


def without_rope(q: Any, k_pages: Any, v_pages: Any, asked: Any) -> Any:
    return torch.cat([q[..., :RANK], torch.zeros_like(q[..., RANK:])], -1), v_pages, asked


def without_mscale(q: Any, k_pages: Any, v_pages: Any, asked: Any) -> Any:
    return q, v_pages, asked._replace(scaling=(8 + 8) ** -0.5)


def scaled_by_the_latent(q: Any, k_pages: Any, v_pages: Any, asked: Any) -> Any:
    return q, v_pages, asked._replace(scaling=q.shape[-1] ** -0.5)


def values_from_behind(q: Any, k_pages: Any, v_pages: Any, asked: Any) -> Any:
    return q, k_pages[..., -RANK:], asked


CONTROLS = {
    "no rotary part": ("deepseek-v3", without_rope),
    "no mscale": ("deepseek-v3 with yarn", without_mscale),
    "the width of a latent for that of a head": ("deepseek-v3", scaled_by_the_latent),
    "values from the end of a latent": ("deepseek-v3", values_from_behind),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_latents_read_wrongly_are_noticed(control):
    """That the tests above can fail: each of these changes a token, and nothing else does.

    Mutation: `Latent.query` drops the rotary part; `_attend` scales by the width that a query has as a latent.
    """
    name, change = CONTROLS[control]
    longer = [prompt(60 + n, 30 + n) for n in range(4)]
    assert Bed(name, attention=Wrong(change)).said(longer, 24) != right(name, longer, 24), f"{control}: unnoticed"
    unchanged = Bed(name, attention=Wrong(lambda q, k_pages, v_pages, asked: (q, v_pages, asked)))
    assert unchanged.said(longer, 24) == right(name, longer, 24)


# ---- modules that are not as they should be keep their heads


def values_first(self: Any, latent: Any, rope: Any) -> Any:
    """Heads whose values come before their keys in `kv_b_proj`."""
    both = self.kv_b_proj(latent).view(1, latent.shape[2], self.num_heads, -1).transpose(1, 2)
    v, nope = both.split([self.v_head_dim, self.qk_nope_head_dim], -1)
    return torch.cat([nope, rope.expand(-1, self.num_heads, -1, -1)], -1), v


def squashed_keys(self: Any, latent: Any, rope: Any) -> Any:
    """Keys that are no linear function of the latent; below, such values."""
    k, v = self.__class__.plain_expand_kv(self, latent, rope)
    return torch.tanh(k), v


def squashed_values(self: Any, latent: Any, rope: Any) -> Any:
    k, v = self.__class__.plain_expand_kv(self, latent, rope)
    return k, torch.tanh(v)


@pytest.mark.parametrize("other", [values_first, squashed_keys, squashed_values, None])
def test_p13_a_module_that_expands_otherwise_keeps_its_heads(other, monkeypatch):
    """As a later version of transformers may have it, in another order, with something in between, or (None) without
    such a method: paged as heads, and the same tokens.

    Mutation: `_same_attention` looks at values alone; at scores alone; `page_latents` does not ask it.
    """
    attention = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention
    monkeypatch.setattr(attention, "plain_expand_kv", attention.expand_kv, raising=False)
    if other is not None:
        monkeypatch.setattr(attention, "expand_kv", other)
    else:
        monkeypatch.setattr(attention, "forward", _forward_of_old(attention.forward))
        monkeypatch.delattr(attention, "expand_kv")
    for cached in (zoo.model_of, zoo._answer):
        cached.cache_clear()
    try:
        bed = Bed("deepseek-v3")
        assert [name for name, _ in parts_of(bed.served)] == ["k", "v"] * 3
        assert bed.said(PROMPTS) == right("deepseek-v3", PROMPTS)
    finally:
        for cached in (zoo.model_of, zoo._answer):
            cached.cache_clear()


def _forward_of_old(forward: Any) -> Any:
    """The same forward, for a module whose `expand_kv` has another name."""

    class Renamed:
        def __init__(self, module: Any) -> None:
            self.module = module

        def __getattr__(self, name: str) -> Any:
            return getattr(self.module, "plain_expand_kv" if name == "expand_kv" else name)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(Renamed(self), *args, **kwargs)

    return called


def test_p13_a_bias_on_the_expansion_keeps_the_heads():
    """A bias would have to be added to keys by head: no latent can hold it.

    Mutation: `_candidates` does not look at the bias.
    """
    model = build("deepseek-v3")
    for layer in model.model.layers[:2]:
        up = layer.self_attn.kv_b_proj
        up.bias = torch.nn.Parameter(torch.randn(up.out_features, dtype=up.weight.dtype))
    served = ServedModel(model, PAGE)
    assert [name for name, _ in parts_of(served)] == ["k", "v", "k", "v", "latent"]


def test_a_model_may_be_served_twice():
    """The second finds the latents that the first has found.

    Mutation: `page_latents` takes what stands in for a module's method for that method.
    """
    model = build("deepseek-v3")
    served = [ServedModel(model, PAGE) for _ in range(2)]
    assert served[0].latents and served[0].latents == served[1].latents
    assert parts_of(served[0]) == parts_of(served[1])


# ---- adapters


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft")
def test_l01_adapters_on_the_expansion_are_heard(tmp_path):
    """Rows of two adapters and of the base in one batch, first as chunks and then as decodes, one adapter in two rows
    that do not lie together: the logits of PEFT with each alone. (The weight of `kv_b_proj` is read, and the module
    that an adapter wraps never called.)

    Mutation: `Latent.query` or `Latent.values` leaves `added_to` out, or takes another head's rows of B; `added_to`
    does not count as a call, and adapters there are refused.
    """
    model = build("deepseek-v3")
    targets = ["kv_b_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    folders = [adapter(tmp_path / str(n), model, n, r=rank, target_modules=targets) for n, rank in ((1, 4), (2, 3))]
    owners = [folders[0], None, folders[1], folders[0]]
    rows = [prompt(80 + n, length) for n, length in enumerate((9, 6, 11, 5))]
    wanted = [_alone(model, folder, row) for folder, row in zip(owners, rows, strict=True)]

    served = ServedModel(model.to(DEVICE), PAGE)
    adapters = Adapters(model, max_loras=2, max_rank=4)
    adapters.only_called(served.dry)
    digests = [None if folder is None else adapters.load(folder.name, folder) for folder in owners]
    group = served.groups[0]
    memory = [CacheGroup(group.name, group.family, 20, page_bytes=group.layout.page_bytes)]
    served.bind(TorchArena.allocate(memory, {group.name: group.layout}, device=DEVICE))
    table = 1 + np.arange(12).reshape(4, 3)
    ends = np.array([len(row) for row in rows])
    for starts, lengths in ((0 * ends, ends - 1), (ends - 1, 1 + 0 * ends)):
        tokens = np.concatenate([row[s : s + n] for row, s, n in zip(rows, starts, lengths, strict=True)])
        places = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        reads = rows_of(starts, lengths, table, starts, PAGE, None, DEVICE)
        last = np.cumsum(lengths) - 1
        flat = Flat(*(torch.from_numpy(each).to(DEVICE) for each in (tokens, places, last)), {"full": reads}, None)
        routing = adapters.begin(digests, lengths.tolist())
        with adapters.applied(routing):
            said = served.logits(flat).cpu()
        adapters.end(routing)
        for row, end in enumerate((starts + lengths - 1).tolist()):
            assert (said[row] - wanted[row][end]).abs().max() < 1e-5


def _alone(model: Any, folder: Any, tokens: list[int]) -> Any:
    model = copy.deepcopy(model)
    if folder is not None:
        model = peft.PeftModel.from_pretrained(model, folder)
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def test_adapters_of_latents_are_read_from_the_device():
    """Which token has which adapter may be known to the device alone, as in a graph: queries and values are the same.

    Mutation: `ReadRouting.of` is true for slot 0 too; `Wrapped.present` leaves out the last slot.
    """
    model = build("deepseek-v3", torch.float32)
    (latent, *_) = page_latents(model)
    adapters = Adapters(model, 3, 4)
    wrapped: Any = latent._up.forward
    random = torch.Generator().manual_seed(5)
    out, wide = latent._up.weight.shape
    for slot, rank in ((1, 4), (3, 2)):
        pair = LoraPair(torch.randn(rank, wide, generator=random), torch.randn(out, rank, generator=random))
        wrapped.upload(slot, pair)
    slots = np.array([0, 3, 1, 1, 0, 3], np.int32)
    q = torch.randn(1, latent._heads, 6, latent._nope + ROPE, generator=random)
    gathered = torch.randn(1, 6, latent._heads, latent.rank, generator=random)
    found = []
    for routing in (Routing(slots, torch.device("cpu")), ReadRouting(torch.from_numpy(slots)), None):
        with torch.inference_mode(), adapters.applied(routing):
            found.append((latent.query(q), latent.values(gathered)))
    for known, read, base in zip(*found, strict=True):
        torch.testing.assert_close(known, read)
        assert (known - base).norm() > 0.1 * base.norm()
