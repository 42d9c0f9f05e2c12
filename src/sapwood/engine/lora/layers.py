"""What adapters add to linear layers in a forward: which token has which slot, and the weights of the slots.

    y = base(x);   y[tokens of slot s] += (x @ A[s]^T) @ B[s]^T

On a GPU two kernels do it for all slots at once (kernels/lora.py), elsewhere torch does, slot by slot. Layers that are
computed as one product (fused.py) have one stack of weights, with a part for each of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..models.fused import Fused, FusedPart, Product

Slots = npt.NDArray[np.int32]
_MOST_RANK = 256  # of kernels: a processor has no memory for more


class LoraPair(NamedTuple):
    """What an adapter has for one module: A [rank, in] and B [out, rank], or as something else needs them."""

    a: Tensor
    b: Tensor


class SlotTokens(NamedTuple):
    """The tokens of one slot: a range where they lie together, an index on the device where they do not."""

    slot: int
    tokens: slice | Tensor


class Added(NamedTuple):
    """What one adapter adds to a linear layer, [in, rank] and [rank, out], and to which tokens: a range, their index,
    or one number a token, 1 or 0."""

    pair: LoraPair
    tokens: slice | Tensor

    def to(self, total: Tensor, x: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """Add a linear `change` of these tokens of `x` [1, H, T, in] to `total` [1, H, T, out]."""
        if isinstance(self.tokens, Tensor) and self.tokens.is_floating_point():
            total += change(x * self.tokens[:, None])
        else:
            total[:, :, self.tokens] += change(x[:, :, self.tokens])


class Routing:
    """Which tokens of a flat batch belong to which slot. `slots` has one entry a token, 0 for the base model."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        self.slots = slots
        self.device = device

    def __len__(self) -> int:
        return len(self.slots)

    @functools.cached_property
    def used(self) -> list[int]:
        """The slots of adapters."""
        found: list[int] = np.unique(self.slots[self.slots > 0]).tolist()
        return found

    @functools.cached_property
    def on_device(self) -> Tensor:
        """`slots` as kernels read them."""
        return torch.from_numpy(self.slots).to(self.device, non_blocking=True)

    @functools.cached_property
    def spans(self) -> list[SlotTokens]:
        found = []
        for slot in self.used:
            tokens = np.flatnonzero(self.slots == slot)
            first, end = int(tokens[0]), int(tokens[-1]) + 1
            together = end - first == len(tokens)
            found.append(SlotTokens(slot, slice(first, end) if together else torch.from_numpy(tokens).to(self.device)))
        return found

    def part(self, tokens: slice | npt.NDArray[np.integer]) -> Routing | None:
        """The routing of some of the tokens, for a module that is given those alone, in this order."""
        slots = self.slots[tokens]
        return Routing(slots, self.device) if slots.any() else None


class ReadRouting:
    """A routing that is read from the device's memory whenever the forward runs: what a CUDA graph is captured with.
    `on_device`: the slot of each token, int32; it is written before the graph is replayed."""

    def __init__(self, on_device: Tensor) -> None:
        if on_device.dtype is not torch.int32 or on_device.ndim != 1 or not on_device.is_contiguous():
            raise ValueError(f"slots on the device must be int32 in one piece, got {on_device.dtype} {on_device.shape}")
        self.on_device = on_device

    def __len__(self) -> int:
        return len(self.on_device)

    def of(self, slot: int, dtype: torch.dtype) -> Tensor:
        """1 for each token of a slot, 0 for the others."""
        return (self.on_device == slot).to(dtype)

    def part(self, tokens: slice | Tensor) -> ReadRouting:
        """As `Routing.part`; the index is on the device too."""
        some = self.on_device[tokens] if isinstance(tokens, slice) else self.on_device.index_select(0, tokens)
        return ReadRouting(some)


class Forward:
    """The forward that runs now: its routing, and, while they are collected, the names of the layers it has called."""

    def __init__(self) -> None:
        self.routing: Routing | ReadRouting | None = None
        self.called: set[str] | None = None
        self._side: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def beside(self, work: Callable[[], None]) -> Iterator[None]:
        """Do this work beside what is inside: in a graph that is being captured, as a branch of its own. Elsewhere
        streams cost the host more than they gain the device, and it is done before."""
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            work()
            yield
            return
        current = torch.cuda.current_stream()
        self._side = self._side or torch.cuda.Stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            work()
        yield
        current.wait_stream(self._side)


class Stack:
    """A and B of all slots, for linear layers that are computed as one; slot 0 is the base model.

    a [slots + 1, parts, max_rank, in], b [slots + 1, out of all parts, max_rank], ranks [slots + 1, parts]
    """

    def __init__(self, forward: Forward, layers: dict[str, nn.Linear], slots: int, max_rank: int) -> None:
        weight = next(iter(layers.values())).weight
        sizes = [each.out_features for each in layers.values()]
        self.forward = forward
        self.names = list(layers)
        self.a = weight.new_zeros(slots + 1, len(layers), max_rank, weight.shape[1])
        self.b = weight.new_zeros(slots + 1, sum(sizes), max_rank)
        self.ranks = torch.zeros(slots + 1, len(layers), dtype=torch.int32, device=weight.device)
        ends = np.cumsum(sizes).tolist()
        self.parts = [
            Wrapped(self, name, part, linear, slice(end - size, end))
            for part, ((name, linear), size, end) in enumerate(zip(layers.items(), sizes, ends, strict=True))
        ]
        self._kernels = grouped(weight) if max_rank <= _MOST_RANK else None
        self._blocks = None if self._kernels is None else self._kernels.out_blocks(sizes, self.a)

    @property
    def grouped(self) -> bool:
        """Whether kernels add all slots at once."""
        return self._kernels is not None

    def used_by(self, routing: Routing | ReadRouting) -> bool:
        """Whether its adapters change any of these layers, as far as the host knows."""
        if isinstance(routing, ReadRouting):
            return True
        return any(part.in_use[slot] is not None for part in self.parts for slot in routing.used)

    def around(self, x: Tensor, product: Product) -> Tensor:
        """The product of an input, and what adapters add to it."""
        if self.forward.called is not None:
            self.forward.called.update(self.names)
        kernels, routing, flat = self._kernels, self.forward.routing, x.reshape(-1, x.shape[-1])
        if routing is None or not self.used_by(routing):
            return product(x)
        if kernels is None:
            if isinstance(routing, ReadRouting):
                raise RuntimeError("the host does not know which tokens have which slot: only kernels can add adapters")
            y = product(x)
            for part in self.parts:
                part.add(routing, flat, y.view(len(flat), -1)[:, part.columns])
            return y
        check_tokens(self.names[0], len(flat), routing)
        shrunk = kernels.room(flat, self.a)
        slots = routing.on_device
        with self.forward.beside(lambda: kernels.shrink(flat, self.a, self.ranks, slots, shrunk)):
            y = product(x)
        kernels.expand(shrunk, y.view(len(flat), -1), self.b, self.ranks, slots, self._blocks)
        return y


