"""`HybridPrefixCache`: the one door to the cache. It speaks of a request's life and never names a family.

    bind -> match_prefix -> admit -> [opening, grow, publish, checkpoint -> step_commit | step_failed, rewind]* ->
    retract | finish_request -> unbind

Every method either does all it says or raises (or returns None where it says so) with nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from . import check as checking
from . import explain as explaining
from .admission import NOTHING_KEPT, Admission, Reserve
from .checkpoints import Checkpoints
from .detach import detach_namespace
from .events import AllBlocksCleared, KVEvent
from .follow import Follower
from .group import DEVICE, HOST, TIERS, CacheGroup, validate_groups, whole_number
from .hashes import chain
from .host_pins import HostPins, PinnedOnHost
from .lease import Binding, Lease, Match, PageCopy, Span
from .load import Landed, Loads
from .match import Explanation, Matcher
from .namespace import Namespace
from .outline import outline
from .page_ids import Ids, runs
from .pool import OWNERS, PagePool
from .publish import Publisher
from .readers import count_all
from .room import Room
from .save import Saves
from .steps import Commit, StepCommits
from .stored import MissingPages, StoreFetches, StoreOperation
from .tokens import token_bytes
from .transfer import Operation, PendingTransfers
from .tree import Tree

_NO_POOL = PagePool("nothing", 0)
Tokens = bytes | bytearray | memoryview | npt.NDArray[Any] | Sequence[int]


class HybridPrefixCache:
    """A prefix cache for models of any mix of groups, on device and host. Pure book-keeping: pages are numbers.

    `events` records KV events for `drain_events`; `hashes` computes page hashes even without them (for a store).
    `enabled=False` finds and keeps nothing, with the same interface. `ghost_bytes` bounds the memory of what was
    evicted, from which `explain` tells. Real pages are offered for saving in spans of at least `save_pages`, and what
    is left of a request when it ends.
    """

    def __init__(
        self,
        page_size: int,
        groups: Sequence[CacheGroup],
        events: bool = False,
        hashes: bool = False,
        *,
        enabled: bool = True,
        ghost_bytes: int = 1 << 20,
        save_pages: int = 32,
    ) -> None:
        groups = tuple(groups)
        validate_groups(page_size, groups)
        whole_number("ghost_bytes", ghost_bytes, 0, 1 << 40)
        whole_number("save_pages", save_pages, 1, 1 << 30)
        self.page_size = page_size
        self.groups = groups
        self.enabled = enabled
        self._tree = tree = Tree(page_size, groups, hashes, events, ghost_bytes)
        self._room = Room(tree)
        self._ledger = PendingTransfers(tree)
        self._publisher = Publisher(tree, save_pages)
        self._saves = Saves(tree, self._room, self._ledger, self._publisher)
        self._loads = Loads(tree, self._ledger)
        self._stored = StoreFetches(tree, self._room, self._ledger, self._saves)
        self._matcher = Matcher(tree)
        self._host_pins = HostPins(tree, self._matcher, self._ledger)
        self._admission = Admission(tree, self._room, self._loads)
        self._follower = Follower(tree, self._matcher)
        self._checkpoints = Checkpoints(tree, self._room, self._follower, self._publisher)
        self._steps = StepCommits(tree, self._follower, self._publisher, self._checkpoints)
        self._leases: dict[Lease, None] = {}
        self._index = {group.name: i for i, group in enumerate(groups)}
        self._tally: dict[str, int] = {
            "requests": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "retracted": 0,
            "copies": 0,
        }
        self._reasons: dict[str, int] = {}

    # ---- namespaces

    def bind(self, namespace: Namespace) -> Binding:
        """Tie a request to a namespace as it is now. Evicting the namespace later does not move the request."""
        root = self._tree.root_of(self._space(namespace))
        root.bound += 1
        return Binding(root, self)

    def unbind(self, binding: Binding) -> None:
        """The request is over."""
        self._bound(binding)
        binding.live = False
        binding._root.bound -= 1
        self._tree.forget_if_empty(binding._root)

    def evict_namespace(self, namespace: Namespace) -> bool:
        """Forget a namespace at once, on device and host. What running requests hold of it is freed when the last of
        them ends. Returns whether there was anything; doing it again changes nothing. The store is not reached: it has
        what it was given until it lets go of that by itself, and who comes in an equal namespace may fetch it again.
        """
        root = self._tree.roots.get(self._space(namespace))
        if root is None:
            self._tree.ghosts.forget(namespace.digest())
            return False
        self._host_pins.leave(root)
        detach_namespace(self._tree, root, silently=False)
        return True

    def flush(self) -> None:
        """Forget every namespace."""
        tree = self._tree
        for root in list(tree.roots.values()):
            self._host_pins.leave(root)
            detach_namespace(tree, root, silently=True)
        tree.ghosts.clear()
        if tree.announcing:
            tree.events.append(AllBlocksCleared())

    # ---- the life of a request

    def match_prefix(self, binding: Binding, tokens: Tokens, host: bool = True) -> Match:
        """What the cache could serve this prompt, from the device or (unless `host` is False) by loading from host.
        Pins nothing. `tokens` may be bytes of int32, which are taken as they are."""
        if type(binding) is not Binding or binding.cache is not self or not binding.live:
            self._bound(binding)
        raw = self._raw(tokens)
        if not self.enabled:
            return self._matcher.nothing(binding, raw, len(raw) // 4, "off")
        return self._matcher.match(binding, raw, len(raw) // 4, HOST if host else DEVICE)

    def match_nothing(self, binding: Binding, tokens: Tokens) -> Match:
        """A match that adopts nothing, for a request that must compute every token itself."""
        self._bound(binding)
        raw = self._raw(tokens)
        return self._matcher.nothing(binding, raw, len(raw) // 4, "off")

    def admit(
        self, match: Match, upto: int, *, writes: bool = True, keep: Reserve = NOTHING_KEPT
    ) -> tuple[Lease, Operation | None] | None:
        """A lease for the matched request with pages for its tokens up to `upto`, in all groups; None if one of them
        has no room, with nothing changed. `keep` says what must be left for others, and whether fewer pages will do
        (`growable` tells then how far they reach); `writes=False` publishes nothing of this request. With an Operation
        to carry out, or `lease.loading`, the request waits for `load_done` and gets its pages with `grow` then.

        If the tree has changed since the match, the prompt is matched again: it may begin before or behind
        `match.start`, and `upto` moves along, to as many tokens after the new start, at most to the prompt's end. And
        where the only slot left holds the snapshot it would start from, it begins at 0 with pages for one chunk. So
        compute from `lease.start`, and ask `reach` how far the pages go."""
        if match.binding.cache is not self or not match.binding.live:
            self._bound(match.binding)
        if type(upto) is not int or not match.start < upto <= match.length:
            whole_number("upto", upto, match.start + 1, match.length)
        if match.version != self._tree.version and match.reason != "off":
            again = self._matcher.match(match.binding, match.tokens, match.length, match.path.tier)
            upto = min(match.length, again.start + upto - match.start)
            match = again
        if not writes and match.cuts:  # nobody may wait for snapshots it will not leave
            match = match._replace(cuts=())
        admitted = self._admission.admit(match, upto, keep)
        if admitted is None:
            admitted = self._admission.admit_from_zero(match, upto, keep)
            if admitted is None:
                return None
        lease = admitted[0]
        lease.writes = self.enabled and writes
        self._leases[lease] = None
        self._count(match, lease)
        if not lease.waits:
            self._replace_provisional_hit(lease, lease.start)
        return admitted

    def opening(self, lease: Lease, step: int) -> list[PageCopy]:
        """The copies to run before the first batch of a lease (or the next, after `adopt` and `rewind`)."""
        self._seated(lease)
        if lease.opened or not (self._tree.slots or lease.source):
            lease.opened = True
            return []
        copies = self._checkpoints.opening(lease, self._steps.flight(step))
        self._tally["copies"] += len(copies)
        return copies

    def adopt(self, lease: Lease, tokens: bytes, position: int) -> int:
        """Before the next chunk at `position`: take over what others have published since, if no step in flight has
        a row of this lease. Returns where to go on; beyond `position` if some of it need not be computed."""
        self._live(lease)
        if not self.enabled:
            return position
        self._computed(lease, position)
        begin = self._follower.adopt(lease, tokens, position, self._steps.in_flight(self._steps.doomed))
        if begin > position:
            self._replace_provisional_hit(lease, begin)
        return begin

    def could_adopt(self, lease: Lease, tokens: bytes, position: int) -> bool:
        """Whether `adopt` would go on beyond `position`. For a lease that has a row in flight and must wait with it."""
        self._live(lease)
        return self.enabled and self._follower.could_adopt(lease, tokens, position)

    def growable(self, lease: Lease, upto: int) -> int:
        """Up to which token, at most `upto`, every group could give pages now."""
        self._live(lease)
        size, tree = self.page_size, self._tree
        for g in tree.paged:
            have = len(lease.tables[g]) // 4
            if (have + tree.device.pools[g].free) * size < upto:  # else it need not be asked what could go
                upto = min(upto, (have + self._room.available(DEVICE, g)) * size)
        return upto

    def grow(self, lease: Lease, upto: int) -> bool:
        """Private pages for the tokens up to `upto`, in every group or (False, nothing changed) in none."""
        self._seated(lease)
        columns = -(-upto // self.page_size)
        need = {}
        for g in self._tree.paged:
            more = columns - len(lease.tables[g]) // 4
            if more > 0:
                need[g] = more
        if need:
            if not self._room.made(DEVICE, need):
                return False
            self._admission.extend(lease, need)
        return True

    def grow_rows(self, leases: Sequence[Lease]) -> dict[str, bytes] | None:
        """One more page for each lease in every group of pages: by group, the new ids as bytes of int32. None if there
        is no room, with nothing changed."""
        known = self._leases
        for lease in leases:
            if lease not in known or lease.waits:
                self._seated(lease)
        if not self._room.made(DEVICE, dict.fromkeys(self._tree.paged, len(leases))):
            return None
        return self._admission.extend_rows(leases)

    def table(self, lease: Lease, group: str) -> Ids:
        """The pages of one group by column (0 = hole); for a family of slots, the working slot."""
        if group not in self._index:
            raise ValueError(f"group must be one of {', '.join(self._index)}, got {group!r:.60}")
        return lease.table(self._index[group])

    def tables(self, lease: Lease) -> Sequence[bytearray]:
        """`table` of every group, in their order, as the bytes of int32. They change as the lease does: copy them."""
        return lease.tables

    def columns(self, lease: Lease) -> int:
        """How many columns its tables have, or will have once they are loaded: pages it reads or was given."""
        most = 4 * lease.boundary if lease.waits else 0
        for g in self._tree.paged:
            if len(lease.tables[g]) > most:
                most = len(lease.tables[g])
        return most // 4

    def reach(self, lease: Lease) -> int:
        """How many tokens its pages hold, in every group."""
        return lease.reach(self._tree.paged) * self.page_size

    def write_from(self, lease: Lease, start: int) -> dict[str, int]:
        """By group: the first position whose K/V a row beginning at `start` may write. Ask before `publish`."""
        size, upto = self.page_size, lease.upto
        begin = dict.fromkeys(self._index, start)
        for g in self._tree.paged:
            if upto[g] * size > start:
                begin[self.groups[g].name] = upto[g] * size
        return begin

    def slide(self, lease: Lease, position: int) -> list[tuple[str, int, int]]:
        """Everything up to `position` is real: give up pages no row from there on needs. Returns which, as
        (group, first column, last column + 1)."""
        self._live(lease)
        gone = self._follower.slide_rows([lease], [position])
        return [(group, *run) for group, (_, columns) in gone.items() for run in runs(np.array(columns, np.int32))]

    def slide_rows(self, leases: Sequence[Lease], positions: Sequence[int]) -> dict[str, tuple[list[int], list[int]]]:
        """`slide` for many; by group: which of `leases`, and the columns they gave up."""
        if len(positions) != len(leases):
            raise ValueError(f"positions must be one a lease, got {len(positions)} for {len(leases)} leases")
        if not all(map(self._leases.__contains__, leases)):
            for lease in leases:
                self._live(lease)
        return self._follower.slide_rows(leases, positions)

    def publish(self, lease: Lease, tokens: bytes, upto: int, step: int) -> None:
        """Hand the first `upto` pages to the tree, promised by `step`; `tokens` are those of the request from its
        first on."""
        self._seated(lease)
        if upto <= lease.depth and not lease.cuts:
            behind = lease.upto
            for g in self._tree.sliding:
                if behind[g] < upto:
                    break
            else:
                return
        if len(tokens) < upto * self._tree.page_bytes:
            raise ValueError(f"tokens must hold {upto} pages of {self.page_size}, got {len(tokens) // 4} tokens")
        self._has_pages(lease, upto)
        if lease.writes and not lease.detached:
            if lease.cuts:
                self._checkpoints.pass_cuts(lease, upto, self._steps.flights)
            steps = self._steps
            flight = steps.flight(step)
            self._publisher.publish(lease, tokens, 0, upto, flight, steps.oldest(step) if lease.deps else step)

    def publish_rows(self, leases: Sequence[Lease], pages: Sequence[bytes], step: int | None = None) -> None:
        """Each lease has computed one more page, real already: hand it to the tree. `pages` are their tokens. `step` is
        the one that computed them, if its `step_commit` comes only after this: what it promised is real first, for some
        of these pages may follow on it."""
        size = self._tree.page_bytes
        if len(pages) != len(leases):
            raise ValueError(f"pages must be one page of tokens a lease, got {len(pages)} for {len(leases)} leases")
        if set(map(len, pages)) - {size}:
            wrong = next(len(page) for page in pages if len(page) != size)
            raise ValueError(f"pages must be of {size} bytes each, got one of {wrong}")
        if not all(map(self._leases.__contains__, leases)):
            for lease in leases:
                self._live(lease)
        short = self._publisher.short_of_pages(leases)
        if short is not None:
            self._has_pages(short, short.depth + 1)
        if step is not None:
            self._steps.computed(step)
        for lease, duplicates in self._publisher.publish_rows(leases, pages):
            self._steps.remember_duplicates(lease, duplicates)

    def checkpoint(self, lease: Lease, page: int, step: int) -> list[PageCopy]:
        """Keep the state as it will be after `step`, at the end of `page` pages. Empty if no slot can be had."""
        self._seated(lease)
        return self._checkpoints.checkpoint(lease, page, self._steps.flight(step), rolling=False)

    def roll_checkpoint(self, lease: Lease, page: int, step: int) -> list[PageCopy]:
        """A checkpoint that takes the place of the lease's last rolling one once it is real."""
        self._seated(lease)
        return self._checkpoints.checkpoint(lease, page, self._steps.flight(step), rolling=True)

    def step_commit(self, step: int, reading: int | None = None) -> Commit:
        """Step `step` is done: what it promised is real. `reading` is the newest later step in flight, if there is one:
        duplicates that give way to the tree's pages are free only after it."""
        return self._steps.commit(step, reading)

    def step_failed(self, step: int, newest: int) -> list[Lease]:
        """Step `step` failed, while steps up to `newest` were in flight: what they promised is withdrawn, and the later
        ones count as failed whatever their events say. Returns the leases that lost pages; each of them, and each that
        had a row in those steps, goes on from where `rewind` says."""
        return self._steps.failed(step, newest)

    def rewind(self, lease: Lease, position: int) -> int:
        """Where a row goes on that had computed `position` tokens before the step that failed."""
        self._live(lease)
        self._computed(lease, position)
        begin = self._steps.rewind(lease, position)
        self._replace_provisional_hit(lease, begin)
        return begin

    def retract(self, lease: Lease, fill: bytes, computed: int, reading: int | None) -> Span | None:
        """Take a lease away from a request that will come back: like `finish_request`."""
        span = self.finish_request(lease, fill, computed, reading)
        self._replace_provisional_hit(lease, 0)  # what it was served and has not used is no hit
        self._tally["retracted"] += 1
        return span

    def finish_request(self, lease: Lease, fill: bytes, computed: int, reading: int | None) -> Span | None:
        """The request ends after `computed` tokens. `fill` are the tokens of whole computed pages that are not
        published yet. `reading` is the newest step in flight with one of its rows, or None. Returns what of it
        was never offered for saving."""
        self._live(lease)
        pages = 0
        if fill:
            pages, rest = divmod(len(fill), self._tree.page_bytes)
            if rest:
                raise ValueError(f"fill must be whole pages of {self._tree.page_bytes} bytes, got {len(fill)} bytes")
            self._has_pages(lease, lease.depth + pages)
        tree, publisher = self._tree, self._publisher
        offered = len(publisher.real)
        if (pages or tree.slots) and lease.writes and not lease.detached and self._steps.in_flight(reading) is None:
            if pages:
                publisher.publish(lease, fill, lease.depth, lease.depth + pages, None, 0)
            if tree.slots:
                self._checkpoints.publish_state(lease, computed)
        elif tree.slots:
            self._checkpoints.counts["states_dropped"] += 1
        del self._leases[lease]
        self._computed(lease, computed)
        span = publisher.leftover(lease, offered) if tree.has_host else None
        self._steps.end(lease, reading)
        return span

    # ---- transfers

    def begin_save(self, span: Span) -> Operation | None:
        """Start to copy real pages to host. None: there is nothing to do, there is no room, or pages above them are not
        real yet (then `step_commit` offers them again)."""
        return self._saves.begin_save(span)

    @property
    def foresees_eviction(self) -> bool:
        """Whether `cold_spans` can tell what goes next: where no group is closed, it cannot."""
        return bool(self._tree.closed)

    def cold_spans(self, most: int) -> list[Span]:
        """What the device is going to lose next for good, if fewer than an eighth of its pages are free: up to `most`
        spans worth saving first. Empty where no group is closed."""
        tree = self._tree
        if not tree.has_host or not tree.closed:
            return []
        pools = [tree.device.pools[g] for g in tree.closed]
        if all(8 * pool.free >= pool.capacity for pool in pools):
            return []
        leaves = tree.device.leaves.coldest(DEVICE, 4 * most)
        # Once for each time it was used: on a small host two of them would push each other out in turns, for ever.
        fresh = [leaf for leaf in leaves if leaf.tried < leaf.copies[DEVICE].used and not leaf.saving]
        lost = [leaf for leaf in fresh if tree.has_host and leaf.copies[HOST].count < leaf.n]
        # On host a page is worth nothing without its path.
        return [Span(0, leaf.end, leaf) for leaf in lost[:most]]

    @property
    def pages_skipped(self) -> int:
        """Pages that could not be saved, because host had no room for them."""
        return self._ledger.counts["pages_skipped"]

    def save_done(self, op: int, ok: bool) -> Span | None:
        """A save is over; what host has now is visible. None if it failed or its namespace is gone."""
        return self._saves.save_done(_number(op, "save"), bool(ok))

    def load_done(self, op: int, ok: bool) -> Landed:
        """A load is over: leases that can go on, and leases that must be given back and admitted without host."""
        landed = self._loads.load_done(_number(op, "load"), bool(ok))
        for lease in landed.failed:
            self._uncount(lease)
        for lease in landed.ready:
            self._admission.seat(lease)
            self._replace_provisional_hit(lease, lease.start)
        return landed

    # ---- the store

    def next_op(self) -> int:
        """A number for an operation that the cache has no part in: one sequence for all of them."""
        return self._ledger.number()

    def missing(self, binding: Binding, tokens: Tokens, least: int) -> MissingPages | None:
        """What of a prompt is neither on the device nor on host, to its last page that could be served, as the hashes
        by which a store knows it. None if it is fewer than `least` pages, or could not be fetched."""
        self._bound(binding)
        raw = self._raw(tokens)
        last = self._matcher.most_pages(len(raw) // 4)
        if not self.enabled or not binding.attached or not self._stored.whole or last < least:
            return None
        first = self._matcher.match(binding, raw, len(raw) // 4, HOST).boundary
        if last - first < max(1, least):
            return None
        return MissingPages(first, self._stored.hashes(binding._root, raw, first, last))

    def servable_run(self, start_page: int, there: Mapping[str, npt.NDArray[Any]]) -> int:
        """If everything before `start_page` is at hand and a store had the pages from there on that `there` says (by
        group, one entry a page): how many pages further every group could begin. What `LookupDone` must say."""
        return self._stored.servable_run(start_page, there)

    def begin_fetch(
        self, binding: Binding, tokens: Tokens, first: int, last: int, hashes: Sequence[bytes] | None = None
    ) -> StoreOperation | None:
        """Start to bring pages [first, last) of this prompt from the store to host: of each group those with which a
        request can begin at `last`. None if there is no room, or nobody could reach them there. `hashes` are those of
        these pages, if they are known."""
        self._bound(binding)
        raw = self._raw(tokens)
        self._fetched_pages(raw, first, last)
        return self._stored.begin_fetch(binding, raw, first, last, None if hashes is None else list(hashes))

    def fetchable_run(self, binding: Binding, tokens: Tokens, first: int, last: int) -> int:
        """How many of pages [first, last) of this prompt, from the first on, a fetch could bring to host now: as many
        as it can take without letting go of what they follow."""
        self._bound(binding)
        raw = self._raw(tokens)
        self._fetched_pages(raw, first, last)
        return self._stored.fetchable_run(binding, raw, first, last)

    @property
    def cuts_anywhere(self) -> bool:
        """Whether all groups can begin at any page of what they could be served. Else a store that could serve some
        pages must be asked whether it could serve fewer."""
        return self._stored.cuts_anywhere

    def fetch_done(self, op: int, ok: bool, pages: int) -> bool:
        """A fetch is over: the first `pages` of its pages have arrived in every group that has a part there. They are
        visible now, each under its own tokens; where that cannot be, and beyond them, host pages are free again.
        Returns whether any of it was of use."""
        if type(pages) is not int:
            raise ValueError(f"pages must be how many have arrived, got {pages!r:.40}")
        return self._stored.fetch_done(_number(op, "fetch"), bool(ok), pages)

    def pin_on_host(self, binding: Binding, tokens: Tokens, upto: int) -> PinnedOnHost:
        """Keep on host what is there of the first `upto` pages of a prompt, for a request that waits to come in, until
        `unpin_on_host` or the end of its namespace. Stays have no more than half of the host pages of any group
        together: `short` tells that this one could have had more. Nothing is held (0) where host has nothing of use, or
        lacks pages above it."""
        self._bound(binding)
        whole_number("upto", upto, 0, 1 << 30)
        return self._host_pins.begin(binding, self._raw(tokens), upto)

    def unpin_on_host(self, pin: int) -> None:
        """What stayed can be evicted again. Nothing happens if it has ended already, or was nothing (0)."""
        whole_number("pin", pin, 0, 1 << 62)
        self._host_pins.end(pin)

    def begin_backups(self, span: Span) -> list[StoreOperation]:
        """Start to copy to the store what `save_done` has returned; it stays on host until `backup_done`. What must
        wait, because host lacks pages above it, comes with a later call."""
        return self._stored.begin_backups(span)

    def backup_done(self, op: int, ok: bool) -> Span | None:
        """A backup is over. If it failed, what it was to keep: to be given to `begin_backups` again at any time, which
        takes what host has of it then. None if it was kept, or its namespace is gone."""
        return self._stored.backup_done(_number(op, "backup"), bool(ok))

    # ---- questions

    @property
    def slides(self) -> bool:
        """Whether leases give pages back as they go, so that `slide` has work to do."""
        return bool(self._tree.sliding)

    @property
    def has_host(self) -> bool:
        """Whether there is a second tier."""
        return self._tree.has_host

    @property
    def has_pages(self) -> bool:
        """Whether any group has pages by token, so that tables are as wide as requests are long."""
        return bool(self._tree.paged)

    @property
    def keeps_snapshots(self) -> bool:
        """Whether requests start from snapshots, so that checkpoints are worth making."""
        return bool(self._tree.slots)

    def available(self) -> tuple[int, ...]:
        """By group: device pages that are free or could be evicted."""
        return tuple(self._room.available(DEVICE, g) for g in range(len(self.groups)))

    def room(self) -> int:
        """How many pages groups that keep everything could give, each of them."""
        return min([self._room.available(DEVICE, g) for g in self._tree.closed], default=1 << 60)

    def too_long(self, tokens: int) -> str:
        """Why a request that computes `tokens` tokens could not run even with all pages of a group; "" if it could."""
        columns = -(-tokens // self.page_size)
        for g in self._tree.closed:
            group = self.groups[g]
            if columns > group.device_pages:
                return f"{tokens} tokens take {columns} pages of group {group.name!r}, which has {group.device_pages}"
        return ""

    def would_free(self, lease: Lease) -> bool:
        """Whether the end of this lease would give anybody else a page or a slot."""
        self._live(lease)
        tree = self._tree
        count_all(tree)
        if lease.working:
            return True
        if not lease.detached and tree.closed and lease.depth and lease.node.copies[DEVICE].holds == 1:
            return True
        for g in tree.paged:
            if len(lease.private(g)):
                return True
            if lease.detached:
                if 1 in tree.device.pools[g].readers[lease.adopted(g)[1]]:
                    return True
            elif g in tree.sliding:
                for low, high in lease.reading(g):
                    for at, first, last in tree.cover(lease.node, low, high):
                        if 1 in (at.copies[DEVICE].reads[g] or b"")[first:last]:
                            return True
        return False

    def page_hashes(self, namespace: Namespace, tokens: Tokens) -> list[bytes]:
        """The sha256 chain of a prompt's whole pages: what its store keys and events are made of."""
        raw = self._raw(tokens)
        whole = len(raw) // self._tree.page_bytes * self._tree.page_bytes
        digests = chain(self._space(namespace).digest(), raw[:whole], self._tree.page_bytes)
        return [bytes(digests[at : at + 32]) for at in range(0, len(digests), 32)]

    def drain_events(self) -> list[KVEvent]:
        """The KV events since the last call, in order."""
        events, self._tree.events = self._tree.events, []
        return events

    def explain(self, namespace: Namespace, tokens: Tokens, admin: bool = False) -> Explanation:
        """Why this prompt would hit no more than it does. Changes nothing."""
        space, raw = self._space(namespace), token_bytes(tokens)
        return explaining.explain(self._tree, self._matcher, self.enabled, space, raw, admin)

    def outline(self, most: int) -> dict[str, Any]:
        """The tree for an administrator: up to `most` nodes with their tokens, pages and parents. Tokens of everybody
        are in it."""
        return outline(self._tree, whole_number("most", most, 1, 1 << 20))

    def stats(self) -> dict[str, Any]:
        """Everything a dashboard draws: pages by group, tier and owner; hits, reasons, evictions, transfers.

        A request counts once, when it is first admitted: in `requests`, with its whole prompt in `prompt_tokens`, and
        under its reason. `cached_tokens` are the prompt tokens that requests did not compute, each once however often
        it was retracted or its steps failed, loads once they have come: the sum of what `Ended.cached` says.
        """
        tree = self._tree
        pages: dict[str, dict[str, dict[str, int]]] = {}
        used: dict[str, dict[str, int]] = {}
        evicted: dict[str, dict[str, int]] = {}
        available: dict[str, dict[str, int]] = {}  # not of windows: their readers would have to be counted for it
        for g, group in enumerate(self.groups):
            pages[group.name], used[group.name], evicted[group.name] = {}, {}, {}
            for t, name in enumerate(TIERS):
                tier = tree.tiers[t] if t < len(tree.tiers) else None
                pool = tier.pools[g] if tier else _NO_POOL
                owners = dict(zip(("free", *OWNERS), pool.counts, strict=True))
                pages[group.name][name] = {"capacity": pool.capacity, **owners}
                used[group.name][name] = pool.used_bytes
                evicted[group.name][name] = tier.evicted[g] if tier else 0
                if tier and g not in tree.sliding:
                    available.setdefault(group.name, {})[name] = self._room.available(t, g)
        return {
            "pages": pages,
            "bytes": used,
            "evicted": evicted,
            "available": available,
            **self._tally,
            "reasons": dict(self._reasons),
            "transfers": dict(self._ledger.counts),
            "steps": {**self._steps.counts, **self._checkpoints.counts},
            "staying": {group.name: held for group, held in zip(self.groups, self._host_pins.held, strict=True)},
            "nodes": tree.nodes,
            "leases": len(self._leases),
            "ghosts": {"entries": len(tree.ghosts), "bytes": tree.ghosts.used_bytes, "limit": tree.ghosts.limit_bytes},
            "namespaces": [
                {"namespace": namespace, "bound": root.bound, **root.tally, "misses": dict(root.misses)}
                for namespace, root in tree.roots.items()
            ],
            "unhooked": len(tree.detached_roots),
        }

    def check(self) -> None:
        """Raise AssertionError, saying what is wrong, if an invariant does not hold. Slow: for tests."""
        checking.check(self._tree, self._loads, self._stored, self._host_pins, self._steps, self._leases)

    def watch(self, seen: Callable[[str, str, str, Ids], None]) -> None:
        """Call `seen(group, tier, "taken" | "freed", pages)` whenever pages change hands with a pool: for checkers."""
        for tier in self._tree.tiers:
            for group, pool in zip(self.groups, tier.pools, strict=True):
                pool.watch = partial(seen, group.name, tier.name)

    # ---- inside

    def _count(self, match: Match, lease: Lease) -> None:
        """A request counts once: not again when it comes back after a retraction."""
        if match.binding.prompt:
            return
        found = self._matcher.found(match)
        lease.reason = found.reason
        match.binding.prompt, match.binding.found = lease.length, found
        self._add(lease, 1, found.reason)

    def _uncount(self, lease: Lease) -> None:
        """What it was to be served did not come: its next admission counts instead."""
        if lease.reason:
            self._add(lease, -1, lease.reason)
            lease.binding.prompt, lease.reason = 0, ""

    def _add(self, lease: Lease, sign: int, reason: str) -> None:
        self._reasons[reason] = self._reasons.get(reason, 0) + sign
        for tally in (self._tally, lease.root.tally):
            tally["requests"] += sign
            tally["prompt_tokens"] += sign * lease.length
        if reason != "hit":
            misses = lease.root.misses
            misses[reason] = misses.get(reason, 0) + sign

    def _replace_provisional_hit(self, lease: Lease, position: int) -> None:
        """A lease goes on at `position`: prompt tokens before it that its request has not computed, now or before a
        retraction, are cached, instead of what was so since its last step that was done."""
        binding = lease.binding
        served = (position if position < binding.prompt else binding.prompt) - binding.reached
        if served < 0:
            served = 0
        more = served - lease.served
        lease.begun, lease.served = position, served
        if more:
            self._tally["cached_tokens"] += more
            lease.root.tally["cached_tokens"] += more

    @staticmethod
    def _computed(lease: Lease, position: int) -> None:
        """Everything before `position` is computed. If that is beyond where the lease has begun, what it was served has
        been used, and stays counted."""
        if position > lease.begun:
            lease.begun, lease.served = position, 0
            if position > lease.binding.reached:
                lease.binding.reached = position

    @staticmethod
    def _space(namespace: Namespace) -> Namespace:
        if not isinstance(namespace, Namespace):
            raise ValueError(f"namespace must be a Namespace, got {namespace!r:.60}")
        return namespace

    @staticmethod
    def _raw(tokens: Tokens) -> bytes:
        """Tokens as bytes of int32; what comes as bytes has been through `token_bytes` and is taken as it is."""
        if type(tokens) is not bytes:
            return token_bytes(tokens)
        if not tokens or len(tokens) % 4:
            raise ValueError(f"tokens must be one or more int32 values, got {len(tokens)} bytes")
        return tokens

    def _fetched_pages(self, raw: bytes, first: int, last: int) -> None:
        whole_number("first", first, 0, 1 << 30)
        whole_number("last", last, first + 1, max(first + 1, self._matcher.most_pages(len(raw) // 4)))

    def _bound(self, binding: Binding) -> None:
        if not isinstance(binding, Binding) or binding.cache is not self:
            raise ValueError("this binding is not of this cache; bind the request to a namespace here")
        if not binding.live:
            raise ValueError("this binding has ended; bind the request to a namespace again")

    def _live(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise ValueError("this lease has ended; match and admit the request again")

    def _seated(self, lease: Lease) -> None:
        if lease not in self._leases or lease.waits:
            self._live(lease)
            raise ValueError("this lease waits for a load; go on after load_done")

    def _has_pages(self, lease: Lease, pages: int) -> None:
        """What is published must be in the lease's tables."""
        for g in self._tree.paged:
            if len(lease.tables[g]) < 4 * pages:
                have = len(lease.tables[g]) // 4
                raise ValueError(f"the lease has {have} pages of group {self.groups[g].name!r}, cannot publish {pages}")


def _number(op: int, what: str) -> int:
    """The number of an operation, seen to be one."""
    if type(op) is not int:
        raise ValueError(f"no {what} with number {op!r:.40} is under way")
    return op
