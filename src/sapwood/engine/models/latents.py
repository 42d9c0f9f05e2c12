"""Multi-head latent attention (DeepSeek-V2 and what came of it) over pages of latents, not of the heads made from them.

Such a layer keeps a latent c of `kv_lora_rank` numbers a token, and a rotary key r that all heads share. `kv_b_proj`
makes K and V of every head from c. As that is linear, it can be done on the other side: to the query before, and to
what attention has gathered after:

    K[h] = [Wk[h] c, r]                  q . K[h] = [Wk[h]^T q_nope, q_rope] . [c, r]
    V[h] =  Wv[h] c             sum of p * Wv[h] c = Wv[h] (sum of p * c)

So it is attention with one K/V head: keys [c, r], and values that are the first part of the keys. That is what a page
holds, and it is all that the rest of the engine sees.

The seam is the method `expand_kv(c, r)` that modules of transformers call right before the attention function. A
`Latent` stands in for it. Modules without such a method, or whose method does something else, keep their heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..lora.layers import added_to

_CLOSE = 1e-3  # relative: another order of heads or parts is off by far more
_CLOSE_HALF = 0.1


class Latent:
    """The latent attention of one layer. The module calls it as its `expand_kv`."""

    def __init__(self, module: Any) -> None:
        self.rank = int(module.kv_lora_rank)
        self.expand = module.expand_kv
        self._nope = int(module.qk_nope_head_dim)
        self._heads = int(module.num_heads)
        self._up: nn.Linear = module.kv_b_proj

    def __call__(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """What the module passes on as K and V: [1, 1, T, rank + rope], and its first part."""
        keys = torch.cat([latent, rope], -1)
        return keys, keys[..., : self.rank]

    def query(self, q: Tensor) -> Tensor:
        """[1, H, T, nope + rope] of the module -> [1, H, T, rank + rope], which sees latents."""
        nope, rope = q[..., : self._nope], q[..., self._nope :]
        seen = nope @ self._by_head(self._up.weight)[:, : self._nope]
        for added in added_to(self._up, q.shape[2]):
            a, b = added.pair.a.t(), self._by_head(added.pair.b.t())[:, : self._nope]
            added.to(seen, nope, lambda some, a=a, b=b: some @ b @ a)  # type: ignore[misc]
        return torch.cat([seen, rope], -1)

    def values(self, gathered: Tensor) -> Tensor:
        """[1, T, H, rank] of latents -> [1, T, H, value], which the module expects."""
        latents = gathered.transpose(1, 2)
        values = latents @ self._by_head(self._up.weight)[:, self._nope :].transpose(1, 2)
        for added in added_to(self._up, gathered.shape[1]):
            a, b = added.pair.a, self._by_head(added.pair.b.t())[:, self._nope :].transpose(1, 2)
            added.to(values, latents, lambda some, a=a, b=b: some @ a @ b)  # type: ignore[misc]
        return values.transpose(1, 2)

    def _by_head(self, weight: Tensor) -> Tensor:
        """[H, nope + value, ...] of what has a row for each output of `kv_b_proj`."""
        return weight.view(self._heads, -1, weight.shape[1])


def page_latents(model: nn.Module) -> list[Latent]:
    """The attention modules of a model that hand on latents from now on."""
    found: list[Latent] = []
    alike: dict[type, bool] = {}
    for module in _candidates(model):
        latent = latent_of(module) or Latent(module)
        if type(module) not in alike:
            alike[type(module)] = _same_attention(latent, module)
        if alike[type(module)]:
            module.expand_kv = latent
            found.append(latent)
    return found


def latent_of(module: Any) -> Latent | None:
    """What stands in for a module's `expand_kv`, if its latents are paged."""
    stands_in = getattr(module, "expand_kv", None)
    return stands_in if isinstance(stands_in, Latent) else None


def _candidates(model: nn.Module) -> Iterator[Any]:
    """Modules that have all that is used here, in the right sizes."""
    names = ("layer_idx", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for module in model.modules():
        sizes = [getattr(module, name, None) for name in names]
        up = getattr(module, "kv_b_proj", None)
        if not hasattr(module, "expand_kv") or not all(isinstance(size, int) for size in sizes):
            continue
        if type(up) is not nn.Linear or up.bias is not None:
            continue
        _, heads, rank, nope, _, value = sizes
        if up.weight.shape == (heads * (nope + value), rank):
            yield module


@torch.inference_mode()
def _same_attention(latent: Latent, module: Any) -> bool:
    """Whether scores and values are those of the heads that the module makes itself, asked with a few numbers."""
    weight, heads = module.kv_b_proj.weight, module.num_heads
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weight)

    c, r = some(1, 1, 3, latent.rank), some(1, 1, 3, module.qk_rope_head_dim)
    q = some(1, heads, 3, module.qk_nope_head_dim + module.qk_rope_head_dim)
    k, v = latent.expand(c, r)
    keys, values = latent(c, r)
    if k.shape != q.shape or v.shape != (1, heads, 3, module.v_head_dim):
        return False
    each = values.transpose(1, 2).expand(-1, -1, heads, -1)
    scores = latent.query(q) @ keys.transpose(-1, -2)
    return _close(scores, q @ k.transpose(-1, -2)) and _close(latent.values(each), v.transpose(1, 2))


def _close(one: Tensor, other: Tensor) -> bool:
    off = (one - other).abs().max() / other.abs().max().clamp_min(1e-6)
    return bool(off < (_CLOSE if one.dtype in (torch.float32, torch.float64) else _CLOSE_HALF))
