"""What a model remembers: which of its layers keep K and V, a window of them, or a state, and how large that is.

Two witnesses are asked, and must agree. The config says what kind each layer is, and what we cannot serve is refused
from it, by name. One dry forward of four tokens says what the layers really do: heads, dimensions, dtypes, windows and
states, as the attention function and a cache of transformers' own see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..transfer.arena import PageLayout, PagePart

_LONG_ROPE = ("longrope", "su")  # other frequencies for all tokens once a row is longer than it was at first
_FULL = ("full_attention", "attention", "hybrid", "global")
_WINDOW = ("sliding_attention", "local_attention", "hybrid_sliding")
_STATE = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding")
_NOTHING = ("mlp", "moe", "dense", "sparse")


class Unsupported(ValueError):
    """A model that cannot be served here, and why."""


class GroupSpec(NamedTuple):
    """One group: layers that keep the same kind of memory."""

    name: str
    family: str  # "full", "window" or "state"
    window: int | None
    layout: PageLayout


class ProbedLayer(NamedTuple):
    """What the dry forward saw of one call of attention."""

    layer: int | None  # by the module's own number; None: it has none (a block that several layers share)
    window: int | None
    k: tuple[int, int]  # heads, dimension
    v: tuple[int, int]
    dtype: torch.dtype
    queries: int  # heads that ask
    latent: bool  # the values are the first part of the keys (latents.py)


def text_config(config: Any) -> Any:
    """The config of the language model, where it is nested in another."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def refuse(config: Any) -> None:
    """Unsupported, with the reason, for a model whose config tells that we cannot serve it yet."""
    name = getattr(config, "model_type", "this model")

    def no(why: str) -> None:
        raise Unsupported(f"{name} cannot be served yet: {why}")

    if getattr(config, "quantization_config", None):
        method = config.quantization_config
        method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", "")
        no(f"its checkpoint is quantised ({method or 'unknown method'}); use one in bf16, f16 or f32")
    refuse_encoder(config)
    text = text_config(config)
    kinds = layer_kinds(text)
    if "chunked_attention" in kinds:
        no("it has chunked attention (attention_chunk_size)")
    unknown = sorted(set(kinds) - {*_FULL, *_WINDOW, *_STATE, *_NOTHING})
    if unknown:
        no(f"its config has layers of unknown kinds: {', '.join(unknown)}")
    for rope in _ropes(text):
        if _rope_limit(text, rope) == 0:
            no(
                f"its rotary frequencies depend on the length of the batch (rope type {_rope_type(rope)!r}), and its "
                "config does not say up to which length they are as they were trained "
                "(original_max_position_embeddings)"
            )
    if getattr(text, "use_bidirectional_attention", False) not in (False, None, "vision"):  # that is for images alone
        no("its attention is bidirectional")
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", "absolute") == "relative_key":
        no("its positions are no function of the token alone (alibi or relative keys)")


def refuse_encoder(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"{getattr(config, 'model_type', 'this model')} cannot be served yet: it has an encoder")


def longest_context(text: Any) -> tuple[int, str] | None:
    """How long a context can be without its company changing what its tokens are given, and why; None: as long as you
    like. Beyond, some rotary embeddings give every token of the batch other frequencies (longrope, dynamic)."""
    limits = [(limit, _rope_type(rope)) for rope in _ropes(text) if (limit := _rope_limit(text, rope)) is not None]
    if not limits:
        return None
    limit, kind = min(limits)
    return limit, f"beyond, rope type {kind!r} changes the rotary frequencies of the whole batch"


def freeze_rotary(model: Any) -> None:
    """Rotary embeddings keep the frequencies they were made with, which hold up to `longest_context`."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and _changes(kind):
            module.rope_type = "frozen"
        elif isinstance(kind, dict):
            module.rope_type = {name: "frozen" if _changes(each) else each for name, each in kind.items()}


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind in _LONG_ROPE


def _ropes(text: Any) -> list[Mapping[str, Any]]:
    """The rotary embeddings a config asks for, one or one for each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return []
    if _rope_type(rope):
        return [rope]
    return [part for part in rope.values() if isinstance(part, Mapping)]


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "")


