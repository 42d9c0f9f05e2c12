"""Which modules of transformers are computed in another way, by their class, and how. They keep their names and
weights; only `forward` is replaced, in place:

    ...RMSNorm      one kernel
    ...Attention    its own code, with q, k and v as one product, and another function for rotary positions
    ...MLP          gate and up as one product, then activation and product as one kernel

A class is patched if its family is known here, and if what it computes then is what it computed before: the first
module of each class is asked both ways, with a few numbers. All others run as they are. The kernels for that are those
of steps; they are compiled side by side before any of them answers.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .fused import Fused, linears_of

log = logging.getLogger(__name__)

_PLAIN = ("Llama", "Mistral", "Ministral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
_PLUS_ONE = ("Gemma", "Gemma2", "Gemma3")  # the weight of a norm is what is added to one
_FAMILIES = _PLAIN + _PLUS_ONE
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_ROTARY = "apply_rotary_pos_emb"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CLOSE, _CLOSE_HALF = 1e-4, 0.03  # relative
_RETURN_AFTER_BYTES = 1 << 30  # bytes of weights that were replaced, after which torch is asked to give them back


class Kernels(NamedTuple):
    """What is used in place of torch's own operations. None: torch's own."""

    norm: Callable[[Tensor, Tensor, float, bool], Tensor] | None  # x, weight, eps, whether one is added to the weight
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None  # q, k, cos, sin
    can_rotate: Callable[[Tensor, Tensor, Tensor, Tensor], bool] | None
    gated: Mapping[str, Callable[[Tensor], Tensor]]  # by the class of the activation: [gate, up] -> act(gate) * up
    compiling: Callable[[], AbstractContextManager[Any]] = nullcontext  # inside they are compiled, and give nothing


TORCH = Kernels(None, None, None, {})


def triton_kernels() -> Kernels:
    from ..kernels import elementwise as own
    from ..kernels.launch import compiling

    gated = {
        "SiLUActivation": own.silu_mul,
        "SiLU": own.silu_mul,
        "GELUTanh": own.gelu_tanh_mul,
        "PytorchGELUTanh": own.gelu_tanh_mul,
    }
    return Kernels(own.rms_norm, own.rotary, own.can_rotate, gated, compiling)


def patch_for(model: nn.Module, device: torch.device) -> dict[str, int]:
    """What is fastest on this device; how many modules of which class were patched. On a CPU: none."""
    if device.type != "cuda":
        return {}
    try:
        kernels = triton_kernels()
    except ImportError as error:
        log.warning("modules run as they are, which is slow: Triton is not installed (%s)", error)
        return {}
    patched = patch(model, kernels)
    if not patched:
        log.warning("%s has no modules that are known here: all run as they are", type(model).__name__)
    return patched


def patch(model: nn.Module, kernels: Kernels) -> dict[str, int]:
    """Patch a model whose weights are in place. Of the weights, no more than one module's are there twice."""
    patched: dict[str, int] = {}
    modules = list(model.modules())
    questions: dict[tuple[type, str], _Question] = {}  # to the first module of each class
    replaced = 0
    with torch.no_grad():
        with kernels.compiling():
            for module in modules:
                for what, put in _patches(module, kernels):
                    if (type(module), what) not in questions:
                        questions[type(module), what] = _Question(module, what, put)
        alike = {key: question.stays_the_same() for key, question in questions.items()}
        for module in modules:
            done = any(alike[key] for key, question in questions.items() if question.module is module)
            for what, put in _patches(module, kernels):
                key = (type(module), what)
                if alike[key] and questions[key].module is not module:
                    put()
                    done = True
            if done:
                patched[type(module).__name__] = patched.get(type(module).__name__, 0) + 1
                replaced += sum(each.nbytes for each in module.buffers(recurse=False))
            if replaced > _RETURN_AFTER_BYTES and torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # the pieces that were freed fit nothing that comes
                replaced = 0
    if replaced and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return patched


def _patches(module: nn.Module, kernels: Kernels) -> Iterator[tuple[str, Callable[[], None]]]:
    """What can be done to a module, by name."""
    family, kind = _known(module)
    own: Any = module
    weight = next(module.parameters(), None)
    if weight is None:
        return
    if weight.dtype not in _DTYPES:
        kernels = TORCH
    if kind == "RMSNorm" and kernels.norm is not None:
        eps = own.variance_epsilon if hasattr(own, "variance_epsilon") else own.eps
        norm = Norm(kernels.norm, weight, eps, family in _PLUS_ONE)
        yield "norm", lambda: setattr(own, "forward", norm)
    if kind == "Attention":
        if kernels.rotary is not None and (turned := _with_rotary(own, kernels)) is not None:
            yield "rotary", lambda: setattr(own, "forward", turned)
        if linears_of(module, _QKV):
            yield "qkv", lambda: setattr(own, "qkv", Fused(module, _QKV))
    if kind == "MLP" and linears_of(module, _GATE_UP) and hasattr(own, "act_fn"):
        gated = kernels.gated.get(type(own.act_fn).__name__) or _gated_by_torch(own.act_fn)
        yield "mlp", lambda: setattr(own, "forward", Gated(own, Fused(module, _GATE_UP), gated))


