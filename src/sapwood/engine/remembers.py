"""What a model remembers: which of its layers keep K and V, a window of them, or a state, and how large that is.

Two witnesses are asked, and must agree. The config says what kind each layer is, and what we cannot serve is refused
from it, by name. One dry forward of four tokens says what the layers really do: heads, dimensions, dtypes, windows and
states, as the attention function and a cache of transformers' own see them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import torch

from .arena import PageLayout, PagePart

_ROPE = {"dynamic", "longrope", "su"}  # what these give a token changes with the longest row
_FULL = ("full_attention", "attention", "hybrid", "global")
_WINDOW = ("sliding_attention", "local_attention", "hybrid_sliding")
_STATE = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding")
_NOTHING = ("mlp", "moe", "dense", "sparse")


class Unsupported(ValueError):
    """A model that cannot be served here, and why."""


class Remembered(NamedTuple):
    """One group: layers that keep the same kind of memory."""

    name: str
    family: str  # "full", "window" or "state"
    window: int | None
    layout: PageLayout


class Seen(NamedTuple):
    """What the dry forward saw of an attention layer."""

    window: int | None
    k: tuple[int, ...]  # heads, dimension
    v: tuple[int, ...] | None  # None: in K (latents.py)
    dtype: torch.dtype
    queries: int  # heads that ask


def text_config(config: Any) -> Any:
    """The config of the language model, where it is nested in another."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def refuse(config: Any) -> None:
    """Unsupported, with the reason, for a model we cannot serve yet."""
    name = getattr(config, "model_type", "this model")

    def no(why: str) -> None:
        raise Unsupported(f"{name} cannot be served yet: {why}")

    if getattr(config, "quantization_config", None):
        method = config.quantization_config
        method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", "")
        no(f"its checkpoint is quantised ({method or 'unknown method'}); use one in bf16, f16 or f32")
    if getattr(config, "is_encoder_decoder", False):
        no("it has an encoder")
    for part in ("vision_config", "audio_config", "speech_config"):
        if getattr(config, part, None) is not None:
            no(f"it takes multimodal input ({part})")
    text = text_config(config)
    if getattr(text, "num_kv_shared_layers", 0):
        no(f"{text.num_kv_shared_layers} of its layers share K and V with others (num_kv_shared_layers)")
    kinds = layer_kinds(text)
    if "chunked_attention" in kinds:
        no("it has chunked attention (attention_chunk_size)")
    unknown = sorted(set(kinds) - {*_FULL, *_WINDOW, *_STATE, *_NOTHING})
    if unknown:
        no(f"its config has layers of unknown kinds: {', '.join(unknown)}")
    changing = sorted(
        _rope_types(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)) & _ROPE
    )
    if changing:
        no(f"its rotary frequencies depend on the length of the batch (rope type {changing[0]!r})")
    if getattr(text, "use_bidirectional_attention", False):
        no("its attention is bidirectional")
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", "absolute") == "relative_key":
        no("its positions are no function of the token alone (alibi or relative keys)")


def _rope_types(told: Any) -> set[str]:
    """The kinds of rotary embedding a config asks for, one or one for each kind of layer."""
    if not isinstance(told, dict):
        return set()
    types = {str(told[name]) for name in ("rope_type", "type") if name in told}
    return types.union(*(_rope_types(part) for part in told.values()))


def layer_kinds(text: Any) -> list[str]:
    """The kind of each layer as the config names it; empty if it does not."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    return [str(kind) for kind in kinds]


def config_window(text: Any) -> int | None:
    """The window that the config gives its sliding layers, wherever it stands."""
    if getattr(text, "use_sliding_window", True) is False:
        return None
    window = getattr(text, "sliding_window", None) or getattr(text, "sliding_window_size", None)
    return int(window) if window else None


class Probe:
    """Stands in for attention during the dry forward: sees what each layer asks for, and answers with zeros."""

    def __init__(self, latents: Container[int]) -> None:
        self.layers: dict[int, Seen] = {}
        self._latents = latents  # layers whose values are the first part of their keys

    def attend(self, module: Any, q: Any, k: Any, v: Any, window: int | None, **_: Any) -> Any:
        layer = int(module.layer_idx)
        values = None if layer in self._latents else (v.shape[1], v.shape[3])
        self.layers[layer] = Seen(window, (k.shape[1], k.shape[3]), values, k.dtype, q.shape[1])
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


def states_of(cache: Any) -> dict[int, list[tuple[str, torch.Tensor]]]:
    """By layer: the states that a dry forward left in a cache, batch of one. What is added to token by token is kept in
    float32 at least: rounding it each time would add up."""
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for layer, kept in enumerate(cache.layers):
        parts = []
        for kind in ("conv", "recurrent"):
            for at, state in (getattr(kept, f"{kind}_states", None) or {}).items():
                if state is not None:
                    sums = kind == "recurrent" and state.dtype is not torch.float64
                    parts.append((f"{kind}{at}", state[0].float() if sums else state[0]))
        if parts:
            found[layer] = parts
    return found


def remembered(
    text: Any, attention: dict[int, Seen], states: dict[int, list[tuple[str, torch.Tensor]]], page: int
) -> list[Remembered]:
    """The groups of a model, from what its dry forward showed; Unsupported if its config says something else."""
    kinds, window = layer_kinds(text), config_window(text)
    for layer, kind in enumerate(kinds):
        _agree(layer, kind, window, attention.get(layer), layer in states)
    groups = []
    full = [layer for layer, seen in attention.items() if seen.window is None]
    if full:
        groups.append(Remembered("full", "full", None, _pages(attention, full, page)))
    for width in sorted({seen.window for seen in attention.values() if seen.window is not None}):
        layers = [layer for layer, seen in attention.items() if seen.window == width]
        groups.append(Remembered(f"window{width}", "window", width, _pages(attention, layers, page)))
    if states:
        parts = [
            PagePart(layer, name, tuple(state.shape), state.dtype)
            for layer, kept in sorted(states.items())
            for name, state in kept
        ]
        groups.append(Remembered("state", "state", None, PageLayout(parts)))
    if not groups:
        raise Unsupported("this model keeps nothing that could be cached: no layer has attention or a state")
    return groups


def _agree(layer: int, kind: str, window: int | None, seen: Seen | None, has_state: bool) -> None:
    attends = kind in _FULL or kind in _WINDOW
    if attends and seen is None:
        raise Unsupported(f"layer {layer} is {kind} by its config, and called no attention function of transformers")
    if seen is not None and kind in _WINDOW and seen.window != window:
        raise Unsupported(f"layer {layer} is {kind} of {window} by its config, and asks for a window of {seen.window}")
    if seen is not None and kind in _FULL and seen.window is not None:
        raise Unsupported(f"layer {layer} is {kind} by its config, and asks for a window of {seen.window}")
    if kind in _STATE and not attends and not has_state:
        raise Unsupported(f"layer {layer} is {kind} by its config, and left no state")


def _pages(attention: dict[int, Seen], layers: list[int], page: int) -> PageLayout:
    def parts() -> Iterator[PagePart]:
        for layer in sorted(layers):
            seen = attention[layer]
            if seen.v is None:
                yield PagePart(layer, "latent", (page, *seen.k), seen.dtype)
                continue
            yield PagePart(layer, "k", (page, *seen.k), seen.dtype)
            yield PagePart(layer, "v", (page, *seen.v), seen.dtype)

    return PageLayout(parts())