def _rope_limit(text: Any, rope: Mapping[str, Any]) -> int | None:
    """Up to which length its frequencies are those it was made with; None: always; 0: not known."""
    kind = _rope_type(rope)
    if not _changes(kind) or rope.get("alpha"):  # a fixed alpha stretches them once and for all (Hunyuan)
        return None
    name = "original_max_position_embeddings"
    if kind in _LONG_ROPE:
        return int(rope.get(name) or getattr(text, name, None) or 0)
    return int(getattr(text, "max_position_embeddings", None) or 0)


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
    """Stands in for attention during the dry forward: sees what each call asks for, and answers with zeros."""

    def __init__(self) -> None:
        self.calls: list[ProbedLayer] = []

    def attend(
        self, call: int, module: Any, q: Any, k: Any, v: Any, *, window: int | None, latent: bool, **_: Any
    ) -> Any:
        layer = getattr(module, "layer_idx", None)
        own = layer if isinstance(layer, int) and layer >= 0 else None
        self.calls.append(ProbedLayer(own, window, _sizes(k), _sizes(v), k.dtype, q.shape[1], latent))
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


def _sizes(kept: Any) -> tuple[int, int]:
    return int(kept.shape[1]), int(kept.shape[3])


def gathered_of(cache: Any) -> list[ProbedLayer]:
    """What a dry forward left in a cache of K and V, layer by layer: of a model that attends by itself."""
    found: list[ProbedLayer] = []
    for layer, kept in enumerate(cache.layers):
        k, v = getattr(kept, "keys", None), getattr(kept, "values", None)
        if (
            isinstance(k, torch.Tensor)
            and isinstance(v, torch.Tensor)
            and k.dim() == v.dim() == 4
            and len(found) == layer
        ):
            found.append(ProbedLayer(layer, None, _sizes(k), _sizes(v), k.dtype, k.shape[1], False))
    return found


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
    text: Any, calls: list[ProbedLayer], states: dict[int, list[tuple[str, torch.Tensor]]], page: int
) -> list[GroupSpec]:
    """The groups of a model, from what its dry forward showed; Unsupported if its config says something else. In
    groups of attention the layers of a page are numbered by the calls of a forward."""
    kinds, window = layer_kinds(text), config_window(text)
    numbered = all(seen.layer is not None for seen in calls)
    for layer, kind in enumerate(kinds) if numbered else ():
        own = [seen for seen in calls if seen.layer == layer]
        _agree(layer, kind, window, own[0] if own else None, layer in states)
    groups = []
    for width in sorted({seen.window for seen in calls}, key=lambda width: width or 0):
        name, family = ("full", "full") if width is None else (f"window{width}", "window")
        some = {call: seen for call, seen in enumerate(calls) if seen.window == width}
        groups.append(GroupSpec(name, family, width, _pages(some, page)))
    if states:
        parts = [
            PagePart(layer, name, tuple(state.shape), state.dtype)
            for layer, kept in sorted(states.items())
            for name, state in kept
        ]
        groups.append(GroupSpec("state", "state", None, PageLayout(parts)))
    if not groups:
        raise Unsupported(
            "its layers attend in a way of their own: through no attention function of transformers, and with no cache "
            "of K and V or of states"
        )
    return groups


def _agree(layer: int, kind: str, window: int | None, seen: ProbedLayer | None, has_state: bool) -> None:
    attends = kind in _FULL or kind in _WINDOW
    if attends and seen is None:
        raise Unsupported(f"layer {layer} is {kind} by its config, and called no attention function of transformers")
    if seen is not None and kind in _WINDOW and seen.window != window:
        raise Unsupported(f"layer {layer} is {kind} of {window} by its config, and asks for a window of {seen.window}")
    if seen is not None and kind in _FULL and seen.window is not None:
        raise Unsupported(f"layer {layer} is {kind} by its config, and asks for a window of {seen.window}")
    if kind in _STATE and not attends and not has_state:
        raise Unsupported(f"layer {layer} is {kind} by its config, and left no state")


def _pages(calls: dict[int, ProbedLayer], page: int) -> PageLayout:
    def parts() -> Iterator[PagePart]:
        for call, seen in calls.items():
            if seen.latent:
                yield PagePart(call, "latent", (page, *seen.k), seen.dtype)
                continue
            yield PagePart(call, "k", (page, *seen.k), seen.dtype)
            yield PagePart(call, "v", (page, *seen.v), seen.dtype)

    return PageLayout(parts())
