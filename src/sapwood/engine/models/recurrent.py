"""Recurrent layers (Mamba, gated delta nets, short convolutions) on state slots.

A mixer of transformers takes [batch, tokens, hidden] and touches its cache through a handful of methods. Here it is
given the rows of a step apart from each other: all decode rows as a batch of one token each, every other row by itself;
and instead of a cache the states of their slots, which are read before and written back after:

    slots ---gather---> states ---mixer---> states ---scatter---> slots

A fresh row begins with a slot of zeros, which a mixer takes for a state like any other. On a GPU most mixers take all
tokens of a step at once instead.

Mamba 2 may limit its time steps. The limits are those of the config (`time_step_limit`; usually there are none), and
they hold for every token, so that a prompt's chunks, its cached part and the answer are computed by one rule.
transformers applies them to prompts alone, and for Nemotron-H and Zamba 2 takes others, made of a parameter of
initialisation (`time_step_min`), which these models were not trained with.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .kv_groups import Unsupported, text_config
from .patches import off, with_names

log = logging.getLogger(__name__)
_CACHE_NAMES = ("cache_params", "past_key_values", "past_key_value")
_CLOSE_TO_ROWS = 1e-4  # relative, in float32: a mixer over all tokens beside one over rows
_CLOSE, _CLOSE_HALF = 1e-3, 0.05  # relative: a mixer that forgets its state in a chunk is off by far more


class StateRows(NamedTuple):
    """The rows of a step as mixers see them."""

    single_at: Any  # [B] where in the batch rows of one token are: a host array,
    single: Tensor  # and on the device
    single_slots: Tensor  # [B] their working slots
    chunks: list[tuple[int, int, Tensor]]  # tokens [first, last), and the slot as [1]


class Runs(NamedTuple):
    """The rows of a step for mixers that take all tokens at once: int32, on the device."""

    whose: Tensor  # [T] the row of each token; -1: padding
    rows: Tensor  # [R, 3] first token, how many, and the slot of the state; a row of no tokens is none


class _Same(dict[int, Any]):
    """The same for every layer that is asked for."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def __missing__(self, layer_idx: int) -> Any:
        return self.value


class States:
    """What a mixer takes for its cache: the states of one layer, for the rows of one call. Older mixers look into
    `cache.layers[layer_idx]`, later ones ask `get_conv_state(layer_idx)`."""

    record_past = False

    def __init__(self, states: dict[str, Tensor]) -> None:
        self.states = states
        self.layers = _Same(self)
        self.conv_states = {int(name[4:]): state for name, state in states.items() if name.startswith("conv")}
        self.recurrent_states = {int(name[9:]): state for name, state in states.items() if name.startswith("recurrent")}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"recurrent{state_idx}")

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """The new columns behind those that were kept; of all of them the last are kept."""
        kept = self.states[f"conv{state_idx}"]
        both = torch.cat([kept, conv_states.to(kept.dtype)], -1)
        kept.copy_(both[..., both.shape[-1] - kept.shape[-1] :])
        return both

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        kept = self.states[f"recurrent{state_idx}"]
        kept.copy_(recurrent_states)
        return kept


