"""A model's layers, compiled by torch: the general way to fewer and larger kernels, for architectures that patches.py
does not know.

    layer.forward --> Layer --> [ norm, q, k, v, rotary ]   attention   [ output, norm, MLP ]
                                        compiled              outside         compiled

Layers of one class share what is compiled, and one version of it serves every number of tokens: sizes are variables in
it. One token alone would be a second version of everything (torch takes a size of 1 for a constant), so that such a
step runs the layers as they are; on a GPU small steps are padded, and it hardly ever comes.

What reads the engine's own state runs outside of what is compiled: attention, mixers, linear layers with adapters. A
class of layers that torch fails to compile runs as it is, and the log says so. Whatever is made of a layer is made at
the start, by one forward of a few tokens.

Nothing here is imported unless it is asked for: torch's compiler alone takes seconds to import.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from ..lora.layers import Wrapped
from ..progress import bar
from . import model as served_model
from .kv_groups import Probe

log = logging.getLogger(__name__)
BACKEND: Any = "inductor"  # its kernels are chosen by rules: trying them all takes long, and is no faster in a step
_NAME = f"{served_model.NAME}-outside"
# Of the first forward: a size that is no other size of a model, or torch would take the two for one.
_FIRST_TOKENS = 509
_MAX_VERSIONS = 8  # of a layer: what torch allows, and more is no sharing
_thread = threading.local()  # torch's settings may be a thread's own


class Compiled(NamedTuple):
    """What became of a model's layers."""

    layers: int  # that run compiled
    pieces: int  # that were made of them
    seconds: float
    failed: tuple[str, ...]  # classes that run as they are


class Outside:
    """Stands in for the `forward` of a module: what it computes is no part of what is compiled. One class for all, as
    torch may tell functions apart, and compile around each."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        answer = self.inner(*args, **kwargs)
        plain: Tensor = answer[0] if isinstance(answer, tuple) else answer
        return plain.contiguous()  # always laid out alike, or there would be versions for that


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    out, weights = served_model._attend(*args, **kwargs)
    return out.contiguous(), weights


class Kind:
    """The layers of one class."""

    def __init__(self, of: type[nn.Module], most: int) -> None:
        self.name = of.__name__
        self.compiled: Any = torch.compile(of.forward, dynamic=True, backend=BACKEND)
        self.most = most  # versions of it
        self.proven = False  # it has run
        self.failed = ""  # why it is not used

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_thread, "most", 0) >= self.most:
            _thread.most = self.most
            config = torch._dynamo.config
            config.recompile_limit = max(config.recompile_limit, self.most)
        try:
            answer = self.compiled(*args, **kwargs)
        except Exception as error:
            if not self.proven or isinstance(error, TorchDynamoException):
                why: Exception = getattr(error, "inner_exception", error)
                self.failed = (str(why).strip() or type(why).__name__).splitlines()[0]
                log.warning("layers of class %s run as they are, torch cannot compile them: %s", self.name, self.failed)
            raise  # some of it may have run: the caller takes that back
        self.proven = True
        return answer


class Layer:
    """Stands in for the `forward` of a layer."""

    def __init__(self, module: nn.Module, kind: Kind) -> None:
        self.module = module
        self.kind = kind
        self.own: Callable[..., Any] = module.forward

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.kind.failed or hidden_states.shape[1] == 1:
            return self.own(hidden_states, *args, **kwargs)
        return self.kind(self.module, hidden_states, *args, **kwargs)


def compile_layers(served: served_model.ServedModel, progress: bool = False) -> Compiled:
    """Compile a model whose modules are as they will be called: after mixers and adapters have put themselves in."""
    begin, before = time.perf_counter(), counters["stats"]["unique_graphs"]
    _put_outside(served)
    found = layers_for_text(served.model)
    kinds: dict[type, Kind] = {}
    most = len(found) + _MAX_VERSIONS  # so that none is left uncompiled even if none is shared
    for layer in found:
        layer.forward = Layer(layer, kinds.setdefault(type(layer), Kind(type(layer), most)))
    log.info("compiling %d layers (%s)", len(found), ", ".join(kind.name for kind in kinds.values()) or "none is known")
    with bar(len(found), "compiling layers", progress) as shown:
        own = _first_forward(served, found, kinds, shown)
    failed = tuple(kind.name for kind in kinds.values() if kind.failed)
    done = sum(type(layer) in kinds and not kinds[type(layer)].failed for layer in found)
    if not done:
        _refuse(served, [kind.failed for kind in kinds.values()])
    if own > _MAX_VERSIONS:
        told_apart = "%d of %d layers were compiled one by one, as torch tells them apart (recompile_limit is now %d)"
        log.warning(told_apart, own, len(found), most)
    if served.device.type == "cuda":
        torch.cuda.empty_cache()
    result = Compiled(done, counters["stats"]["unique_graphs"] - before, time.perf_counter() - begin, failed)
    log.info("compiled %d layers, of %d pieces, in %.1f s", *result[:3])
    return result


def layers_for_text(model: Any) -> list[nn.Module]:
    """The layers of a model, without those of a tower for images. Some call their output layer a decoder, which
    has none."""
    return list(layers_of(model.get_decoder())) or list(layers_of(model))


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model: the members of its outermost lists of modules that take hidden states."""
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) and all(map(_is_layer, child)):
            yield from child
        else:
            yield from layers_of(child)


def _is_layer(module: nn.Module) -> bool:
    parameters = list(inspect.signature(type(module).forward).parameters)
    return parameters[1:2] == ["hidden_states"] and "forward" not in vars(module)


def _put_outside(served: served_model.ServedModel) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    served.model.set_attn_implementation(_NAME)
    adapted = [module for module in served.model.modules() if isinstance(module.forward, Wrapped)]
    for module in (*served.mixers.layers.values(), *adapted):
        module.forward = Outside(module.forward)


def _first_forward(served: served_model.ServedModel, layers: list[Any], kinds: dict[type, Kind], shown: Any) -> int:
    """Run all layers once, again without those that fail. Returns how many had to be compiled, and not what others
    had compiled before."""
    seen = counters["stats"]["unique_graphs"]
    own = 0

    def after(*_: Any) -> None:
        nonlocal seen, own
        now = counters["stats"]["unique_graphs"]
        own += now > seen
        seen = now
        if shown is not None:
            shown.update()

    hooks = [layer.register_forward_hook(after) for layer in layers]
    ids = torch.arange(_FIRST_TOKENS, device=served.device) % served.vocabulary
    one = torch.zeros(1, dtype=torch.long, device=served.device)
    try:
        while True:
            failed = sum(bool(kind.failed) for kind in kinds.values())
            try:
                with warnings.catch_warnings():  # hints for the author of a model
                    warnings.simplefilter("ignore")
                    served.forward(ids, torch.zeros_like(ids), one, Probe().attend, None)
                return own
            except Exception:
                if failed == sum(bool(kind.failed) for kind in kinds.values()):
                    raise
                if shown is not None:
                    shown.reset()
    finally:
        for hook in hooks:
            hook.remove()


def _refuse(served: served_model.ServedModel, why: list[str]) -> None:
    """On a GPU a server starts all the same, more slowly; elsewhere it is an error: nothing else needs it."""
    reason = why[0] if why else f"{type(served.model).__name__} has no layers that are known here"
    if served.device.type != "cuda":
        raise ValueError(f"compile must be False: torch cannot compile this model here ({reason})")
    log.warning("compile=True does nothing: all layers run as they are, which is slow (%s)", reason)
