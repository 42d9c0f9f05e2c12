"""Why a prompt was not served more: each reason of `explain`, what it never tells, and that asking changes nothing."""

from __future__ import annotations

import tracemalloc

import pytest

from sapwood.cache import Explanation, HybridPrefixCache, Namespace
from sapwood.cache.ghosts import Ghosts

from .driver import BASE, Engine, full, state, toks, window
from .stories import LAYOUTS, PAGE, compute, crowd, empty_device, engine_of, hit, leave, newcomer, write_back

MINE = Namespace(salt="mine")
THEIRS = Namespace(salt="theirs")


def why(engine: Engine, tokens, ns: Namespace = BASE, admin: bool = False) -> Explanation:
    """Ask, and see that asking changed nothing."""
    before, version = engine.cache.stats(), engine.cache._tree.version
    found = engine.cache.explain(ns, tokens, admin=admin)
    assert engine.cache.stats() == before and engine.cache._tree.version == version, "asking changed something"
    assert engine.cache.drain_events() == []
    engine.cache.check()
    assert 0 <= found.cached <= found.position < len(tokens)
    served = hit(engine, tokens, ns).cached
    assert found.cached == served or (engine.flights and found.cached < served), "told is what would be served"
    return found


def counted(engine: Engine, tokens, ns: Namespace = BASE) -> str:
    """The reason under which the statistics count a request, which is admitted and leaves."""
    before = engine.cache.stats()["reasons"]
    binding = engine.cache.bind(ns)
    match = engine.cache.match_prefix(binding, tokens)
    lease, _ = engine.cache.admit(match, match.start + 1)
    leave(engine, lease)
    after = engine.cache.stats()["reasons"]
    (reason,) = (name for name in after if after[name] != before.get(name, 0))
    return reason


# ---- one for each reason


def test_explain_hit():
    """All that could be cached is; or nobody has sent more of this prompt before.

    Mutation: `Matcher.reason` calls the end of a leaf `diverged`.
    """
    engine = engine_of(full(24))
    prompt = toks(1, 17)
    engine.run("ann", prompt)
    found = why(engine, prompt)
    assert found[:4] == ("hit", 16, 16, None) and "16 of 17" in found.detail
    assert why(engine, prompt[:16])[:3] == ("hit", 15, 15), "its last token is always computed"
    assert why(engine, prompt[:16] + toks(2, 9))[:3] == ("hit", 16, 16), "nobody has sent more"
    assert counted(engine, prompt) == "hit" == counted(engine, prompt[:16] + toks(2, 9))


@pytest.mark.parametrize("groups", [(full(24),), (full(24), state(4))], ids=["full", "state"])
def test_explain_short(groups):
    """A prompt without a whole page (for states: a whole page before its last token) is too short to be cached.

    Mutation: `Matcher.most_pages` counts a started page.
    """
    engine = engine_of(*groups)
    longest = PAGE if len(groups) == 2 else PAGE - 1
    engine.run("ann", toks(1, 9))
    for length in range(1, longest + 1):
        found = why(engine, toks(1, 9)[:length])
        copied = 0 if len(groups) == 2 else length - 1
        assert found[:4] == ("short", copied, copied, None) and f"{length} tokens" in found.detail
        assert counted(engine, toks(1, 9)[:length]) == "short"
    assert why(engine, toks(1, 9)[: longest + 1]).reason != "short"


def test_explain_empty():
    """Nothing is cached in this namespace: nobody was there, somebody waits, or all of it was unloaded.

    Mutation: `Ghosts.forget` is not called for an unloaded namespace (it would be told as evicted).
    """
    engine = engine_of(full(8))
    prompt = toks(1, 9)
    assert why(engine, prompt, MINE)[:4] == ("empty", 0, 0, None)
    assert not engine.cache.stats()["namespaces"], "asking makes no namespace"
    binding = engine.cache.bind(MINE)
    assert why(engine, prompt, MINE)[:4] == ("empty", 0, 0, None)
    engine.cache.unbind(binding)

    engine.run("ann", prompt, ns=MINE)
    crowd(engine, 1, 8)
    assert why(engine, prompt, MINE).reason == "evicted"
    engine.cache.evict_namespace(MINE)
    assert why(engine, prompt, MINE)[:4] == ("empty", 0, 0, None), "it is as if it had never been"
    assert counted(engine, prompt, MINE) == "empty"


