"""A scheduler with a store behind it, for stories told operation by operation."""

from __future__ import annotations

from dataclasses import replace

from sapwood.scheduler import Plan, Tick
from sapwood.sim.depot import Depot
from sapwood.sim.executor import ContentExecutor

from .driver import Run, groups_of

PAGE = 4


class StoreRun(Run):
    """Pages of 4 tokens, a lookup is worth it from 2 pages on. Transfers arrive when the test says so. `windows`: host
    pages of groups that slide."""

    def __init__(
        self,
        layout: str = "full",
        pages: int = 40,
        host: int = 40,
        depot: Depot | None = None,
        page=PAGE,
        windows: int = 0,
        **config,
    ) -> None:
        groups = [
            replace(group, host_pages=windows or host if group.family == "window" else host)
            for group in groups_of(layout, page, pages, slots=20)
        ]
        config.setdefault("prefetch_threshold", 2)
        super().__init__(*groups, page=page, store=True, **config)
        self.depot = depot if depot is not None else Depot()
        self.executor = ContentExecutor(self.scheduler, depot=self.depot)

    def turn(self) -> Plan:
        """One plan, and its end if it has rows."""
        plan = self.plan()
        if plan.batch.ids:
            self.done()
        return plan

    def ops(self, kind: str) -> list[int]:
        return [op for op, moving in self.executor.moving.items() if moving == kind]

    def land(self, *kinds: str, ok: bool = True, **faults) -> int:
        """Operations of these kinds (or all) are over. Returns how many."""
        ops = [op for op, kind in self.executor.moving.items() if not kinds or kind in kinds]
        for op in ops:
            self.tell(self.executor.land(op, ok, **faults))
        return len(ops)

    def tick(self, n: int) -> None:
        self.tell(Tick(n))

    def serve(self, id: str, tokens, max_tokens: int = 1, but: tuple[str, ...] = (), **more):
        """One request to its end, with everything that it starts, except operations of the kinds in `but`."""
        self.submit(id, tokens, max_tokens, **more)
        self.see_to(id, but=but)
        return self.ended[id]

    def see_to(self, *ids: str, but: tuple[str, ...] = ()) -> None:
        kinds = [kind for kind in ("load", "save", "lookup", "fetch", "backup") if kind not in but]
        for _ in range(2000):
            if not self.live & set(ids):
                break
            plan = self.turn()
            assert not plan.empty or self.executor.moving or plan.wake_in, f"stuck: {sorted(self.live)}"
            self.land(*kinds)
        else:
            raise AssertionError(f"{ids} do not end")
        self.settle(*kinds)

    def settle(self, *kinds: str) -> None:
        """Carry out what is left to do."""
        for _ in range(20):
            plan = self.turn()
            if not self.land(*kinds) and plan.empty:
                return
        raise AssertionError("it does not come to rest")

    def host(self, owner: str) -> dict[str, int]:
        return {name: tiers["host"][owner] for name, tiers in self.cache.stats()["pages"].items()}

    def close(self) -> None:
        """Everything is over: all memory of both tiers is free after a flush, and the answers were right."""
        self.see_to(*self.live)
        self.right_answers()
        self.scheduler.flush()
        self.settle()
        self.cache.check()
        for group in self.cache.groups:
            assert self.owned("free")[group.name] == group.device_pages, "something leaks on the device"
            assert self.host("free")[group.name] == group.host_pages, "something leaks on host"
