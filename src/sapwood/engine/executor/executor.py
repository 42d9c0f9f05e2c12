"""Turning plans into tensors, and running them: the executor for real models.

    begin   page tables as of this plan --> flat rows --> copies before --> the model --> copies after --> sampling
    finish  its tokens, as an event

On a GPU `begin` only issues work; on a CPU it is done when `begin` returns. Tokens that a plan does not know yet (-1)
are those sampled last for their slot, and never leave the device for that.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.cache import PageCopy
from sapwood.scheduler import Batch, Event, Plan, StepDone, StepFailed

from ..models import recurrent
from ..models.gathered import gather_of
from ..models.model import Flat, ServedModel
from ..params import Likely
from ..samples import StepLogprobs
from ..transfer.torch_mover import TorchArena
from . import attention as att
from .pieces import BatchPiece, pieces
from .rows import Greedy, PlanRows, RowSource
from .sampling import Logprobs, Sampled, logprobs_of

log = logging.getLogger(__name__)
_MIN_PIECE_TOKENS, _MAX_PIECE_TOKENS = 16, 1 << 30  # tokens of a piece: below, it is not tried in smaller ones
_STEPS_BEFORE_GROWTH = 256  # steps that fit, before pieces are tried that are twice as large
_MAX_GATHERED_SCORES = 1 << 27  # scores of a layer that attends by itself: every token's with every key, for every head
_SCORED_TOKENS = 256  # prompt tokens whose log-probabilities are taken at once


class Scores(NamedTuple):
    """Log-probabilities of some of a prompt's tokens, on the device."""

    row: int
    first: int  # the position of the first of them
    tokens: Tensor
    logprobs: Logprobs


class Running(NamedTuple):
    rows: PlanRows
    drawn: Sampled
    scores: list[Scores]
    ready: Any = None  # on a GPU: the event after which all of this is on host