def test_explain_empty_after_a_flush():
    """A flush forgets what was evicted before, too.

    Mutation: `flush` keeps the ghosts.
    """
    engine = engine_of(full(8))
    engine.run("ann", toks(1, 9))
    crowd(engine, 1, 8)
    assert why(engine, toks(1, 9)).reason == "evicted"
    engine.cache.flush()
    assert why(engine, toks(1, 9)).reason == "empty" and engine.cache.stats()["ghosts"]["entries"] == 0


@pytest.mark.parametrize("at", [0, 1, 3, 4, 6, 8, 15])
def test_explain_diverged(at):
    """Other tokens follow at exactly the position that is told: inside a page, at a page end, and at the first token.

    Mutation: `_diverged` compares with the first child, not the nearest; or gives the page's position and not the
    token's.
    """
    engine = engine_of(full(48))
    prompt = toks(1, 17)
    engine.run("far", toks(8, 17))
    engine.run("ann", prompt)
    engine.run("farther", toks(9, 17))
    found = why(engine, prompt[:at] + toks(2, 20 - at))
    assert found[:4] == ("diverged", at, at, None), "up to there it would be copied"
    assert counted(engine, prompt[:at] + toks(2, 20 - at)) == "diverged"


def test_explain_diverged_only_where_tokens_differ():
    """A prompt that ends inside a cached page differs from nothing: what it has is served, and that is a hit.

    Mutation: neither `Matcher.reason` nor `_diverged` looks whether the prompt has ended.
    """
    engine = engine_of(full(48))
    engine.run("ann", toks(1, 17))
    assert why(engine, toks(1, 17)[:10])[:3] == ("hit", 9, 9), "the last token is computed"
    assert why(engine, toks(1, 17)[:7])[:3] == ("hit", 6, 6)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_explain_evicted(left):
    """It was cached, and had to make room: told with the step, from the place where what is left of it ends.

    Mutation: `Tree.truncate` or `Tree.prune` leaves no ghost; or `Ghosts.since` is asked with another checksum.
    """
    engine = engine_of(full(8))
    prompt = toks(1, 17)
    engine.run("ann", prompt)
    step_of_ann = engine.step
    crowd(engine, 1, 8 - left)
    found = why(engine, prompt)
    assert found[:4] == ("evicted", left * PAGE, left * PAGE, step_of_ann)
    assert f"step {step_of_ann}" in found.detail
    assert why(engine, prompt[: left * PAGE] + toks(2, 9)).reason in ("empty", "hit"), "of that there was nothing"
    assert counted(engine, prompt) == "evicted"
    engine.run("again", prompt)
    assert why(engine, prompt).reason == "hit", "it is back"


def test_explain_evicted_behind_a_split():
    """A ghost is found whether the path before it was split before it went, or after.

    Mutation: `crc_at` starts anew at each node.
    """
    engine = engine_of(full(12))
    prompt = toks(1, 17)
    engine.run("ann", prompt)
    engine.run("bob", prompt[:8] + toks(2, 5))
    engine.run("cyd", prompt[:4] + toks(3, 5))
    crowd(engine, 1, 7)
    assert why(engine, prompt)[:3] == ("evicted", 12, 12), "the last of four pages in three nodes is gone"
    engine.run("dan", prompt[:12] + [1])
    engine.run("eve", prompt[:11] + toks(4, 2))
    assert why(engine, prompt)[:3] == ("evicted", 12, 12)


