"""A plan as the numbers that kernels read: which padded size it has, and what stands where in the step's buffer.

plan, piece --> positions, places of K and V, states, adapters --+
            --> work lists, one for layers that are alike -------+--> StepBuffer --> device
            --> what it changes in the page tables --------------+
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sapwood.scheduler import Plan

from ..kernels import attention as kernels
from ..kernels.steps import DeviceTables
from ..models.model import LayerPages
from .graphs import BUCKET_TOKENS
from .rows import BatchPiece
from .step_buffer import MAX_TABLE_CHANGES, LargestStep, ListRoom, Packed, PinnedCopies, StepBuffer
from .work_list import Tiles, work_list


class List(NamedTuple):
    """A work list that layers of one group share: those with the same heads."""

    group: str
    window: int | None
    shape: kernels.HeadShape
    itemsize: int


class StepSize(NamedTuple):
    """A step's size as kernels and graphs see it: tokens and rows with their padding, and how tiles are cut. `single`:
    every row has one token, and tiles are small whatever the number of rows. `runs`: rows that have a state."""

    tokens: int
    single: bool
    wanted: int  # logits
    runs: int
    built: tuple[kernels.Built, ...]  # by work list
    items: tuple[int, ...]
    merges: tuple[int, ...]


class Sizes:
    """The sizes of steps: those that are padded, and so can be graphs, and any other."""

    def __init__(
        self,
        kept: Mapping[int, LayerPages],
        windows: Mapping[str, int | None],
        slots: int,
        most_tokens: int,
        device: torch.device,
    ) -> None:
        self._processor = kernels.Processor.of(device)
        self._slots = slots
        self.lists, self.list_of = _find_lists(kept, windows)  # and which is each call's
        self.padded = [size for size in BUCKET_TOKENS if size <= most_tokens] or [most_tokens]
        self.largest = max(most_tokens, self.padded[-1])
        self.known = {
            (tokens, single): self.size(tokens, min(tokens, slots, most_tokens), single)
            for tokens in self.padded
            for single in (False, True)
            if not single or tokens <= (self.bucket(slots) or self.padded[-1])
        }

    def bucket(self, tokens: int) -> int | None:
        """The padded size for so many tokens."""
        return next((size for size in self.padded if tokens <= size), None)

    def size(self, tokens: int, wanted: int, single: bool = False) -> StepSize:
        built = tuple(self._built(each, tokens, single) for each in self.lists)
        rows = min(self._slots, tokens)
        items = tuple(each.tiles.most_items(rows, tokens) for each in built)
        merges = tuple(each.tiles.most_parts() // 2 for each in built)
        return StepSize(tokens, single, wanted, rows, built, items, merges)

    def kinds(self) -> list[StepSize]:
        """One size of each kind of tiles, the smallest; what takes longest to compile first."""
        some = list(self.known.values())
        if self.largest > BUCKET_TOKENS[-1]:
            some.append(self.size(BUCKET_TOKENS[-1] + 1, min(BUCKET_TOKENS[-1] + 1, self._slots)))
        some.sort(key=lambda size: size.tokens, reverse=True)
        return list({size.built: size for size in some}.values())

    def room(self, groups: tuple[str, ...]) -> LargestStep:
        """For the largest step, whatever its tiles are. A step may also ask for the logits of prompts: as many as it
        has tokens."""
        every = [*self._every()]
        lists = (
            ListRoom(max(size.items[at] for size in every), max(size.merges[at] for size in every))
            for at in range(len(self.lists))
        )
        return LargestStep(self.largest, self.largest, self._slots, groups, tuple(lists))

    def scratch(self, device: torch.device) -> kernels.Scratch:
        sizes = [kernels.Scratch.sizes(built) for size in self._every() for built in size.built]
        numbers, rows = (max(column) for column in zip(*sizes, (1, 1), strict=True))
        return kernels.Scratch(numbers, rows, device)

    def _every(self) -> list[StepSize]:
        some = [(tokens, single) for tokens in self.padded for single in (False, True)]
        return [self.size(tokens, tokens, single) for tokens, single in (*some, (self.largest, False))]

    def _built(self, each: List, tokens: int, single: bool) -> kernels.Built:
        """Small tiles where decode rows are alone, large ones for chunks."""
        tuned = (
            kernels.SMALL
            if tokens <= 64 or single
            else kernels.MIDDLE
            if tokens <= BUCKET_TOKENS[-1]
            else kernels.LARGE
        )
        return kernels.build(each.shape, tuned, self._processor, each.itemsize)


def _find_lists(kept: Mapping[int, LayerPages], windows: Mapping[str, int | None]) -> tuple[list[List], dict[int, int]]:
    found: dict[List, int] = {}
    of: dict[int, int] = {}
    for call, (group, k_pages, v_pages, queries, _) in kept.items():
        heads = k_pages.shape[2]
        shape = kernels.HeadShape(heads, queries // heads, k_pages.shape[3], v_pages.shape[3])
        of[call] = found.setdefault(List(group, windows[group], shape, k_pages.element_size()), len(found))
    return list(found), of


class Packer:
    """Packs and sends. `state`: the group of states, if the model has one."""

    def __init__(
        self,
        sizes: Sizes,
        known: DeviceTables,
        buffer: StepBuffer,
        link: PinnedCopies,
        page_size: int,
        state: str | None,
    ) -> None:
        self._sizes, self._known, self._buffer, self._link = sizes, known, buffer, link
        self._page, self._state = page_size, state

    def send(
        self,
        plan: Plan,
        piece: BatchPiece,
        size: StepSize,
        wanted: npt.NDArray[Any],
        *,
        plain: bool = False,
        changes: bool = True,
        adapters: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """The numbers of a piece. `wanted`: the tokens whose logits are; `plain`: the likeliest tokens become the last
        of their slots; `changes`: those of the plan are not there yet."""
        batch = plan.batch
        step: Packed = self._buffer.packing()
        starts, lengths, slots = piece.starts, piece.lengths, batch.slots[piece.rows]
        tokens, n, padded = batch.tokens[piece.first : piece.last], piece.last - piece.first, size.tokens
        begins = np.cumsum(lengths) - lengths
        if n == len(starts):
            row, positions = np.arange(n), starts
        else:
            row = np.repeat(np.arange(len(starts)), lengths)
            positions = starts[row] + np.arange(n) - begins[row]
        whose, none = slots[row], self._known.slots
        assert n <= padded <= self._sizes.largest and len(starts) <= min(none, size.runs), (n, padded, len(starts))
        _fill(step.tokens, np.where(tokens < 0, -whose - 1, tokens), padded)
        _fill(step.positions, positions, padded)
        column, offset = positions // self._page, positions % self._page
        for name, places in step.places.items():
            at = plan.tables[name][whose, column] * self._page + offset
            _fill(places, np.where(positions < batch.write_from[name][piece.rows][row], 0, at), padded)
        if self._state is not None:
            kept = plan.tables[self._state][slots, 0]
            _fill(step.states, kept[row], padded)
            _fill(step.whose, row, padded, -1)
            _fill(step.runs, np.stack([begins, lengths, kept], 1), size.runs)
        if adapters is not None:
            _fill(step.adapters, adapters, padded)
        assert len(wanted) <= size.wanted, (len(wanted), size.wanted)
        _fill(step.wanted, wanted, size.wanted)
        _fill(step.targets, slots[piece.samples] if plain else (), size.wanted, none)
        self._pack_work(step, starts, lengths, slots, size)
        self._pack_changes(step, plan if changes else None)
        self._buffer.send()

    def send_nothing(self) -> None:
        """A step without rows."""
        step = self._buffer.packing()
        step.whole[:] = 0
        step.targets[:] = self._known.slots
        step.whose[:] = -1
        self._buffer.send()

    def _pack_work(self, step: Packed, starts: Any, lengths: Any, slots: Any, size: StepSize) -> None:
        made: dict[tuple[int | None, Tiles], Any] = {}
        for at, (each, built) in enumerate(zip(self._sizes.lists, size.built, strict=True)):
            key = each.window, built.tiles
            if key not in made:
                made[key] = work_list(starts, lengths, slots, each.window, built.tiles)
            items, merges, parts = made[key]
            assert len(items) <= size.items[at] and len(merges) <= size.merges[at] and parts <= built.tiles.most_parts()
            _fill(step.items[at], items, size.items[at])
            _fill(step.merges[at], merges, size.merges[at])

    def _pack_changes(self, step: Packed, plan: Plan | None) -> None:
        """What this plan changes in the page tables."""
        at = 0
        if plan is not None:
            changes = {name: plan.changes[name] for name in self._known.tables}
            if sum(len(places) for places, _ in changes.values()) > MAX_TABLE_CHANGES:
                for name, there in self._known.tables.items():
                    table = np.ascontiguousarray(plan.tables[name])
                    assert table.shape == there[:-1].shape, (table.shape, there.shape)
                    there[:-1].copy_(self._link.put(table))
                changes = {}
            for name, (places, pages) in changes.items():
                step.changed[0, at : at + len(places)] = places + self._known.first[name]
                step.changed[1, at : at + len(places)] = pages
                at += len(places)
        step.count[0] = at


def _fill(field: Any, values: npt.NDArray[Any] | Sequence[int], padded: int, padding: int = 0) -> None:
    field[: len(values)] = values
    field[len(values) : padded] = padding
