"""The house itself: imports point one way, `cache` is light enough to be a library, and no chain is too long for it."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import sapwood
import sapwood.cache
import sapwood.cache.families
from sapwood.cache import CacheGroup, HybridPrefixCache, Lease, Match, Namespace, token_bytes

SOURCE = Path(sapwood.__file__).parent
BASE = Namespace()
FILES = sorted(SOURCE.rglob("*.py"))

# Who may import whom. `cli.py` is the only place that knows everybody, and `__main__.py` knows that.
ALLOWED = {
    "cache": set(),
    "scheduler": {"cache"},
    "store": set(),
    "engine": {"scheduler", "store", "cache"},
    "server": {"engine", "scheduler", "cache"},
    "sim": {"scheduler", "store", "cache"},
    "bench": {"engine", "sim", "scheduler", "store", "cache"},
    "commands": {"engine"},
}
HEAVY = {"torch", "transformers", "starlette", "fastapi", "uvicorn", "zmq", "msgspec", "redis"}
LIGHT = {"cache": {"numpy"}, "scheduler": {"numpy"}}  # what these may import beside the standard library


def module_of(file: Path) -> list[str]:
    parts = list(file.relative_to(SOURCE.parent).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def room_at(file: Path) -> str:
    """The room of the house a file stands in; "" for the package itself."""
    parts = module_of(file)
    return parts[1] if len(parts) > 1 else ""


def imports_of(file: Path, text: str) -> list[tuple[str, str | None]]:
    """Everything a file imports, as (absolute module, name or None), wherever in the file it does."""
    package = module_of(file) if file.name == "__init__.py" else module_of(file)[:-1]
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(text, str(file))):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(module, alias.name) for alias in node.names]
    return found


def wrong_ways(file: Path, text: str) -> list[str]:
    """The imports of a file that point the wrong way. The package itself and cli.py may know everybody."""
    room = room_at(file)
    if room in ("", "cli", "__main__"):
        return []
    assert room in ALLOWED, f"{file}: {room} is no room of the house (DESIGN 2)"
    wrong = []
    for module, name in imports_of(file, text):
        parts = module.split(".")
        if parts[0] != "sapwood":
            if room in LIGHT and parts[0] not in sys.stdlib_module_names | LIGHT[room]:
                wrong.append(module)
            continue
        target = parts[1] if len(parts) > 1 else name
        if target != room and target in {*ALLOWED, "cli"} and target not in ALLOWED[room]:
            wrong.append(f"sapwood.{target}")
    return wrong


def hidden_names(file: Path, text: str) -> list[str]:
    """What a file outside `cache` takes from inside it and not from its door."""
    room = room_at(file)
    if room == "cache":
        return []
    doors = {"sapwood.cache": set(sapwood.cache.__all__)}
    if room == "sim":
        doors["sapwood.cache.families"] = set(sapwood.cache.families.__all__)
    hidden = []
    for module, name in imports_of(file, text):
        if f"{module}.{name}" in doors:
            continue
        if module.startswith("sapwood.cache") and not (module in doors and (name is None or name in doors[module])):
            hidden.append(f"{module}.{name}")
    return hidden


each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))


@each_file
def test_imports_point_one_way(file):
    """server -> engine -> scheduler -> cache; engine -> store; sim -> scheduler, store, cache; and cache and scheduler
    need numpy and the standard library only.

    Mutation: a file in cache/ imports something of sapwood.sim, or torch.
    """
    assert wrong_ways(file, file.read_text()) == []


@each_file
def test_the_cache_has_one_door(file):
    """Outside cache/ only names exported by `sapwood.cache` are imported (and, by sim, those of its families).

    Mutation: sim/content.py imports `PagePool` from sapwood.cache.pool.
    """
    assert hidden_names(file, file.read_text()) == []


def test_these_rules_see_every_kind_of_import():
    """The two tests above see imports that are absolute, relative, of a whole package, or inside a function.

    Mutation: `imports_of` looks at the top level only, or does not resolve dots.
    """
    text = """
import torch, os
from ..sim import content
from .. import scheduler
def f():
    import sapwood.engine.models.model
    from sapwood import server