def _known(module: nn.Module) -> tuple[str, str]:
    """The family of a module of transformers that is known here, and what it is; empty if it is not."""
    name = type(module).__name__
    if type(module).__module__.startswith("transformers.models."):
        for kind in ("RMSNorm", "Attention", "MLP"):
            if name.endswith(kind) and name.removesuffix(kind) in _FAMILIES:
                return name.removesuffix(kind), kind
    return "", ""


# ---- what stands in for `forward`


class Norm:
    def __init__(self, kernel: Any, weight: Tensor, eps: float, plus_one: bool) -> None:
        self.kernel = kernel
        self.weight = weight
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, hidden_states: Tensor) -> Tensor:
        y: Tensor = self.kernel(hidden_states, self.weight, self.eps, self.plus_one)
        return y


class Gated:
    """An MLP: down(act(gate(x)) * up(x))."""

    def __init__(self, module: Any, gate_up: Fused, gated: Callable[[Tensor], Tensor]) -> None:
        self.down = module.down_proj
        self.gate_up = gate_up
        self.gated = gated

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.gated(self.gate_up(x)))
        return y


def _gated_by_torch(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return act(gate) * up

    return gated


def _with_rotary(module: Any, kernels: Kernels) -> Callable[..., Any] | None:
    """A module's own `forward`, with a kernel where it calls its file's function for rotary positions."""
    method = module.forward
    code = getattr(method, "__code__", None)
    if not inspect.ismethod(method) or code is None or _ROTARY not in code.co_names:
        return None
    function: Any = method.__func__
    theirs, ours, can = function.__globals__[_ROTARY], kernels.rotary, kernels.can_rotate

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return ours(q, k, cos, sin) if ours and can and can(q, k, cos, sin) else theirs(q, k, cos, sin)

    return types.MethodType(with_names(function, {_ROTARY: turn}), module)


def with_names(function: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of a function that finds other things under these names of its file."""
    every = {**function.__globals__, **names}
    copy = types.FunctionType(function.__code__, every, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# ---- asking both ways


class _Question:
    """A module that is patched, and what it said before to a few numbers. A product of several layers is never
    undone: it is the same by how it is made, and is not asked."""

    def __init__(self, module: Any, what: str, put: Callable[[], None]) -> None:
        self.module, self.what, self._own = module, what, module.forward
        self._weight = next(module.parameters())
        generator = torch.Generator().manual_seed(1)

        def some(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self._weight)

        self._ask = _ASKS[what](module, some)
        self._before = [answer.clone() for answer in self._ask()]
        put()
        self._ask()

    def stays_the_same(self) -> bool:
        """Whether it says the same now. If not, it runs as it did."""
        if not self._before:
            return True
        by = [off(*pair) for pair in zip(self._ask(), self._before, strict=True)]
        close = _CLOSE if self._weight.dtype is torch.float32 else _CLOSE_HALF
        if all(each < close for each in by):
            return True
        name = type(self.module).__name__
        log.warning("%s (%s) runs as it is: patched, it would be off by %.1e", name, self.what, max(by))
        self.module.forward = self._own
        return False


def _ask_norm(module: Any, some: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
    width = len(module.weight)
    x, heads = some(1, 3, width), some(1, 2, 5, 3 * width)[..., :width].transpose(1, 2)
    return lambda: [module.forward(x), module.forward(heads)]


def _ask_mlp(module: Any, some: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
    x = some(1, 3, module.gate_proj.in_features)
    return lambda: [module.forward(x)]


def _ask_rotary(module: Any, some: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
    """The function alone: the rest of the module is its own code."""
    q, k, cos, sin = some(1, 3, 4, module.head_dim), some(1, 2, 4, module.head_dim), *some(2, 1, 4, module.head_dim)
    return lambda: list(module.forward.__func__.__globals__[_ROTARY](q, k, cos, sin))


def off(one: Tensor, other: Tensor) -> float:
    """How far apart, relative."""
    return float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-20))


_ASKS: dict[str, Callable[[Any, Callable[..., Tensor]], Callable[[], list[Tensor]]]] = {
    "norm": _ask_norm,
    "mlp": _ask_mlp,
    "rotary": _ask_rotary,
    "qkv": lambda module, some: list,
}
