"""A model of transformers on our memory: its own modules, with attention over pages and states in slots.

    ids, positions [1, T] --> the model's layers --+--> attention function "sapwood" --> K, V into pages; rows attend
                                                   +--> mixers (recurrent.py) ---------> states in slots
                              logits of the rows that sample <--- lm_head

transformers calls the attention function by the name in the config; masks are ours, so it is not registered for those,
and every mask is None. A forward makes the same calls each time, and what a call keeps is known by its number among
them: some blocks stand in several layers, and some layers attend more than once.

What is served is what is understood. A model whose attention is given a mask or a tensor of its own, or that is not
given positions, is refused; and self_check.py asks each model both ways at the start.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..executor import attention as att
from ..executor.attention import AttentionRows, Ints
from ..loading.weights import quiet
from ..transfer.arena import DeviceArena
from . import recurrent
from .kv_groups import (
    GroupSpec,
    Probe,
    ProbedLayer,
    Unsupported,
    freeze_rotary,
    gathered_of,
    refuse,
    remembered,
    states_of,
    text_config,
)
from .latents import latent_of, page_latents

NAME = "sapwood"
_DRY_TOKENS = 4
Attend = Callable[..., Tensor]  # (call, module, q [1, H, T, D], k, v, window=, asked=, latent=) -> [1, T, H, Dv]
_KNOWN = (
    "position_ids",
    "cache_position",
    "logits_to_keep",
)  # tensors that may be handed to attention, and that change nothing in it
_run = threading.local()  # what stands in for attention in this thread's forward


class LayerPages(NamedTuple):
    """Where a call of attention keeps K and V: the name of its group, and its part of every page; how many heads ask
    it; and whether its values are the first part of its keys."""

    group: str
    k_pages: Tensor  # [pages + 1, page, heads, dim]
    v_pages: Tensor
    queries: int
    latent: bool


class Flat(NamedTuple):
    """A step as the model sees it: all rows one after the other."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    wanted: Tensor  # [S] the tokens whose logits are wanted
    attention: dict[str, att.AttentionRows]  # by group
    states: recurrent.StateRows | None


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
    **more: Any,
) -> tuple[Tensor, None]:
    """q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, T, H, Dv], as transformers calls it."""
    own = [name for name, value in more.items() if isinstance(value, Tensor) and name not in _KNOWN]
    if attention_mask is not None or own:
        what = "a mask of its own" if attention_mask is not None else f"{own[0]}, which is not known here,"
        raise Unsupported(f"{type(module).__name__} hands {what} to attention")
    if not more.get("is_causal", getattr(module, "is_causal", True)):
        raise Unsupported(f"{type(module).__name__} attends to later tokens too (is_causal is False)")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = att.ScoreOptions(scaling, softcap, s_aux)
    call, _run.calls = _run.calls, _run.calls + 1
    latent = latent_of(module)
    if latent is None:
        out = _run.attend(call, module, query, key, value, window=sliding_window, asked=asked, latent=False)
        return out, None
    query = latent.query(query)
    out = _run.attend(call, module, query, key, value, window=sliding_window, asked=asked, latent=True)
    return latent.values(out), None


@contextmanager
def _attending(attend: Any) -> Iterator[None]:
    _run.attend, _run.calls = attend, 0
    try:
        yield
    finally:
        del _run.attend, _run.calls


