"""Moving pages between device and host: what every mover promises, and the one for numpy. No torch here.

An operation is all or nothing for its caller. Everything that can be wrong with it is looked at before a byte moves,
and what goes wrong later is reported by `poll` as not ok: the step loop never sees an exception for it.

    start("save", op, plan's pages) ---> check ---> a copy a run of neighbours, or gather and scatter small pages
                                                                                           ---> poll: (op, ok), once
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .arena import DeviceArena, HostArena

Kind = Literal["save", "load"]
Ids = npt.NDArray[np.int32]

log = logging.getLogger(__name__)

# From this many bytes a run on average, copying run by run is faster than gathering all and scattering it again.
LONG_RUN_BYTES = 4096
_MAX_REASONS = 256  # how many reasons are remembered
_ONE = np.ones(1, np.int32)


class TransferPart(NamedTuple):
    """The pages of one group in an operation: source and target ids, without holes, never empty."""

    group: str
    sources: Ids
    targets: Ids


class Refusal(ValueError):
    """An operation that names something that is not there. Nothing was moved."""


class Mover(ABC):
    """Carries out saves (device to host) and loads (host to device).

    `start` takes an operation of a plan and returns without waiting for its bytes. `poll` tells which operations ended
    since it was last asked, and whether the bytes are there; `wait` blocks for one of them and tells the same. Every
    operation is reported once, by the one or the other. Several may be under way; nothing is promised about their
    order. While one is, its source pages must not be written and its target pages not be touched.
    """

    def __init__(self, device: DeviceArena, host: HostArena) -> None:
        for group in host.groups:
            found = device.page_bytes.get(group.name)
            if found is None:
                raise ValueError(f"the device arena must have group {group.name!r}, has {sorted(device.page_bytes)}")
            if found != group.page_bytes:
                raise ValueError(
                    f"pages of group {group.name!r} must have the same size on device and host, "
                    f"got {found} and {group.page_bytes} bytes"
                )
        self.device = device
        self.host = host
        self._rows: dict[str, tuple[Any, Any]] = {
            group.name: (device.rows[group.name], host.pages[group.name]) for group in host.groups
        }
        self._limits = {group.name: (device.pages[group.name], group.host_pages) for group in host.groups}
        self._open: dict[int, tuple[Kind, list[TransferPart]]] = {}  # started, not reported
        self._ended: dict[int, bool] = {}
        self._reasons: dict[int, str] = {}
        self._closed = False
        self._counts = dict.fromkeys(
            ("saves", "save_pages", "save_bytes", "loads", "load_pages", "load_bytes", "failed", "copies"), 0
        )

    def start(self, kind: Kind, op: int, pages: Mapping[str, tuple[Ids, Ids]]) -> None:
        """Begin an operation: for each group source and target ids, one entry a page; 0 in both means no part there.

        A save sees everything that was written to the device before this call. Raises only if the caller lost count:
        for an unknown kind, or a number that is under way.
        """
        if kind not in ("save", "load"):
            raise ValueError(f"kind must be 'save' or 'load', got {kind!r:.60}")
        if op in self._open:
            raise ValueError(f"operation {op} is under way")
        self._counts[f"{kind}s"] += 1
        self._open[op] = (kind, [])
        try:
            parts = self._check(kind, pages)
        except Exception as error:
            self._end(op, str(error) if isinstance(error, Refusal) else reason_of(error))
            return
        self._open[op] = (kind, parts)
        self._begin(kind, op, parts)

    def poll(self) -> list[tuple[int, bool]]:
        """The operations that ended and have not been reported: (op, ok). Never blocks."""
        self._advance()
        if not self._ended:
            return []
        ended = list(self._ended.items())
        self._ended.clear()
        for op, _ in ended:
            del self._open[op]
        return ended

    def wait(self, op: int) -> bool:
        """Block until `op` has ended; whether its bytes are there. `poll` will not tell of it again."""
        if op not in self._open:
            raise ValueError(f"operation {op!r:.60} is not under way, or was told of already")
        if op not in self._ended:
            self._block(op)
        del self._open[op]
        return self._ended.pop(op)

    def reason(self, op: int) -> str:
        """Why an operation was not ok, if it was one of the last few hundred; else ""."""
        return self._reasons.get(op, "")

    def stats(self) -> dict[str, int]:
        """Counts since the beginning, and how many operations are under way."""
        return {**self._counts, "under_way": len(self._open) - len(self._ended)}

    def close(self) -> None:
        """Wait for what is under way and let go of everything but the arenas. What is started later is not ok."""
        for op in [op for op in self._open if op not in self._ended]:
            self._block(op)
        self._closed = True
        self._rows.clear()

    # ---- for movers

    @abstractmethod
    def _begin(self, kind: Kind, op: int, parts: list[TransferPart]) -> None:
        """Move, or set out to. Calls `_end` now or from `_advance`, and never raises."""

    @abstractmethod
    def _advance(self) -> None:
        """Call `_end` for what has ended."""

    @abstractmethod
    def _block(self, op: int) -> None:
        """Wait until `op` has ended, and call `_end` for it."""

    def _ends(self, kind: Kind, group: str) -> tuple[Any, Any]:
        """Where the bytes of a group's pages come from, and where they go: [pages + 1, page_bytes] each."""
        device, host = self._rows[group]
        return (device, host) if kind == "save" else (host, device)

    def _end(self, op: int, reason: str = "") -> None:
        """The operation has ended: well, if there is no reason why not."""
        if reason:
            log.warning("operation %s failed: %s", op, reason)
            self._counts["failed"] += 1
            self._reasons[op] = reason
            if len(self._reasons) > _MAX_REASONS:
                del self._reasons[next(iter(self._reasons))]
        else:
            kind, parts = self._open[op]
            for part in parts:
                self._counts[f"{kind}_pages"] += len(part.sources)
                self._counts[f"{kind}_bytes"] += len(part.sources) * self.device.page_bytes[part.group]
        self._ended[op] = not reason

    def _check(self, kind: Kind, pages: Mapping[str, tuple[Ids, Ids]]) -> list[TransferPart]:
        """The parts of an operation without their holes, if there is nothing wrong with any of them."""
        if self._closed:
            raise Refusal("the mover is closed")
        parts = []
        for group, pair in pages.items():
            if group not in self._limits:
                raise Refusal(f"group {group!r:.60} has no host pages here, only {sorted(self._limits)} have")
            device, host = self._limits[group]
            from_limit, to_limit = (device, host) if kind == "save" else (host, device)
            try:
                sources, targets = (np.asarray(ids) for ids in pair)
            except (TypeError, ValueError) as error:
                raise Refusal(f"group {group!r}: not a pair of arrays of page ids: {error}") from None
            if sources.ndim != 1 or sources.shape != targets.shape:
                raise Refusal(f"group {group!r}: {sources.shape} source pages for {targets.shape} target pages")
            if not len(sources):
                continue
            if sources.dtype.kind not in "iu" or targets.dtype.kind not in "iu":
                raise Refusal(f"group {group!r}: page ids are {sources.dtype} and {targets.dtype}, not integers")
            if np.count_nonzero(sources) < len(sources) or np.count_nonzero(targets) < len(targets):
                part = sources != 0
                if (part != (targets != 0)).any():
                    raise Refusal(f"group {group!r}: a page has a source or a target only")
                sources, targets = sources[part], targets[part]
                if not len(sources):
                    continue
            self._within(group, "source", sources, from_limit)
            ordered = self._within(group, "target", targets, to_limit)
            if len(ordered) > 1 and (twice := ordered[1:] == ordered[:-1]).any():
                raise Refusal(f"group {group!r}: target page {int(ordered[1:][twice][0])} comes twice")
            parts.append(TransferPart(group, sources, targets))
        return parts

    def _within(self, group: str, what: str, ids: Ids, limit: int) -> Ids:
        """The ids in order, if all of them are there."""
        ordered = ids if len(ids) == 1 else np.sort(ids)
        low, high = int(ordered[0]), int(ordered[-1])
        if low < 0 or high > limit:
            raise Refusal(f"group {group!r}: {what} page {low if low < 0 else high} is not one of 1 to {limit}")
        return ordered


