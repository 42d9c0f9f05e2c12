"""Recurrent layers over all tokens of a step at once, whatever its rows are, so that a CUDA graph can hold them.

A mixer of transformers goes on from its state in one or two places, each a function of its file. Given one token a row,
all the rest of it treats tokens alike: so it is called with every token of the step as a row, and those functions are
kernels that know where rows begin and end, and which state each has (kernels/states.py):

    causal_conv1d_update
    mamba_selective_state_update, mamba2_selective_state_update
    torch_recurrent_gated_delta_rule

A mixer is run so if it answers as before: the first of each class is asked both ways.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.patches import off, with_names
from ..models.recurrent import (
    Mixers,
    Runs,
    StateRows,
    hidden_size,
    in_float32,
    multiplied,
    time_step_limits,
    within_limits,
)

log = logging.getLogger(__name__)
_CLOSE = 1e-4  # relative, in float32


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
    return "" if all(by < _CLOSE for by in apart_by) else f"it would be off by {max(apart_by):.1e}"


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