class InPlace(States):
    """The same for a mixer that takes all tokens: the states of all slots, which have been written when it is done."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("a mixer that asks for more than its state")

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        assert recurrent_states is self.states["recurrent0"], "a state that is not in its slot"
        return recurrent_states


class Mixers:
    """The recurrent layers of a model. `bind` gives each its memory; within `running` they work on a step's slots."""

    def __init__(self, model: Any) -> None:
        self.layers: dict[int, Any] = {}
        self._memory: dict[int, dict[str, Tensor]] = {}  # layer -> part -> [slots + 1, ...]
        self.rows: StateRows | Runs | None = None  # of the step that runs
        self.ragged: dict[int, Callable[..., Any]] = {}  # forwards that take all tokens of a step at once
        settle_time_steps(model)
        for module in model.modules():
            layer = getattr(module, "layer_idx", None)
            if layer is not None and _is_mixer(module):
                if int(layer) in self.layers:
                    raise Unsupported(f"layer {layer} has two recurrent parts: {type(module).__name__} is one of them")
                self.layers[int(layer)] = module
                self._wrap(module, int(layer))
        self.within: Callable[[Any], AbstractContextManager[Any]] = lambda tokens: nullcontext()  # around some tokens
        self._loops: dict[type, bool] = {}  # classes whose chunks begin from nothing: token by token instead

    def bind(self, memory: dict[int, dict[str, Tensor]]) -> None:
        self._memory = memory
        for layer, module in self.layers.items():
            if layer in memory and type(module) not in self._loops:
                self._loops[type(module)] = not self._chunks_go_on(module, layer)

    @contextmanager
    def running(self, rows: StateRows | Runs | None) -> Iterator[None]:
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def _wrap(self, module: Any, layer: int) -> None:
        inner: Callable[..., Tensor] = _own_forward(module)
        parameters = inspect.signature(inner).parameters
        cache = next(name for name in _CACHE_NAMES if name in parameters)

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            rows = self.rows
            if rows is None:
                return inner(hidden_states, *args, **kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name not in (cache, "attention_mask")}
            if isinstance(rows, Runs):
                given = hidden_states.transpose(0, 1)  # every token a row
                return _first(self.ragged[layer](given, **{cache: InPlace(self._memory[layer])}, **kwargs)).transpose(
                    0, 1
                )

            def call(some: Tensor, states: dict[str, Tensor]) -> Tensor:
                return _first(inner(some, **{cache: States(states)}, **kwargs))

            return self._run(module, layer, hidden_states, rows, call)

        module.forward = forward

    def _run(
        self,
        module: Any,
        layer: int,
        hidden: Tensor,
        rows: StateRows,
        call: Callable[[Tensor, dict[str, Tensor]], Tensor],
    ) -> Tensor:
        memory = self._memory[layer]
        out: Tensor | None = None
        if len(rows.single):
            states = {part: kept.index_select(0, rows.single_slots) for part, kept in memory.items()}
            with self.within(rows.single_at):
                answer = call(hidden[0].index_select(0, rows.single)[:, None], states)
            out = hidden.new_empty(1, hidden.shape[1], answer.shape[-1], dtype=answer.dtype)
            out[0, rows.single] = answer[:, 0]
            for part, kept in memory.items():
                kept[rows.single_slots] = states[part]
        for first, last, slot in rows.chunks:
            states = {part: kept.index_select(0, slot) for part, kept in memory.items()}
            with self.within(slice(first, last)):
                answer = self._chunk(module, hidden[:, first:last], states, call)
            if out is None:
                out = hidden.new_empty(1, hidden.shape[1], answer.shape[-1], dtype=answer.dtype)
            out[:, first:last] = answer
            for part, kept in memory.items():
                kept[slot] = states[part]
        assert out is not None
        return out

    def _chunk(self, module: Any, hidden: Tensor, states: dict[str, Tensor], call: Any) -> Tensor:
        if not self._loops.get(type(module), False):
            return call(hidden, states)  # type: ignore[no-any-return]
        return torch.cat([call(hidden[:, at : at + 1], states) for at in range(hidden.shape[1])], 1)

    @torch.no_grad()
    def _chunks_go_on(self, module: Any, layer: int) -> bool:
        """Whether a chunk of several tokens goes on from the state it is given. (Some scans begin from zeros.) That may
        hardly show in what it computes, so that the state it leaves is looked at too. Asked in float32, and not of
        cuDNN, which rounds."""
        try:
            with in_float32(module), torch.backends.cudnn.flags(enabled=False):
                return self._asked(module, layer, _CLOSE)
        except Exception:  # a package's kernels that transformers has found, and that take no float32
            return self._asked(module, layer, _CLOSE_HALF)

    def _asked(self, module: Any, layer: int, close: float) -> bool:
        weight = multiplied(module)
        size = hidden_size(module)
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(1, 7, size, generator=generator).to(weight)
        begin = {
            part: 0.5 * torch.randn(kept.shape, generator=generator) for part, kept in self.small(layer, 2).items()
        }
        slot = torch.ones(1, dtype=torch.long, device=weight.device)
        answers = []
        for ends in ([3, 7], [3, 4, 5, 6, 7]):
            memory = {part: kept.copy_(begin[part]) for part, kept in self.small(layer, 2).items()}
            first, parts = 0, []
            for end in ends:
                rows = StateRows(None, slot[:0], slot[:0], [(0, end - first, slot)])
                with self.running(rows), self.on(layer, memory):
                    parts.append(module.forward(hidden[:, first:end]))
                first = end
            answers.append([torch.cat(parts, 1), *(memory[part][1:] for part in sorted(memory))])
        return all(off(*pair) < close for pair in zip(*answers, strict=True))

    def small(self, layer: int, slots: int) -> dict[str, Tensor]:
        """Memory like a layer's, of a few slots, in float32 where the model is."""
        wide = multiplied(self.layers[layer]).dtype in (torch.float32, torch.float64)
        some = {part: kept.new_zeros(slots, *kept.shape[1:]) for part, kept in self._memory[layer].items()}
        return {part: exact(kept) if wide else kept for part, kept in some.items()}

    @contextmanager
    def on(self, layer: int, memory: dict[str, Tensor]) -> Iterator[None]:
        """A layer with other memory, for a while."""
        before, self._memory = self._memory, {**self._memory, layer: memory}
        try:
            yield
        finally:
            self._memory = before


