"""What weights are is what is in their files: any byte counts, and what is remembered is never believed too long."""

from __future__ import annotations

import json
import os
import time

import pytest

from sapwood.engine.loading import fingerprint
from sapwood.engine.loading.fingerprint import DIGEST_BYTES, dummy_digest, file_digest, weights_digest

CONFIG = {"model_type": "llama", "hidden_size": 8, "rope_parameters": {"rope_theta": 1.0}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "_CHUNK", 1 << 10)  # files of a few chunks
    return tmp_path / "cache" / "sapwood" / "digests"


def weights(folder, content=b"w" * 5000, name="model.safetensors"):
    """A file that was written a while ago."""
    path = folder / name
    path.write_bytes(content)
    return path


def settle(monkeypatch):
    """Time goes by."""
    now = time.time_ns()
    monkeypatch.setattr(fingerprint.time, "time_ns", lambda: now + 10**10)


def reads(monkeypatch):
    """The chunks that are read from now on."""
    seen = []
    real = fingerprint._chunk_digest
    monkeypatch.setattr(fingerprint, "_chunk_digest", lambda path, start: seen.append(start) or real(path, start))
    return seen


def test_t09_every_byte_counts_and_names_do_not(tmp_path):
    """One other byte anywhere, other bytes at the end, another order of shards: another digest. A copy under another
    name: the same.

    Mutation: `_chunk_digest` reads one block only; `file_digest` leaves the last chunk out.
    """
    content = bytes(range(256)) * 20
    first = file_digest(weights(tmp_path, content))
    assert len(first) == DIGEST_BYTES
    assert file_digest(weights(tmp_path, content, "another name")) == first
    places = (0, 1023, 1024, 3000, len(content) - 1)
    others = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places]
    others += [content + b"\0", content[:-1], b""]
    assert len({file_digest(weights(tmp_path, other, f"{i}")) for i, other in enumerate(others)} | {first}) == 9
    a, b = weights(tmp_path, b"a", "a"), weights(tmp_path, b"b", "b")
    assert weights_digest([a, b], CONFIG, "float32") != weights_digest([b, a], CONFIG, "float32")


def test_t09_config_dtype_and_seed_count(tmp_path):
    """The same weights under another config or computed in another dtype are other weights; where the model came from,
    and the version that wrote it, say nothing. Random weights are never those of a file.

    Mutation: `_digest` leaves dtype out; `_NOT_CONTENT` is empty.
    """
    path = weights(tmp_path)
    base = weights_digest([path], CONFIG, "float32")
    noise = {"_name_or_path": "elsewhere", "transformers_version": "5.0"}
    assert weights_digest([path], dict(reversed(CONFIG.items())) | noise, "float32") == base
    others = [
        weights_digest([path], CONFIG, "bfloat16"),
        weights_digest([path], CONFIG | {"rope_parameters": {"rope_theta": 2.0}}, "float32"),
        dummy_digest(0, CONFIG, "float32"),
        dummy_digest(1, CONFIG, "float32"),
        dummy_digest(0, CONFIG, "bfloat16"),
        dummy_digest(0, CONFIG | {"hidden_size": 9}, "float32"),
    ]
    assert len({base, *others}) == 7


def test_a_second_start_reads_nothing(tmp_path, monkeypatch):
    """What was digested once is remembered, for this user alone.

    Mutation: `_remember` writes nothing; `cache_folder` makes folders that anybody may read.
    """
    path = weights(tmp_path)
    settle(monkeypatch)
    first = file_digest(path)
    seen = reads(monkeypatch)
    assert file_digest(path) == first and not seen
    assert oct(os.stat(tmp_path / "cache" / "sapwood").st_mode & 0o777) == "0o700"


CHANGES = {
    "written in place, times set back": lambda path: path.write_bytes(b"x" * 5000),
    "another file moved here": lambda path: os.replace(weights(path.parent, b"x" * 5000, "new"), path),
    "longer": lambda path: path.write_bytes(b"x" * 5001),
}


@pytest.mark.parametrize("change", CHANGES)
def test_l20_what_changed_is_read_again(tmp_path, monkeypatch, change):
    """Weights that were changed behind our back, even with the old size and the old time of change put back, are not
    taken for the old ones.

    Mutation: `_state` knows only mtime_ns and size.
    """
    path = weights(tmp_path)
    settle(monkeypatch)
    old = file_digest(path)
    before = os.stat(path)
    CHANGES[change](path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_digest(path) != old


def test_what_was_written_just_now_is_not_remembered(tmp_path, monkeypatch):
    """A file could change twice within one tick of the file system's clock: it is remembered once it is older.

    Mutation: `_SETTLED_NS` is 0.
    """
    path = weights(tmp_path)
    seen = reads(monkeypatch)
    file_digest(path)
    file_digest(path)
    assert len(seen) == 10


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    """Mutation: `file_digest` does not look at the file's state again."""
    path = weights(tmp_path)
    real = fingerprint._chunk_digest

    def read_and_write(path, start):
        with open(path, "ab") as file:
            file.write(b"more")
        return real(path, start)

    monkeypatch.setattr(fingerprint, "_chunk_digest", read_and_write)
    with pytest.raises(OSError, match=r"model\.safetensors changes while it is read"):
        file_digest(path)


@pytest.mark.parametrize("note", [b"", b"\xff\xfe{", b"[]", b"3", b'{"digest": 5}', b'{"digest": "00"}', "other"])
def test_notes_that_are_not_ours_are_not_believed(tmp_path, monkeypatch, cache, note):
    """Half a note, garbage, the note of another path: the file is read.

    Mutation: `_recall` does not compare the path; it lets an error of JSON through.
    """
    path = weights(tmp_path)
    settle(monkeypatch)
    first = file_digest(path)
    (place,) = cache.iterdir()
    if note == "other":
        told = json.loads(place.read_text())
        note = json.dumps(told | {"path": "/elsewhere", "digest": "00" * 32}).encode()
    place.write_bytes(note)
    assert file_digest(path) == first


def test_no_cache_folder_is_no_obstacle(tmp_path, monkeypatch):
    """Where nothing can be written, the digest is made every time.

    Mutation: `_remember` lets OSError through.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/nowhere")
    settle(monkeypatch)
    path = weights(tmp_path)
    assert file_digest(path) == file_digest(path)