def test_explain_no_snapshot():
    """The tokens are known, but a recurrent group has no snapshot so deep.

    Mutation: `Matcher.reason` calls every group that limits a window.
    """
    engine = engine_of(full(64), state(2, name="mamba"))
    prompt = toks(1, 17)
    engine.run("ann", prompt)
    assert why(engine, prompt).reason == "hit"
    crowd(engine, 2, 1)
    found = why(engine, prompt)
    assert found[:4] == ("no_snapshot", 0, 0, None)
    assert "'mamba'" in found.detail and "up to 16" in found.detail
    assert counted(engine, prompt) == "no_snapshot"


def test_explain_window_gone():
    """The tokens are known, but a window group has lost pages it would need so deep.

    Mutation: `Matcher.reason` calls every group that limits a snapshot.
    """
    engine = engine_of(full(64), window(6, 12, name="local"))
    prompt = toks(1, 17)
    engine.run("ann", prompt)
    assert why(engine, prompt).reason == "hit"
    crowd(engine, 1, 12)
    found = why(engine, prompt)
    assert found[:4] == ("window_gone", 0, 0, None)
    assert "'local'" in found.detail and "up to 16" in found.detail
    assert counted(engine, prompt) == "window_gone"


def test_explain_off():
    """With the prefix cache switched off nothing is found or kept, and that is the reason.

    Mutation: `explain` does not look at `enabled`.
    """
    engine = engine_of(full(24), enabled=False)
    prompt = toks(1, 17)
    engine.run("ann", prompt)
    found = why(engine, prompt, admin=True)
    assert found[:4] == ("off", 0, 0, None) and "off" in found.detail
    assert engine.pages("full")["free"] == 24
    assert counted(engine, prompt) == "off"


@pytest.mark.parametrize("mine", ["nothing", "other tokens", "a shorter part"])
def test_explain_other_namespace_only_for_an_administrator(mine):
    """That another namespace has more of a prompt is told to an administrator, with its name; to others the answer is
    the same as if it were not there.

    Mutation: `explain` looks at other namespaces without `admin`; or says so when the other has no more than this one.
    """
    engine = engine_of(full(48))
    prompt = toks(1, 17)
    if mine == "other tokens":
        engine.run("own", toks(2, 17), ns=MINE)
    elif mine == "a shorter part":
        engine.run("own", prompt[:9] + toks(2, 8), ns=MINE)
    alone = why(engine, prompt, MINE)
    assert why(engine, prompt, MINE, admin=True).reason == alone.reason != "other_namespace"

    engine.run("their own", prompt, ns=THEIRS)
    assert why(engine, prompt, MINE) == alone, "they must not learn of each other"
    told = why(engine, prompt, MINE, admin=True)
    assert told[:3] == ("other_namespace", alone.position, alone.cached)
    assert "theirs" in told.detail and "16 of 17" in told.detail and alone.reason in told.detail
    assert why(engine, prompt, THEIRS, admin=True).reason == "hit", "here is no more to be had elsewhere"


def test_explain_other_namespace_when_nobody_here_has_sent_more():
    """A namespace that would serve all it ever saw of a prompt does not hide from an administrator that another has
    more.

    Mutation: `explain` looks elsewhere only if the reason is not `hit`.
    """
    engine = engine_of(full(48))
    prompt = toks(1, 17)
    engine.run("own", prompt[:8], ns=MINE)
    assert why(engine, prompt, MINE)[:3] == ("hit", 8, 8)
    engine.run("their own", prompt, ns=THEIRS)
    assert why(engine, prompt, MINE)[:3] == ("hit", 8, 8)
    assert why(engine, prompt, MINE, admin=True)[:3] == ("other_namespace", 8, 8)