def settle_time_steps(model: Any) -> None:
    """Every mixer has the limits of the config."""
    limits = getattr(text_config(model.config), "time_step_limit", None) or (0.0, math.inf)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limits)


def time_step_limits(module: Any) -> tuple[float, float] | None:
    """Between which time steps a Mamba 2 mixer stays; None: it has no limits."""
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    return None if (low, high) == (0.0, math.inf) else (float(low), float(high))


def within_limits(update: Callable[..., Any], limits: tuple[float, float] | None) -> Callable[..., Any]:
    """The function in which a Mamba 2 mixer goes on by one token a row, with its time steps within limits."""
    if limits is None:
        return update

    def limited(
        state: Tensor,
        hidden: Tensor,
        dt: Tensor,
        *rest: Any,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **more: Any,
    ) -> Any:
        dt = exact(dt) if dt_bias is None else exact(dt) + exact(dt_bias)
        dt = softplus(dt) if dt_softplus else dt
        return update(state, hidden, dt.clamp(*limits), *rest, dt_bias=None, dt_softplus=False, **more)

    return limited


def _own_forward(module: Any) -> Callable[..., Tensor]:
    """A mixer's forward. Where it has limits, they hold for single tokens too."""
    function: Any = inspect.unwrap(type(module).forward)
    name, limits = "mamba2_selective_state_update", time_step_limits(module)
    own: Callable[..., Tensor] = module.forward
    if limits is None or name not in function.__code__.co_names:
        return own
    return partial(with_names(function, {name: within_limits(function.__globals__[name], limits)}), module)


def _first(answer: Any) -> Tensor:
    found: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return found


