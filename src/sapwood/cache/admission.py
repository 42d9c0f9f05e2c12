"""From a match to a lease: all groups are admitted, or none. A dry run comes first and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .flight import note_promises
from .group import DEVICE, HOST
from .lease import Lease, Match, Sibling, hold
from .load import Loads
from .node import Node
from .page_ids import HOLE, Ids, first_of, one, page_at, part, width
from .path import Path
from .pool import FLIGHT, LEASE, UNHOOKED
from .readers import count_all, idle_in, use
from .transfer import Operation, Transfer
from .tree import Tree


class Demand(NamedTuple):
    """What an admission will read and take, found without changing anything."""

    depth: int  # the anchor
    spans: dict[int, list[tuple[int, int]]]  # groups that are not closed: columns to read
    tables: dict[int, bytearray]  # and the device pages there, as far as the tree has them
    load: dict[int, tuple[Ids, Ids]]  # columns and host pages to bring
    joined: list[Transfer]
    seeds: dict[int, int]  # snapshots on the device
    need: dict[int, int]  # device pages to take


class Reserve(NamedTuple):
    """What an admission must leave for others, or sees ahead for itself. Every page it counts is one that closed
    groups could not get back; groups that slide only keep a page for each running row."""

    tokens: int = 0  # how many tokens the request itself will have soon; at least what it is admitted for
    pages: int = 0  # what running requests will still take of each closed group
    rows: int = 0  # how many requests run
    least: int = 0  # the fewest tokens worth starting with, where groups that slide are short; 0: all that was asked


NOTHING_KEPT = Reserve()
_NO_SLOTS: dict[int, int] = {}


class Admission:
    """Makes leases of matches, and gives leases more pages."""

    def __init__(self, tree: Tree, loads: Loads) -> None:
        self.tree = tree
        self.loads = loads

    def wish(self, match: Match, upto: int) -> Demand:
        """What it takes to admit `match` and give it pages up to token `upto`."""
        tree = self.tree
        path, boundary = match.path, match.boundary
        if path.tier == DEVICE:
            depth = match.depth
        else:
            depth = path.device_closed(path.depth) if tree.closed else path.depth
        load: dict[int, tuple[Ids, Ids]] = {}
        joined: list[Transfer] = []
        seeds: dict[int, int] = {}
        spans: dict[int, list[tuple[int, int]]] = {}
        tables: dict[int, bytearray] = {}
        if depth < boundary:
            self._load_closed(path, depth, boundary, load, joined)
            depth = boundary
        for g in tree.sliding:
            spans[g] = tree.families[g].columns(boundary, match.length)
            tables[g] = path.device_pages(g, spans[g], boundary)
            if tree.has_host:
                self._load_holes(path, g, spans[g], tables[g], load, joined)
        if tree.slots and boundary:
            node = path.holding(boundary)
            for g in tree.slots:
                slot = (node.copies[DEVICE].pages[g] or _NO_SLOTS).get(boundary)
                if slot:
                    seeds[g] = slot
                else:
                    self._load_one(g, boundary - 1, node.copies[HOST].pages[g][boundary], load, joined)
        columns = 0 if load or joined else -(-upto // tree.page_size)
        need = dict.fromkeys(tree.closed, columns - depth if columns > depth else 0)
        for g in tree.sliding:
            if columns and depth > boundary and (tree.families[g].reads_promised or not tree.promises):
                more = path.device_run(g, boundary, depth)
                if more:
                    spans[g] = [*spans[g], (boundary, boundary + width(more))]
                    tables[g] += more
            need[g] = max(0, columns - width(tables[g]))
        for g in tree.slots:
            need[g] = 1
        for g, (wanted, _) in load.items():
            need[g] += len(wanted)
        return Demand(depth, spans, tables, load, joined, seeds, need)

    def _less(self, match: Match, wish: Demand, need: dict[int, int]) -> dict[int, int]:
        """By group: device pages that eviction could have taken, and that this admission is going to read."""
        tree = self.tree
        pinned = self._would_pin(match.path, wish.depth)
        less = dict.fromkeys(tree.closed, pinned)
        for g in tree.sliding:
            if need[g] <= tree.device.pools[g].free and match.sibling is None:
                continue  # it is there without eviction
            count_all(tree)
            less[g] = idle_in(tree, match.path.nodes[-1], DEVICE, g, wish.spans[g]) if wish.spans[g] else 0
        for g in tree.slots:
            less[g] = int(g in wish.seeds and tree.device.pools[g].readers[wish.seeds[g]] == 0)
        return less

    def _load_closed(
        self, path: Path, first: int, last: int, load: dict[int, tuple[Ids, Ids]], joined: list[Transfer]
    ) -> None:
        tree = self.tree
        parts: list[tuple[Node, int]] = []
        for node in path.nodes:
            if node.end <= first or node.start >= last:
                continue
            if node.loading is not None:
                if node.loading not in joined:
                    joined.append(node.loading)
            else:
                parts.append((node, min(node.n, last - node.start)))
        if not parts:
            return
        columns = np.concatenate([np.arange(n.start, n.start + k, dtype=np.int32) for n, k in parts])
        for g in tree.closed:
            ids = b"".join([part(n.copies[HOST].pages[g], 0, k) for n, k in parts])
            load[g] = (columns, np.frombuffer(ids, np.int32))

    def _load_one(
        self, g: int, column: int, page: int, load: dict[int, tuple[Ids, Ids]], joined: list[Transfer]
    ) -> None:
        transfer = self.loads.loading.get((g, page))
        if transfer is not None:
            if transfer not in joined:
                joined.append(transfer)
            return
        columns, ids = load.get(g, (np.zeros(0, np.int32), np.zeros(0, np.int32)))
        load[g] = (np.append(columns, np.int32(column)), np.append(ids, np.int32(page)))

    def _load_holes(
        self,
        path: Path,
        g: int,
        spans: list[tuple[int, int]],
        table: bytearray,
        load: dict[int, tuple[Ids, Ids]],
        joined: list[Transfer],
    ) -> None:
        """Add the pages in `spans` that the device lacks to what is to be loaded: host has them."""
        for low, high in spans:
            if table.find(HOLE, 4 * low, 4 * high) < 0:
                continue
            ids = np.frombuffer(bytes(table), np.int32)
            for at in (ids[low:high] == 0).nonzero()[0].tolist():
                page = path.host_page(g, low + at)
                assert page, "a boundary was offered that cannot be served"
                self._load_one(g, low + at, page, load, joined)

    @staticmethod
    def _would_pin(path: Path, depth: int) -> int:
        """How many evictable closed device pages a pin at `depth` would take out of reach."""
        pinned = 0
        for node in reversed(path.nodes):
            if node.start >= depth:
                continue
            if node.copies[DEVICE].holds:
                break
            pinned += min(node.copies[DEVICE].count, depth - node.start)
        return pinned

    def admit(self, match: Match, upto: int, keep: Reserve) -> tuple[Lease, Operation | None] | None:
        """A lease on everything `match` promised, with private pages up to token `upto`; or None, nothing changed."""
        tree = self.tree
        device = tree.device
        wish = self.wish(match, upto)
        need = wish.need if keep is NOTHING_KEPT else self._ahead(wish, upto, keep)
        sibling = match.sibling
        fits = device.has_free(need)
        if not fits:
            less = self._less(match, wish, need)
            if not device.can_make(need, less):
                fewer = self._shrunk(match, wish, upto, keep, less)
                return self.admit(match, fewer, keep) if fewer else None
            if sibling is not None:
                extra = self._sibling_cost(sibling)
                if not device.can_make(need, {g: n + extra[g] for g, n in less.items()}):
                    sibling = None
        lease, nodes = self._anchored(match, wish.depth)
        self._read(lease, match, wish)
        if sibling is not None:
            self._hold_sibling(lease, sibling)
        if not fits:  # everything it reads is held: what is evicted now is not its own
            device.make(wish.need)
        pools, operation = device.pools, None
        for g in tree.slots:
            slot = lease.working[g] = first_of(pools[g].allocate(1, LEASE))
            lease.tables[g] = bytearray(one(slot))
        if wish.load or wish.joined:
            lease.wanted = wish.spans
            operation = self.loads.begin_load(lease, wish.load, wish.joined)
            return lease, operation
        for g in tree.closed:
            parts = [node.copies[DEVICE].pages[g] for node in nodes]
            parts.append(pools[g].allocate(wish.need[g], LEASE))
            lease.tables[g] = bytearray().join(parts)
            lease.upto[g] = wish.depth
        for g in tree.sliding:
            lease.tables[g] += pools[g].allocate(wish.need[g], LEASE)
        return lease, operation

    def _will_snapshot(self, lease: Lease, match: Match) -> None:
        """Let later matches find at which page ends this request will leave a snapshot."""
        if lease.detached:
            return
        size, makers = self.tree.page_bytes, lease.root.makers
        lease.cuts, lease.tokens = match.cuts, match.tokens
        for cut in match.cuts:
            page = match.tokens[(cut - 1) * size : cut * size]
            makers.setdefault(cut, {}).setdefault(page, []).append(lease)

    def _ahead(self, wish: Demand, upto: int, keep: Reserve) -> dict[int, int]:
        """What must be there for the admission and what is to be kept beside it."""
        tree = self.tree
        size = tree.page_size
        more = max(0, -(-keep.tokens // size) - max(-(-upto // size), wish.depth)) + keep.pages
        need = dict(wish.need)
        for g in tree.closed:
            need[g] += more
        for g in tree.sliding:
            need[g] += keep.rows
        return need

    def _shrunk(self, match: Match, wish: Demand, upto: int, keep: Reserve, less: dict[int, int]) -> int:
        """How far groups that slide could give pages now, if that is worth it and less than asked; or 0."""
        if not keep.least or wish.load or wish.joined:
            return 0
        tree, size = self.tree, self.tree.page_size
        fewer = upto
        for g in tree.sliding:
            there = self.tree.device.available(g) - less.get(g, 0) - keep.rows
            fewer = min(fewer, (width(wish.tables[g]) + there) * size)
        return fewer if match.start + keep.least <= fewer < upto else 0

    def admit_from_zero(self, match: Match, upto: int, keep: Reserve) -> tuple[Lease, Operation | None] | None:
        """The last way in, when the one slot a request could have is taken by the snapshot it would start from, and no
        other request will give one back: compute from the beginning, and let the snapshot go."""
        tree = self.tree
        if not match.boundary or not tree.slots:
            return None
        for g in tree.slots:
            pool = tree.device.pools[g]
            if pool.owned[LEASE] or pool.owned[FLIGHT] or pool.owned[UNHOOKED]:
                return None
        start = match.start
        cuts = tuple(cut for cut in {match.depth, (match.length - 1) // tree.page_size} if cut)
        match = match._replace(boundary=0, start=0, cuts=tuple(sorted(cuts)), sibling=None)
        first = min([upto - start, *(cut * tree.page_size for cut in match.cuts)])
        return self.admit(match, max(1, first), keep)

    def _read(self, lease: Lease, match: Match, wish: Demand) -> None:
        """The lease becomes a reader of what it needs of its path beside closed pages."""
        tree = self.tree
        if wish.seeds:
            tree.snapshots.use(tree.node_at(lease.node, match.boundary).copies[DEVICE], match.boundary)
        if tree.slots:
            lease.seed_depth = match.boundary
            for g, slot in wish.seeds.items():
                tree.device.pools[g].read(slot)
                lease.start_snapshot[g] = slot
        for g in tree.sliding:
            spans = wish.spans[g]
            table = lease.tables[g] = wish.tables[g]
            upto = lease.upto[g] = width(table)
            lease.low[g] = spans[0][0] if spans else upto
            if spans:
                use(tree, lease.node, lease.low[g])
        note_promises(tree, lease)
        if match.cuts:
            self._will_snapshot(lease, match)

    def _anchored(self, match: Match, depth: int) -> tuple[Lease, list[Node]]:
        """A lease that holds the path down to `depth`, and the nodes of that path."""
        tree = self.tree
        root = match.binding._root
        nodes = match.path.nodes.copy()
        node = root.top
        if depth:
            while nodes[-1].start >= depth:
                nodes.pop()
            node = nodes[-1]
            if node.start + node.n > depth:
                node = nodes[-1] = tree.split(node, depth - node.start)
        elif nodes:
            nodes = []
        lease = Lease(match.binding, node, depth, len(tree.groups))
        root.holders[lease] = None
        if root.attached:
            tree.pin(node, DEVICE)
            if tree.sliding:
                lease.counted, tree.uncounted[lease] = False, None
        else:
            lease.detached = True
            tree.detached_roots[root] = None
        start = match.boundary * tree.page_size
        lease.boundary = match.boundary
        lease.length = match.length
        lease.prompt_end = match.length // tree.page_size if tree.sliding else 0
        lease.start = start if start < match.length else match.length - 1
        return lease, nodes

    def seat(self, lease: Lease) -> None:
        """All pages of the path are on the device: the lease's tables follow it."""
        tree = self.tree
        if lease.detached:
            for g in tree.closed:
                lease.upto[g] = width(lease.tables[g])
            return
        nodes = tree.path_to(lease.node).nodes
        for g in tree.closed:
            lease.tables[g] = bytearray().join([node.copies[DEVICE].pages[g] for node in nodes])
            lease.upto[g] = lease.depth
        lease.wanted = {}

    # ---- more pages

    def growable(self, lease: Lease, upto: int) -> int:
        """Up to which token, at most `upto`, every group could give pages now."""
        tree, size = self.tree, self.tree.page_size
        for g in tree.paged:
            have = width(lease.tables[g])
            if (have + tree.device.pools[g].free) * size < upto:  # else it need not be asked what could go
                upto = min(upto, (have + tree.device.available(g)) * size)
        return upto

    def grow(self, lease: Lease, upto: int) -> bool:
        """Private pages for the tokens up to `upto`, in every group or (False, nothing changed) in none."""
        device, columns = self.tree.device, -(-upto // self.tree.page_size)
        need = {g: more for g in self.tree.paged if (more := columns - width(lease.tables[g])) > 0}
        if not device.try_make(need):
            return False
        for g, n in need.items():
            lease.tables[g] += device.pools[g].allocate(n, LEASE)
        return True

    def grow_rows(self, leases: Sequence[Lease]) -> dict[str, bytes] | None:
        """One more page of every group of pages for each of these leases; by group, the new ids. None if there is no
        room."""
        tree, grown = self.tree, {}
        if not tree.device.try_make(dict.fromkeys(tree.paged, len(leases))):
            return None
        for g in tree.paged:
            ids = grown[tree.groups[g].name] = tree.device.pools[g].allocate(len(leases), LEASE)
            for at, lease in zip(range(0, len(ids), 4), leases, strict=True):
                lease.tables[g] += ids[at : at + 4]
        return grown

    def too_long(self, tokens: int) -> str:
        """Why a request that computes `tokens` tokens could not run even with all pages of a group; "" if it could."""
        columns = -(-tokens // self.tree.page_size)
        for g in self.tree.closed:
            group = self.tree.groups[g]
            if columns > group.device_pages:
                return f"{tokens} tokens take {columns} pages of group {group.name!r}, which has {group.device_pages}"
        return ""

    # ---- copy on write

    def _sibling_cost(self, sibling: Sibling) -> list[int]:
        """Device pages that holding the source keeps eviction from taking."""
        tree = self.tree
        costs = [0] * len(tree.groups)
        node: Node | None = sibling.node
        closed = 0
        while node is not None and not node.copies[DEVICE].holds:
            closed += node.copies[DEVICE].count
            node = node.parent
        for g in tree.closed:
            costs[g] = closed
        for g in tree.sliding:
            costs[g] = 1
        return costs

    def _hold_sibling(self, lease: Lease, sibling: Sibling) -> None:
        tree = self.tree
        # The anchor's own split may have cut the sibling's node; its lower half kept the identity.
        ((node, at, _),) = tree.cover(sibling.node, sibling.column, sibling.column + 1)
        pages = {(DEVICE, g): one(page_at(node.copies[DEVICE].pages[g], at)) for g in tree.paged}
        where = (sibling.column, sibling.column + 1)
        spans = {(DEVICE, g): [where] for g in tree.sliding}
        lease.source = hold(tree, sibling.node, (DEVICE,), where, pages, spans)
        lease.copied = sibling.tokens
        lease.start += sibling.tokens
