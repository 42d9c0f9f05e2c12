"""`HybridPrefixCache`: the one door to the cache. It speaks of a request's life and never names a family.

    bind -> match_prefix -> admit -> [opening, grow, publish, checkpoint -> step_commit | step_failed, rewind]* ->
    retract | finish_request -> unbind

Every method either does all it says or raises (or returns None where it says so) with nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from .admission import NOTHING_KEPT, Admission, Reserve
from .arguments import Tokens, operation_number, prompt_bytes, token_bytes, whole_number
from .check import check
from .checkpoints import Checkpoints
from .contents import outline
from .events import AllBlocksCleared, KVEvent
from .explain import explain
from .follow import Follower
from .group import DEVICE, HOST, CacheGroup, validate_groups
from .hashes import chain, divided
from .host_pins import HostPins, PinnedOnHost
from .lease import Binding, Lease, Match, PageCopy, Span
from .load import Landed, Loads
from .match import Explanation, Matcher
from .namespace import Namespace, checked
from .page_ids import Ids
from .publish import Publisher
from .roots import detach_namespace
from .save import Saves
from .statistics import Statistics
from .steps import Commit, StepCommits
from .stored import MissingPages, StoreFetches, StoreOperation
from .transfer import Operation, PendingTransfers
from .tree import Tree


class HybridPrefixCache:
    """A prefix cache for models of any mix of groups, on device and host. Pure book-keeping: pages are numbers.

    `events` records KV events for `drain_events`; `hashes` computes page hashes even without them (for a store).
    `enabled=False` finds and keeps nothing, with the same interface. `ghost_bytes` bounds the memory of what was
    evicted, for `explain`. Real pages are offered for saving in spans of at least `save_pages`, and what is left of a
    request when it ends.

    slides             leases give pages back as they go, so that `slide` has work to do
    has_host           there is a second tier
    has_pages          some group has pages by token, so that tables are as wide as requests are long
    keeps_snapshots    requests start from snapshots, so that checkpoints are worth making
    foresees_eviction  `cold_spans` knows what goes next: where no group is closed, it does not
    cuts_anywhere      all groups can begin at any page of what they could be served. Else a store that could serve some
                       pages must be asked whether it could serve fewer
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
        self._transfers = PendingTransfers(tree)
        self._publisher = Publisher(tree, save_pages)
        self._saves = Saves(tree, self._transfers, self._publisher)
        self._loads = Loads(tree, self._transfers)
        self._matcher = Matcher(tree)
        self._stored = StoreFetches(tree, self._matcher, self._transfers, self._saves)
        self._host_pins = HostPins(tree, self._matcher, self._transfers)
        self._admission = Admission(tree, self._loads)
        self._follower = Follower(tree, self._matcher)
        self._checkpoints = Checkpoints(tree, self._follower, self._publisher)
        self._steps = StepCommits(tree, self._follower, self._publisher, self._checkpoints)
        self._statistics = Statistics(tree, self._matcher, self._transfers, self._host_pins, self._steps)
        self.slides, self.has_host, self.has_pages = bool(tree.sliding), tree.has_host, bool(tree.paged)
        self.keeps_snapshots, self.foresees_eviction = bool(tree.slots), bool(tree.closed)
        self.cuts_anywhere = len(tree.closed) == len(groups)
        self._leases: dict[Lease, None] = {}
        self._index = {group.name: i for i, group in enumerate(groups)}

    # ---- namespaces

    def bind(self, namespace: Namespace) -> Binding:
        """Tie a request to a namespace as it is now. Evicting the namespace later does not move the request."""
        root = self._tree.root_of(checked(namespace))
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
        them ends. Returns whether there was anything; doing it again changes nothing. The store is not reached: it
        keeps what it was given until it lets go of that, and requests of an equal namespace may fetch it again."""
        root = self._tree.roots.get(checked(namespace))
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
        if not self.enabled:
            return self.match_nothing(binding, tokens)
        self._bound(binding)
        return self._matcher.match(binding, prompt_bytes(tokens), HOST if host else DEVICE)

    def match_nothing(self, binding: Binding, tokens: Tokens) -> Match:
        """A match that adopts nothing, for a request that must compute every token itself."""
        self._bound(binding)
        return self._matcher.nothing(binding, prompt_bytes(tokens), "off")

    def admit(
        self, match: Match, upto: int, *, writes: bool = True, keep: Reserve = NOTHING_KEPT
    ) -> tuple[Lease, Operation | None] | None:
        """A lease for the matched request with pages for its tokens up to `upto`, in all groups; None if one of them
        has no room, with nothing changed. `keep` is what must be left for other requests, and whether fewer pages will
        do (`growable` is then how far they reach); `writes=False` publishes nothing of this request. With an Operation
        to carry out, or `lease.loading`, the request waits for `load_done` and gets its pages with `grow` then.

        If the tree has changed since the match, the prompt is matched again: it may begin before or behind
        `match.start`, and `upto` moves along, to as many tokens after the new start, at most to the prompt's end. And
        where the only slot left holds the snapshot it would start from, it begins at 0 with pages for one chunk. So
        compute from `lease.start`, and ask `reach` how far the pages go."""
        self._bound(match.binding)
        if type(upto) is not int or not match.start < upto <= match.length:
            whole_number("upto", upto, match.start + 1, match.length)
        current = self._matcher.current(match)
        if current is not match:
            upto, match = min(match.length, current.start + upto - match.start), current
        if not writes and match.cuts:  # no request may wait for snapshots that this one will not leave
            match = match._replace(cuts=())
        admitted = self._admission.admit(match, upto, keep) or self._admission.admit_from_zero(match, upto, keep)
        if admitted is None:
            return None
        lease, _ = admitted
        lease.writes = self.enabled and writes
        self._leases[lease] = None
        self._statistics.admitted(match, lease)
        if not lease.waits:
            self._statistics.begins_at(lease, lease.start)
        return admitted

    def opening(self, lease: Lease, step: int) -> list[PageCopy]:
        """The copies to run before the first batch of a lease (or the next, after `adopt` and `rewind`)."""
        self._seated(lease)
        copies = self._steps.opening(lease, step)
        self._statistics.tally["copies"] += len(copies)
        return copies

    def adopt(self, lease: Lease, tokens: bytes, position: int) -> int:
        """Before the next chunk at `position`: take over what others have published since, if no step in flight has
        a row of this lease. Returns where to go on; beyond `position` if some of it need not be computed."""
        self._live(lease)
        if not self.enabled:
            return position
        self._statistics.computed(lease, position)
        begin = self._follower.adopt(lease, tokens, position, self._steps.in_flight(self._steps.doomed))
        if begin > position:
            self._statistics.begins_at(lease, begin)
        return begin

    def could_adopt(self, lease: Lease, tokens: bytes, position: int) -> bool:
        """Whether `adopt` would go on beyond `position`. For a lease that has a row in flight and must wait with it."""
        self._live(lease)
        return self.enabled and self._follower.could_adopt(lease, tokens, position)

    def growable(self, lease: Lease, upto: int) -> int:
        """Up to which token, at most `upto`, every group could give pages now."""
        self._live(lease)
        return self._admission.growable(lease, upto)

    def grow(self, lease: Lease, upto: int) -> bool:
        """Private pages for the tokens up to `upto`, in every group or (False, nothing changed) in none."""
        self._seated(lease)
        return self._admission.grow(lease, upto)

    def grow_rows(self, leases: Sequence[Lease]) -> dict[str, bytes] | None:
        """One more page for each lease in every group of pages: by group, the new ids as bytes of int32. None if there
        is no room, with nothing changed."""
        for lease in leases:
            if lease.waits or lease not in self._leases:
                self._seated(lease)
        return self._admission.grow_rows(leases)

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
        return lease.columns(self._tree.paged)

    def reach(self, lease: Lease) -> int:
        """How many tokens its pages hold, in every group."""
        return lease.reach(self._tree.paged) * self.page_size

    def write_from(self, lease: Lease, start: int) -> dict[str, int]:
        """By group: the first position whose K/V a row beginning at `start` may write. Ask before `publish`."""
        return lease.write_from(self._tree, start)

    def slide(self, lease: Lease, position: int) -> list[tuple[str, int, int]]:
        """Everything up to `position` is real: give up pages no row from there on needs. Returns which, as
        (group, first column, last column + 1)."""
        self._live(lease)
        return self._follower.slide(lease, position)

    def slide_rows(self, leases: Sequence[Lease], positions: Sequence[int]) -> dict[str, tuple[list[int], list[int]]]:
        """`slide` for many; by group: which of `leases`, and the columns they gave up."""
        if len(positions) != len(leases):
            raise ValueError(f"positions must be one a lease, got {len(positions)} for {len(leases)} leases")
        self._all_live(leases)
        return self._follower.slide_rows(leases, positions)

    def publish(self, lease: Lease, tokens: bytes, upto: int, step: int) -> None:
        """Hand the first `upto` pages to the tree, promised by `step`; `tokens` are those of the request from its
        first on."""
        self._seated(lease)
        if not lease.cuts and self._publisher.is_published(lease, upto):
            return
        if len(tokens) < upto * self._tree.page_bytes:
            raise ValueError(f"tokens must hold {upto} pages of {self.page_size}, got {len(tokens) // 4} tokens")
        self._publisher.check_pages(lease, upto)
        if lease.writes and not lease.detached:
            self._steps.publish(lease, tokens, upto, step)

    def publish_rows(self, leases: Sequence[Lease], pages: Sequence[bytes], step: int | None = None) -> None:
        """Each lease has computed one more page, real already: hand it to the tree. `pages` are their tokens. `step` is
        the one that computed them, if its `step_commit` comes only after this: what it promised is real first, for some
        of these pages may follow on it."""
        self._all_live(leases)
        self._publisher.check_rows(leases, pages)
        self._steps.publish_rows(leases, pages, step)

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
        self._statistics.computed(lease, position)
        begin = self._steps.rewind(lease, position)
        self._statistics.begins_at(lease, begin)
        return begin

    def retract(self, lease: Lease, fill: bytes, computed: int, reading: int | None) -> Span | None:
        """Take a lease away from a request that will come back: like `finish_request`."""
        span = self.finish_request(lease, fill, computed, reading)
        self._statistics.begins_at(lease, 0)  # what it was served and has not used is no hit
        self._statistics.tally["retracted"] += 1
        return span

    def finish_request(self, lease: Lease, fill: bytes, computed: int, reading: int | None) -> Span | None:
        """The request ends after `computed` tokens. `fill` are the tokens of whole computed pages that are not
        published yet. `reading` is the newest step in flight with one of its rows, or None. Returns what of it
        was never offered for saving."""
        self._live(lease)
        rest = len(fill) % self._tree.page_bytes
        if rest:
            raise ValueError(f"fill must be whole pages of {self._tree.page_bytes} bytes, got {len(fill)} bytes")
        if fill:
            self._publisher.check_pages(lease, lease.depth + len(fill) // self._tree.page_bytes)
        offered = len(self._publisher.real)
        self._steps.publish_rest(lease, fill, computed, reading)
        del self._leases[lease]
        self._statistics.computed(lease, computed)
        span = self._publisher.leftover(lease, offered) if self._tree.has_host else None
        self._steps.end(lease, reading)
        return span

    # ---- transfers

    def begin_save(self, span: Span) -> Operation | None:
        """Start to copy real pages to host. None: there is nothing to do, there is no room, or pages above them are not
        real yet (then `step_commit` offers them again)."""
        return self._saves.begin_save(span)

    def cold_spans(self, most: int) -> list[Span]:
        """What the device is going to lose next for good, if fewer than an eighth of its pages are free: up to `most`
        spans worth saving first. Empty where no group is closed."""
        return self._saves.cold_spans(most)

    @property
    def pages_skipped(self) -> int:
        """Pages that could not be saved, because host had no room for them."""
        return self._transfers.counts["pages_skipped"]

    def save_done(self, op: int, ok: bool) -> Span | None:
        """A save is over; what host has now is visible. None if it failed or its namespace is gone."""
        return self._saves.save_done(operation_number(op, "save"), bool(ok))

    def load_done(self, op: int, ok: bool) -> Landed:
        """A load is over: leases that can go on, and leases that must be given back and admitted without host."""
        landed = self._loads.load_done(operation_number(op, "load"), bool(ok))
        for lease in landed.failed:
            self._statistics.load_failed(lease)
        for lease in landed.ready:
            self._admission.seat(lease)
            self._statistics.begins_at(lease, lease.start)
        return landed

    # ---- the store

    def next_op(self) -> int:
        """A number for an operation that the cache has no part in: one sequence for all of them."""
        return self._transfers.number()

    def missing(self, binding: Binding, tokens: Tokens, least: int) -> MissingPages | None:
        """What of a prompt is neither on the device nor on host, to its last page that could be served, as the hashes
        by which a store knows it. None if it is fewer than `least` pages, or could not be fetched."""
        self._bound(binding)
        return self._stored.missing(binding, prompt_bytes(tokens), least) if self.enabled else None

    def servable_run(self, start_page: int, there: Mapping[str, npt.NDArray[Any]]) -> int:
        """If everything before `start_page` is at hand and a store had the pages of `there` from there on (by
        group, one entry a page): how many pages further every group could begin. What `LookupDone` must say."""
        return self._stored.servable_run(start_page, there)

    def begin_fetch(
        self, binding: Binding, tokens: Tokens, first: int, last: int, hashes: Sequence[bytes] | None = None
    ) -> StoreOperation | None:
        """Start to bring pages [first, last) of this prompt from the store to host: of each group those with which a
        request can begin at `last`. None if there is no room, or no request could reach them there. `hashes` are
        those of these pages, if they are known."""
        self._bound(binding)
        return self._stored.begin_fetch(binding, prompt_bytes(tokens), first, last, hashes)

    def fetchable_run(self, binding: Binding, tokens: Tokens, first: int, last: int) -> int:
        """How many of pages [first, last) of this prompt, from the first on, a fetch could bring to host now: as many
        as it can take without letting go of what they follow."""
        self._bound(binding)
        return self._stored.fetchable_run(binding, prompt_bytes(tokens), first, last)

    def fetch_done(self, op: int, ok: bool, pages: int) -> bool:
        """A fetch is over: the first `pages` of its pages have arrived in every group that has a part there. They are
        visible now, each under its own tokens; where that cannot be, and beyond them, host pages are free again.
        Returns whether any of it was of use."""
        if type(pages) is not int:
            raise ValueError(f"pages must be how many have arrived, got {pages!r:.40}")
        return self._stored.fetch_done(operation_number(op, "fetch"), bool(ok), pages)

    def pin_on_host(self, binding: Binding, tokens: Tokens, upto: int) -> PinnedOnHost:
        """Keep on host what is there of the first `upto` pages of a prompt, for a request that waits to come in, until
        `unpin_on_host` or the end of its namespace. Host pins have at most half of the host pages of any group
        together: `short` is set if this one could have had more. Nothing is held (0) where host has nothing of use, or
        lacks pages above it."""
        self._bound(binding)
        whole_number("upto", upto, 0, 1 << 30)
        return self._host_pins.begin(binding, prompt_bytes(tokens), upto)

    def unpin_on_host(self, pin: int) -> None:
        """What was pinned can be evicted again. Nothing happens if it has ended already, or was nothing (0)."""
        whole_number("pin", pin, 0, 1 << 62)
        self._host_pins.end(pin)

    def begin_backups(self, span: Span) -> list[StoreOperation]:
        """Start to copy to the store what `save_done` has returned; it stays on host until `backup_done`. What must
        wait, because host lacks pages above it, comes with a later call."""
        return self._stored.begin_backups(span)

    def backup_done(self, op: int, ok: bool) -> Span | None:
        """A backup is over. If it failed, what it was to keep: to be given to `begin_backups` again at any time, which
        takes what host has of it then. None if it was kept, or its namespace is gone."""
        return self._stored.backup_done(operation_number(op, "backup"), bool(ok))

    # ---- questions

    def available(self) -> tuple[int, ...]:
        """By group: device pages that are free or could be evicted."""
        return tuple(map(self._tree.device.available, range(len(self.groups))))

    def room(self) -> int:
        """How many pages groups that keep everything could give, each of them."""
        return min([self._tree.device.available(g) for g in self._tree.closed], default=1 << 60)

    def too_long(self, tokens: int) -> str:
        """Why a request that computes `tokens` tokens could not run even with all pages of a group; "" if it could."""
        return self._admission.too_long(tokens)

    def would_free(self, lease: Lease) -> bool:
        """Whether the end of this lease would give other requests a page or a slot."""
        self._live(lease)
        return lease.would_free(self._tree)

    def page_hashes(self, namespace: Namespace, tokens: Tokens) -> list[bytes]:
        """The sha256 chain of a prompt's whole pages: what its store keys and events are made of."""
        raw, size = prompt_bytes(tokens), self._tree.page_bytes
        return divided(chain(checked(namespace).digest(), raw[: len(raw) // size * size], size))

    def drain_events(self) -> list[KVEvent]:
        """The KV events since the last call, in order."""
        events, self._tree.events = self._tree.events, []
        return events

    def explain(self, namespace: Namespace, tokens: Tokens, admin: bool = False) -> Explanation:
        """Why this prompt would hit no more than it does. Changes nothing."""
        return explain(self._tree, self._matcher, self.enabled, checked(namespace), token_bytes(tokens), admin)

    def outline(self, most: int) -> dict[str, Any]:
        """The tree for an administrator: up to `most` nodes with their tokens, pages and parents. Tokens of all
        tenants are in it."""
        return outline(self._tree, whole_number("most", most, 1, 1 << 20))

    def stats(self) -> dict[str, Any]:
        """Everything a dashboard draws: pages by group, tier and owner; hits, reasons, evictions, transfers. What the
        figures mean stands at `Statistics`."""
        return self._statistics.report(len(self._leases))

    def check(self) -> None:
        """Raise AssertionError, saying what is wrong, if an invariant does not hold. Slow: for tests."""
        check(self._tree, self._loads, self._stored, self._host_pins, self._steps, self._leases)

    def watch(self, seen: Callable[[str, str, str, Ids], None]) -> None:
        """Call `seen(group, tier, "taken" | "freed", pages)` whenever pages change hands with a pool: for checkers."""
        for tier in self._tree.tiers:
            tier.watch(seen)

    # ---- inside

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

    def _all_live(self, leases: Sequence[Lease]) -> None:
        if not all(map(self._leases.__contains__, leases)):
            for lease in leases:
                self._live(lease)
