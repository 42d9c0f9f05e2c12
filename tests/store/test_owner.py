"""A store in a folder that somebody else may write to is not opened."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from sapwood.store import StoreError, check_uri, open_store

from .kit import fingerprint


def opened(folder: Path, more: str = "") -> None:
    open_store(f"file://{folder}?size=64MiB{more}", fingerprint()).close()


def refused(folder: Path, words: str) -> None:
    """Before anything is made in it, and with what to do."""
    before = sorted(folder.iterdir())
    for look in (lambda: opened(folder), lambda: check_uri(f"faulty+file://{folder}?size=64MiB")):
        with pytest.raises(StoreError, match=words) as caught:
            look()
        assert "trusted=1" in str(caught.value) and "folder of its own" in str(caught.value)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_everybody_may_write_to(tmp_path, mode):
    """Pages in it are believed, whoever wrote them.

    Mutation: `check_folder` does not look at the mode; `FileBackend` does not call it.
    """
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(mode)
    refused(folder, rf"everybody may write to it \(mode {mode:o}\)")
    folder.chmod(0o700)
    opened(folder)
    folder.chmod(mode)
    check_uri(f"file://{folder}?size=64MiB&trusted=1")
    opened(folder, "&trusted=1")
    opened(folder / "below")


def test_a_folder_of_another_user(tmp_path, monkeypatch):
    """Root's is taken: what root may do, it may do anyway.

    Mutation: `check_folder` does not look at the owner.
    """
    owner = tmp_path.stat().st_uid
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: owner + 1)
        if owner:
            refused(tmp_path, f"belongs to user {owner}, and this is user {owner + 1}")
        else:
            check_uri(f"file://{tmp_path}?size=64MiB")
    if os.geteuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir(mode=0o700)
        os.chown(theirs, 12345, 12345)
        refused(theirs, "belongs to user 12345, and this is user 0")
        opened(theirs, "&trusted=1")


def test_a_folder_of_a_group_is_warned_of(tmp_path, caplog):
    """Many a folder belongs to a group of one.

    Mutation: `check_folder` refuses it; it says nothing.
    """
    tmp_path.chmod(0o770)
    with caplog.at_level(logging.WARNING):
        opened(tmp_path)
    assert "its group may write to it" in caplog.text and "chmod g-w" in caplog.text


def test_what_a_store_makes_is_for_its_user_alone(tmp_path):
    """Folders 0700, files 0600, whatever the umask says.

    Mutation: `makedirs` gets no mode.
    """
    before = os.umask(0)
    try:
        opened(tmp_path / "store")
    finally:
        os.umask(before)
    made = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    assert [path for path in made if path.is_dir() and path.stat().st_mode & 0o077] == []