class Wrapped:
    """One nn.Linear with the adapters of all slots: its part of a stack. The module keeps its class, its name and its
    weights. Where it is computed alone, this stands in for its `forward`."""

    def __init__(self, stack: Stack, name: str, part: int, linear: nn.Linear, columns: slice) -> None:
        self.stack = stack
        self.name = name
        self.columns = columns  # of the stack's output
        self.shape = (linear.out_features, linear.in_features)
        self.a, self.b = stack.a[:, part], stack.b[:, columns]
        self.ranks = stack.ranks[:, part]
        self.in_use: list[LoraPair | None] = [None] * len(
            self.a
        )  # [in, rank] and [rank, out] of each slot, as they are
        self.base: Any = linear.forward
        if isinstance(linear.forward, FusedPart):
            linear.forward.fused.around = stack.around
        else:
            linear.forward = self  # type: ignore[method-assign]

    def __call__(self, input: Tensor) -> Tensor:
        return self.stack.around(input, self.base)

    def present(self, routing: Routing | ReadRouting, tokens: int) -> list[Added]:
        """What is added to the outputs of a batch of so many tokens."""
        if isinstance(routing, ReadRouting):
            slots = range(1, len(self.a))
            added = [Added(LoraPair(self.a[s].t(), self.b[s].t()), routing.of(s, self.a.dtype)) for s in slots]
        else:
            added = [Added(pair, span.tokens) for span in routing.spans if (pair := self.in_use[span.slot]) is not None]
        if added:
            check_tokens(self.name, tokens, routing)
        return added

    def add(self, routing: Routing, x: Tensor, y: Tensor) -> None:
        for pair, tokens in self.present(routing, len(x)):
            if isinstance(tokens, slice):
                y[tokens].addmm_(x[tokens] @ pair.a, pair.b)
            else:
                y.index_add_(0, tokens, x.index_select(0, tokens) @ pair.a @ pair.b)

    def upload(self, slot: int, pair: LoraPair | None) -> None:
        """On the current stream, behind every step that was issued before. Padding is zero: kernels read all of it."""
        self.in_use[slot] = None
        rank = 0 if pair is None else len(pair.a)
        self.ranks[slot].fill_(rank)
        if pair is None:
            self.b[slot].zero_()  # whatever A has, nothing is added
            return
        a, b = self.a[slot, :rank], self.b[slot, :, :rank]
        a.copy_(pair.a, non_blocking=True)
        b.copy_(pair.b, non_blocking=True)
        self.a[slot, rank:].zero_()
        self.b[slot, :, rank:].zero_()
        self.in_use[slot] = LoraPair(a.t(), b.t())


def stacks(forward: Forward, layers: dict[str, nn.Linear], slots: int, max_rank: int) -> list[Stack]:
    """Stacks for all of these layers: those that are computed as one share one."""
    found, left = [], dict(layers)
    names = {id(linear): name for name, linear in layers.items()}
    while left:
        name, linear = next(iter(left.items()))
        together = _together(linear)
        some = {names[id(each)]: left.pop(names[id(each)]) for each in together}
        assert name in some
        found.append(Stack(forward, some, slots, max_rank))
    return found


def added_to(linear: nn.Module, tokens: int) -> list[Added]:
    """What the forward that runs now adds to a linear layer, for code that computes with its weight and does not call
    it."""
    wrapped = getattr(linear.forward, "inner", linear.forward)  # compiled.Outside
    if not isinstance(wrapped, Wrapped):
        return []
    forward = wrapped.stack.forward
    if forward.called is not None:
        forward.called.add(wrapped.name)
    return [] if forward.routing is None else wrapped.present(forward.routing, tokens)


def check_tokens(name: str, tokens: int, routing: Routing | ReadRouting) -> None:
    if tokens != len(routing):
        raise RuntimeError(
            f"{name} was given {tokens} tokens and the adapters are routed for {len(routing)}: "
            "whoever calls it with others must apply the routing's `part` of them"
        )


def grouped(weight: Tensor) -> Any:
    """The kernels for all slots at once, where there are any for this device and dtype; else None."""
    if not weight.is_cuda or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    try:
        from ..kernels import lora as lora_kernels
    except ImportError:
        return None
    return lora_kernels


def _together(linear: nn.Linear) -> Sequence[nn.Linear]:
    """The layers that a layer is computed with, itself included, in the order of the output."""
    fused: Fused | None = linear.forward.fused if isinstance(linear.forward, FusedPart) else None
    return [linear] if fused is None else fused.linears
