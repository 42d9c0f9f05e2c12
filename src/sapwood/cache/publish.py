"""Publishing: handing full pages to the tree, where others can find them; and what happens when they become real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .events import announce_stored
from .flight import Fill, Promise, StepInFlight, mark, note_promises
from .group import DEVICE, HOST
from .hashes import hash_path
from .lease import Lease, Span
from .node import Node
from .page_ids import Run, as_ids, joined, lengthened, one, page_at, part, put, ranges, runs_of, width
from .path import agree
from .pool import FLIGHT, LEASE, TREE
from .readers import read
from .tree import Tree

Fallen = tuple[Lease, list[tuple[int, int]]]  # and (group, column) of its duplicates
_MAX_COPY_TO_GROW_BYTES = 65536  # a resting edge longer than this gets a child instead of being copied to grow


class Replaced(NamedTuple):
    """A lease's duplicate gave way to the tree's page: write `page` into its table."""

    lease: Lease
    group: str
    column: int
    page: int


class Publisher:
    def __init__(self, tree: Tree, save_pages: int) -> None:
        self.tree = tree
        self.save_pages = save_pages
        self.replaced: list[Replaced] = []
        self.real: list[Span] = []  # what the events of a step have made real, for saving

    def publish(
        self, lease: Lease, tokens: bytes | bytearray, base: int, upto: int, flight: StepInFlight | None, oldest: int
    ) -> list[tuple[int, int]]:
        """Put the pages of `lease` up to `upto` into the tree: promised by `flight`, or real if that is None.
        `tokens` holds the tokens from page `base` on. Returns (group, column) of pages that the tree had already."""
        tree = self.tree
        duplicates: list[tuple[int, int]] = []
        first = self._descend(lease, tokens, base, upto, duplicates) if upto > lease.depth else upto
        if lease.prompt_end:
            self._note_prompt_end(lease)
        fills: list[Fill] = []
        for g in tree.sliding:
            if lease.upto[g] < upto:
                self._fill(lease, g, upto, fills, duplicates)
        if flight is None:
            if duplicates and tree.promises:  # the pages beside ours may yet be withdrawn
                note_promises(tree, lease)
            self.became_real(lease, lease.node, first, upto, fills)
        elif first < upto or fills or duplicates:
            promise = Promise(flight.step, lease, lease.node, first, upto, fills, duplicates)
            flight.promises.append(promise)
            tree.promises += 1
            if first < upto or fills:
                mark(tree, promise)
            low = promise.low
            if duplicates:
                low = min(low, min(column for _, column in duplicates))
            lease.depends(flight.step, low, oldest)
        return duplicates

    def is_published(self, lease: Lease, upto: int) -> bool:
        """Whether the tree has the first `upto` pages of a lease already, in every group."""
        if upto > lease.depth:
            return False
        for g in self.tree.sliding:  # noqa: SIM110  (a loop: this is asked of every chunk)
            if lease.upto[g] < upto:
                return False
        return True

    def publish_rows(self, leases: Sequence[Lease], pages: Sequence[bytes]) -> list[Fallen]:
        """One more computed page for each lease. Returns those that had duplicates.

        The loop of every decode step in which rows cross a page: a leaf that only gets longer is extended right here,
        and owners change for all rows at once."""
        tree = self.tree
        closed, sliding, host = tree.closed, tree.sliding, tree.has_host
        moved: list[list[bytearray]] = [[] for _ in tree.groups]
        fallen: list[Fallen] = []
        announcing, hashing = tree.announcing, tree.hashing
        queued = {g: tree.device.queues[g].bits[0] for g in sliding}
        may_grow, save_pages = bool(closed) or not announcing or tree.announced_group in sliding, self.save_pages
        for lease, page in zip(leases, pages, strict=True):
            if lease.detached or not lease.writes:
                continue
            node, depth, upto = lease.node, lease.depth, lease.upto
            grows = may_grow and type(node.edge) is bytearray and self.can_grow(node)
            for g in sliding:
                grows = grows and upto[g] == depth
            if not grows:
                duplicates = self.publish(lease, page, depth, depth + 1, None, 0)
                if duplicates:
                    fallen.append((lease, duplicates))
                continue
            last, at, copy, tables = depth + 1, 4 * depth, node.copies[DEVICE], lease.tables
            there = copy.pages
            node.edge += page
            node.n = n = node.n + 1
            node.crc = None
            for g in closed:
                one = tables[g][at : at + 4]
                there[g] += one
                moved[g].append(one)
                upto[g] = last
                copy.count = n
            for g in sliding:
                one = tables[g][at : at + 4]
                moved[g].append(one)
                upto[g] = last
                pages_here = there[g]
                if pages_here is None or len(pages_here) < 4 * n - 4:
                    pages_here = there[g] = lengthened(pages_here, n - 1)
                pages_here += one
                tree.device.pools[g].idle += 1
                if lease.counted:  # `idle` was raised above; `read` lowers it again
                    read(tree, node, DEVICE, g, depth, last)
                elif not copy.queued & queued[g]:
                    tree.device.queues[g].add(node, copy)
            lease.depth = last
            if announcing:
                announce_stored(tree, node, DEVICE, depth, last)
            elif hashing:
                hash_path(tree, node, depth, last)
            if host:
                unsaved = lease.unsaved
                if unsaved is not None and last - unsaved[0] < save_pages:
                    unsaved[1], unsaved[2] = last, node
                else:
                    self.offer(lease, depth, last, node)
        for g in tree.paged:
            if moved[g]:
                tree.device.pools[g].move(b"".join(moved[g]), LEASE, TREE)
        return fallen

    def check_pages(self, lease: Lease, upto: int) -> None:
        """ValueError if a lease was not given the first `upto` pages of some group, which it is to publish."""
        for g in self.tree.paged:
            have = width(lease.tables[g])
            if have < upto:
                name = self.tree.names[g]
                raise ValueError(f"the lease has {have} pages of group {name!r}, cannot publish {upto}")

    def check_rows(self, leases: Sequence[Lease], pages: Sequence[bytes]) -> None:
        """ValueError if these cannot be published: a page of tokens for each lease, for which it has pages."""
        size = self.tree.page_bytes
        if len(pages) != len(leases):
            raise ValueError(f"pages must be one page of tokens a lease, got {len(pages)} for {len(leases)} leases")
        if set(map(len, pages)) - {size}:
            wrong = next(len(page) for page in pages if len(page) != size)
            raise ValueError(f"pages must be of {size} bytes each, got one of {wrong}")
        for g in self.tree.paged:
            for lease in leases:
                if len(lease.tables[g]) <= 4 * lease.depth:
                    self.check_pages(lease, lease.depth + 1)

    def became_real(self, lease: Lease, node: Node, first: int, last: int, fills: list[Fill]) -> None:
        """Pages of the path to `node` have been computed: hash and announce them, and offer them for saving."""
        tree = self.tree
        if tree.announcing:
            if tree.closed:
                if first < last:
                    announce_stored(tree, node, DEVICE, first, last)
            else:
                for fill in fills:
                    if fill.g == tree.announced_group:
                        for low, high in fill.where:
                            announce_stored(tree, node, DEVICE, low, high)
        elif tree.hashing and first < last:
            hash_path(tree, node, first, last)
        if tree.has_host:
            for fill in fills:
                first = min(first, fill.where[0][0])
            if first < last:
                self.offer(lease, first, last, node)

    def take(self) -> tuple[list[Span], list[Replaced]]:
        """What has become real, and which table entries have changed, since the last time."""
        real, replaced = self.real, self.replaced
        self.real, self.replaced = [], []
        return real, replaced

    def offer(self, lease: Lease, first: int, last: int, node: Node) -> None:
        """Pages [first, last) of the path to `node` can be saved. Few transfers are better than many, and while the
        lease runs its pages stay on the device: so short spans wait for more, or for the end of the lease."""
        waiting = lease.unsaved
        if waiting is not None:
            if waiting[1] > last:
                last, node = waiting[1], waiting[2]
            if waiting[0] < first:
                first = waiting[0]
        if last - first >= self.save_pages or lease.ended:
            self.real.append(Span(first, last, node))
            lease.unsaved = None
        else:
            lease.unsaved = [first, last, node]

    def leftover(self, lease: Lease, offered: int) -> Span | None:
        """What a lease that ends has made real and was never offered; `offered` spans were there before."""
        unsaved, lease.unsaved = lease.unsaved, None
        spans = self.real[offered:]
        del self.real[offered:]
        if unsaved is not None:
            spans.append(Span(*unsaved))
        if lease.prompt_end and lease.writes and not lease.detached:
            self._note_prompt_end(lease)
        if not spans:
            return None
        deepest = max(spans, key=lambda span: span.last)
        return Span(min(span.first for span in spans), deepest.last, deepest.node)

    def _note_prompt_end(self, lease: Lease) -> None:
        """The tree knows where the prompt of a lease ends, once it has all of its pages."""
        end = lease.prompt_end
        if lease.depth >= end:
            self.tree.node_at(lease.node, end).prompt_end = end
            lease.prompt_end = 0

    def snapshot_is_real(self, lease: Lease, node: Node, depth: int, groups: list[int], rolling: bool) -> None:
        """A snapshot of `groups` at `depth` in `node` can be used, announced if events speak of it, and saved."""
        tree = self.tree
        if tree.announcing and tree.announced_group in groups:
            announce_stored(tree, node, DEVICE, depth - 1, depth)
        if tree.has_host and not rolling:
            self.offer(lease, depth - 1, depth, node)

    # ---- closed groups

    def _descend(
        self, lease: Lease, tokens: bytes | bytearray, base: int, upto: int, duplicates: list[tuple[int, int]]
    ) -> int:
        """Move the lease's anchor down to `upto`, through what is there and into new pages.
        Returns the first page that is new on the device for closed groups."""
        tree = self.tree
        size = tree.page_bytes
        node, depth = lease.node, lease.depth
        first = upto
        while depth < upto:
            offset = (depth - base) * size
            child = node.children.get(bytes(tokens[offset : offset + size])) if node.children else None
            if child is None:
                if tree.closed and depth < first:
                    first = depth
                self._append(lease, node, depth, tokens, offset, upto)
                lease.depth = upto
                return first
            both = agree(child.edge, bytes(tokens[offset : (upto - base) * size]), 0, size)
            if both < child.n:
                child = tree.split(child, both)
            node.recent = child
            if not child.copies[DEVICE].count and tree.closed:
                first = min(first, depth)
                self._put(lease, child, depth, depth + both)
            else:
                for g in tree.closed:
                    pages = lease.tables[g]
                    for column in range(max(depth, lease.upto[g]), depth + both):
                        lease.own[g, column] = page_at(pages, column)
                        duplicates.append((g, column))
            node, depth = child, depth + both
        tree.pin(node, DEVICE)
        tree.unpin(lease.node, DEVICE)
        lease.node, lease.depth = node, upto
        for g in tree.closed:
            lease.upto[g] = upto
        return first

    def _put(self, lease: Lease, node: Node, low: int, high: int) -> None:
        """A node that was on host only gets the lease's computed pages as its device copy."""
        pages = {}
        for g in self.tree.closed:
            pages[g] = bytes(part(lease.tables[g], low, high))
            self.tree.device.pools[g].move(pages[g], LEASE, TREE)
        self.tree.closed_pages.put(node, DEVICE, pages)

    def _append(self, lease: Lease, node: Node, depth: int, tokens: bytes | bytearray, offset: int, upto: int) -> None:
        """New pages [depth, upto) below `node`: its edge grows where no other holder minds, else a child is added."""
        tree = self.tree
        n = upto - depth
        end = offset + n * tree.page_bytes
        if node is lease.node and self.can_grow(node):
            if type(node.edge) is bytes:
                node.edge = bytearray().join((node.edge, tokens[offset:end]))
            else:
                node.edge += tokens[offset:end]
            node.n += n
            node.crc = None
            copy = node.copies[DEVICE]
        else:
            child = tree.attach(node, bytearray(memoryview(tokens)[offset:end]), n)
            copy = child.copies[DEVICE]
            copy.holds = 1
            if node is not lease.node:  # else the lease's own pin becomes "a child with holds": no climb
                tree.pin(node, DEVICE)
                tree.unpin(lease.node, DEVICE)
            if tree.closed:
                node.copies[DEVICE].backed_children += 1
            lease.node = child
        for g in tree.closed:
            mine = part(lease.tables[g], depth, upto)
            tree.device.pools[g].move(mine, LEASE, TREE)
            there = copy.pages[g]
            if type(there) is bytearray:
                there += mine
            else:
                copy.pages[g] = bytearray().join((there, mine)) if there else mine
            lease.upto[g] = upto
        if tree.closed:
            copy.count += n

    def can_grow(self, node: Node) -> bool:
        """Whether `node` may get longer in place: a leaf, held by one lease alone."""
        tree = self.tree
        copy = node.copies[DEVICE]
        if node.children or node.parent is None or copy.holds - node.held != 1 or node.loading is not None:
            return False
        if tree.closed and copy.count != node.n:
            return False
        if tree.has_host and node.copies[HOST].holds:  # by a backup: what it holds is all on host, and stays so
            return False
        return type(node.edge) is bytearray or len(node.edge) <= _MAX_COPY_TO_GROW_BYTES

    # ---- groups that are not closed

    def _fill(self, lease: Lease, g: int, upto: int, fills: list[Fill], duplicates: list[tuple[int, int]]) -> None:
        """Put the lease's pages into the holes of its path; where the tree has one already, ours is a duplicate."""
        tree = self.tree
        table = lease.tables[g]
        filled: list[Run] = []
        for node, first, last in reversed(tree.cover(lease.node, lease.upto[g], upto)):
            start = node.start
            mine = part(table, start + first, start + last)
            taken = tree.sliding_pages[g].fill(node, DEVICE, first, mine)
            filled += [(start + low, part(table, start + low, start + high)) for low, high in taken]
            if lease.counted:
                for low, high in runs_of(as_ids(mine)):
                    read(tree, node, DEVICE, g, start + first + low, start + first + high)
            if taken != [(first, last)]:
                ours = {column for low, high in taken for column in range(low, high)}
                for at in range(first, last):
                    page = page_at(table, start + at)
                    if page and at not in ours:
                        lease.own[g, start + at] = page
                        duplicates.append((g, start + at))
        lease.upto[g] = upto
        if filled:
            ids = joined(filled)
            tree.device.pools[g].move(ids, LEASE, TREE)
            fills.append(Fill(g, ranges(filled), ids))

    # ---- duplicates

    def settle(
        self, lease: Lease, duplicates: list[tuple[int, int]], held: StepInFlight | None
    ) -> list[tuple[int, int]]:
        """Give up a lease's duplicates where the tree's page is real; `held`, the newest step in flight, may still read
        and write them. Returns those whose page is not real yet."""
        tree = self.tree
        left: list[tuple[int, int]] = []
        if lease.detached or lease.ended:
            return left
        for g, column in duplicates:
            page = lease.own.get((g, column))
            if page is None:
                continue
            ((node, at, _),) = tree.cover(lease.node, column, column + 1)
            pages = node.copies[DEVICE].pages[g]
            theirs = page_at(pages, at)
            if not theirs:
                continue
            if not node.is_real(g, column, g in tree.closed):
                left.append((g, column))
                continue
            del lease.own[g, column]
            if held is None:
                tree.device.pools[g].release(one(page), LEASE)
            else:
                tree.device.pools[g].move(one(page), LEASE, FLIGHT)
                held.freed.append((g, one(page)))
            put(lease.tables[g], column, one(theirs))
            self.replaced.append(Replaced(lease, tree.groups[g].name, column, theirs))
        return left
