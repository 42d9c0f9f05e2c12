"""The executor of a GPU: a step's numbers are sent in one copy, kernels of our own attend, and small steps are graphs.

    begin   plan --> packed numbers --> one copy --> [tables, tokens | the model, attention over pages | likeliest]
                                                      a graph for up to 512 tokens, padded to one of some sizes
                     --> other sampling, where it is asked for --> copy to host, and an event
    finish  wait for the event

`begin` waits for nothing, so that the next step can be planned and issued while one runs. A step of a size that has no
graph, or of a model that cannot be captured, runs the same code without one. (Under Triton's interpreter all of it runs
on a CPU, which is for tests.)
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.scheduler import Event, Plan

from . import recurrent
from . import triton_attention as kernels
from .attention import Asked
from .graphs import BUCKETS, Graphs
from .model import ServedModel
from .pieces import Piece, pieces
from .sampling import Logprobs, Sampled
from .step_buffer import CHANGES, ListRoom, Packed, Room, StepBuffer
from .steps import Hooks, ModelExecutor, _Running, _Scores
from .transfer_torch import TorchArena
from .triton_steps import Known
from .work_list import Tiles, work_list

log = logging.getLogger(__name__)


class _List(NamedTuple):
    """A work list that layers of one group share: those with the same heads."""

    group: str
    window: int | None
    shape: kernels.Shape
    itemsize: int


class _Size(NamedTuple):
    """A step's size as kernels and graphs see it: tokens and rows with their padding, and how tiles are cut. `single`:
    every row has one token, and tiles are small whatever the number of rows."""

    tokens: int
    single: bool
    rows: int
    built: tuple[kernels.Built, ...]  # by work list
    items: tuple[int, ...]
    merges: tuple[int, ...]


class GpuExecutor(ModelExecutor):
    """Runs plans on a GPU. `columns` and `most_tokens`: those of the scheduler's tables and of its largest plan."""

    def __init__(
        self,
        served: ServedModel,
        arena: TorchArena,
        slots: int,
        hooks: Hooks | None = None,
        *,
        columns: int,
        most_tokens: int,
    ) -> None:
        super().__init__(served, arena, slots, hooks)
        self._slots = slots
        self._cuda = self.device.type == "cuda"
        self._processor = kernels.Processor.of(self.device)
        attending = [group for group in served.groups if group.family != "state"]
        self._windows = {group.name: group.window for group in attending}
        self._lists, self._list_of = self._find_lists()
        self._padded = [size for size in BUCKETS if size <= most_tokens] or [most_tokens]
        self._rows = min(slots, most_tokens)
        largest = max(most_tokens, self._padded[-1])
        # A step may also ask for the logits of prompts: as many as it has tokens.
        rooms = tuple(self._list_room(each, largest) for each in self._lists)
        room = Room(largest, largest, tuple(self._windows), rooms)
        self._buffer = StepBuffer(room, self.device)
        self._known = Known(dict.fromkeys(self._windows, columns), slots, self.device)
        self._last = self._known.last
        self._out = torch.zeros((2, self._rows), dtype=torch.int32, device=self.device)
        sizes = [kernels.Scratch.sizes(built) for size in self._every_size() for built in size.built]
        numbers, rows = (max(column) for column in zip(*sizes, (1, 1), strict=True))
        self._scratch = kernels.Scratch(numbers, rows, self.device)
        self._sizes = {
            (tokens, single): self._size(tokens, min(tokens, self._rows), single)
            for tokens in self._padded
            for single in (False, True)
            if not single or tokens <= (self._bucket(slots) or 0)
        }
        self._ready: deque[Any] = deque()  # for each plan that runs: the event after its read-back
        self._columns = columns
        self.graphs, self.adapted_graphs = Graphs(self.device), Graphs(self.device)

    def _find_lists(self) -> tuple[list[_List], dict[int, int]]:
        found: dict[_List, int] = {}
        of: dict[int, int] = {}
        for layer, (group, k_pages, v_pages, queries) in self.served.kept.items():
            heads = k_pages.shape[2]
            shape = kernels.Shape(heads, queries // heads, k_pages.shape[3], v_pages.shape[3])
            of[layer] = found.setdefault(_List(group, self._windows[group], shape, k_pages.element_size()), len(found))
        return list(found), of

    # ---- sizes

    def _every_size(self) -> list[_Size]:
        several = [self._size(tokens, tokens, False) for tokens in (*self._padded, self._buffer_tokens)]
        return [*several, *(self._size(tokens, tokens, True) for tokens in self._padded)]

    @property
    def _buffer_tokens(self) -> int:
        return len(self._buffer.device.tokens)

    def _built(self, each: _List, tokens: int, single: bool) -> kernels.Built:
        """Small tiles where decode rows are alone, large ones for chunks."""
        tuned = kernels.SMALL if tokens <= 64 or single else kernels.MIDDLE if tokens <= BUCKETS[-1] else kernels.LARGE
        return kernels.build(each.shape, tuned, self._processor, each.itemsize)

    def _list_room(self, each: _List, largest: int) -> ListRoom:
        """Room for the largest step, whatever its tiles are."""
        sizes = (*((tokens, single) for tokens in self._padded for single in (False, True)), (largest, False))
        tiles = [(self._built(each, tokens, single).tiles, tokens) for tokens, single in sizes]
        items = max(some.most_items(min(self._slots, tokens), tokens) for some, tokens in tiles)
        return ListRoom(items, max(some.most_parts() // 2 for some, _ in tiles))

    def _size(self, tokens: int, rows: int, single: bool) -> _Size:
        built = tuple(self._built(each, tokens, single) for each in self._lists)
        items = tuple(each.tiles.most_items(min(self._slots, tokens), tokens) for each in built)
        return _Size(tokens, single, rows, built, items, tuple(each.tiles.most_parts() // 2 for each in built))

    def _bucket(self, tokens: int) -> int | None:
        return next((size for size in self._padded if tokens <= size), None)

    # ---- graphs

    def capture(self) -> None:
        """Make the graphs, if the model can be captured; said either way."""
        sizes = {key: size for key, size in self._sizes.items() if self._state is None or size.single}
        blank = self._buffer.packing()
        blank.whole[:] = 0
        blank.targets[:] = self._slots
        self._buffer.send()
        self.graphs.capture({key: partial(self._compute, size) for key, size in sizes.items()})
        if self._can_adapt():
            self.adapted_graphs.capture({key: partial(self._compute_adapted, size) for key, size in sizes.items()})

    def _compute(self, size: _Size) -> Tensor:
        """A step of padded size whose numbers are on the device. The likeliest tokens are taken; all logits are
        there."""
        singles = torch.arange(size.tokens, device=self.device) if self._state is not None else None
        logits = self._forward(size, singles)
        best, tokens = logits.max(-1)
        self._known.end(tokens, best, self._buffer.device.targets, self._out)
        return logits

    def _compute_adapted(self, size: _Size) -> Tensor:
        """The same with adapters, whose slots are on the device too."""
        adapting = self._adapting(size)
        assert adapting is not None
        with adapting:
            return self._compute(size)

    def _adapting(self, size: _Size) -> AbstractContextManager[Any] | None:
        return self.hooks.adapting(self._buffer.device.adapters[: size.tokens])

    def _can_adapt(self) -> bool:
        return self.hooks.adapting(self._buffer.device.adapters) is not None

    def _forward(self, size: _Size, singles: Tensor | None, states: recurrent.Rows | None = None) -> Tensor:
        """`singles`: every row has one token, and its state is where the buffer says."""
        step = self._buffer.device
        begun = self._known.begin(step, size.tokens, size.rows)
        if singles is not None:
            states = recurrent.Rows(None, singles, begun.states, [])
        places = {name: places[: size.tokens] for name, places in step.places.items()}
        items = [items[:n] for items, n in zip(step.items, size.items, strict=True)]
        merges = [merges[:n] for merges, n in zip(step.merges, size.merges, strict=True)]

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, asked: Asked) -> Tensor:
            layer = int(module.layer_idx)
            group, k_pages, v_pages, _ = self.served.kept[layer]
            values = None if layer in self.served.latents else v[0].transpose(0, 1)
            kernels.write(k[0].transpose(0, 1), values, k_pages, v_pages, places[group])
            at = self._list_of[layer]
            return kernels.attend(
                *(size.built[at], q[0].transpose(0, 1), k_pages, v_pages, self._known.tables[group]),
                *(items[at], merges[at], self._scratch, self._windows[group], asked),
            )[None]

        return self.served.forward(begun.tokens, begun.positions, begun.wanted, attend, states)

    # ---- plans

    def _run(self, plan: Plan) -> _Running:
        batch = plan.batch
        scored = self.hooks.scored(plan)
        rows = batch.samples.nonzero()[0].tolist()
        plain = self.hooks.plain(plan, rows)
        self._copy(plan.copies, "before")
        parts = pieces(batch, min(self.most, self._buffer_tokens))
        bucket = self._bucket(parts[0].last) if len(parts) == 1 and not scored and self._one_size(plan) else None
        scores: list[_Scores] = []
        if bucket is not None:
            key = bucket, int(batch.lengths.max()) == 1
            size, adapters = self._sizes[key], self.hooks.adapter_slots(plan)
            self._send(plan, parts[0], size, plain=plain, adapters=adapters)
            if adapters is None:
                with self.hooks.adapted(plan, slice(0, parts[0].last)):
                    logits = self.graphs.run(key, partial(self._compute, size))
            else:
                logits = self.adapted_graphs.run(key, partial(self._compute_adapted, size))
        else:
            logits = self._in_pieces(plan, parts, scored, scores)
        self._copy(plan.copies, "after")
        drawn = self._drawn(plan, rows, logits, plain and bucket is not None)
        return self._read_back(_Running(plan, rows, drawn, scores))

    def _one_size(self, plan: Plan) -> bool:
        """Whether a plan can be computed in a padded size. Not so where chunks of states are in it, or adapters that
        kernels cannot apply."""
        if any(adapter is not None for adapter in plan.batch.adapters):
            if not self._can_adapt():
                return False
        return self._state is None or int(plan.batch.lengths.max()) == 1

    def _in_pieces(
        self, plan: Plan, parts: Sequence[Piece], scored: Mapping[int, Any], scores: list[_Scores]
    ) -> Tensor:
        """The logits of the rows that sample, of a plan in sizes as they come."""
        found = []
        for at, piece in enumerate(parts):
            flat_rows, which = self._wanted(plan, piece, scored)
            size = self._size(piece.last - piece.first, max(1, len(flat_rows)), False)
            self._send(plan, piece, size, wanted=flat_rows, changes=at == 0)
            table = None if self._state is None else plan.tables[self._state][plan.batch.slots[piece.rows], 0]
            ends = np.cumsum(piece.lengths)
            states = None if table is None else self._states(ends - piece.lengths, piece.lengths, table)
            with self.hooks.adapted(plan, slice(piece.first, piece.last)):
                logits = self._forward(size, None, states)
            found.append(logits[: len(piece.samples)])
            rest = logits[len(piece.samples) :]
            for row, first, tokens in which:
                scores += self._score(row, first, tokens, rest[: len(tokens)])
                rest = rest[len(tokens) :]
        return torch.cat(found) if len(found) > 1 else found[0]

    def _drawn(self, plan: Plan, rows: list[int], logits: Tensor, plain: bool) -> Sampled:
        """The tokens of a plan's rows; `plain`: the likeliest have been taken already. They are in `_out` too."""
        n = len(rows)
        if plain:
            return Sampled(self._out[0, :n], self._out[1, :n], np.zeros(0, np.int64), None)
        drawn = self.hooks.draw(logits[:n], plan, rows)
        if n:
            slots = self._put(plan.batch.slots[rows])
            best = torch.where(drawn.bad, torch.nan, 0.0)
            self._known.end(drawn.tokens, best, slots, self._out)
        return drawn

    # ---- there and back

    def _send(
        self,
        plan: Plan,
        piece: Piece,
        size: _Size,
        *,
        plain: bool = False,
        wanted: npt.NDArray[Any] | None = None,
        changes: bool = True,
        adapters: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Pack the numbers of a piece and send them. `plain`: the likeliest tokens become the last of their slots."""
        batch = plan.batch
        step: Packed = self._buffer.packing()
        starts, lengths, slots = piece.starts, piece.lengths, batch.slots[piece.rows]
        tokens, n, padded = batch.tokens[piece.first : piece.last], piece.last - piece.first, size.tokens
        ends = np.cumsum(lengths)
        if n == len(starts):
            row, positions = np.arange(n), starts
        else:
            row = np.repeat(np.arange(len(starts)), lengths)
            positions = starts[row] + np.arange(n) - (ends - lengths)[row]
        whose = slots[row]
        assert n <= padded <= self._buffer_tokens and len(starts) <= self._slots, (n, padded, len(starts))
        step.tokens[:n] = np.where(tokens < 0, -whose - 1, tokens)
        step.positions[:n] = positions
        step.tokens[n:padded] = step.positions[n:padded] = 0
        column, offset = positions // self.served.page_size, positions % self.served.page_size
        for name, places in step.places.items():
            at = plan.tables[name][whose, column] * self.served.page_size + offset
            places[:n] = np.where(positions < batch.write_from[name][piece.rows][row], 0, at)
            places[n:padded] = 0
        if self._state is not None:
            step.states[:n] = plan.tables[self._state][whose, 0]
            step.states[n:padded] = 0
        if adapters is not None:
            step.adapters[:n] = adapters
            step.adapters[n:padded] = 0
        rows = ends[piece.samples] - 1 if wanted is None else wanted
        assert len(rows) <= size.rows, (len(rows), size.rows)
        step.wanted[: len(rows)], step.wanted[len(rows) : size.rows] = rows, 0
        step.targets[: size.rows] = self._slots
        if plain:
            step.targets[: len(rows)] = slots[piece.samples]
        self._pack_work(step, starts, lengths, slots, size)
        self._pack_changes(step, plan if changes else None)
        self._buffer.send()

    def _pack_work(self, step: Packed, starts: Any, lengths: Any, slots: Any, size: _Size) -> None:
        made: dict[tuple[int | None, Tiles], Any] = {}
        for at, (each, built) in enumerate(zip(self._lists, size.built, strict=True)):
            key = each.window, built.tiles
            if key not in made:
                made[key] = work_list(starts, lengths, slots, each.window, built.tiles)
            items, merges, parts = made[key]
            assert len(items) <= size.items[at] and len(merges) <= size.merges[at] and parts <= built.tiles.most_parts()
            step.items[at][: len(items)] = items
            step.items[at][len(items) : size.items[at]] = 0
            step.merges[at][: len(merges)] = merges
            step.merges[at][len(merges) : size.merges[at]] = 0

    def _pack_changes(self, step: Packed, plan: Plan | None) -> None:
        """What this plan changes in the page tables."""
        at = 0
        if plan is not None:
            changes = {name: plan.changes[name] for name in self._windows}
            if sum(len(places) for places, _ in changes.values()) > CHANGES:
                for name in changes:
                    table = np.ascontiguousarray(plan.tables[name])
                    assert table.shape == (self._slots, self._columns), (table.shape, self._slots, self._columns)
                    self._known.tables[name][:-1].copy_(self._pinned(table), non_blocking=True)
                changes = {}
            for name, (places, pages) in changes.items():
                step.changed[0, at : at + len(places)] = places + self._known.first[name]
                step.changed[1, at : at + len(places)] = pages
                at += len(places)
        step.count[0] = at

    def _wanted(
        self, plan: Plan, piece: Piece, scored: Mapping[int, Any]
    ) -> tuple[npt.NDArray[Any], list[tuple[int, int, Tensor]]]:
        """The tokens of a piece whose logits are wanted: those of rows that sample; then, of prompts that are scored,
        all: for each of these (row, position, next tokens)."""
        ends = np.cumsum(piece.lengths)
        wanted, which = [ends[piece.samples] - 1], []
        for at, row in enumerate(piece.rows.tolist()) if scored else ():
            if row in scored:
                first = int(piece.starts[at] - plan.batch.starts[row])
                next_tokens = scored[row][first : first + int(piece.lengths[at])]
                begin = int(ends[at] - piece.lengths[at])
                wanted.append(np.arange(begin, begin + len(next_tokens)))
                which.append((row, int(piece.starts[at]) + 1, self._put(next_tokens)))
        return np.concatenate(wanted), which

    def _pinned(self, numbers: npt.NDArray[Any]) -> Tensor:
        here = torch.from_numpy(numbers)
        return here.pin_memory() if self._cuda else here.clone()

    def _put(self, numbers: npt.NDArray[Any]) -> Tensor:
        return self._pinned(numbers.astype(np.int64)).to(self.device, non_blocking=True)

    def _read_back(self, running: _Running) -> _Running:
        """Copies of everything on host, which are there once the event is."""
        plan, rows, drawn, scores = running
        told = None if drawn.logprobs is None else Logprobs(*map(self._host, drawn.logprobs))
        tokens, bad = self._host(self._out[:, : len(rows)])
        drawn = Sampled(tokens, bad, drawn.asked, told)
        scores = [
            _Scores(row, first, self._host(tokens), Logprobs(*map(self._host, logprobs)))
            for row, first, tokens, logprobs in scores
        ]
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
        self._ready.append(event)
        return _Running(plan, rows, drawn, scores)

    def _host(self, tensor: Tensor) -> Tensor:
        if not self._cuda:
            return tensor.clone()
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return here.copy_(tensor, non_blocking=True)

    def finish(self, block: bool = True) -> Sequence[Event]:
        event = self._ready[0]
        if event is not None:
            if not block and not event.query():
                return ()
            begin = time.perf_counter()
            event.synchronize()
            self.waited += time.perf_counter() - begin
        self._ready.popleft()
        return super().finish()

    def close(self) -> None:
        self.graphs.close()
        self.adapted_graphs.close()
        super().close()

    def newest(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The tokens sampled last for these slots: by the last plan that was begun before this one."""
        plan, rows, drawn, _ = self._running[-1]
        if self._ready[-1] is not None:
            self._ready[-1].synchronize()
        tokens = np.zeros(self._slots, np.int64)
        tokens[plan.batch.slots[rows]] = drawn.tokens.numpy()
        found: npt.NDArray[np.int64] = tokens[slots]
        return found
