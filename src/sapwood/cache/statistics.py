"""The figures of the cache: what requests asked for, what they were served, and the report that `stats()` gives."""

from __future__ import annotations

from typing import Any

from .group import TIERS
from .host_pins import HostPins
from .lease import Lease, Match
from .match import Matcher
from .pool import OWNERS, PagePool
from .steps import StepCommits
from .transfer import PendingTransfers
from .tree import Tree

_NO_POOL = PagePool("nothing", 0)


class Statistics:
    """A request counts once, when it is first admitted: in `requests`, with its whole prompt in `prompt_tokens`, and
    under its reason. `cached_tokens` are the prompt tokens that requests did not compute, each once however often it
    was retracted or its steps failed, loads once they have come: the sum of what `Ended.cached` says.

    A lease is served what stands before the place where it begins, provisionally: only when a step from there on is
    done, has it been used. Until then the figure is replaced whenever the lease goes on elsewhere.
    """

    def __init__(
        self,
        tree: Tree,
        matcher: Matcher,
        transfers: PendingTransfers,
        host_pins: HostPins,
        steps: StepCommits,
    ) -> None:
        self.tree = tree
        self.matcher = matcher
        self.transfers = transfers
        self.host_pins = host_pins
        self.steps = steps
        self.tally = {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "retracted": 0, "copies": 0}
        self.reasons: dict[str, int] = {}

    def admitted(self, match: Match, lease: Lease) -> None:
        """A request counts once: not again when it comes back after a retraction."""
        if match.binding.prompt:
            return
        found = self.matcher.found(match)
        lease.reason = found.reason
        match.binding.prompt, match.binding.found = lease.length, found
        self._count(lease, 1)

    def load_failed(self, lease: Lease) -> None:
        """What a lease was to be served did not come: its next admission counts instead."""
        if lease.reason:
            self._count(lease, -1)
            lease.binding.prompt, lease.reason = 0, ""

    def _count(self, lease: Lease, sign: int) -> None:
        reason, root = lease.reason, lease.root
        self.reasons[reason] = self.reasons.get(reason, 0) + sign
        for tally in (self.tally, root.tally):
            tally["requests"] += sign
            tally["prompt_tokens"] += sign * lease.length
        if reason != "hit":
            root.misses[reason] = root.misses.get(reason, 0) + sign

    def begins_at(self, lease: Lease, position: int) -> None:
        """A lease goes on at `position`. Prompt tokens before it that its request has not computed, now or before a
        retraction, are a hit: they replace the provisional hit of this lease."""
        binding = lease.binding
        served = (position if position < binding.prompt else binding.prompt) - binding.reached
        if served < 0:
            served = 0
        more = served - lease.served
        lease.begun, lease.served = position, served
        if more:
            self.tally["cached_tokens"] += more
            lease.root.tally["cached_tokens"] += more

    @staticmethod
    def computed(lease: Lease, position: int) -> None:
        """Everything before `position` is computed. If that is beyond where the lease has begun, its provisional hit
        has been used, and stays counted."""
        if position > lease.begun:
            lease.begun, lease.served = position, 0
            if position > lease.binding.reached:
                lease.binding.reached = position

    def report(self, leases: int) -> dict[str, Any]:
        """Everything a dashboard draws, with the number of live leases."""
        tree = self.tree
        pages: dict[str, dict[str, dict[str, int]]] = {}
        used: dict[str, dict[str, int]] = {}
        evicted: dict[str, dict[str, int]] = {}
        available: dict[str, dict[str, int]] = {}  # not of windows: their readers would have to be counted for it
        for g, group in enumerate(tree.groups):
            pages[group.name], used[group.name], evicted[group.name] = {}, {}, {}
            for t, name in enumerate(TIERS):
                tier = tree.tiers[t] if t < len(tree.tiers) else None
                pool = tier.pools[g] if tier else _NO_POOL
                owners = dict(zip(("free", *OWNERS), pool.counts, strict=True))
                pages[group.name][name] = {"capacity": pool.capacity, **owners}
                used[group.name][name] = pool.used_bytes
                evicted[group.name][name] = tier.evicted[g] if tier else 0
                if tier and g not in tree.sliding:
                    available.setdefault(group.name, {})[name] = tier.available(g)
        return {
            "pages": pages,
            "bytes": used,
            "evicted": evicted,
            "available": available,
            **self.tally,
            "reasons": dict(self.reasons),
            "transfers": dict(self.transfers.counts),
            "steps": {**self.steps.counts, **self.steps.checkpoints.counts},
            "staying": {group.name: held for group, held in zip(tree.groups, self.host_pins.held, strict=True)},
            "nodes": tree.nodes,
            "leases": leases,
            "ghosts": {"entries": len(tree.ghosts), "bytes": tree.ghosts.used_bytes, "limit": tree.ghosts.limit_bytes},
            "namespaces": [root.report() for root in tree.roots.values()],
            "unhooked": len(tree.detached_roots),
        }
