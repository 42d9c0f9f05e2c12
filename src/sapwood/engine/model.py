"""A model of transformers on our memory: its own modules, with attention over pages and states in slots.

    ids, positions [1, T] --> the model's layers --+--> attention function "sapwood" --> K, V into pages; rows attend
                                                   +--> mixers (recurrent.py) ---------> states in slots
                              logits of the rows that sample <--- lm_head

transformers calls the attention function by the name in the config; masks are ours, so it is not registered for those,
and every mask is None.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import attention as att
from . import recurrent
from .arena import DeviceArena
from .latents import latent_of, page_latents
from .remembers import Probe, Remembered, refuse, remembered, states_of, text_config

NAME = "sapwood"
_DRY_TOKENS = 4
Attend = Callable[..., Tensor]  # (module, q [1, H, T, D], k, v, window=, asked=) -> [1, T, H, Dv]
_run = threading.local()  # what stands in for attention in this thread's forward


class Kept(NamedTuple):
    """Where a layer keeps K and V: the name of its group, and its part of every page; and how many heads ask it."""

    group: str
    k_pages: Tensor  # [pages + 1, page, heads, dim]
    v_pages: Tensor
    queries: int


class Flat(NamedTuple):
    """A step as the model sees it: all rows one after the other."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    wanted: Tensor  # [S] the tokens whose logits are wanted
    attention: dict[str, att.Rows]  # by group
    states: recurrent.Rows | None


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, T, H, Dv], as transformers calls it."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = att.Asked(scaling, softcap, s_aux)
    latent = latent_of(module)
    if latent is None:
        return _run.attend(module, query, key, value, window=sliding_window, asked=asked), None
    return latent.values(_run.attend(module, latent.query(query), key, value, window=sliding_window, asked=asked)), None


@contextmanager
def _attending(attend: Any) -> Iterator[None]:
    _run.attend = attend
    try:
        yield
    finally:
        del _run.attend


class ServedModel:
    """A causal language model, and what it remembers (`groups`). `bind` gives it memory; `logits` runs a step."""

    def __init__(self, model: Any, page_size: int, attention: att.Attention | None = None) -> None:
        from transformers import AttentionInterface

        refuse(model.config)
        AttentionInterface.register(NAME, _attend)
        model.set_attn_implementation(NAME)
        if model.dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch's grouped products take no float64
        self.model = model.eval().requires_grad_(False)
        self.page_size = page_size
        self.attention: att.Attention = att.FoldedAttention() if attention is None else attention
        self.device = next(model.parameters()).device
        self.vocabulary = int(text_config(model.config).vocab_size)
        self._asks = _arguments(model)
        self.mixers = recurrent.Mixers(model)
        self.latents = page_latents(model)
        self.groups = self._look()
        self.kept: dict[int, Kept] = {}  # by layer, once there is memory

    def _look(self) -> list[Remembered]:
        probe, cache = self.dry()
        self._queries = {layer: seen.queries for layer, seen in probe.layers.items()}
        return remembered(text_config(self.model.config), probe.layers, states_of(cache), self.page_size)

    @torch.inference_mode()
    def dry(self) -> tuple[Probe, Any]:
        """One forward of a few tokens, for what it shows: what attention was asked for, and the states it left."""
        from transformers import DynamicCache

        probe, cache = Probe(self.latents), DynamicCache(config=self.model.config)
        ids = torch.arange(_DRY_TOKENS, device=self.device)[None]
        place = "cache_params" if "cache_params" in self._asks else "past_key_values"
        with _attending(probe.attend):
            self.model(input_ids=ids, use_cache=True, **{place: cache})
        return probe, cache

    def bind(self, arena: DeviceArena) -> None:
        """Take the memory in which groups of these names and layouts lie."""
        states: dict[int, dict[str, Tensor]] = {}
        for group in self.groups:
            for part in group.layout.parts:
                view = arena.view(group.name, part.layer, part.name)
                if group.family == "state":
                    states.setdefault(part.layer, {})[part.name] = view
                elif part.name in ("k", "latent"):
                    latent = self.latents.get(part.layer)
                    values = view[..., : latent.rank] if latent else arena.view(group.name, part.layer, "v")
                    self.kept[part.layer] = Kept(group.name, view, values, self._queries[part.layer])
        if states:
            self.mixers.bind(states)

    def close(self) -> None:
        """Let go of all memory, the weights' too."""
        self.kept.clear()
        self.mixers.bind({})
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.new_empty(0)

    def logits(self, flat: Flat) -> Tensor:
        """[S, vocabulary] after the step's K, V and states were written."""

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, asked: att.Asked) -> Tensor:
            layer = int(module.layer_idx)
            name, k_pages, v_pages, _ = self.kept[layer]
            rows = flat.attention[name]
            place = rows.pages, rows.offsets
            k_pages.index_put_(place, k[0].transpose(0, 1))
            if layer not in self.latents:  # whose values are in their keys
                v_pages.index_put_(place, v[0].transpose(0, 1))
            return self.attention.attend(q[0].transpose(0, 1), k_pages, v_pages, rows, asked)[None]

        return self.forward(flat.ids, flat.positions, flat.wanted, attend, flat.states)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        wanted: Tensor,
        attend: Attend,
        states: recurrent.Rows | recurrent.Runs | None,
    ) -> Tensor:
        """The logits of the tokens that are wanted. `attend` writes what each layer has of K and V, and attends."""
        arguments: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
        if "position_ids" in self._asks:
            arguments["position_ids"] = positions[None]
        if "logits_to_keep" in self._asks:
            arguments["logits_to_keep"] = wanted
        with torch.inference_mode(), _attending(attend), self.mixers.running(states):
            logits: Tensor = self.model(**arguments).logits[0]
        return logits if "logits_to_keep" in self._asks else logits[wanted]


def _arguments(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