"""
    wrong = ["torch", "sapwood.sim", "sapwood.scheduler", "sapwood.engine", "sapwood.server"]
    assert sorted(wrong_ways(SOURCE / "cache" / "made_up.py", text)) == sorted(wrong)
    assert sorted(wrong_ways(SOURCE / "cache" / "families" / "__init__.py", "from ...store import x")) == [
        "sapwood.store"
    ]
    assert wrong_ways(SOURCE / "server" / "made_up.py", "import torch\nfrom ..store import file") == ["sapwood.store"]
    assert wrong_ways(SOURCE / "engine" / "made_up.py", "import torch\nfrom ..store import file") == []

    text = "from ..cache.pool import PagePool\nfrom sapwood.cache import Tree, Lease\nfrom ..cache import families"
    hidden = ["sapwood.cache.pool.PagePool", "sapwood.cache.Tree", "sapwood.cache.families"]
    assert hidden_names(SOURCE / "scheduler" / "made_up.py", text) == hidden
    assert hidden_names(SOURCE / "sim" / "made_up.py", text) == hidden[:2]


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SOURCE.parent)
    return done.stdout.strip()


ROOMS = ["sapwood.cache"] + (["sapwood.scheduler"] if (SOURCE / "scheduler" / "__init__.py").exists() else [])


@pytest.mark.server
@pytest.mark.parametrize("room", ROOMS)
def test_import_is_quick_and_light(room):
    """A fresh interpreter imports it in well under 0.2 s beyond numpy, on a machine that counts to a million in 36 ms,
    and nothing heavy comes along.

    Mutation: cache/__init__.py imports torch, or is busy for 0.2 s.
    """
    code = f"""
