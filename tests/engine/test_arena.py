"""Where bytes lie: host arenas of a set size, and device memory of any layout seen page by page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sapwood.cache import CacheGroup
from sapwood.engine import DeviceArena, HostArena, NumpyMover, open_mover, with_host_bytes
from sapwood.engine.arena import ALIGNMENT, available_bytes

from .memory import need


def group(name="full", device=8, host=4, page_bytes=4096, family="full"):
    return CacheGroup(name, family, device, host, page_bytes=page_bytes)


# ---- host


def test_a_host_arena_has_a_row_for_every_page_and_the_null_page():
    """Ids run from 1 to host_pages, row 0 is zero, and a group without host pages has no memory.

    Mutation: `host_pages` rows only.
    """
    arena = HostArena([group(host=4), group("state", host=3, page_bytes=100, family="state"), group("none", host=0)])
    assert {name: pages.shape for name, pages in arena.pages.items()} == {"full": (5, 4096), "state": (4, 100)}
    assert not arena.pages["full"][0].any()
    assert arena.nbytes == 5 * 4096 + 4 * 100 == sum(pages.nbytes for pages in arena.pages.values())
    arena.close()
    assert arena.pages == {}


def test_pages_begin_where_a_disk_can_read_and_write_them():
    """A group begins at a multiple of 4096 bytes, so pages of such a size can go to disk with O_DIRECT.

    Mutation: memory is taken as numpy gives it.
    """
    for pages in (1, 7, 300):
        arena = HostArena([group(host=pages), group("odd", host=pages, page_bytes=333)])
        assert all(memory.ctypes.data % ALIGNMENT == 0 for memory in arena.pages.values())
        assert all(memory.flags.c_contiguous and memory.flags.writeable for memory in arena.pages.values())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells how much memory is resident")
def test_memory_is_taken_when_it_is_written():
    """An arena of a gigabyte costs nothing until pages are saved to it.

    Mutation: the arena is filled with zeros by hand.
    """

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    arena = HostArena([group(host=1023, page_bytes=1 << 20)])
    assert arena.nbytes == 1 << 30 and resident() - before < 64 << 20


def test_more_than_there_is_is_refused_with_what_there_is(monkeypatch):
    """An arena larger than what is available says what it wanted, what there is and what to do.

    Mutation: the check is left to the system, which kills the process when the pages are written.
    """
    monkeypatch.setattr("sapwood.engine.arena.available_bytes", lambda: 3 << 20)
    assert HostArena([group(host=2, page_bytes=1 << 20)]).nbytes == 3 << 20
    with pytest.raises(MemoryError, match=r"wants 4 MiB and 3 MiB are available: .*\(full: 3 pages of 1 MiB\)"):
        HostArena([group(host=3, page_bytes=1 << 20)])


def test_what_the_system_refuses_is_told_as_clearly(monkeypatch):
    """Where the system does not tell how much there is, its refusal is passed on with the same words.

    Mutation: numpy's own MemoryError reaches the user.
    """
    monkeypatch.setattr("sapwood.engine.arena.available_bytes", lambda: None)
    with pytest.raises(MemoryError, match=r"the host cache wants .*fewer host pages"):
        HostArena([group(host=2_000_000_000, page_bytes=1 << 30)])


def test_the_system_tells_how_much_there_is():
    """On Linux the answer is a sensible number of bytes.

    Mutation: kilobytes are taken for bytes.
    """
    found = available_bytes()
    if Path("/proc/meminfo").exists():
        assert found is not None and 64 << 20 < found < 1 << 50


def test_a_group_must_say_how_large_its_pages_are():
    """Without page_bytes there is nothing to allocate.

    Mutation: an arena of pages without bytes is made.
    """
    with pytest.raises(ValueError, match="page_bytes of group 'full' must be at least 1"):
        HostArena([group(page_bytes=0)])
    with pytest.raises(ValueError, match="page_bytes of group 'full' must be at least 1"):
        with_host_bytes([group(page_bytes=0)], 1 << 20)


def test_a_number_of_bytes_is_shared_out_by_what_groups_have_on_the_device():
    """Host pages come in the proportion of device pages, and the arena never has more bytes than were given.

    Mutation: the null pages are not counted; every group gets the same number.
    """
    groups = [
        group("full", device=1000, page_bytes=2048),
        group("window", device=100, page_bytes=1024),
        group("state", device=10, page_bytes=50_000, family="state"),
    ]
    for nbytes in (400_000, 1 << 20, 10_000_001):
        given = with_host_bytes(groups, nbytes)
        assert HostArena(given).nbytes <= nbytes
        full, window, state = (g.host_pages for g in given)
        assert full // 10 >= window >= full // 10 - 1 and window // 10 >= state >= window // 10 - 1
    assert HostArena(with_host_bytes(groups[:1], 1 << 20)).nbytes == 1 << 20
    assert [g.device_pages for g in given] == [1000, 100, 10]


def test_too_few_bytes_are_refused_with_how_many_it_takes():
    """The message names the least number of bytes, and that number is enough.

    Mutation: a group gets no page at all.
    """
    groups = [group("full", device=1000, page_bytes=2048), group("state", device=10, page_bytes=50_000, family="state")]
    with pytest.raises(ValueError, match="must have at least 306848 bytes, got 306847"):
        with_host_bytes(groups, 306_847)
    assert min(g.host_pages for g in with_host_bytes(groups, 306_848)) == 1
    with pytest.raises(ValueError, match="at least"):
        with_host_bytes(groups, 0)


# ---- device


def page_of(arena, name, i):
    return b"".join(np.ascontiguousarray(block.rows[i]).tobytes() for block in arena.blocks[name])


def test_any_view_is_seen_page_by_page():
    """Random shapes, axis orders, steps and dtypes: page i is the bytes of array[i], and nothing is copied.

    Mutation: axes that do not step evenly are folded into one; only the last axis is looked at for contiguity.
    """
    random = np.random.default_rng(5)
    several = 0
    for _ in range(300):
        axes = int(random.integers(2, 6))
        whole = np.empty(random.integers(2, 5, axes), random.choice(["u1", "f2", "f4", "f8"]))
        whole.view(np.uint8)[...] = np.frombuffer(random.bytes(whole.nbytes), np.uint8).reshape(*whole.shape[:-1], -1)
        view = whole.transpose(random.permutation(axes))
        cuts = [slice(None, None, int(random.choice([1, 1, 1, 2]))) if n > 2 else slice(None) for n in view.shape]
        view = view[tuple(cuts)]
        arena = DeviceArena({"g": view})
        several += len(arena.blocks["g"]) > 1
        assert arena.pages["g"] == len(view) - 1
        for i in range(len(view)):
            assert page_of(arena, "g", i) == np.ascontiguousarray(view[i]).tobytes()
        assert all(np.shares_memory(block.rows, whole) for block in arena.blocks["g"])
    assert several, "some axes cannot be folded"


def test_an_engines_layout_is_one_block():
    """[layers, 2, pages + 1, tokens, heads, dim] with the page axis first needs one gather, not one a layer.

    Mutation: every axis before the contiguous end makes blocks of its own.
    """
    kv = np.zeros((6, 2, 9, 16, 2, 8), np.float16)
    arena = DeviceArena({"full": np.moveaxis(kv, 2, 0)})
    assert [block.rows.shape for block in arena.blocks["full"]] == [(9, 12, 512)]
    assert arena.page_bytes["full"] == 6 * 2 * 16 * 2 * 8 * 2


def test_tensors_are_seen_like_arrays():
    """The same random views with torch, of dtypes that numpy has not.

    Mutation: a tensor's storage offset is forgotten.
    """
    need("torch")
    import torch

    from sapwood.engine.transfer_torch import TorchArena

    random = np.random.default_rng(6)
    for _ in range(100):
        axes = int(random.integers(2, 6))
        whole = torch.randn(tuple(random.integers(2, 5, axes).tolist())).to(torch.bfloat16)
        view = whole.permute(tuple(random.permutation(axes).tolist()))
        if view.shape[-1] > 2:
            view = view[..., 1:]
        arena = TorchArena({"g": view})
        for i in range(len(view)):
            expected = view[i].contiguous().view(torch.uint8).numpy().tobytes()
            assert page_of(arena, "g", i) == page_of(arena.as_numpy(), "g", i) == expected
        assert all(
            block.rows.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for block in arena.blocks["g"]
        )


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ([], "at least one array"),
        ([np.zeros((5, 8)), np.zeros((6, 8))], r"pages \+ 1 rows each, at least 2, got \[5, 6\]"),
        (np.zeros((1, 8)), "at least 2"),
        (np.zeros(8), "must be arrays"),
        ("pages", "must be arrays"),
        (np.zeros((5, 0)), "at least one byte"),
        (np.broadcast_to(np.zeros(8), (5, 8)), "writeable"),
        (np.zeros((5, 8), object), "plain dtypes"),
        (np.zeros(5, np.dtype("u1,f4"))["f1"].reshape(5, 1), "strides of whole elements"),
    ],
)
def test_memory_that_cannot_be_pages_is_refused(memory, message):
    """Arrays that do not agree, have no pages, no bytes, or cannot be written.

    Mutation: the first array's number of rows is taken for all.
    """
    with pytest.raises(ValueError, match=message):
        DeviceArena({"full": memory})


def test_both_sides_must_agree():
    """A mover is made only if every group on host is on the device, with pages of the same size.

    Mutation: the sizes are not compared.
    """
    arena = HostArena([group(page_bytes=64)])
    with pytest.raises(ValueError, match="same size on device and host, got 32 and 64 bytes"):
        NumpyMover(DeviceArena({"full": np.zeros((9, 32), np.uint8)}), arena)
    with pytest.raises(ValueError, match="must have group 'full', has \\['other'\\]"):
        NumpyMover(DeviceArena({"other": np.zeros((9, 64), np.uint8)}), arena)
    assert isinstance(open_mover(DeviceArena({"full": np.zeros((9, 64), np.uint8)}), arena), NumpyMover)


def test_torch_memory_that_cannot_be_moved_is_refused():
    """Tensors that are sparse, or on a device we do not know; pinned memory without CUDA.

    Mutation: any device is taken, and the first transfer fails.
    """
    need("torch")
    import torch

    from sapwood.engine.transfer_torch import PinnedArena, TorchArena

    with pytest.raises(ValueError, match="CUDA or CPU, got \\['meta'\\]"):
        TorchArena({"full": torch.zeros(5, 8, device="meta")})
    with pytest.raises(ValueError, match="dense tensors"):
        TorchArena({"full": torch.zeros(5, 8).to_sparse()})
    with pytest.raises(ValueError, match="dense tensors"):
        TorchArena({"full": np.zeros((5, 8))})
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use HostArena"):
            PinnedArena([group()])
