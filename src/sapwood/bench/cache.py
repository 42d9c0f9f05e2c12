"""`sapwood bench cache`: the time to the first token of a prompt, by where its prefix is found.

    one engine      cold, then once more: cached on the device; and all of it goes through host memory to the store
    a second one    with nothing but that store, and device memory for one prompt and a half:
                    fetched from the store; then, pushed out of the device by the others, loaded from host

What each request found is counted, and where: a figure that is not what it says is an error.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from sapwood.engine.flags import EngineConfig

from .arguments import MOST_TOKENS, number
from .run import Prompt, Prompts, opened, progress, run, settle
from .tables import BenchReport

if TYPE_CHECKING:
    from sapwood.engine.engine import Engine

HELP = "time to the first token: cold, cached on the device, loaded from host, fetched from a store"
_FORMS = {
    "first token": "{:,.1f} ms",
    "of cold": "{:.3f}",
    "cached tokens": "{:,.0f}",
    "pages loaded": "{:,.0f}",
    "pages fetched": "{:,.0f}",
}
_HOST = "4GiB"  # where no host_cache is asked for; memory is taken when it is used


class Salted(NamedTuple):
    """A prompt, and with whom it may share: with itself."""

    text: Prompt
    salt: str


class Found(NamedTuple):
    """One request: when its first token came, and where its prompt was found."""

    seconds: float
    cached: int  # tokens
    loaded: int  # pages that came from host
    fetched: int  # pages that came from the store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number(parser, "--input-len", 1024, 2, MOST_TOKENS, "tokens of a prompt")
    number(parser, "--repeats", 5, 3, 10**4, "prompts, of whose figures the median is shown")


def measure(asked: argparse.Namespace, config: EngineConfig) -> BenchReport:
    if not config.enable_prefix_caching:
        raise ValueError("enable_prefix_caching must be True: this measures it")
    with tempfile.TemporaryDirectory(prefix="sapwood-bench-") as folder:
        host = _HOST if config.host_cache == "0" else config.host_cache
        store = config.store or f"file://{folder}/store?size=1TiB"
        stages = _stages(asked, replace(config, host_cache=host, store=store))
    cold = median(found.seconds for found in stages["cold"])
    figures = {}
    for name, found in stages.items():
        taken = median(each.seconds for each in found)
        figures[name] = {
            "first token": 1000 * taken,
            "of cold": taken / cold,
            "cached tokens": median(each.cached for each in found),
            "pages loaded": median(each.loaded for each in found),
            "pages fetched": median(each.fetched for each in found),
        }
    return BenchReport("cache", _FORMS, figures, [f"medians of {asked.repeats} prompts of {asked.input_len} tokens"])


def _stages(asked: argparse.Namespace, config: EngineConfig) -> dict[str, list[Found]]:
    with progress(4 * asked.repeats, "cache", config.progress) as bar:
        stages, prompts, small = _first_engine(asked, config, bar)
        stages |= _second_engine(prompts, small, bar)
    for name, found in stages.items():
        _must_be(name, found, asked.input_len, config.page_size)
    return {name: stages[name] for name in ("cold", "device", "host", "store")}


def _first_engine(
    asked: argparse.Namespace, config: EngineConfig, bar: Any
) -> tuple[dict[str, list[Found]], list[Salted], EngineConfig]:
    """Cold and from the device. The prompts besides, which the store has now, and the second engine's config."""
    salt = secrets.token_hex(8)  # and a number for each: nobody, on whatever store, has computed any of them before
    cold: list[Found] = []
    device: list[Found] = []
    with opened(config) as engine:
        random = Prompts(engine, config.seed)
        run(engine, [random.one(asked.input_len)], [1])
        texts = random.some(asked.repeats, asked.input_len)
        prompts = [Salted(text, f"{salt} {at}") for at, text in enumerate(texts)]
        _must_fit(engine, texts)
        settle(engine)
        for prompt in prompts:
            for found in (cold, device):
                found.append(_find(engine, prompt))
                settle(engine)  # else the next one would be measured beside a backup
                bar.update(1)
        return {"cold": cold, "device": device}, prompts, _little(engine, asked.input_len * 3 // 2)


def _second_engine(prompts: Sequence[Salted], config: EngineConfig, bar: Any) -> dict[str, list[Found]]:
    """From the store, and then from host."""
    stages: dict[str, list[Found]] = {"store": [], "host": []}
    with opened(config) as engine:
        run(engine, [Prompts(engine, config.seed).one(2)], [1])
        for found in stages.values():
            for prompt in prompts:
                found.append(_find(engine, prompt))
                settle(engine)
                bar.update(1)
    return stages


def _find(engine: Engine, prompt: Salted) -> Found:
    def moved() -> tuple[int, int]:
        transfers = engine.scheduler.cache.stats()["transfers"]
        return transfers["pages_loaded"], engine.loop.tiers.stats()["pages_fetched"]

    loaded, fetched = moved()
    done = run(engine, [prompt.text], [1], prompt.salt)
    return Found(done.first, done.requests[0].cached, moved()[0] - loaded, moved()[1] - fetched)


def _must_fit(engine: Engine, prompts: Sequence[Prompt]) -> None:
    page = engine.config.page_size
    pages = sum(-(-len(prompt) // page) for prompt in prompts)
    for group in engine.sized.groups:
        if group.family == "full" and group.host_pages < pages:
            raise ValueError(
                f"host_cache must hold {len(prompts)} prompts of {len(prompts[0])} tokens, which is "
                f"{pages * page} tokens and about {pages * group.page_bytes:,} bytes; it holds "
                f"{group.host_pages * page} tokens"
            )


def _little(engine: Engine, tokens: int) -> EngineConfig:
    """The same engine for one request at a time, with device memory for about so many tokens, and for windows and
    states no more than one request needs that computes the end of a page."""
    from sapwood.engine.models.sizing import size

    page, longest, groups = engine.config.page_size, engine.requests.max_model_len, engine.served.groups
    step = sum(group.layout.page_bytes for group in groups if group.family == "full") or 1 << 16
    nbytes, room = 0, 0
    while room < tokens:
        nbytes += step
        with suppress(ValueError):  # still too little for this model
            sized = size(groups, nbytes, page, 1, longest, 0, page).groups
            room = min((group.device_pages * page for group in sized if group.family == "full"), default=tokens)
    return replace(
        engine.config, device_cache=str(nbytes), max_num_seqs=1, max_num_batched_tokens=page, max_model_len=longest
    )


def _must_be(stage: str, found: Sequence[Found], tokens: int, page: int) -> None:
    """Whether every request found its prompt where the name of the stage says."""
    for each in found:
        whole = each.cached >= (tokens - 1) // page * page
        right = {
            "cold": not each.cached,
            "device": whole and not each.loaded and not each.fetched,
            "host": whole and each.loaded > 0 and not each.fetched,
            "store": whole and each.fetched > 0,
        }[stage]
        if not right:
            raise RuntimeError(
                f"{stage}: a prompt of {tokens} tokens had {each.cached} cached, {each.loaded} pages loaded and "
                f"{each.fetched} fetched, so its time is not what it would be called"
            )
