"""Linear layers of a module that read the same input, computed as one product: q, k and v; gate and up.

    before   q_proj.weight [Q, in]   k_proj.weight [K, in]   v_proj.weight [V, in]     a product each
    after    one buffer    [Q + K + V, in]                                             one product
             q_proj.weight and the others are rows of it

The linear layers stay where they are, under their names, with their shapes: a checkpoint's tensors are copied to them
as before, and adapters are for them. Only their memory is shared, and a call of one of them gives its part of what
was computed for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Product = Callable[[Tensor], Tensor]  # [..., in] -> [..., out]


class Fused:
    """Some linear layers of a module as one. `parts` are their names in the module, in the order of the output."""

    def __init__(self, module: nn.Module, parts: Sequence[str]) -> None:
        linears = linears_of(module, parts)
        assert linears is not None, f"{type(module).__name__} has no such linear layers: {parts}"
        self.parts = tuple(parts)
        self.linears = linears
        self.sizes = [each.out_features for each in linears]
        self.around: Callable[[Tensor, Product], Tensor] | None = None  # adapters: the product of an input, and more
        self._module = module
        self._weight, self._bias = (f"{'_'.join(parts)}_{name}" for name in ("weight", "bias"))
        # Not parameters: a checkpoint has none of them. Buffers, so that they go where the module's memory goes.
        module.register_buffer(self._weight, _joined([each.weight for each in linears]), persistent=False)
        biases = [each.bias for each in linears if each.bias is not None]
        module.register_buffer(self._bias, _joined(biases) if biases else None, persistent=False)
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}  # parts that were computed for `_input` and not asked for yet
        for index, each in enumerate(linears):
            each.forward = FusedPart(self, index)  # type: ignore[method-assign]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of out], all parts side by side."""
        return self._product(x) if self.around is None else self.around(x, self._product)

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, getattr(self._module, self._weight), getattr(self._module, self._bias))

    def part(self, x: Tensor, index: int) -> Tensor:
        """What one of the layers gives. The others' parts are kept for the next call with the same tensor; each is
        given out once."""
        if x is self._input and index in self._waiting:
            y = self._waiting.pop(index)
        else:
            self._input, self._waiting = x, dict(enumerate(self(x).split(self.sizes, -1)))
            y = self._waiting.pop(index)
        if not self._waiting:
            self._input = None
        return y


class FusedPart:
    """Stands in for the `forward` of a linear layer that is computed with others."""

    def __init__(self, fused: Fused, index: int) -> None:
        self.fused = fused
        self.index = index

    def __call__(self, input: Tensor) -> Tensor:
        return self.fused.part(input, self.index)


def linears_of(module: nn.Module, names: Sequence[str]) -> list[nn.Linear] | None:
    """These layers of a module, if they can be one: all of them there and alike, and none of them fused before."""
    found: list[Any] = [getattr(module, name, None) for name in names]
    if not all(type(each) is nn.Linear and not isinstance(each.forward, FusedPart) for each in found):
        return None
    alike = {(each.in_features, each.weight.dtype, each.weight.device, each.bias is None) for each in found}
    return found if len(alike) == 1 else None


@torch.no_grad()
def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of which these are the rows from now on. Their own memory is given back one by one."""
    sizes = [len(each) for each in tensors]
    whole = tensors[0].new_empty(sum(sizes), *tensors[0].shape[1:])
    for tensor, rows in zip(tensors, whole.split(sizes), strict=True):
        rows.copy_(tensor)
        tensor.data = rows
    return whole