class ModelExecutor:
    """Runs plans on a model. `arena` holds the memory of its groups, page-major, as the scheduler gives it out.
    `source`: where the rows of each plan come from. `logprobs`: by step, what plans that are done found; the engine
    takes it out."""

    def __init__(self, served: ServedModel, arena: TorchArena, slots: int, source: RowSource | None = None) -> None:
        served.bind(arena)
        self.served = served
        self.arena = arena
        self.device = served.device
        self.source: RowSource = Greedy() if source is None else source
        self.logprobs: dict[int, StepLogprobs] = {}
        self.waited = 0.0  # seconds for the device, by `finish`
        # Tokens of a piece; less after a step that memory did not suffice for, for a while.
        self.most = _MAX_PIECE_TOKENS
        self._fitted = 0  # steps since then
        self._last = torch.zeros(slots, dtype=torch.long, device=self.device)
        self._running: deque[Running] = deque()
        self._state = next((group.name for group in served.groups if group.family == "state"), None)

    def begin(self, plan: Plan) -> None:
        rows = self.source.rows(plan)
        try:
            while not self._fits(rows):
                pass
        except BaseException:
            rows.close()
            raise

    def _fits(self, rows: PlanRows) -> bool:
        """Run a plan. False if memory did not suffice: then it can be tried again, in smaller pieces."""
        try:
            self._running.append(self._run(rows))
            self._more()
            return True
        except Exception as error:
            if not out_of_memory(error):
                raise
            largest = min(self.most, int(rows.plan.batch.lengths.sum()))
            if largest <= _MIN_PIECE_TOKENS:
                raise
            # States have gone on in some layers and not in others: the scheduler must take that back, and does not try
            # forever.
            self.most, self._fitted = max(_MIN_PIECE_TOKENS, largest // (2 if self._state is None else 4)), 0
            log.warning("out of memory in a step of %d tokens: computed in pieces of %d now", largest, self.most)
            if self._state is not None:
                raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return False

    def _more(self) -> None:
        """A step has fitted: after some of these, larger pieces are tried again. What took the memory may be over."""
        if self.most < _MAX_PIECE_TOKENS:
            self._fitted += 1
            if self._fitted >= _STEPS_BEFORE_GROWTH:
                self.most, self._fitted = 2 * self.most, 0

    def _run(self, rows: PlanRows) -> Running:
        plan, batch = rows.plan, rows.plan.batch
        scores: list[Scores] = []
        found: list[Tensor] = []
        self._copy(plan.copies, "before")
        for piece in pieces(batch, self._largest(batch)):
            flat, which = self._flat(plan, piece, rows.scored)
            self._scrub(flat)
            with rows.adapted(slice(piece.first, piece.last)):
                logits = self.served.logits(flat)
            found.append(logits[: len(piece.samples)])
            rest = logits[len(piece.samples) :]
            for row, first, tokens in which:
                scores += self._score(row, first, tokens, rest[: len(tokens)])
                rest = rest[len(tokens) :]
        self._copy(plan.copies, "after")
        drawn = rows.draw(torch.cat(found) if len(found) > 1 else found[0], self.newest)
        if rows.sampling:
            self._last[self._put(batch.slots[rows.sampling])] = drawn.tokens
        return Running(rows, drawn, scores)

    def _largest(self, batch: Batch) -> int:
        """The most tokens of a piece. Where models attend by themselves, scores take the memory of tokens times keys:
        rows apart from each other have fewer of them."""
        if not self.served.gathers:
            return self.most
        keys = int(batch.starts.sum() + batch.lengths.sum())
        heads = max(kept.queries for kept in self.served.kept.values())
        return min(self.most, max(_MIN_PIECE_TOKENS, _MAX_GATHERED_SCORES // (heads * max(keys, 1))))

    def finish(self, block: bool = True) -> Sequence[Event]:
        rows, drawn, scores, _ = self._running.popleft()
        rows.close()
        plan = rows.plan
        assert plan.step is not None
        begin = time.perf_counter()
        wrong = drawn.bad.cpu().numpy()
        self.waited += time.perf_counter() - begin
        if wrong.any():
            ids = plan.batch.ids
            culprits = [ids[row] for row, is_bad in zip(rows.sampling, wrong.tolist(), strict=True) if is_bad]
            return [StepFailed(plan.step, "the model's logits are no numbers (NaN or infinite)", culprits)]
        if drawn.logprobs is not None or scores:
            self.logprobs[plan.step] = _by_request(rows, drawn, scores)
        return [StepDone(plan.step, drawn.tokens.cpu().numpy().astype(np.int32))]

    def close(self) -> None:
        """Let go of all memory."""
        self.arena.close()

    def forget(self) -> None:
        """Nothing runs, and whoever gives plans from now on begins anew."""
        self._last.zero_()

    def newest(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The tokens sampled last for these slots. Waits for the step that samples them."""
        return self._last[torch.from_numpy(slots.astype(np.int64)).to(self.device)].cpu().numpy()

    # ---- plans as tensors

    def _flat(
        self, plan: Plan, piece: BatchPiece, scored: Mapping[int, npt.NDArray[np.int32]]
    ) -> tuple[Flat, list[tuple[int, int, Tensor]]]:
        """The piece for the model; and of rows whose prompt is scored: (row, position, next tokens), whose logits come
        behind those of the rows that sample."""
        batch, device = plan.batch, self.device
        rows, starts, lengths = piece.rows, piece.starts, piece.lengths
        slots = batch.slots[rows]
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
                write_from, page = batch.write_from[group.name][rows], self.served.page_size
                found = att.rows_of(starts, lengths, table, write_from, page, group.window, device)
                if self.served.gathers:
                    found = found._replace(gather=gather_of(starts, lengths, table, page, device))
                groups[group.name] = found
        tokens = batch.tokens[piece.first : piece.last]
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        unknown = (tokens < 0).nonzero()[0]
        if len(unknown):
            whose = torch.from_numpy(slots[row[unknown]].astype(np.int64)).to(device)
            ids[torch.from_numpy(unknown).to(device)] = self._last[whose]
        wanted = [ends[piece.samples] - 1]
        which = []
        for at in [at for at, row in enumerate(rows.tolist()) if row in scored] if scored else []:
            first = int(starts[at] - batch.starts[rows[at]])
            next_tokens = scored[int(rows[at])][first : first + int(lengths[at])]
            begin = int(ends[at] - lengths[at])
            wanted.append(np.arange(begin, begin + len(next_tokens)))
            which.append((int(rows[at]), int(starts[at]) + 1, self._put(next_tokens)))
        flat = Flat(ids, torch.from_numpy(positions).to(device), self._put(np.concatenate(wanted)), groups, states)
        return flat, which

    def _put(self, numbers: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device)

    def _states(self, begins: Any, lengths: Any, slots: Any) -> recurrent.StateRows:
        single, put = (lengths == 1).nonzero()[0], self._put
        return recurrent.StateRows(
            *(begins[single], put(begins[single]), put(slots[single])),
            [
                (int(begins[i]), int(begins[i] + lengths[i]), put(slots[i : i + 1]))
                for i in (lengths > 1).nonzero()[0].tolist()
            ],
        )

    def _score(self, row: int, first: int, tokens: Tensor, logits: Tensor) -> Iterator[Scores]:
        for at in range(0, len(tokens), _SCORED_TOKENS):
            some = tokens[at : at + _SCORED_TOKENS]
            yield Scores(
                row, first + at, some, logprobs_of(logits[at : at + _SCORED_TOKENS], some, self.source.max_logprobs)
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
                rows[self._put(np.array(fresh))] = 0
            some = [copy for copy in some if copy.source]
            if some:
                sources, targets = (
                    np.array(pages) for pages in zip(*((c.source, c.target) for c in some), strict=True)
                )
                rows[self._put(targets)] = rows.index_select(0, self._put(sources))

    def _scrub(self, flat: Flat) -> None:
        """A page whose first token comes now shows nothing of whoever had it before: what is masked is multiplied by
        zero, and a stranger's NaN would stay one."""
        for name, rows in flat.attention.items():
            if len(rows.fresh):
                whole = self.arena.rows[name]
                words = whole.view(torch.int64) if whole.shape[1] % 8 == 0 else whole  # bytes take four times as long
                words.index_fill_(0, rows.fresh, 0)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _by_request(rows: PlanRows, drawn: Sampled, scores: list[Scores]) -> StepLogprobs:
    ids = rows.plan.batch.ids
    new: dict[str, Likely] = {}
    prompts: dict[str, list[tuple[int, Likely]]] = {}
    if drawn.logprobs is not None:
        asked = drawn.asked.tolist()
        likely = _likely(drawn.tokens[torch.from_numpy(drawn.asked).to(drawn.tokens.device)], drawn.logprobs)
        new = {ids[rows.sampling[at]]: each for at, each in zip(asked, likely, strict=True)}
    for row, first, tokens, logprobs in scores:
        prompts.setdefault(ids[row], []).extend(enumerate(_likely(tokens, logprobs), first))
    return StepLogprobs(new, prompts)


def _likely(tokens: Tensor, logprobs: Logprobs) -> list[Likely]:
    """For each row: the token it got and the likeliest ones, each with its log-probability and its rank."""
    chosen, ranks, ids, values = (each.cpu().tolist() for each in logprobs)
    found = []
    for at, token in enumerate(tokens.cpu().tolist()):
        best = {id: (value, rank) for rank, (id, value) in enumerate(zip(ids[at], values[at], strict=True), 1)}
        found.append({token: (chosen[at], ranks[at]), **best})
    return found
