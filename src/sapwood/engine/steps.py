"""Turning plans into tensors, and running them: the executor for real models.

    begin   page tables as of this plan --> flat rows --> copies before --> the model --> copies after --> sampling
    finish  its tokens, as an event

On a GPU `begin` only issues work; on a CPU it is done when `begin` returns. Tokens that a plan does not know yet (-1)
are those sampled last for their slot, and never leave the device for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sapwood.cache import PageCopy
from sapwood.scheduler import Event, Plan, StepDone, StepFailed

from . import attention as att
from . import recurrent
from .arena import DeviceArena
from .model import Flat, ServedModel
from .sampling import Sampled


class Hooks(Protocol):
    """What an executor asks of whoever knows the requests."""

    def seat(self, plan: Plan) -> None:
        """Slots have new owners (`plan.seated`)."""

    def draw(self, logits: Tensor, plan: Plan, rows: Sequence[int]) -> Sampled:
        """A token for each of these rows of the plan's batch."""

    def adapted(self, plan: Plan) -> AbstractContextManager[Any]:
        """Around the model's forward: the adapters of its rows."""

    def over(self, plan: Plan) -> None:
        """A plan is over, one way or the other."""


class Greedy:
    """The likeliest token, always, and no adapters."""

    def seat(self, plan: Plan) -> None: ...

    def draw(self, logits: Tensor, plan: Plan, rows: Sequence[int]) -> Sampled:
        return Sampled(logits.argmax(-1), ~torch.isfinite(logits).all(-1), np.zeros(0, np.int64), None)

    def adapted(self, plan: Plan) -> AbstractContextManager[Any]:
        return nullcontext()

    def over(self, plan: Plan) -> None: ...


class _Running(NamedTuple):
    plan: Plan
    rows: list[int]  # of the batch, that sample
    drawn: Sampled


