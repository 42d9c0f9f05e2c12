"""Which request comes in next. A policy orders the requests that wait; the planner admits those that fit, in that
order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from .request import Request

_MOST = 2**31
Peek = Callable[["Request"], int]


class Policy(Protocol):
    """`waiting` comes in order of urgency, then arrival. `peek` counts the tokens of a request that are cached now."""

    def order(self, waiting: Sequence[Request], overdue: int, peek: Peek) -> Iterable[Request]:
        """The order in which they are tried. A request that `overdue` later ones have overtaken must not be overtaken
        again."""


class Fcfs:
    """First come, first served, within a priority."""

    def order(self, waiting: Sequence[Request], overdue: int, peek: Peek) -> Iterable[Request]:
        return waiting


class Prefix:
    """Within a priority, what is cached goes first: it costs least now, and might be evicted while it waits."""

    LOOK: ClassVar[int] = 256  # waiting requests that it weighs; the others keep their order behind them

    def order(self, waiting: Sequence[Request], overdue: int, peek: Peek) -> Iterable[Request]:
        def place(request: Request) -> tuple[int, int, int]:
            cached = _MOST if request.overtaken >= overdue else peek(request)
            return request.priority, -cached, request.arrival

        return [*sorted(waiting[: self.LOOK], key=place), *waiting[self.LOOK :]]


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "prefix": Prefix}


def register_policy(name: str, policy: type[Policy]) -> None:
    """Make a policy known under `name`, for `SchedulerConfig(policy=name)`."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"name of a policy must be a non-empty string, got {name!r:.60}")
    if POLICIES.get(name, policy) is not policy:
        raise ValueError(f"policy {name!r} is registered already; choose another name")
    POLICIES[name] = policy
