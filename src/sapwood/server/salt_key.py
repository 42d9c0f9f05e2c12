"""The secret with which salts are made of API keys. A salt goes where a key must not: its digest is in KV events, and a
reader of these must not be able to try keys against it.

The secret is in a file that is made once. Servers that share the pages of a store need the same secret. So it lies in
the folder of a store of files, where all servers of the store find it; for other stores it lies in the user's cache
folder, and servers on other machines are given a copy (--salt-key-file).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
from pathlib import Path

from sapwood.engine.flags import folder_of_store
from sapwood.engine.loading.usercache import cache_folder

log = logging.getLogger(__name__)
_NAME = "sapwood-store-salt-key"  # in a store's folder, where no page has such a name
_MIN_BYTES, _MAX_BYTES = 32, 4096  # of the secret


def salt_of(secret: bytes, key: str) -> str:
    return hmac.new(secret, b"sapwood.key:" + key.encode(), hashlib.sha256).hexdigest()


def salt_key(given: str | None, store: str | None) -> bytes:
    """The secret: from the given file, else from that of the store; without a store, one of this server alone.
    ValueError, with what to do, if there is no secret that can be trusted."""
    if given is not None:
        return _read(Path(given))
    if store is None or store.removeprefix("faulty+").startswith("memory:"):
        return secrets.token_bytes(_MIN_BYTES)
    folder = folder_of_store(store)
    try:
        if folder is not None:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        path = Path(folder, _NAME) if folder is not None else cache_folder() / "salt-key"
        if not path.exists():
            _make(path)
    except OSError as error:
        raise ValueError(
            f"salt_by_key: no secret can be kept ({error}): give a file with one (--salt-key-file)"
        ) from None
    return _read(path)


def _make(path: Path) -> None:
    """Make the file. It appears with its whole content or not at all; of several makers the first one wins."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(_MIN_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"salt key {path} must be a plain file")
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError(f"salt key {path} can be changed by others: chmod 600")
            if found.st_mode & (stat.S_IRGRP | stat.S_IROTH):
                log.warning("salt key %s can be read by others: chmod 600", path)
            secret = file.read(_MAX_BYTES).strip()
    except OSError as error:
        raise ValueError(
            f"salt key {path} cannot be read: {error.strerror}; give another file (--salt-key-file)"
        ) from None
    if len(secret) < _MIN_BYTES:
        raise ValueError(f"salt key {path} must hold {_MIN_BYTES} bytes or more, as `openssl rand -hex 32` writes them")
    return secret