class NumpyMover(Mover):
    """Between two numpy arenas, in the caller's thread: the bytes are there when `start` returns, and `poll` says so.

    A thread of its own would gain nothing here: it would wait for the interpreter after every page.
    """

    def _begin(self, kind: Kind, op: int, parts: list[TransferPart]) -> None:
        try:
            for part in parts:
                self._move(kind, part)
        except Exception as error:  # whatever it is, the step loop goes on
            self._end(op, reason_of(error))
        else:
            self._end(op)

    def _move(self, kind: Kind, part: TransferPart) -> None:
        there, here = self._ends(kind, part.group)
        sources, targets, lengths = runs(part.sources, part.targets)
        if len(part.sources) * there.shape[1] < LONG_RUN_BYTES * len(lengths):
            here[part.targets] = there[part.sources]
            self._counts["copies"] += 1
            return
        for source, target, n in zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True):
            here[target : target + n] = there[source : source + n]
        self._counts["copies"] += len(lengths)

    def _advance(self) -> None:
        pass

    def _block(self, op: int) -> None:
        raise AssertionError(f"operation {op} has not ended")  # it had when `start` returned


def open_mover(device: DeviceArena, host: HostArena) -> Mover:
    """The right mover for this memory: numpy's for numpy arrays and tensors in main memory, torch's for CUDA."""
    if type(device) is DeviceArena:
        return NumpyMover(device, host)
    from .torch_mover import TorchArena, TorchMover

    if not isinstance(device, TorchArena):
        raise TypeError(f"device must be a DeviceArena or a TorchArena, got {type(device).__name__}")
    if device.device.type == "cpu":
        return NumpyMover(device.as_numpy(), host)
    return TorchMover(device, host)


def reason_of(error: BaseException) -> str:
    """An exception as a reason, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.500}"


def runs(sources: Ids, targets: Ids) -> tuple[Ids, Ids, Ids]:
    """The runs in which both ids count up by one, each of them one piece on both sides: where it begins on either, and
    how many pages it has."""
    if len(sources) == 1:
        return sources, targets, _ONE
    ends = np.flatnonzero((sources[1:] - sources[:-1] != 1) | (targets[1:] - targets[:-1] != 1)) + 1
    begins = np.concatenate(([0], ends))
    return sources[begins], targets[begins], np.diff(begins, append=len(sources))
