"""From a prompt to a lease: match, then admit all groups or none. Later, before each chunk, adopt what is new."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from .flight import Flight, is_real, note_promises
from .ghosts import crc_at
from .group import DEVICE, HOST
from .lease import Binding, Holder, Lease, Match, Sibling
from .node import Node
from .path import Path, agree
from .pool import FLIGHT, LEASE, Ids
from .room import Room
from .transfer import Operation, Transfer, Transfers
from .tree import Tree

_SIBLINGS = 4  # how many of the most recent siblings a copy on write looks at


class Wish(NamedTuple):
    """What an admission will read and take, found without changing anything."""

    depth: int  # the anchor
    reads: dict[int, list[tuple[int, int]]]  # groups that are not closed: columns to read
    upto: dict[int, int]  # groups that are not closed: columns the tree has
    load: dict[int, tuple[Ids, Ids]]  # columns and host pages to bring
    joined: list[Transfer]
    seeds: dict[int, int]  # snapshots on the device
    need: dict[int, int]  # device pages to take
    less: dict[int, int]  # device pages it reads that eviction could have taken


class Desk:
    """Where requests come in."""

    def __init__(self, tree: Tree, room: Room, transfers: Transfers) -> None:
        self.tree = tree
        self.room = room
        self.transfers = transfers
        self.can_copy = not tree.slots

    # ---- match

    def match(self, binding: Binding, tokens: bytes, length: int, tier: int) -> Match:
        tree = self.tree
        root = binding._root
        if not root.hooked:
            return self.nothing(binding, tokens, length, "empty")
        path = tree.walk(root, tokens)
        path.tier = min(tier, path.tier)
        boundary, limiter = self.boundary(path, length)
        size = tree.page_size
        start = min(boundary * size, length - 1)
        on_device = path.device_closed(path.depth) if tree.closed else path.depth
        sibling = None
        if self.can_copy and boundary == path.depth and on_device >= boundary and start == boundary * size:
            sibling = self._sibling(path, tokens, length)
        depth = path.deepest_closed(path.depth) if tree.closed else path.depth
        cached = start + (sibling.tokens if sibling else 0)
        pending = self._pending(root, tokens, length, boundary) if tree.slots else 0
        reason = self.reason(path, boundary, limiter, length)
        load = tree.has_host and path.tier > 0 and self._touches_host(path, boundary, on_device, length)
        return Match(
            boundary,
            start + (sibling.tokens if sibling else 0),
            cached,
            depth,
            self._cuts(boundary, depth, length),
            pending,
            load,
            length,
            reason,
            binding,
            tokens,
            path,
            sibling,
            tree.version,
        )

    def nothing(self, binding: Binding, tokens: bytes, length: int, reason: str) -> Match:
        """A match that adopts nothing."""
        tree = self.tree
        return Match(
            0,
            0,
            0,
            0,
            self._cuts(0, 0, length),
            0,
            False,
            length,
            reason,
            binding,
            tokens,
            Path(tree, binding._root, [], 0),
            None,
            tree.version,
        )

    def boundary(self, path: Path, length: int) -> tuple[int, int]:
        """The deepest boundary every family can serve, and the group that last lowered it (-1: the tree's tokens)."""
        boundary, limiter = path.depth, -1
        families = self.tree.families
        if len(families) == 1:
            lower = families[0].deepest(path, boundary, length)
            return lower, -1 if lower == boundary else 0
        settled = 0
        while settled < len(families):
            for g, family in enumerate(families):
                lower = family.deepest(path, boundary, length)
                if lower < boundary:
                    boundary, limiter, settled = lower, g, 1
                else:
                    settled += 1
                if settled >= len(families) or not boundary:
                    return boundary, limiter
        return boundary, limiter

    def _cuts(self, boundary: int, depth: int, length: int) -> tuple[int, ...]:
        """Where a prompt's chunks end so that a snapshot can be taken: where others branched, and its last page end."""
        if not self.tree.slots:
            return ()
        last = (length - 1) // self.tree.page_size
        return tuple(sorted({cut for cut in (depth, last) if boundary < cut <= last}))

    def _pending(self, root: object, tokens: bytes, length: int, boundary: int) -> int:
        """A deeper boundary than ours at which a running request will leave a snapshot."""
        tree = self.tree
        last = (length - 1) // tree.page_size
        deepest = 0
        for maker in root.makers.get(tokens[: tree.page_bytes], ()):  # type: ignore[attr-defined]
            for cut in maker.cuts:
                if max(boundary, deepest) < cut <= last and tokens.startswith(
                    memoryview(maker.tokens)[: cut * tree.page_bytes]
                ):
                    deepest = cut
        return deepest

    def _sibling(self, path: Path, tokens: bytes, length: int) -> Sibling | None:
        """The real page beside the end of the path that shares most tokens with the prompt."""
        tree = self.tree
        offset = path.depth * tree.page_bytes
        most = min(tree.page_size, length - 1 - path.depth * tree.page_size)
        if most < 1:
            return None
        last = path.nodes[-1] if path.nodes else path.root.top
        if path.nodes and last.end > path.depth:
            candidates = [(last, path.depth - last.start)]
        else:
            candidates = [(child, 0) for child in islice(reversed(last.children.values()), _SIBLINGS)]
        best: Sibling | None = None
        for node, at in candidates:
            page = node.edge[at * tree.page_bytes : (at + 1) * tree.page_bytes]
            same = min(agree(page, tokens, offset, 4), most)
            if same > (best.tokens if best else 0) and self._copyable(node, at):
                best = Sibling(node, node.start + at, same)
        return best

    def _copyable(self, node: Node, at: int) -> bool:
        tree = self.tree
        if tree.closed and not node.device.count:
            return False
        for g in tree.loose:
            pages = node.device.pages[g]
            if pages is None or not any(pages[4 * at : 4 * at + 4]):
                return False
        return all(is_real(tree, node, g, node.start + at) for g in range(len(tree.groups)))

    def _touches_host(self, path: Path, boundary: int, on_device: int, length: int) -> bool:
        tree = self.tree
        if tree.closed and on_device < boundary:
            return True
        path.tier = DEVICE
        served, _ = self.boundary(path, length)
        path.tier = HOST
        return served < boundary

    def reason(self, path: Path, boundary: int, limiter: int, length: int) -> str:
        tree = self.tree
        most = self.most_pages(length)
        if not most:
            return "short"
        if boundary >= most:
            return "hit"
        if limiter >= 0 and boundary < min(path.depth, most):
            return "no_snapshot" if tree.families[limiter].shape == "slot" else "window_gone"
        last = path.nodes[-1] if path.nodes else path.root.top
        if not path.nodes and not last.children:
            return "empty"
        return "diverged" if last.children or last.end > path.depth else "hit"

    def most_pages(self, length: int) -> int:
        """How many pages of a prompt of `length` tokens could be served at best."""
        return (length - 1) // self.tree.page_size if self.tree.slots else length // self.tree.page_size

    def refine(self, match: Match) -> str:
        """The reason of a match, with the ghosts asked."""
        tree = self.tree
        reason = match.reason
        if reason in ("diverged", "empty", "hit") and len(tree.ghosts):
            path = match.path
            at = path.depth * tree.page_bytes
            page = match.tokens[at : at + tree.page_bytes]
            if len(page) == tree.page_bytes:
                last = path.nodes[-1] if path.nodes else path.root.top
                crc = crc_at(last, path.depth - last.start, tree.page_bytes)
                if tree.ghosts.since(path.root.digest, path.depth, crc, page) is not None:
                    return "evicted"
        return reason

    # ---- admit

    def wish(self, match: Match, upto: int) -> Wish:
        """What it takes to admit `match` and give it pages up to token `upto`."""
        tree = self.tree
        path, boundary, size = match.path, match.boundary, tree.page_size
        depth = path.device_closed(path.depth) if tree.closed else path.depth
        load: dict[int, tuple[Ids, Ids]] = {}
        joined: list[Transfer] = []
        seeds: dict[int, int] = {}
        reads: dict[int, list[tuple[int, int]]] = {}
        ends: dict[int, int] = {}
        if match.load:
            if tree.closed and depth < boundary:
                self._load_closed(path, depth, boundary, load, joined)
            depth = max(depth, boundary)
            upto = 0
        columns = -(-upto // size)
        need: dict[int, int] = {}
        less: dict[int, int] = {}
        if tree.closed:
            pinned = self._would_pin(path, depth)
            for g in tree.closed:
                need[g] = max(0, columns - depth) + (len(load[g][0]) if g in load else 0)
                less[g] = pinned
        for g in tree.loose:
            spans = tree.families[g].columns(boundary, match.length)
            end = boundary
            if not match.load and depth > boundary:
                end = self._run(path, g, boundary, depth)
                if end > boundary:
                    spans = [*spans, (boundary, end)]
            reads[g], ends[g] = spans, end
            there = self._see(path, g, spans, load, joined)
            pool = tree.pools[DEVICE][g]
            less[g] = int(np.count_nonzero(pool.readers[there] == 0))
            need[g] = max(0, columns - end) + (len(load[g][0]) if g in load else 0)
        for g in tree.slots:
            need[g], less[g] = 1, 0
            if boundary:
                node = next(node for node in path.nodes if node.end == boundary)
                slot = node.device.pages[g]
                if slot:
                    seeds[g] = slot
                    less[g] = int(tree.pools[DEVICE][g].readers[slot] == 0)
                else:
                    assert node.host is not None
                    self._load_one(g, boundary - 1, node.host.pages[g], load, joined)
                    need[g] += 1 if g in load else 0
        return Wish(depth, reads, ends, load, joined, seeds, need, less)

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
            ids = b"".join(bytes(tree.copy_in(n, HOST).pages[g][: 4 * k]) for n, k in parts)
            load[g] = (columns, np.frombuffer(ids, np.int32))

    def _load_one(
        self, g: int, column: int, page: int, load: dict[int, tuple[Ids, Ids]], joined: list[Transfer]
    ) -> None:
        transfer = self.transfers.loading.get((g, page))
        if transfer is not None:
            if transfer not in joined:
                joined.append(transfer)
            return
        columns, ids = load.get(g, (np.zeros(0, np.int32), np.zeros(0, np.int32)))
        load[g] = (np.append(columns, np.int32(column)), np.append(ids, np.int32(page)))

    def _see(
        self, path: Path, g: int, spans: list[tuple[int, int]], load: dict[int, tuple[Ids, Ids]], joined: list[Transfer]
    ) -> Ids:
        """The device pages of `g` in `spans`; where there is only a host page, it is put down for loading."""
        found: list[Ids] = []
        for low, high in spans:
            for node in path.nodes:
                if node.end <= low or node.start >= high:
                    continue
                first, last = max(low - node.start, 0), min(high - node.start, node.n)
                pages = node.device.pages[g]
                here = (
                    np.frombuffer(bytes(pages), np.int32)[first:last]
                    if pages is not None
                    else np.zeros(last - first, np.int32)
                )
                found.append(here[here != 0])
                for at in (here == 0).nonzero()[0].tolist():
                    host = node.host.pages[g] if node.host is not None else None
                    page = int.from_bytes(host[4 * (first + at) : 4 * (first + at) + 4], "little") if host else 0
                    assert page, "a boundary was offered that cannot be served"
                    self._load_one(g, node.start + first + at, page, load, joined)
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    @staticmethod
    def _run(path: Path, g: int, low: int, high: int) -> int:
        """How far the device has every page of `g` from `low` on, at most to `high`."""
        for node in path.nodes:
            if node.end <= low or node.start >= high:
                continue
            first, last = max(low - node.start, 0), min(high - node.start, node.n)
            pages = node.device.pages[g]
            if pages is None:
                return node.start + first
            hole = (np.frombuffer(bytes(pages), np.int32)[first:last] == 0).nonzero()[0]
            if len(hole):
                return node.start + first + int(hole[0])
        return high

    @staticmethod
    def _would_pin(path: Path, depth: int) -> int:
        """How many evictable closed device pages a pin at `depth` would take out of reach."""
        pinned = 0
        for node in reversed(path.nodes):
            if node.start >= depth:
                continue
            if node.device.holds:
                break
            pinned += min(node.device.count, depth - node.start)
        return pinned

    def admit(self, match: Match, upto: int) -> tuple[Lease, Operation | None] | None:
        """A lease on everything `match` promised, with private pages up to token `upto`; or None, nothing changed."""
        tree, room = self.tree, self.room
        wish = self.wish(match, upto)
        if not room.can_make(DEVICE, wish.need, wish.less):
            return None
        sibling = match.sibling
        if sibling is not None:
            extra = self._sibling_cost(sibling)
            less = {g: wish.less.get(g, 0) + extra[g] for g in range(len(tree.groups))}
            if not room.can_make(DEVICE, wish.need, less):
                sibling = None
        lease = self._open(match, wish)
        if sibling is not None:
            self._hold_sibling(lease, sibling)
        # Everything it reads is held: what is evicted now is somebody else's.
        room.make(DEVICE, wish.need)
        operation = None
        if wish.load or wish.joined:
            columns = [c for c, _ in wish.load.values()]
            first = min((int(c.min()) for c in columns), default=0)
            last = max((int(c.max()) + 1 for c in columns), default=0)
            operation = self.transfers.begin_load(lease, lease.node, first, last, wish.load, wish.joined)
        for g in tree.slots:
            slot = tree.pools[DEVICE][g].allocate(1, LEASE)
            lease.working[g] = int(slot[0])
            lease.tables[g] = bytearray(slot.tobytes())
        if not lease.waits:
            self.seat(lease)
            self.extend(lease, upto)
        return lease, operation

    def _open(self, match: Match, wish: Wish) -> Lease:
        """Pin the path and read the pages the lease needs of it."""
        tree = self.tree
        root = match.binding._root
        path = match.path
        node = root.top
        if wish.depth:
            last = next(n for n in reversed(path.nodes) if n.start < wish.depth)
            node = last if last.end == wish.depth else tree.split(last, wish.depth - last.start)
        seed_node = tree.node_ending(node, match.boundary) if tree.slots and match.boundary else None
        lease = Lease(match.binding, node, wish.depth, len(tree.groups))
        root.holders[lease] = None
        if root.hooked:
            tree.pin(node, DEVICE)
        else:
            lease.detached = True
            tree.unhooked[root] = None
        lease.boundary = match.boundary
        lease.length = match.length
        lease.start = min(match.boundary * tree.page_size, match.length - 1)
        lease.seed_node = seed_node
        if match.load:
            lease.wanted = wish.reads
        for g, slot in wish.seeds.items():
            tree.pools[DEVICE][g].read(np.array([slot], np.int32))
            lease.seed[g] = slot
        if seed_node is not None:
            seed_node.device.used = tree.now
        for g in tree.loose:
            end = wish.upto[g]
            table = np.zeros(end, np.int32)
            pool = tree.pools[DEVICE][g]
            for low, high in wish.reads[g]:
                for at, first, last_ in tree.cover(node, low, high):
                    pages = at.device.pages[g]
                    at.device.used = tree.now
                    if pages is not None:
                        there = np.frombuffer(bytes(pages), np.int32)[first:last_]
                        table[at.start + first : at.start + last_] = there
                        pool.read(there[there != 0])
            lease.tables[g] = bytearray(table.tobytes())
            lease.upto[g] = end
            lease.low[g] = wish.reads[g][0][0] if wish.reads[g] else end
        note_promises(lease)
        if match.cuts and not lease.detached:
            lease.cuts = match.cuts
            lease.tokens = match.tokens
            root.makers.setdefault(match.tokens[: tree.page_bytes], []).append(lease)
        return lease

    def seat(self, lease: Lease) -> None:
        """All pages of the path are on the device: the lease's tables follow it."""
        tree = self.tree
        if lease.detached:
            for g in tree.closed:
                lease.upto[g] = len(lease.tables[g]) // 4
            return
        nodes = tree.path_to(lease.node).nodes
        for g in tree.closed:
            lease.tables[g] = bytearray().join([node.device.pages[g] for node in nodes])
            lease.upto[g] = lease.depth
        lease.wanted = {}

    def extend(self, lease: Lease, upto: int) -> None:
        """Give the lease private pages up to token `upto`. The room is there."""
        tree = self.tree
        columns = -(-upto // tree.page_size)
        for g in tree.closed + tree.loose:
            table = lease.tables[g]
            more = columns - len(table) // 4
            if more > 0:
                table += tree.pools[DEVICE][g].allocate(more, LEASE).tobytes()

    def slide(self, lease: Lease, position: int) -> None:
        """Give up the pages of groups that are not closed which no row from `position` on needs."""
        tree = self.tree
        for g in tree.loose:
            spans, lease.low[g] = tree.families[g].slid(lease.low[g], position)
            for low, high in spans:
                self._give_up(lease, g, low, high)

    def _give_up(self, lease: Lease, g: int, low: int, high: int) -> None:
        tree = self.tree
        pool = tree.pools[DEVICE][g]
        table = np.frombuffer(lease.tables[g], np.int32)
        split = min(max(lease.upto[g], low), high)
        mine = [lease.own.pop((g, c)) for c in range(low, split) if (g, c) in lease.own] if lease.own else []
        shared, private = table[low:split].copy(), table[split:high].copy()
        table[low:high] = 0
        del table
        if mine:
            shared = shared[~np.isin(shared, mine)]
            private = np.append(private, np.array(mine, np.int32))
        shared = shared[shared != 0]
        if len(shared):
            pool.unread(shared)
            if not lease.detached:
                tree.requeue(lease.node, DEVICE, g, low, split)
        pool.release(private[private != 0], LEASE)

    # ---- again

    def refit(self, lease: Lease, path: Path, boundary: int, depth: int, length: int, held: Flight | None) -> None:
        """Let a lease go on from `boundary` of its own path (all of it on the device), following closed pages to
        `depth`. Its private pages are given back, after `held` if that still runs: nothing in them is needed."""
        tree = self.tree
        if held is not None:
            reading = {(DEVICE, g): lease.adopted(g)[1] for g in tree.loose}
            held.holders.append(Holder(tree, lease.node, (DEVICE,), (0, lease.depth), reading))
        node = lease.root.top
        if depth:
            last = next(n for n in reversed(path.nodes) if n.start < depth)
            node = last if last.end == depth else tree.split(last, depth - last.start)
        if lease.source is not None:
            lease.source.let_go(tree)
            lease.source, lease.copied = None, 0
        tree.pin(node, DEVICE)
        private = {g: lease.private(g) for g in tree.closed + tree.loose}
        for g in tree.closed:
            lease.upto[g] = depth
        for g in tree.loose:
            self._reread(lease, node, g, boundary, length)
        for g, ids in private.items():
            if held is None:
                tree.pools[DEVICE][g].release(ids, LEASE)
            else:
                tree.pools[DEVICE][g].move(ids, LEASE, FLIGHT)
                held.freed.append((g, ids))
        lease.own.clear()
        tree.unpin(lease.node, DEVICE)
        lease.node, lease.depth, lease.boundary = node, depth, boundary
        nodes = tree.path_to(node).nodes
        for g in tree.closed:
            lease.tables[g] = bytearray().join([at.device.pages[g] for at in nodes])
        lease.start = min(boundary * tree.page_size, length - 1)
        self.reseed(lease, boundary)
        note_promises(lease)

    def _reread(self, lease: Lease, node: Node, g: int, boundary: int, length: int) -> None:
        tree = self.tree
        pool = tree.pools[DEVICE][g]
        columns, before = lease.adopted(g)
        spans = tree.families[g].columns(boundary, length)
        table = np.zeros(boundary, np.int32)
        for low, high in spans:
            for at, first, last in tree.cover(node, low, high):
                there = np.frombuffer(bytes(at.device.pages[g]), np.int32)[first:last]
                table[at.start + first : at.start + last] = there
                at.device.used = tree.now
        pool.read(table[table != 0])
        if len(before):
            pool.unread(before)
            tree.requeue(lease.node, DEVICE, g, int(columns[0]), int(columns[-1]) + 1)
        lease.tables[g] = bytearray(table.tobytes())
        lease.upto[g] = boundary
        lease.low[g] = spans[0][0] if spans else boundary

    def reseed(self, lease: Lease, boundary: int) -> None:
        """Start the lease's state afresh from the snapshot at `boundary` (0: the zero state)."""
        tree = self.tree
        if not tree.slots:
            return
        old = lease.seed
        lease.seed = {}
        lease.opened = False
        lease.seed_node = tree.node_ending(lease.node, boundary) if boundary else None
        for g in tree.slots:
            pool = tree.pools[DEVICE][g]
            if lease.seed_node is not None:
                slot = lease.seed_node.device.pages[g]
                lease.seed[g] = slot
                pool.read(np.array([slot], np.int32))
                lease.seed_node.device.used = tree.now
        self.unseed(old, lease)

    def unseed(self, seeds: dict[int, int], lease: Lease) -> None:
        tree = self.tree
        for g, slot in seeds.items():
            tree.pools[DEVICE][g].unread(np.array([slot], np.int32))
            if not lease.detached:
                tree.requeue(lease.node, DEVICE, g, 0, lease.depth)

    def adopt(self, lease: Lease, tokens: bytes, position: int) -> int:
        """Before the next chunk at `position`: take over what others have published since. Returns the new position."""
        tree = self.tree
        if lease.detached or not lease.root.hooked:
            return position
        path = tree.walk(lease.root, tokens)
        path.tier = DEVICE
        boundary, _ = self.boundary(path, lease.length)
        depth = path.device_closed(path.depth) if tree.closed else path.depth
        if min(boundary * tree.page_size, lease.length - 1) > position:
            self.refit(lease, path, boundary, max(depth, boundary), lease.length, None)
            return lease.start
        if tree.closed and depth > lease.depth:
            self._follow(lease, path, depth)
        return position

    def _follow(self, lease: Lease, path: Path, depth: int) -> None:
        """Closed groups go further than the lease follows: give back its unwritten pages and follow."""
        tree = self.tree
        last = next(n for n in reversed(path.nodes) if n.start < depth)
        node = last if last.end == depth else tree.split(last, depth - last.start)
        tree.pin(node, DEVICE)
        tree.unpin(lease.node, DEVICE)
        nodes = tree.path_to(node).nodes
        for g in tree.closed:
            pool = tree.pools[DEVICE][g]
            table = lease.table(g)
            spare = table[lease.upto[g] : depth]
            pool.release(spare[spare != 0], LEASE)
            lease.tables[g] = bytearray().join([*(at.device.pages[g] for at in nodes), table[depth:].tobytes()])
            for (group, column), page in lease.own.items():
                if group == g:
                    lease.tables[g][4 * column : 4 * column + 4] = page.to_bytes(4, "little")
            lease.upto[g] = depth
        lease.node, lease.depth = node, depth
        note_promises(lease)

    # ---- copy on write

    def _sibling_cost(self, sibling: Sibling) -> list[int]:
        """Device pages that holding the source keeps eviction from taking."""
        tree = self.tree
        costs = [0] * len(tree.groups)
        node: Node | None = sibling.node
        closed = 0
        while node is not None and not node.device.holds:
            closed += node.device.count
            node = node.parent
        for g in tree.closed:
            costs[g] = closed
        for g in tree.loose:
            costs[g] = 1
        return costs

    def _hold_sibling(self, lease: Lease, sibling: Sibling) -> None:
        tree = self.tree
        # The anchor's own split may have cut the sibling's node; its lower half kept the identity.
        ((node, at, _),) = tree.cover(sibling.node, sibling.column, sibling.column + 1)
        pages = {
            (DEVICE, g): np.frombuffer(bytes(node.device.pages[g][4 * at : 4 * at + 4]), np.int32)
            for g in tree.closed + tree.loose
        }
        lease.source = Holder(tree, sibling.node, (DEVICE,), (sibling.column, sibling.column + 1), pages)
        lease.copied = sibling.tokens
        lease.start += sibling.tokens