@contextmanager
def in_float32(module: Any) -> Iterator[None]:
    """A module's weights in float32 at least, for a while."""
    before = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
    for tensor, data in before:
        tensor.data = exact(data)
    try:
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def exact(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _is_mixer(module: Any) -> bool:
    """A layer that keeps states, by what its forward asks a cache for."""
    forward = getattr(type(module), "forward", None)
    if forward is None or not type(module).__module__.startswith("transformers."):
        return False
    try:
        return "update_conv_state(" in inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return False


def multiplied(module: Any) -> Tensor:
    """A weight that hidden states are multiplied with, and so of their dtype: others may be kept in float32."""
    return next(each for each in module.modules() if isinstance(each, nn.Linear)).weight


def hidden_size(module: Any) -> int:
    for name in ("in_proj", "in_proj_qkvz", "in_proj_qkv"):
        if hasattr(module, name):
            return int(getattr(module, name).in_features)
    return int(module.hidden_size)


# ---- all tokens of a step at once
#
# A mixer of transformers goes on from its state in one or two places, each a function of its file. Given one token a
# row, all the rest of it treats tokens alike: so it is called with every token of the step as a row, and those
# functions are kernels that know where rows begin and end, and which state each has (kernels/states.py):
#
#     causal_conv1d_update
#     mamba_selective_state_update, mamba2_selective_state_update
#     torch_recurrent_gated_delta_rule
#
# Whatever the rows of a step are, it is then one kind of forward, which a CUDA graph can hold. A mixer is run so if it
# answers as before: the first of each class is asked both ways.


def take_all_tokens(mixers: Mixers, functions: Any) -> bool:
    """Let mixers that can take all tokens of a step at once do so. Returns whether all can; those that cannot are
    logged. `functions`: the module that has `conv`, `scan` and `delta_rule`, and `compiling`, in which they are only
    compiled."""
    forwards = {layer: _over_all_tokens(module, mixers, functions) for layer, module in mixers.layers.items()}
    first = {type(mixers.layers[layer]): layer for layer in reversed(forwards)}
    with functions.compiling():
        for layer in first.values():
            _why_not(mixers, layer, forwards[layer])
    can: dict[type, bool] = {}
    for kind, layer in first.items():
        why = _why_not(mixers, layer, forwards[layer])
        can[kind] = not why
        if why:
            log.warning("%s: steps with prompts in them run without graphs (%s)", kind.__name__, why)
    mixers.ragged = {
        layer: forward for layer, forward in forwards.items() if forward is not None and can[type(mixers.layers[layer])]
    }
    return len(mixers.ragged) == len(mixers.layers)


def _over_all_tokens(module: Any, mixers: Mixers, functions: Any) -> Callable[..., Any] | None:
    """A mixer's own code, with other functions where it goes on from its state."""
    function: Any = inspect.unwrap(type(module).forward)
    if "causal_conv1d_update" not in function.__code__.co_names:
        return None
    scan = within_limits(_of_step(mixers, functions.scan), time_step_limits(module))
    names = {
        "causal_conv1d_update": _of_step(mixers, functions.conv),
        "mamba_selective_state_update": scan,
        "mamba2_selective_state_update": scan,
        "torch_recurrent_gated_delta_rule": _of_step(mixers, functions.delta_rule),
    }
    return partial(with_names(function, names), module)


def _of_step(mixers: Mixers, function: Callable[..., Any]) -> Callable[..., Any]:
    def with_runs(*args: Any, **kwargs: Any) -> Any:
        return function(mixers.rows, *args, **kwargs)

    return with_runs


_LENGTHS, _SLOTS = (1, 6, 1, 2), (3, 1, 4, 2)  # of the rows that are asked about


@torch.no_grad()
def _why_not(mixers: Mixers, layer: int, forward: Callable[..., Any] | None) -> str:
    """Empty if a mixer answers as before. Some rows both ways, from states that are no zeros, in float32: what comes
    out, and what is left in the slots."""
    if forward is None:
        return "its code is not known"
    mixers.ragged[layer] = forward
    try:
        with in_float32(mixers.layers[layer]), torch.backends.cudnn.flags(enabled=False):
            apart_by = [off(*pair) for pair in zip(*_both_ways(mixers, layer), strict=True)]
    except Exception as error:  # also Triton's own
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    finally:
        del mixers.ragged[layer]
    return "" if all(by < _CLOSE_TO_ROWS for by in apart_by) else f"it would be off by {max(apart_by):.1e}"


def _both_ways(mixers: Mixers, layer: int) -> Iterator[list[Tensor]]:
    """What a mixer answers, and the states it leaves: row by row, and over all tokens at once."""
    module = mixers.layers[layer]
    weight, generator = multiplied(module), torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=generator)

    tokens, firsts = sum(_LENGTHS), [sum(_LENGTHS[:row]) for row in range(len(_LENGTHS))]
    hidden = some(1, tokens + 2, hidden_size(module)).to(weight)  # two more than there are rows for
    states = {part: some(*kept.shape).to(kept) for part, kept in mixers.small(layer, 5).items()}
    place = partial(torch.tensor, device=weight.device)
    every = list(zip(firsts, _LENGTHS, _SLOTS, strict=True))
    single = [(first, slot) for first, length, slot in every if length == 1]
    chunks = [(first, first + length, place([slot])) for first, length, slot in every if length > 1]
    apart = StateRows(None, place([first for first, _ in single]), place([slot for _, slot in single]), chunks)
    whose = [row for row, length in enumerate(_LENGTHS) for _ in range(length)]
    runs = Runs(place([*whose, -1, -1], dtype=torch.int32), place([*every, (0, 0, 0)], dtype=torch.int32))
    for way, given in ((apart, hidden[:, :tokens]), (runs, hidden)):
        memory = {part: kept.clone() for part, kept in states.items()}
        with mixers.running(way), mixers.on(layer, memory):
            out = module.forward(given)[:, :tokens]
        yield [out, *(memory[part][1:] for part in sorted(memory))]