import sys, time, numpy
start = time.process_time()
import {room}
taken = time.process_time() - start
start = time.process_time()
for _ in range(1_000_000): start += 0
print(taken * min(1, 0.036 / (time.process_time() - start)))
print(sorted({HEAVY!r} & set(sys.modules)))
"""
    times = []
    for _ in range(5):
        seconds, loaded = fresh(code).splitlines()
        assert loaded == "[]"
        times.append(float(seconds))
    assert min(times) < 0.15, f"{room} takes {min(times):.3f} s"


@pytest.mark.server
def test_the_api_process_imports_nothing_of_the_engine_process():
    """Both share `process/messages.py`; steps, tiers and the publisher of KV events are imported by the engine alone.

    Mutation: generation.py imports `EngineSide`, or engine_client.py imports `EngineQueries`.
    """
    server = "sapwood.server.process."
    engine = {f"{server}{name}" for name in ("engine_process", "engine_queries", "kv_events", "loaded_model")}
    engine |= {"sapwood.engine.request_table", "sapwood.engine.loop", "sapwood.engine.transfer.tiers", "torch"}
    code = f"import sapwood.server.command, sapwood.server.lifecycle, sys; print(sorted({engine!r} & set(sys.modules)))"
    assert fresh(code) == "[]"


def test_the_package_is_typed():
    """`py.typed` is there, so that type checkers of others read our types.

    Mutation: the file is missing.
    """
    assert (SOURCE / "py.typed").is_file()


# ---- no chain is too long


def chain_of(cache: HybridPrefixCache, tokens: bytes, nodes: int) -> Lease:
    """One request whose path has a node for every two pages, as if others had parted from it at the end of each."""
    lease, _ = cache.admit(ask(cache, tokens, BASE), 1)
    assert cache.grow(lease, 2 * nodes)
    cache.opening(lease, 1)
    cache.publish(lease, tokens, 2 * nodes, 1)
    cache.checkpoint(lease, 2 * nodes, 1)
    cache.step_commit(1)
    whole = [lease.node]
    while whole:  # in halves: each cut copies what is left of an edge
        lower = whole.pop()
        if lower.n > 2:
            whole += [cache._tree.split(lower, lower.n // 4 * 2), lower]
    assert cache.stats()["nodes"] == nodes
    return lease


def ask(cache: HybridPrefixCache, tokens: bytes, namespace: Namespace) -> Match:
    return cache.match_prefix(cache.bind(namespace), tokens)


def leave(cache: HybridPrefixCache, lease: Lease) -> None:
    cache.finish_request(lease, b"", 0, None)
    cache.unbind(lease.binding)


def cache_for(nodes: int, **options) -> tuple[HybridPrefixCache, bytes]:
    groups = [CacheGroup("full", "full", 2 * nodes + 4), CacheGroup("state", "state", 4)]
    return HybridPrefixCache(1, groups, **options), np.arange(2 * nodes + 1, dtype=np.int32).tobytes()


def held_by(cache: HybridPrefixCache, owner: str) -> int:
    return cache.stats()["pages"]["full"]["device"][owner]


def split_evict_and_unhook(nodes: int) -> None:
    """A long chain is matched, explained, split, evicted in part, and unhooked under a reader."""
    pages = 2 * nodes
    cache, tokens = cache_for(nodes, hashes=True)
    leave(cache, chain_of(cache, tokens, nodes))
    match = ask(cache, tokens, BASE)
    assert (match.boundary, match.depth) == (pages, pages)
    assert cache.explain(BASE, tokens).reason == "hit"
    cache.unbind(match.binding)

    # Somebody who parts from it in the middle of a node splits that one; the lease holds half the chain.
    half = nodes // 2 * 2 + 1
    match = ask(cache, tokens[: 4 * half] + token_bytes([9, 9]), BASE)
    reader, _ = cache.admit(match, match.start + 1)
    assert reader.depth == half and cache.stats()["nodes"] == nodes + 1

    # Somebody else needs all the room there is: what nobody holds goes, node by node.
    room = pages - half + held_by(cache, "free")
    match = ask(cache, np.arange(7, 7 + room, dtype=np.int32).tobytes(), Namespace(salt="other"))
    other, _ = cache.admit(match, room)
    match = ask(cache, tokens, BASE)
    assert match.depth == half, "the half that is held is all that is left"
    cache.unbind(match.binding)
    cache.check()

    # The namespace goes while its reader still reads, and then the reader.
    assert cache.evict_namespace(BASE)
    assert held_by(cache, "unhooked") == half
    leave(cache, reader)
    leave(cache, other)
    cache.check()
    assert held_by(cache, "free") == pages + 4 and cache.stats()["unhooked"] == 0


def flush_under_a_reader(nodes: int) -> None:
    cache, tokens = cache_for(nodes)
    lease = chain_of(cache, tokens, nodes)
    cache.flush()
    assert cache.stats()["nodes"] == 0 and held_by(cache, "unhooked") == 2 * nodes
    leave(cache, lease)
    cache.check()
    assert held_by(cache, "free") == 2 * nodes + 4


@pytest.mark.attack
def test_a_chain_of_50_000_nodes():
    """Match, explain, split, evict, evict_namespace, hashes and check() of a path of 50,000 nodes: none is recursive,
    and none takes time by the square of the length.

    Mutation: `Tree.pin` climbs by calling itself.
    """
    split_evict_and_unhook(50_000)


@pytest.mark.attack
def test_a_chain_of_50_000_nodes_is_flushed():
    """A flush takes a path of 50,000 nodes apart under the request that reads it.

    Mutation: `detach_namespace` gathers the nodes below a root by calling itself.
    """
    flush_under_a_reader(50_000)


@pytest.mark.attack
def test_a_cache_with_a_long_chain_is_dropped():
    """Letting go of a whole cache frees it, and does not end the process, however deep its tree is.

    Mutation: a list in node.py remembers every node that was made.
    """
    cache, _ = cache_for(8)
    tree = cache._tree
    node = tree.root_of(BASE).top
    for _ in range(200_000):
        node = tree.attach(node, b"\0\0\0\0", 1)
    seen = weakref.ref(node)
    del cache, tree, node
    gc.collect()
    assert seen() is None


@pytest.mark.long
def test_a_chain_of_a_million_nodes():
    """The same with a million nodes: an ordinary tree.

    Mutation: `Tree.pin` climbs by calling itself.
    """
    split_evict_and_unhook(1_000_000)
    flush_under_a_reader(1_000_000)