def test_explain_other_namespace_only_if_it_has_more():
    """Another namespace that has just as much of a prompt is no reason.

    Mutation: `_elsewhere` takes one that has as much.
    """
    engine = engine_of(full(48))
    prompt = toks(1, 17)
    engine.run("own", prompt[:8] + toks(2, 9), ns=MINE)
    engine.run("their own", prompt[:8] + toks(3, 9), ns=THEIRS)
    assert why(engine, prompt, MINE, admin=True)[:3] == ("diverged", 8, 8)


# ---- what it never tells, and never does


def test_explain_tells_tokens_of_others_to_an_administrator_only():
    """What others have sent in the same namespace is named to an administrator only.

    Mutation: `_diverged` names the cached tokens whoever asks.
    """
    engine = engine_of(full(48))
    secret = [4_000_001 + i for i in range(12)]
    engine.run("ann", [1, 2, 3, 4, 5, *secret])
    mine = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    told = why(engine, mine)
    assert told.reason == "diverged" and not any(str(token) in repr(told) for token in secret)
    seen = why(engine, mine, admin=True)
    assert seen[:4] == told[:4]
    assert "4000001" in seen.detail and "6, 7, 8, 9" in seen.detail


def test_explain_changes_nothing_of_the_order_of_eviction():
    """Asking about a prompt does not count as using it: it is evicted as early as if nobody had asked.

    Mutation: `explain` refreshes `used` of the nodes it walks.
    """
    engine = engine_of(full(12))
    prompts = [toks(seed, 16) for seed in (1, 2, 3)]
    for i, prompt in enumerate(prompts):
        engine.run(f"r{i}", prompt)
    for admin in (False, True):
        for _ in range(3):
            why(engine, prompts[0], admin=admin)
    guest = newcomer(engine, 1, 4)
    assert [hit(engine, prompt).boundary for prompt in prompts] == [0, 4, 4]
    leave(engine, guest)