class ServedModel:
    """A causal language model, and what it remembers (`groups`). `bind` gives it memory; `logits` runs a step."""

    def __init__(self, model: Any, page_size: int, attention: att.Attention | None = None) -> None:
        from transformers import AttentionInterface

        refuse(model.config)
        AttentionInterface.register(NAME, _attend)
        with quiet(False):  # models that attend by themselves warn of it
            model.set_attn_implementation(NAME)
        settle_experts(model)
        self.model = model.eval().requires_grad_(False)
        self.page_size = page_size
        self.attention: att.Attention = att.FoldedAttention() if attention is None else attention
        self.device = next(model.parameters()).device
        self._asks = _arguments(model)
        with _refusing(model.config.model_type):
            self.vocabulary = int(text_config(model.config).vocab_size)
            freeze_rotary(model)
            self.mixers = recurrent.Mixers(model)
            self.latents = page_latents(model)
        self.gathers = False  # whether the model attends by itself (`GatheringCache`)
        self._calls: list[ProbedLayer] = []  # of attention, in a forward
        self.groups = self._look()
        self.kept: dict[int, LayerPages] = {}  # by call, once there is memory

    def _look(self) -> list[GroupSpec]:
        with _refusing(self.model.config.model_type):
            found = self._found()
            if any(group.family != "state" for group in found) and "position_ids" not in self._asks:
                raise Unsupported("its forward takes no position_ids, so that rows of a batch cannot be told apart")
            return found

    def _found(self) -> list[GroupSpec]:
        """The groups. A model that calls no attention function of transformers attends by itself."""
        try:
            probe, cache = self.dry()
        except Unsupported:
            raise
        except Exception:  # it may be one of these, and want the mask that others are not given
            with quiet(False):
                self.model.set_attn_implementation("eager")
            probe, cache = self.dry()
        self._calls, states = probe.calls or gathered_of(cache), states_of(cache)
        self.gathers = bool(self._calls) and not probe.calls
        if self.gathers and (name := _own_mask(self.model)):
            raise Unsupported(f"{name} is a mask of its own, cut by where tokens stand in the batch")
        return remembered(text_config(self.model.config), self._calls, states, self.page_size)

    @torch.inference_mode()
    def dry(self) -> tuple[Probe, Any]:
        """One forward of a few tokens, for what it shows: what attention was asked for, and the states it left."""
        from transformers import DynamicCache

        probe, cache = Probe(), DynamicCache(config=self.model.config)
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
                    seen = self._calls[part.layer]
                    values = view[..., : seen.v[1]] if seen.latent else arena.view(group.name, part.layer, "v")
                    self.kept[part.layer] = LayerPages(group.name, view, values, seen.queries, seen.latent)
        if states:
            with _refusing(self.model.config.model_type):
                self.mixers.bind(states)

    def close(self) -> None:
        """Let go of all memory, the weights' too."""
        self.kept.clear()
        self.mixers.bind({})
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.new_empty(0)

    def logits(self, flat: Flat) -> Tensor:
        """[S, vocabulary] after the step's K, V and states were written."""

        def attend(
            call: int, module: Any, q: Tensor, k: Tensor, v: Tensor, *, asked: att.ScoreOptions, **_: Any
        ) -> Tensor:
            kept = self.kept[call]
            rows = flat.attention[kept.group]
            place = rows.pages, rows.offsets
            kept.k_pages.index_put_(place, k[0].transpose(0, 1))
            if not kept.latent:  # whose values are in their keys
                kept.v_pages.index_put_(place, v[0].transpose(0, 1))
            return self.attention.attend(q[0].transpose(0, 1), kept.k_pages, kept.v_pages, rows, asked)[None]

        cache = GatheringCache(self.kept, flat.attention["full"]) if self.gathers else None
        return self.forward(flat.ids, flat.positions, flat.wanted, attend, flat.states, cache)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        wanted: Tensor,
        attend: Attend,
        states: recurrent.StateRows | recurrent.Runs | None,
        cache: GatheringCache | None = None,
    ) -> Tensor:
        """The logits of the tokens that are wanted. `attend` writes what each call has of K and V, and attends; or
        `cache` does the one, and the model the other."""
        arguments: dict[str, Any] = {"input_ids": ids[None], "use_cache": cache is not None}
        if cache is not None:
            arguments |= {"past_key_values": cache, "attention_mask": cache.mask(self.model.dtype)}
        if "position_ids" in self._asks:
            arguments["position_ids"] = positions[None]
        if "logits_to_keep" in self._asks:
            arguments["logits_to_keep"] = wanted
        with torch.inference_mode(), _attending(attend), self.mixers.running(states):
            logits: Tensor = self.model(**arguments).logits[0]
        return logits if "logits_to_keep" in self._asks else logits[wanted]


def _own_mask(model: Any) -> str | None:
    """The buffer with which a model that attends by itself says which token sees which: by places of keys in the batch,
    which here has the keys of all rows one after the other (GPT-Neo's windows)."""
    masks = (name for name, buffer in model.named_buffers() if buffer.dtype is torch.bool and buffer.ndim >= 3)
    return next(masks, None)


def settle_experts(model: Any) -> None:
    """torch's grouped products take no float64."""
    if model.dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """A model that cannot be run for a few tokens is refused by name, whatever the error."""
    try:
        yield
    except Unsupported as error:
        raise Unsupported(f"{name} cannot be served yet: {error}") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unsupported(f"{name} cannot be served yet: a forward of a few tokens fails ({why})") from error


def _arguments(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


# ---- models that attend by themselves
#
# Falcon, GPT-J, CodeGen and XGLM call no attention function of transformers, and have only a cache to ask for what came
# before. Here the cache hands them K and V of all rows, one after the other, and a mask says which each token sees:
#
#     update(k, v, layer)   K and V of the step into pages --> those of every row, from pages  [1, heads, L, dim]
#     mask [1, 1, T, L]     0 where a token sees a key, the least number where it does not
#
# Every token is multiplied with the keys of every row: right for any mix of rows, and slow where there are many.


class Gather(NamedTuple):
    """Where the keys of a step's rows lie, and which tokens see them."""

    places: Tensor  # [L] page * page_size + offset
    seen: Tensor  # [T, L]


def gather_of(starts: Ints, lengths: Ints, table: Ints, page: int, device: Any) -> Gather:
    """For rows that compute [start, start + length), with `table` [rows, columns] as it is now."""
    ends = starts + lengths
    row = np.repeat(np.arange(len(ends)), ends)  # of each key
    position = np.arange(len(row)) - np.repeat(np.cumsum(ends) - ends, ends)
    places = table[row, position // page].astype(np.int64) * page + position % page
    asks = np.repeat(np.arange(len(ends)), lengths)  # the row of each token
    at = starts[asks] + np.arange(len(asks)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    seen = (asks[:, None] == row) & (position <= at[:, None])
    return Gather(torch.from_numpy(places).to(device), torch.from_numpy(seen).to(device))


class GatheringCache:
    """What such a model takes for its cache, for one forward. It has no past: all of it comes by `update`."""

    is_compileable = False

    def __init__(self, kept: Mapping[int, LayerPages], rows: AttentionRows) -> None:
        assert rows.gather is not None
        self._kept, self._rows, self._gather = kept, rows, rows.gather

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        kept, place = self._kept[layer_idx], (self._rows.pages, self._rows.offsets)
        kept.k_pages.index_put_(place, k[0].transpose(0, 1))
        kept.v_pages.index_put_(place, v[0].transpose(0, 1))
        return self._all(kept.k_pages), self._all(kept.v_pages)

    def _all(self, pages: Tensor) -> Tensor:
        size, places = pages.shape[1], self._gather.places
        return pages[places // size, places % size].transpose(0, 1)[None]

    def mask(self, dtype: torch.dtype) -> Tensor:
        seen = self._gather.seen
        nothing = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return nothing.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def __len__(self) -> int:
        return len(self._kept)
