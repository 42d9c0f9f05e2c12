"""LoRA adapters in one model: which are loaded, which slot of the device holds which, and what each token gets added.

    load(name, path) --> read in a process apart (process.py)
                              |
                              v
                         host copies, by content digest        kept while a name or a request wants them
                              |  begin(digests, lengths): uploads what the step's rows need
                              v
    slots on the device       module 1   A [slots + 1, rank, in]   B [slots + 1, out, rank]     slot 0 is the base model
                              module 2   ...
                              |  applied(routing): what layers.py adds to the outputs of modules
                              v
                          forward of the model, rows of any adapters in one batch

Used from the engine's thread alone; `read` may be called from any.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .files import AdapterError, ModelShape, in_expert
from .layers import Forward, LoraPair, ReadRouting, Routing, stacks
from .process import Reader
from .reader import Placed, as_json

__all__ = ["Adapter", "Adapters", "ReadRouting", "Routing", "UnknownAdapter"]


class UnknownAdapter(LookupError):
    """No adapter has this name or digest. `rows`: of a batch that need it; they never run as the base model."""

    def __init__(self, adapter: str | bytes, rows: Sequence[int] = ()) -> None:
        shown = adapter.hex() if isinstance(adapter, bytes) else repr(adapter)
        where = f", which rows {list(rows)} of the batch need" if rows else ""
        super().__init__(f"adapter {shown}{where} is not loaded")
        self.adapter = adapter
        self.rows = list(rows)
        self.culprits: list[str] = []  # the requests of these rows


class Adapter(NamedTuple):
    """The host copy of an adapter: for each module it changes, A and B as the device will hold them, B scaled."""

    digest: bytes
    pairs: dict[str, LoraPair]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.pairs.values() for tensor in pair)


class Adapters:
    """All adapters of a model. Made once, with the weights in place; the model's linear layers are wrapped then.

    max_loras   different adapters in one step
    max_rank    the highest rank an adapter may have; device memory is for this rank
    slots       adapters on the device at once; twice `max_loras` by default, as two steps in flight may share none
    memory      bytes of host memory that all adapters together may take; None: any
    reader      reads them
    """

    def __init__(
        self,
        model: nn.Module,
        max_loras: int,
        max_rank: int,
        slots: int | None = None,
        *,
        memory: int | None = None,
        reader: Reader | None = None,
    ) -> None:
        for field, value in (("max_loras", max_loras), ("max_rank", max_rank)):
            if value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        self.slots = 2 * max_loras if slots is None else slots
        if self.slots < max_loras:
            raise ValueError(f"slots must be at least max_loras, which is {max_loras}, got {slots}")
        self.max_rank = max_rank
        self._memory = memory
        self._reader = Reader() if reader is None else reader
        self._forward = Forward()
        self._model = model
        head = getattr(model, "get_output_embeddings", lambda: None)()
        layers = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear and module is not head and not in_expert(name)
        }
        if not layers:
            raise ValueError("this model has no nn.Linear that an adapter could change")
        self._stacks = stacks(self._forward, layers, self.slots, max_rank)
        self._wrapped = {part.name: part for stack in self._stacks for part in stack.parts}
        self._device = self._stacks[0].a.device

        self._shape = as_json(self._shape_of(head, set()))
        self._head = head
        self._names: dict[str, bytes] = {}
        self._host: dict[bytes, Adapter] = {}
        self._host_bytes = 0
        self._holders: dict[bytes, int] = {}  # requests bound to an adapter
        self._lru: OrderedDict[bytes, int] = OrderedDict()  # the slot of each digest on the device
        self._free = list(range(self.slots, 0, -1))
        self._in_flight: list[Routing] = []

    def only_called(self, forward: Callable[[], object]) -> None:
        """Modules that this forward does not call take no adapters from now on: code that reads their weights
        directly would leave the adapter out, silently."""
        self._forward.called = called = set[str]()
        try:
            forward()
        finally:
            self._forward.called = None
        self._shape = as_json(self._shape_of(self._head, {name for name in self._wrapped if name not in called}))

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return sum(stack.a.nbytes + stack.b.nbytes for stack in self._stacks)

    @property
    def routing(self) -> Routing | ReadRouting | None:
        """Of the forward that runs now."""
        return self._forward.routing

    @property
    def capturable(self) -> bool:
        """Whether a forward with adapters can be captured in a CUDA graph, inside `applied(ReadRouting(...))`: all that
        adapters add is added by kernels. Ask after `only_called`."""
        return all(stack.grouped for stack in self._stacks)

    # Names and host copies.

    def load(self, name: str, path: str | Path) -> bytes:
        """Load an adapter, or give a loaded one another name. Other content under a name in use is an error."""
        return self.add(name, self.read(path))

    def replace(self, name: str, path: str | Path) -> bytes:
        """Load an adapter under a name that may be in use. Requests that are bound to the old one go on with it."""
        adapter = self.read(path)
        if self._names.get(name) not in (None, adapter.digest):
            self.unload(name)
        return self.add(name, adapter)

    def read(self, path: str | Path, root: str | None = None) -> Adapter:
        """Read an adapter and check it against the model; nothing is changed, so that any thread may do it. `root`: the
        folder in which `path` is, and out of which nothing leads. It takes `lora_seconds` at most, whatever hangs."""
        room = None if self._memory is None else max(0, self._memory - self._host_bytes)
        itemsize = self._stacks[0].a.element_size()
        try:
            found, memory = self._reader.read(str(path), root, self._shape, itemsize, room)
            pairs = {
                module: self._host_copy(module, scale, *(_tensor(memory, placed) for placed in both))
                for module, (scale, *both) in found.modules.items()
            }
            return Adapter(found.digest, pairs)
        except AdapterError as error:
            raise type(error)(f"adapter {path}: {error}") from None

    def add(self, name: str, adapter: Adapter) -> bytes:
        if not name:
            raise ValueError("an adapter needs a name")
        if self._names.get(name, adapter.digest) != adapter.digest:
            raise AdapterError(f"the name {name!r} is in use for other content: unload it first, or replace it")
        if adapter.digest not in self._host:
            if self._memory is not None and self._host_bytes + adapter.nbytes > self._memory:
                raise AdapterError(f"{name!r} and the adapters that are loaded need more than lora_memory: unload some")
            self._host[adapter.digest] = adapter
            self._host_bytes += adapter.nbytes
        self._names[name] = adapter.digest
        return adapter.digest

    def unload(self, name: str) -> bytes:
        """Forget a name at once. Its content stays while another name or a request has it."""
        digest = self.digest_of(name)
        del self._names[name]
        self._drop(digest)
        return digest

    def names(self) -> dict[str, bytes]:
        """The digest of each adapter that new requests may ask for."""
        return dict(self._names)

    def digest_of(self, name: str) -> bytes:
        if name not in self._names:
            raise UnknownAdapter(name)
        return self._names[name]

    def hold(self, digest: bytes) -> None:
        """A request is bound to an adapter, from its submit to its end: waiting, running, retracted."""
        if digest not in self._host:
            raise UnknownAdapter(digest)
        self._holders[digest] = self._holders.get(digest, 0) + 1

    def release(self, digest: bytes) -> None:
        holders = self._holders.pop(digest)
        if holders > 1:
            self._holders[digest] = holders - 1
        self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        if digest not in self._holders and digest not in self._names.values():
            adapter = self._host.pop(digest, None)
            self._host_bytes -= 0 if adapter is None else adapter.nbytes

    def close(self) -> None:
        """Whatever is being read is given up."""
        self._reader.close()

    def _host_copy(self, module: str, scale: float, a: Tensor, b: Tensor) -> LoraPair:
        like = self._wrapped[module].a
        scaled = LoraPair(a.to(like.dtype, copy=True), (b.double() * scale).to(like.dtype))
        if not all(tensor.isfinite().all() for tensor in scaled):
            raise AdapterError(f"{module} has values that are not finite in {like.dtype}")
        # Pinned memory, so that an upload waits in the stream and not in the host.
        return LoraPair(*(tensor.pin_memory() for tensor in scaled)) if like.is_cuda else scaled

    def _shape_of(self, head: object, uncalled: set[str]) -> ModelShape:
        """What adapters may change, and why they may not change the rest. `uncalled`: layers that no forward calls."""
        linears = {name: wrapped.shape for name, wrapped in self._wrapped.items() if name not in uncalled}
        others = {
            name: _why_not(name, module, head, uncalled)
            for name, module in self._model.named_modules(remove_duplicate=False)
            if name not in linears
        }
        return ModelShape(linears, others, self.max_rank)

    # Steps.

    def begin(self, digests: Sequence[bytes | None], lengths: Sequence[int]) -> Routing | None:
        """Bring the adapters of a step's rows to the device; `lengths` are tokens by row. None if all rows are the base
        model's. Their slots stay until `end`.

        Uploads go into slots that no step in flight uses, on the current stream: have the one that runs the model be
        current.
        """
        wanted = dict.fromkeys(digest for digest in digests if digest is not None)
        if not wanted:
            return None
        for digest in wanted:
            if digest not in self._host:
                raise UnknownAdapter(digest, [row for row, other in enumerate(digests) if other == digest])
        absent = [digest for digest in wanted if digest not in self._lru]
        busy = {slot for routing in self._in_flight for slot in routing.used}
        idle = [digest for digest, slot in self._lru.items() if digest not in wanted and slot not in busy]
        short = len(absent) - len(self._free)
        if short > len(idle):
            raise RuntimeError(
                f"{len(wanted)} adapters in a step, {len(busy)} slots in use by steps in flight, {self.slots} slots: "
                "max_loras of the scheduler must not be above that of the adapters"
            )
        for digest in idle[: max(short, 0)]:
            self._free.append(self._lru.pop(digest))
        for digest in absent:
            self._upload(self._free[-1], self._host[digest])
            self._lru[digest] = self._free.pop()  # only now: a slot filled in part is a free one
        for digest in wanted:
            self._lru.move_to_end(digest)
        slot_of = np.array([0 if digest is None else self._lru[digest] for digest in digests], np.int32)
        routing = Routing(np.repeat(slot_of, lengths), self._device)
        self._in_flight.append(routing)
        return routing

    @contextlib.contextmanager
    def applied(self, routing: Routing | ReadRouting | None) -> Iterator[None]:
        """Forwards inside run with these adapters. May be nested, with a `part` for what sees some tokens only."""
        before, self._forward.routing = self._forward.routing, routing
        try:
            yield
        finally:
            self._forward.routing = before

    def end(self, routing: Routing | None) -> None:
        """A step is over, done or failed: nothing on the device reads its slots any more."""
        if routing is not None:
            self._in_flight.remove(routing)

    def _upload(self, slot: int, adapter: Adapter) -> None:
        with torch.inference_mode():
            for name, wrapped in self._wrapped.items():
                wrapped.upload(slot, adapter.pairs.get(name))


def _tensor(memory: mmap.mmap, placed: Placed) -> Tensor:
    rows, columns = placed.shape
    kind = getattr(torch, placed.dtype)
    return torch.frombuffer(memory, dtype=kind, count=rows * columns, offset=placed.at).view(rows, columns)


def _why_not(name: str, module: nn.Module, head: object, uncalled: set[str]) -> str:
    if name in uncalled:
        return "is read by the model without being called: adapters there are not supported"
    if in_expert(name):
        return "is an expert, which sees some tokens only: adapters there are not supported"
    if module is head:
        return "is the output layer: adapters there are not supported"
    if type(module) is nn.Linear:
        return "is a layer that has another name too: adapters there are not supported"
    return f"is a {type(module).__name__}: adapters on what is not nn.Linear are not supported"
