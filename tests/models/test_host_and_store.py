"""Prefixes of every architecture reach host memory and the store, and come back: with default flags, and where host is
much smaller than the device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sapwood import LLM, SamplingParams
from sapwood.engine.models.sizing import resident_pages

from .zoo import STATEFUL, build, each_model, prompt, torch

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "store_patience": 60,
    "skip_tokenizer_init": True,
    "progress": False,
}
SMALL_HOST = {"device_cache": "1GiB", "host_cache": "2MiB"}
SIZES = ("max_model_len", "max_num_seqs")
PATIENCE = 600  # seconds for what takes a moment
LENGTH = 110  # of a prompt, about


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: Any) -> Any:
    """Where a model of the zoo lies, in float32."""
    folders: dict[str, Path] = {}

    def folder(name: str, **more: Any) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            build(name, torch.float32, **more).save_pretrained(folders[name])
        return folders[name]

    return folder


def ask(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)


def said(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def turns(name: str, prompts: list[list[int]]) -> list[list[list[int]]]:
    """What is asked to fill a cache: snapshots stand where chats go on, on second sight."""
    return [[tokens[: LENGTH - 20] for tokens in prompts], prompts] if name in STATEFUL else [prompts]


def until_backed_up(llm: LLM, pages: int) -> None:
    """The engine goes on until the store has kept so many."""
    end = time.monotonic() + PATIENCE
    while (stats := llm.stats())["tiers"]["pages_backed_up"] < pages:
        assert time.monotonic() < end, stats
        llm.engine.requests.step()
        llm.engine.loop.rest(0.2)


def room_for(folder: Path, chats: int) -> str:
    """Device memory for so many of them."""
    with LLM(str(folder), **FLAGS) as llm:
        groups, page = llm.engine.scheduler.cache.groups, llm.engine.config.page_size
    pages = [resident_pages(group.family, group.window, LENGTH + 10, page) for group in groups]
    return f"{chats * sum(n * group.page_bytes for n, group in zip(pages, groups, strict=True))}B"


@each_model
def test_f20_the_store_has_what_a_small_host_let_through(name, folder_of, tmp_path):
    """A host a five hundredth of the device is enough for prefixes to reach the store, in all groups; an engine with
    all sizes as they are by default fetches them from there, and adds its own.

    Mutation: `Saves` leaves out the windows at the end of a span; `begin_backups` begins nothing.
    """
    flags = {**FLAGS, **SMALL_HOST, "store": f"file://{tmp_path}/store?size=1GiB"}
    prompts = [prompt(1, LENGTH), [*prompt(1, 80), *prompt(2, 30)], prompt(3, 100)]
    with LLM(str(folder_of(name)), **flags) as llm:
        for some in turns(name, prompts):
            first = ask(llm, some)
        assert llm.stats()["cache"]["transfers"]["saves_skipped"] == 0
    flags = {flag: value for flag, value in flags.items() if flag not in SIZES and flag not in SMALL_HOST}
    with LLM(str(folder_of(name)), host_cache="auto", **flags) as llm:
        again = ask(llm, prompts)
        stats = llm.stats()
        for some in turns(name, [prompt(4, LENGTH)]):
            ask(llm, some)
        until_backed_up(llm, stats["tiers"]["pages_backed_up"] + 1)
    assert said(again) == said(first)
    assert all(output.num_cached_tokens >= 64 for output in again), [output.num_cached_tokens for output in again]
    assert stats["tiers"]["fetches"] >= 2 and stats["tiers"]["pages_fetched"] >= 8
    assert stats["cache"]["transfers"]["loads"] >= 2


@each_model
def test_f20_what_leaves_the_device_is_loaded_from_host(name, folder_of):
    """Chats push each other from a small device; each comes back from host when it is asked again.

    Mutation: `Saves` leaves out the windows at the end of a span; `size` gives windows no host pages.
    """
    chats, folder = [prompt(seed, LENGTH) for seed in range(1, 13)], folder_of(name)
    flags = {**FLAGS, "max_num_seqs": 1, "device_cache": room_for(folder, 4), "host_cache": "64MiB"}
    with LLM(str(folder), **flags) as llm:
        for some in turns(name, chats):
            first = [output for tokens in some for output in ask(llm, [tokens])]
        again = [output for tokens in chats for output in ask(llm, [tokens])]
        stats = llm.stats()
    assert said(again) == said(first)
    assert all(output.num_cached_tokens >= 64 for output in again), [output.num_cached_tokens for output in again]
    assert stats["cache"]["transfers"]["loads"] >= 6 and stats["cache"]["transfers"]["pages_loaded"] > 0


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral"])
def test_f20_a_host_with_less_room_than_a_prompt_has_pages_in_a_window_group(name, folder_of, tmp_path):
    """A prompt of 31 pages, and host has room for 20 of its window group: the store gets it all the same, and the next
    engine finds it there.

    Mutation: a save takes every page of a window group (`worth` finds all of them worth as much).
    """
    folder, tokens = folder_of(name), prompt(4, 500)
    flags = {**FLAGS, "max_model_len": 4096, "device_cache": "64MiB", "host_cache": "8MiB"}
    with LLM(str(folder), **flags) as llm:
        pages = next(group.host_pages for group in llm.engine.sized.groups if group.family == "window")
    flags |= {"host_cache": f"{(8 << 20) * 20 // pages}B", "store": f"file://{tmp_path}/store?size=1GiB"}
    with LLM(str(folder), **flags) as llm:
        host = {group.family: group.host_pages for group in llm.engine.sized.groups}
        assert host["window"] <= 20 and host.get("full", 64) >= 32
        first = ask(llm, [tokens])
        assert llm.stats()["cache"]["transfers"]["saves_skipped"] == 0
    with LLM(str(folder), **flags) as llm:
        again = ask(llm, [tokens])
        stats = llm.stats()
    assert said(again) == said(first) and again[0].num_cached_tokens == 496
    assert stats["tiers"]["pages_fetched"] == 31
