"""Where bytes lie: pages of parts, host arenas of a set size, and device memory of which a page is one piece."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sapwood.cache import CacheGroup
from sapwood.engine import DeviceArena, HostArena, NumpyMover, PageLayout, PagePart, open_mover, with_host_bytes
from sapwood.engine.transfer.arena import ALIGNMENT, available_bytes

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
    monkeypatch.setattr("sapwood.engine.transfer.arena.available_bytes", lambda: 3 << 20)
    assert HostArena([group(host=2, page_bytes=1 << 20)]).nbytes == 3 << 20
    with pytest.raises(MemoryError, match=r"wants 4 MiB and 3 MiB are available: .*\(full: 3 pages of 1 MiB\)"):
        HostArena([group(host=3, page_bytes=1 << 20)])


def test_what_the_system_refuses_is_told_as_clearly(monkeypatch):
    """Where the system does not tell how much there is, its refusal is passed on with the same words.

    Mutation: numpy's own MemoryError reaches the user.
    """
    monkeypatch.setattr("sapwood.engine.transfer.arena.available_bytes", lambda: None)
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


def test_memory_is_seen_page_by_page():
    """Arrays of any shape and dtype: page i is the bytes of array[i], and nothing is copied.

    Mutation: the arena keeps a copy of what is not bytes.
    """
    random = np.random.default_rng(5)
    for _ in range(100):
        shape = random.integers(2, 5, int(random.integers(2, 6)))
        array = random.integers(0, 200, shape).astype(random.choice(["u1", "f2", "f4", "f8"]))
        arena = DeviceArena({"g": array})
        assert arena.pages["g"] == len(array) - 1 and arena.page_bytes["g"] == array[0].nbytes
        assert [page.tobytes() for page in arena.rows["g"]] == [page.tobytes() for page in array]
        assert np.shares_memory(arena.rows["g"], array)


def test_tensors_are_seen_like_arrays():
    """The same with torch, of a dtype that numpy has not, beginning anywhere in its storage.

    Mutation: the bytes are taken from the storage's beginning.
    """
    need("torch")
    import torch

    from sapwood.engine.transfer.torch_mover import TorchArena

    random = np.random.default_rng(6)
    for _ in range(100):
        whole = torch.randn(tuple(random.integers(3, 6, int(random.integers(2, 6))).tolist())).to(torch.bfloat16)
        tensor = whole[1:]
        arena = TorchArena({"g": tensor})
        expected = [page.view(torch.uint8).numpy().tobytes() for page in tensor.view(len(tensor), -1)]
        assert [page.numpy().tobytes() for page in arena.rows["g"]] == expected
        assert [page.tobytes() for page in arena.as_numpy().rows["g"]] == expected
        assert arena.rows["g"].data_ptr() == tensor.data_ptr() and arena.page_bytes["g"] == len(expected[0])


def parts_of(random, dtypes):
    return [
        PagePart(layer, name, tuple(random.integers(1, 6, int(random.integers(1, 4))).tolist()), random.choice(dtypes))
        for layer in range(int(random.integers(1, 5)))
        for name in "kv"
    ]


@pytest.mark.parametrize("backend", ["numpy", "torch", "cuda"])
def test_a_layer_sees_its_part_of_every_page(backend):
    """Random parts of mixed dtypes: what is written through the view of a part lies in every page's row where the
    layout says, one part after the other as they were given, begins at a multiple of 128 bytes, and is in no other
    part's place; the null page has its own.

    Mutation: an offset counts elements, not bytes; padding is forgotten; a view begins at page 1.
    """
    need(backend)
    random = np.random.default_rng(7)
    dtypes, where, kind = ["u1", "f2", "f4", "f8"], {}, DeviceArena
    if backend != "numpy":
        import torch

        from sapwood.engine.transfer.torch_mover import TorchArena

        dtypes = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64]
        where, kind = {"device": {"torch": "cpu", "cuda": "cuda"}[backend]}, TorchArena
    for _ in range(50):
        layout = PageLayout(parts_of(random, dtypes))
        sizes = [part.nbytes for part in layout.parts]
        offsets = [layout.offsets[part.layer, part.name] for part in layout.parts]
        assert offsets == [sum(-(-size // 128) * 128 for size in sizes[:i]) for i in range(len(sizes))]
        assert layout.page_bytes == offsets[-1] + -(-sizes[-1] // 128) * 128
        arena = kind.allocate([group("g", device=3, page_bytes=layout.page_bytes)], {"g": layout}, **where)
        assert arena.pages["g"] == 3 and not arena.rows["g"].any()
        expected = np.zeros((4, layout.page_bytes), np.uint8)
        for number, (part, first) in enumerate(zip(layout.parts, offsets, strict=True)):
            view = arena.view("g", part.layer, part.name)
            assert tuple(view.shape) == (4, *part.shape) and view.dtype == part.dtype
            for page in range(4):
                expected[page, first : first + part.nbytes] = fresh = random.integers(0, 256, part.nbytes, np.uint8)
                if backend == "numpy":
                    view[page] = fresh.view(part.dtype).reshape(part.shape)
                else:
                    view[page] = torch.from_numpy(fresh).view(part.dtype).view(part.shape)
            rows = arena.rows["g"] if backend == "numpy" else arena.rows["g"].cpu().numpy()
            assert np.array_equal(rows, expected), f"part {number}"


def test_a_layout_that_cannot_be_is_refused():
    """No parts, a part twice, a part without bytes; groups of other sizes, or without a layout.

    Mutation: the later of two parts of one name wins.
    """
    part = PagePart(0, "k", (4, 2, 8), np.float16)
    with pytest.raises(ValueError, match="at least one part"):
        PageLayout([])
    with pytest.raises(ValueError, match="layer 0 must have one part 'k', got two"):
        PageLayout([part, part._replace(shape=(3,))])
    with pytest.raises(ValueError, match="part 'v' of layer 0 must have at least one byte"):
        PageLayout([part, PagePart(0, "v", (4, 0, 8), np.float16)])
    with pytest.raises(ValueError, match=r"layouts must have group 'full', has \['half'\]"):
        DeviceArena.allocate([group()], {"half": PageLayout([part])})
    with pytest.raises(ValueError, match="page_bytes of group 'full' must be its layout's 128, got 4096"):
        DeviceArena.allocate([group()], {"full": PageLayout([part])})


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ([np.zeros((5, 8)), np.zeros((5, 8))], "must be one array"),
        (np.zeros((1, 8)), "at least 2, got 1"),
        (np.zeros(8), "must be one array"),
        ("pages", "must be one array"),
        (np.zeros((5, 0)), "at least one byte"),
        (np.broadcast_to(np.zeros(8), (5, 8)), "writeable"),
        (np.zeros((5, 8), object), "plain dtype"),
        (np.moveaxis(np.zeros((2, 5, 8)), 1, 0), "contiguous, page axis first"),
        (np.zeros((5, 8))[:, :4], "contiguous, page axis first"),
    ],
)
def test_memory_that_cannot_be_pages_is_refused(memory, message):
    """Arrays in which a page is not one piece, which have no pages, no bytes, or cannot be written.

    Mutation: an array that is not contiguous is copied, and transfers move the copy.
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
    """Tensors that are sparse, not contiguous, or on a device we do not know; pinned memory without CUDA.

    Mutation: any device is taken, and the first transfer fails.
    """
    need("torch")
    import torch

    from sapwood.engine.transfer.torch_mover import PinnedArena, TorchArena

    with pytest.raises(ValueError, match="CUDA or CPU, got \\['meta'\\]"):
        TorchArena({"full": torch.zeros(5, 8, device="meta")})
    with pytest.raises(ValueError, match="one dense tensor"):
        TorchArena({"full": torch.zeros(5, 8).to_sparse()})
    with pytest.raises(ValueError, match="one dense tensor"):
        TorchArena({"full": np.zeros((5, 8))})
    with pytest.raises(ValueError, match="contiguous, page axis first"):
        TorchArena({"full": torch.zeros(2, 5, 8).movedim(1, 0)})
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use HostArena"):
            PinnedArena([group()])