class ModelExecutor:
    """Runs plans on a model. `arena` holds the memory of its groups, page-major, as the scheduler gives it out."""

    def __init__(self, served: ServedModel, arena: DeviceArena, slots: int, hooks: Hooks | None = None) -> None:
        served.bind(arena)
        self.served = served
        self.arena = arena
        self.device = served.device
        self.hooks: Hooks = Greedy() if hooks is None else hooks
        self.logprobs: dict[str, dict[int, tuple[float, int]]] = {}  # of the last plan finished: token -> value, rank
        self._last = torch.zeros(slots, dtype=torch.long, device=self.device)
        self._running: deque[_Running] = deque()
        self._state = next((group.name for group in served.groups if group.family == "state"), None)

    def begin(self, plan: Plan) -> None:
        self.hooks.seat(plan)
        try:
            flat, rows = self._flat(plan)
            self._copy(plan.copies, "before")
            self._scrub(flat)
            with self.hooks.adapted(plan):
                logits = self.served.logits(flat)
            self._copy(plan.copies, "after")
            drawn = self.hooks.draw(logits, plan, rows)
            if rows:
                slots = torch.from_numpy(plan.batch.slots[rows].astype(np.int64)).to(self.device)
                self._last[slots] = drawn.tokens
        except BaseException as error:
            self.hooks.over(plan)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            raise
        self._running.append(_Running(plan, rows, drawn))

    def finish(self, block: bool = True) -> Sequence[Event]:
        plan, rows, drawn = self._running.popleft()
        self.hooks.over(plan)
        assert plan.step is not None
        wrong = drawn.bad.cpu().numpy()
        if wrong.any():
            culprits = [plan.batch.ids[row] for row, is_bad in zip(rows, wrong.tolist(), strict=True) if is_bad]
            return [StepFailed(plan.step, "the model's logits are no numbers (NaN or infinite)", culprits)]
        self.logprobs = _logprobs(plan, rows, drawn) if drawn.logprobs is not None else {}
        return [StepDone(plan.step, drawn.tokens.cpu().numpy().astype(np.int32))]

    # ---- plans as tensors

    def _flat(self, plan: Plan) -> tuple[Flat, list[int]]:
        batch, device = plan.batch, self.device
        starts, lengths = batch.starts.astype(np.int64), batch.lengths.astype(np.int64)
        slots = batch.slots
        ends = np.cumsum(lengths)
        row = np.repeat(np.arange(len(starts)), lengths)
        positions = starts[row] + np.arange(len(row)) - (ends - lengths)[row]
        groups = {}
        states = None
        for group in self.served.groups:
            table = plan.tables[group.name][slots]
            if group.family == "state":
                states = self._states(ends - lengths, lengths, table[:, 0])
            else:
                write_from = batch.write_from[group.name]
                groups[group.name] = att.rows_of(
                    starts, lengths, table, write_from, self.served.page_size, group.window, device
                )
        ids = torch.from_numpy(batch.tokens.astype(np.int64)).to(device)
        unknown = (batch.tokens < 0).nonzero()[0]
        if len(unknown):
            whose = torch.from_numpy(slots[row[unknown]].astype(np.int64)).to(device)
            ids[torch.from_numpy(unknown).to(device)] = self._last[whose]
        rows = batch.samples.nonzero()[0]
        wanted = torch.from_numpy(ends[rows] - 1).to(device)
        return Flat(ids, torch.from_numpy(positions).to(device), wanted, groups, states), rows.tolist()

    def _states(self, begins: Any, lengths: Any, slots: Any) -> recurrent.Rows:
        device, slots = self.device, slots.astype(np.int64)
        single = (lengths == 1).nonzero()[0]
        return recurrent.Rows(
            begins[single],
            torch.from_numpy(begins[single]).to(device),
            torch.from_numpy(slots[single]).to(device),
            [
                (int(begins[i]), int(begins[i] + lengths[i]), torch.from_numpy(slots[i : i + 1]).to(device))
                for i in (lengths > 1).nonzero()[0].tolist()
            ],
        )

    # ---- memory

    def _copy(self, copies: Iterable[PageCopy], when: str) -> None:
        """Whole pages, so that what lies behind the copied tokens is clean too. State source 0: zeros."""
        by_group: dict[str, list[PageCopy]] = {}
        for copy in copies:
            if copy.when == when:
                by_group.setdefault(copy.group, []).append(copy)
        for name, some in by_group.items():
            rows = self.arena.rows[name]
            fresh = [copy.target for copy in some if name == self._state and not copy.source]
            if fresh:
                rows[torch.tensor(fresh, device=self.device)] = 0
            some = [copy for copy in some if copy.source]
            if some:
                sources = torch.tensor([copy.source for copy in some], device=self.device)
                targets = torch.tensor([copy.target for copy in some], device=self.device)
                rows[targets] = rows.index_select(0, sources)

    def _scrub(self, flat: Flat) -> None:
        """A page whose first token comes now shows nothing of whoever had it before: what is masked is multiplied by
        zero, and a stranger's NaN would stay one."""
        for name, rows in flat.attention.items():
            fresh = rows.pages[(rows.offsets == 0) & (rows.pages > 0)]
            if len(fresh):
                self.arena.rows[name][fresh] = 0


def _logprobs(plan: Plan, rows: list[int], drawn: Sampled) -> dict[str, dict[int, tuple[float, int]]]:
    """By request: the token it got and the likeliest ones, each with its log-probability and its rank."""
    assert drawn.logprobs is not None
    chosen, ranks, ids, values = (each.cpu().tolist() for each in drawn.logprobs)
    tokens = drawn.tokens.cpu().tolist()
    found = {}
    for at, row in enumerate(drawn.asked.tolist()):
        best = {id: (value, rank) for rank, (id, value) in enumerate(zip(ids[at], values[at], strict=True), 1)}
        found[plan.batch.ids[rows[row]]] = {tokens[row]: (chosen[at], ranks[at]), **best}
    return found