def test_explain_reads_host_copies_as_cached():
    """What is on host only would be served, and is told as cached.

    Mutation: `_within` looks at the device only.
    """
    engine = engine_of(full(24, 24))
    prompt = toks(1, 17)
    engine.run("ann", prompt)
    write_back(engine, engine.spans)
    empty_device(engine)
    assert why(engine, prompt)[:3] == ("hit", 16, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain_tells_of_part_pages_as_a_match_does(layout):
    """A prompt that parts from another inside a page copies the first part of that page: told as cached, as it is by
    `Match.cached`. Not where a state group forbids such copies, nor where the page is on host alone.

    Mutation: `_served` does not ask for a `sibling`; or `Matcher.sibling` does not look at `can_copy`.
    """
    engine = engine_of(*LAYOUTS[layout]())
    prompt = toks(1, 19)
    spans = compute(engine, "ann", prompt)
    copies = "state" not in layout
    for length in range(1, 17):
        found = why(engine, prompt[:length] + toks(2, 9))
        assert copies == (found.cached == length) or not length % PAGE
    write_back(engine, spans)
    empty_device(engine)
    for length in range(1, 17):
        assert why(engine, prompt[:length] + toks(2, 9)).cached % PAGE == 0


def test_explain_compares_namespaces_by_what_each_would_serve():
    """The part of a page that would be copied counts here as elsewhere: who has as much is not named.

    Mutation: `_elsewhere` counts whole pages only, or those of its own namespace.
    """
    engine = engine_of(full(48))
    prompt = toks(1, 17)
    engine.run("own", prompt[:10] + toks(2, 7), ns=MINE)
    engine.run("their own", prompt[:10] + toks(3, 7), ns=THEIRS)
    assert why(engine, prompt, MINE, admin=True)[:3] == ("diverged", 10, 10)
    engine.run("more", prompt[:11] + toks(4, 6), ns=THEIRS)
    told = why(engine, prompt, MINE, admin=True)
    assert told[:3] == ("other_namespace", 10, 10) and "11 of 17" in told.detail


# ---- promised pages


@pytest.mark.parametrize("groups", [(full(24),), (window(6, 24),), (full(24), window(6, 24))], ids=["f", "w", "fw"])
def test_explain_does_not_report_promised_pages(groups):
    """Pages that a step in flight will write are not told as cached, although others may already read them.

    Mutation: `_served` does not stop at the first promise.
    """
    engine = engine_of(*groups)
    prompt = toks(1, 17)
    engine.submit("ann", prompt, 4)
    engine.plan(8)
    assert hit(engine, prompt).boundary == 2, "a row of the same step could read them"
    assert why(engine, prompt).cached == 0
    engine.done()
    assert why(engine, prompt).cached == 8
    engine.plan(8)
    assert why(engine, prompt).cached == 8 < hit(engine, prompt).cached
    assert why(engine, prompt, MINE, admin=True).detail.count("8 of 17") == 1, "nor of another namespace"
    engine.done()
    assert why(engine, prompt).cached == 16


def test_explain_does_not_take_a_promise_for_other_tokens():
    """While a prompt is being computed for the first time, asking about it says that there is nothing yet, and not that
    other tokens are cached; nor does a stranger learn where its own prompt parts from one that is not computed yet.

    Mutation: `Matcher.reason` and `_diverged` look at promised children of the real path.
    """
    engine = engine_of(full(24))
    prompt = toks(1, 17)
    engine.submit("ann", prompt, 4)
    engine.plan(8)
    assert why(engine, prompt).reason in ("empty", "hit")
    assert why(engine, prompt[:6] + toks(2, 9)).reason in ("empty", "hit")
    engine.done()
    engine.plan(8)
    assert why(engine, prompt).reason in ("empty", "hit")
    assert why(engine, prompt[:10] + toks(2, 9)).reason in ("empty", "hit")


# ---- the ghost memory


@pytest.mark.parametrize("limit", [0, 100, 5000])
def test_explain_remembers_within_its_bytes(limit):
    """However much is evicted, the ghost memory stays within its bytes, and what was evicted last is what it knows.

    Mutation: `Ghosts.remember` never lets the oldest go; or lets the newest go.
    """
    engine = engine_of(full(8), ghost_bytes=limit)
    engine.checks = False
    for seed in range(60):
        engine.run(f"r{seed}", toks(seed, 13))
        ghosts = engine.cache.stats()["ghosts"]
        assert ghosts["bytes"] <= limit == ghosts["limit"]
    reasons = [engine.cache.explain(BASE, toks(seed, 13)).reason for seed in range(57)]
    if limit < 5000:
        assert set(reasons) == {"diverged"} and not engine.cache.stats()["ghosts"]["entries"]
    else:
        known = reasons.count("evicted")
        assert 5 < known < 57
        assert reasons[-known:] == ["evicted"] * known, "the newest are known, the oldest forgotten"


@pytest.mark.attack
@pytest.mark.parametrize("page", [1, 16, 256])
def test_explain_counts_the_bytes_it_really_takes(page):
    """The bytes the ghost memory says it uses are those Python really gave it, for small pages and large.

    Mutation: `_OVERHEAD` is left out of the count.
    """
    cache = HybridPrefixCache(page, [full(2)], ghost_bytes=1 << 18)
    binding = cache.bind(BASE)
    tracemalloc.start()
    ghosts: Ghosts = cache._tree.ghosts
    first = tracemalloc.get_traced_memory()[0]
    number = 0
    while number < 1500:
        number += 1
        tokens = list(range(number * page, number * page + page))
        admitted = cache.admit(cache.match_prefix(binding, tokens), page)
        assert admitted is not None
        cache.publish(admitted[0], cache.match_prefix(binding, tokens).tokens, 1, number)
        cache.step_commit(number)
        cache.finish_request(admitted[0], b"", page, None)
    really = tracemalloc.get_traced_memory()[0] - first
    tracemalloc.stop()
    assert len(ghosts) > 150 and ghosts.used_bytes <= 1 << 18
    assert really <= 1.3 * ghosts.used_bytes + 20_000
