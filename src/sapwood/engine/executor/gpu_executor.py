"""The executor of a GPU: a step's numbers are sent in one copy, kernels of our own attend, and small steps are graphs.

    begin   plan --> packed numbers --> one copy --> [tables, tokens | the model, attention over pages | likeliest]
                                                      graphs of up to 512 tokens, padded to one of some sizes
                     --> other sampling, where it is asked for --> copy to host, and an event
    finish  wait for the event

`begin` waits for nothing, so that the next step can be planned and issued while one runs. A step of a size that has no
graph, or of a model that cannot be captured, runs the same code without one. (Under Triton's interpreter all of it runs
on a CPU, which is for tests.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.scheduler import Event, Plan

from ..kernels import attention as kernels
from ..kernels import states as triton_states
from ..kernels.steps import DeviceTables, StepInputs
from ..models import recurrent
from ..models.model import ServedModel
from ..transfer.torch_mover import TorchArena
from .attention import ScoreOptions
from .executor import ModelExecutor, Running, Scores
from .graphs import Graphs
from .packing import Packer, Sizes, StepSize
from .pieces import BatchPiece, pieces
from .pinned_copies import PinnedCopies
from .ragged import take_all_tokens
from .rows import PlanRows, RowSource
from .sampling import Logprobs, Sampled
from .step_buffer import StepBuffer


class GpuExecutor(ModelExecutor):
    """Runs plans on a GPU. `columns` and `most_tokens`: those of the scheduler's tables and of its largest plan."""

    def __init__(
        self,
        served: ServedModel,
        arena: TorchArena,
        slots: int,
        source: RowSource | None = None,
        *,
        columns: int,
        most_tokens: int,
    ) -> None:
        super().__init__(served, arena, slots, source)
        self._slots = slots
        self._cuda = self.device.type == "cuda"
        self._windows = {group.name: group.window for group in served.groups if group.family != "state"}
        self._ragged = self._state is not None and take_all_tokens(served.mixers, triton_states)
        self._sizes = Sizes(served.kept, self._windows, slots, most_tokens, self.device)
        self._scratch = self._sizes.scratch(self.device)
        self._buffer = StepBuffer(self._sizes.room(tuple(self._windows)), self.device)
        self._known = DeviceTables(dict.fromkeys(self._windows, columns), slots, self.device)
        self._link = PinnedCopies(self.device)
        self._packer = Packer(self._sizes, self._known, self._buffer, self._link, served.page_size, self._state)
        self._last = self._known.last
        self._out = torch.zeros((2, min(slots, most_tokens)), dtype=torch.int32, device=self.device)
        self.graphs, self.adapted_graphs = Graphs(self.device), Graphs(self.device)

    # ---- graphs

    @torch.inference_mode()
    def warm(self) -> None:
        """Launch every kernel in every way that steps launch it: in each kind of tiles, with adapters, and for tokens
        that were not taken by `_compute`. Nothing is left of it."""
        self._packer.send_nothing()
        for size in self._sizes.kinds():
            self._compute(size)
        if self._can_adapt():
            self._compute_adapted(size)
        nobody = torch.full((1,), self._slots, device=self.device)
        self._known.end(torch.zeros_like(nobody), torch.zeros(1, device=self.device), nobody, self._out)

    def capture(self, progress: bool = False) -> None:
        """Make the graphs, if the model can be captured; said either way."""
        whole = self._state is None or self._ragged
        sizes = {key: size for key, size in self._sizes.known.items() if whole or size.single}
        self._packer.send_nothing()
        self.graphs.capture({key: partial(self._compute, size) for key, size in sizes.items()}, progress)
        if self._can_adapt():
            adapted = {key: partial(self._compute_adapted, size) for key, size in sizes.items()}
            self.adapted_graphs.capture(adapted, progress)

    def _compute(self, size: StepSize) -> Tensor:
        """A step of padded size whose numbers are on the device. The likeliest tokens are taken; all logits are
        there."""
        logits = self._forward(size)
        best, tokens = logits.max(-1)
        self._known.end(tokens, best, self._buffer.device.targets, self._out)
        return logits

    def _compute_adapted(self, size: StepSize) -> Tensor:
        """The same with adapters, whose slots are on the device too."""
        adapting = self._adapting(size)
        assert adapting is not None
        with adapting:
            return self._compute(size)

    def _adapting(self, size: StepSize) -> AbstractContextManager[Any] | None:
        return self.source.adapting(self._buffer.device.adapters[: size.tokens])

    def _can_adapt(self) -> bool:
        return self.source.adapting(self._buffer.device.adapters) is not None

    def _forward(self, size: StepSize, apart: recurrent.StateRows | None = None) -> Tensor:
        """`apart`: the rows of a step as mixers need them that cannot take all tokens at once."""
        step = self._buffer.device
        begun = self._known.begin(step, size.tokens, size.wanted)
        states = apart if apart is not None else self._states_of(size, begun)
        places = {name: places[: size.tokens] for name, places in step.places.items()}
        items = [items[:n] for items, n in zip(step.items, size.items, strict=True)]
        merges = [merges[:n] for merges, n in zip(step.merges, size.merges, strict=True)]

        def attend(call: int, module: Any, q: Tensor, k: Tensor, v: Tensor, *, asked: ScoreOptions, **_: Any) -> Tensor:
            kept = self.served.kept[call]
            values = None if kept.latent else v[0].transpose(0, 1)
            kernels.write(k[0].transpose(0, 1), values, kept.k_pages, kept.v_pages, places[kept.group])
            at = self._sizes.list_of[call]
            return kernels.attend(
                *(size.built[at], q[0].transpose(0, 1), kept.k_pages, kept.v_pages, self._known.tables[kept.group]),
                *(items[at], merges[at], self._scratch, self._windows[kept.group], asked),
            )[None]

        return self.served.forward(begun.tokens, begun.positions, begun.wanted, attend, states)

    def _states_of(self, size: StepSize, begun: StepInputs) -> recurrent.StateRows | recurrent.Runs | None:
        """The rows of a step of padded size as mixers take them."""
        if self._state is None:
            return None
        if self._ragged:
            return recurrent.Runs(self._buffer.device.whose[: size.tokens], self._buffer.device.runs[: size.runs])
        return recurrent.StateRows(None, torch.arange(size.tokens, device=self.device), begun.states, [])

    # ---- plans

    def _run(self, rows: PlanRows) -> Running:
        plan, batch = rows.plan, rows.plan.batch
        can_pad = not rows.scored and self._one_size(plan)
        parts = pieces(batch, self._most_tokens(int(batch.lengths.sum()), can_pad))
        buckets = [self._sizes.bucket(piece.last - piece.first) if can_pad else None for piece in parts]
        plain = len(parts) == 1 and buckets[0] is not None and rows.plain()
        scores: list[Scores] = []
        found = []
        self._copy(plan.copies, "before")
        for at, (piece, bucket) in enumerate(zip(parts, buckets, strict=True)):
            if bucket is not None:
                logits = self._padded(rows, piece, bucket, plain, at == 0)[: len(piece.samples)]
                found.append(logits if len(parts) == 1 else logits.clone())  # the next graph writes there
            else:
                found.append(self._as_it_is(rows, piece, scores, at == 0))
        self._copy(plan.copies, "after")
        drawn = self._drawn(rows, torch.cat(found) if len(found) > 1 else found[0], plain)
        return self._read_back(Running(rows, drawn, scores))

    def _most_tokens(self, tokens: int, can_pad: bool) -> int:
        """Of a piece. A step a little too large for a graph is computed by two of them: without, the host takes longer
        to issue it than the device to compute both."""
        graph = self._sizes.padded[-1]
        if can_pad and self.graphs.captured and tokens <= 2 * graph:
            return graph  # whatever memory there is: theirs is there
        return min(self.most, self._sizes.largest)

    def _one_size(self, plan: Plan) -> bool:
        """Whether a plan can be computed in a padded size. Not so with adapters that kernels cannot apply, or with
        chunks of states that kernels cannot go on from."""
        if any(adapter is not None for adapter in plan.batch.adapters):
            if not self._can_adapt():
                return False
        return self._state is None or self._ragged or int(plan.batch.lengths.max()) == 1

    def _padded(self, rows: PlanRows, piece: BatchPiece, bucket: int, plain: bool, changes: bool) -> Tensor:
        """The logits of a piece in a padded size: from a graph, where there is one."""
        key = bucket, int(piece.lengths.max()) == 1
        size, adapters, tokens = self._sizes.known[key], rows.adapter_slots(), slice(piece.first, piece.last)
        if adapters is not None:
            adapters = adapters[tokens]
        wanted, _ = self._wanted(rows.plan, piece, {})
        self._packer.send(rows.plan, piece, size, wanted, plain=plain, changes=changes, adapters=adapters)
        if adapters is not None:
            return self.adapted_graphs.run(key, partial(self._compute_adapted, size))
        with rows.adapted(tokens):
            return self.graphs.run(key, partial(self._compute, size))

    def _as_it_is(self, rows: PlanRows, piece: BatchPiece, scores: list[Scores], changes: bool) -> Tensor:
        """The logits of the rows of a piece that sample, computed in the size that it has. `scores` learns those of
        prompts."""
        plan = rows.plan
        wanted, which = self._wanted(plan, piece, rows.scored)
        size = self._sizes.size(piece.last - piece.first, max(1, len(wanted)))
        self._packer.send(plan, piece, size, wanted, changes=changes)
        apart = None
        if self._state is not None and not self._ragged:
            table = plan.tables[self._state][plan.batch.slots[piece.rows], 0]
            apart = self._states(np.cumsum(piece.lengths) - piece.lengths, piece.lengths, table)
        with rows.adapted(slice(piece.first, piece.last)):
            logits = self._forward(size, apart)
        rest = logits[len(piece.samples) :]
        for row, first, tokens in which:
            scores += self._score(row, first, tokens, rest[: len(tokens)])
            rest = rest[len(tokens) :]
        return logits[: len(piece.samples)]

    def _drawn(self, rows: PlanRows, logits: Tensor, plain: bool) -> Sampled:
        """The tokens of a plan's rows; `plain`: the likeliest have been taken already. They are in `_out` too."""
        n = len(rows.sampling)
        if plain:
            return Sampled(self._out[0, :n], self._out[1, :n], np.zeros(0, np.int64), None)
        drawn = rows.draw(logits[:n], self.newest)
        if n:
            slots = self._put(rows.plan.batch.slots[rows.sampling])
            best = torch.where(drawn.bad, torch.nan, 0.0)
            self._known.end(drawn.tokens, best, slots, self._out)
        return drawn

    # ---- there and back

    def _wanted(
        self, plan: Plan, piece: BatchPiece, scored: Mapping[int, Any]
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

    def _put(self, numbers: npt.NDArray[Any]) -> Tensor:
        return self._link.put(numbers.astype(np.int64))

    def _read_back(self, running: Running) -> Running:
        """Copies of everything on host, which are there once the event is."""
        rows, drawn, scores, _ = running
        logprobs = None if drawn.logprobs is None else Logprobs(*map(self._link.fetch, drawn.logprobs))
        tokens, bad = self._link.fetch(self._out[:, : len(rows.sampling)])
        drawn = Sampled(tokens, bad, drawn.asked, logprobs)
        scores = [
            Scores(row, first, self._link.fetch(tokens), Logprobs(*map(self._link.fetch, likely)))
            for row, first, tokens, likely in scores
        ]
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
        return Running(rows, drawn, scores, event)

    def finish(self, block: bool = True) -> Sequence[Event]:
        event = self._running[0].ready
        if event is not None:
            if not block and not event.query():
                return ()
            begin = time.perf_counter()
            event.synchronize()
            self.waited += time.perf_counter() - begin
        return super().finish()

    def close(self) -> None:
        if self._cuda:
            with contextlib.suppress(RuntimeError):  # of a device that is gone
                torch.cuda.synchronize(self.device)  # what is fetched is written where somebody else may come
        self.graphs.close()
        self.adapted_graphs.close()
        super().close()

    def forget(self) -> None:
        self._known.forget()

    def newest(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The tokens sampled last for these slots: by the last plan that was begun before this one."""
        rows, drawn, _, ready = self._running[-1]
        if ready is not None:
            ready.synchronize()
        tokens = np.zeros(self._slots, np.int64)
        tokens[rows.plan.batch.slots[rows.sampling]] = drawn.tokens.numpy()
        found: npt.NDArray[np.int64] = tokens[slots]
        return found
