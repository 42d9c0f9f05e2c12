"""Which requests may share: the namespace, and the digest by which it enters hashes and store keys."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_MAX_SALT = 4096
_MAX_ADAPTER = 256


@dataclass(frozen=True, slots=True)
class Namespace:
    """Base-weights version, adapter content and salt: requests share pages only when all three are equal.

    `adapter` is a digest of the adapter's *content*, never a name or an id that can be reused for other weights.
    """

    adapter: bytes | None = None
    salt: str | None = None
    version: int = 0

    def __post_init__(self) -> None:
        if self.adapter is not None and not (isinstance(self.adapter, bytes) and 0 < len(self.adapter) <= _MAX_ADAPTER):
            raise ValueError(
                f"adapter must be None or a content digest of 1 to {_MAX_ADAPTER} bytes, got {self.adapter!r:.60}"
            )
        if self.salt is not None and not (isinstance(self.salt, str) and 0 < len(self.salt) <= _MAX_SALT):
            raise ValueError(f"salt must be None or a string of 1 to {_MAX_SALT} characters, got {self.salt!r:.60}")
        if self.salt is not None and not _encodes(self.salt):
            raise ValueError(f"salt must be a string that can be written as UTF-8, got {self.salt!r:.60}")
        if isinstance(self.version, bool) or not isinstance(self.version, int) or not 0 <= self.version < 2**63:
            raise ValueError(f"version must be an integer from 0 to 2**63 - 1, got {self.version!r:.60}")

    def digest(self) -> bytes:
        """The parent of the first page's hash; empty for the default namespace, whose hashes are the plain chain.

            sha256( "sapwood.namespace.1"
                    "A" + length of adapter as u32 little-endian + adapter            if there is an adapter
                    "S" + length of salt in UTF-8 as u32 little-endian + salt         if there is a salt
                    "V" + version as u64 little-endian )                              always

        Every field is tagged and framed by its length, so no two namespaces spell the same bytes. A KV event of a first
        page has no parent (`parent_digest` is None) in any namespace: this digest is no page's, and no event has it.
        """
        if self == _DEFAULT:
            return b""
        parts = [b"sapwood.namespace.1"]
        for tag, value in ((b"A", self.adapter), (b"S", None if self.salt is None else self.salt.encode())):
            if value is not None:
                parts += [tag, len(value).to_bytes(4, "little"), value]
        parts += [b"V", self.version.to_bytes(8, "little")]
        return hashlib.sha256(b"".join(parts)).digest()


def checked(namespace: Namespace) -> Namespace:
    """What a caller gives as a namespace, seen to be one."""
    if not isinstance(namespace, Namespace):
        raise ValueError(f"namespace must be a Namespace, got {namespace!r:.60}")
    return namespace


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_DEFAULT = Namespace()
