"""What neighbours do in the stories of these tests: they ask, take a seat, crowd others out, and leave."""

from __future__ import annotations

from sapwood.cache import CacheGroup, Lease, Match, Namespace, Span

from .driver import BASE, Engine, Request, full, state, toks, window

PAGE = 4
NEWCOMERS = Namespace(salt="newcomers")

LAYOUTS = {
    "full": lambda: (full(24, 24),),
    "window": lambda: (window(6, 24, 24),),
    "state": lambda: (state(4, 4),),
    "full+window+state": lambda: (full(24, 24), window(6, 24, 24), state(4, 4)),
    "state+window": lambda: (state(4, 4), window(6, 24, 24)),
}


def engine_of(*groups: CacheGroup, **options) -> Engine:
    """An engine with pages of 4 tokens whose requests make no rolling checkpoints unless a test asks for them."""
    options.setdefault("every", 1000)
    return Engine(PAGE, *groups, **options)


def hit(engine: Engine, tokens, ns: Namespace = BASE, host: bool = True) -> Match:
    """What the cache would serve somebody who asks now, and goes away."""
    binding = engine.cache.bind(ns)
    match = engine.cache.match_prefix(binding, tokens, host=host)
    engine.cache.unbind(binding)
    return match


def newcomer(engine: Engine, seed: int, pages: int = 1) -> Lease | None:
    """Somebody with a prompt nobody has seen takes a seat and memory for it, and does not run yet."""
    binding = engine.cache.bind(NEWCOMERS)
    tokens = toks(500 + seed, pages * PAGE)
    admitted = engine.cache.admit(engine.cache.match_prefix(binding, tokens), len(tokens))
    engine.check()
    if admitted is None:
        engine.cache.unbind(binding)
        return None
    return admitted[0]


def leave(engine: Engine, *leases: Lease) -> None:
    for lease in leases:
        engine.cache.finish_request(lease, b"", 0, None)
        engine.cache.unbind(lease.binding)
    engine.check()


def crowd(engine: Engine, guests: int, pages: int) -> None:
    """Newcomers take that much memory of every group at once, and leave without having computed anything."""
    leases = [newcomer(engine, seed, pages) for seed in range(guests)]
    assert all(leases), "the newcomers were meant to find room"
    leave(engine, *leases)


def empty_device(engine: Engine) -> None:
    """Crowd everything out of device memory."""
    slots = [g.device_pages for g in engine.cache.groups if g.name in engine.double.slots]
    pages = [g.device_pages for g in engine.cache.groups if g.name not in engine.double.slots]
    guests = min(slots, default=1)
    crowd(engine, guests, min(pages, default=guests) // guests)
    for group in engine.cache.groups:
        assert engine.pages(group.name)["free"] == group.device_pages, f"{group.name} was meant to be crowded out"


def compute(engine: Engine, name: str, tokens, ns: Namespace = BASE) -> list[Span]:
    """Run a prompt to its end, and return what could be saved of it."""
    request = engine.submit(name, tokens, 1, ns)
    spans: list[Span] = []
    while not request.ended:
        step(engine)
        spans += engine.spans
    return spans


def save(engine: Engine, spans: list[Span]) -> list[int]:
    """Start to write spans back. The numbers of the operations under way."""
    ops = [engine.begin("save", engine.cache.begin_save(span)) for span in spans]
    engine.check()
    return [op for op in ops if op is not None]


def write_back(engine: Engine, spans: list[Span]) -> None:
    for op in save(engine, spans):
        engine.land(op)


def step(engine: Engine, chunk: int = 1 << 20, times: int = 1) -> None:
    for _ in range(times):
        assert engine.plan(chunk), "there was meant to be something to run"
        engine.done()


def sit(engine: Engine, request: Request) -> None:
    """Admit a request that was just submitted, and do not run it yet."""
    assert engine.admit(request, 8), "it was meant to find room"
    engine.waiting.remove(request)
    engine.running.append(request)
    engine.check()


def all_free(engine: Engine) -> None:
    """Everything is over; forget it all, and every page of every group and tier is free."""
    engine.settle()
    engine.cache.flush()
    engine.check()
    for group in engine.cache.groups:
        for tier, pages in (("device", group.device_pages), ("host", group.host_pages)):
            assert engine.pages(group.name, tier)["free"] == pages, f"{group.name} leaks on {tier}"


def owned(engine: Engine, owner: str, tier: str = "device") -> dict[str, int]:
    return {group.name: engine.pages(group.name, tier)[owner] for group in engine.cache.groups}
