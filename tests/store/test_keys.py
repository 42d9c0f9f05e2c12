"""Keys: who may share, said by length-framed, tagged bytes; and what is refused when it is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sapwood.store import Fingerprint, GroupLayout, unbroken_run
from sapwood.store.keys import key_prefix

from . import kit

FULL = GroupLayout("full", "full", 4096)


def test_t09_every_field_counts() -> None:
    """Two fingerprints that differ in any field, of a group or of the whole, have different digests.

    Mutation: `Fingerprint.digest` or `GroupLayout.frames` leaves out a field.
    """
    base = kit.fingerprint()
    full = base.groups[0]
    changes: list[dict[str, Any]] = [
        {"weights": bytes(32)}, {"dtype": "float16"}, {"page_size": 8}, {"ranks": 2}, {"ranks": 2, "rank": 1},
        {"groups": base.groups[:2]},
        *({"groups": (dataclasses.replace(full, **{name: value}), *base.groups[1:])}
          for name, value in {"name": "a", "family": "window", "page_bytes": 1, "window": 1, "layout": "x"}.items()),
    ]  # fmt: skip
    digests = [dataclasses.replace(base, **change).digest() for change in changes] + [base.digest()]
    assert len(set(digests)) == len(digests)


def test_l07_fields_are_framed() -> None:
    """What one field ends with cannot be what the next one begins with; a window of nothing is no window at all.

    Mutation: `_frame` leaves out the length.
    """
    pairs = [
        (GroupLayout("ab", "c", 1), GroupLayout("a", "bc", 1)),
        (GroupLayout("a", "b", 1, layout="x"), GroupLayout("a", "bx", 1)),
        (GroupLayout("a", "b", 1, window=1), GroupLayout("a", "b", 1)),
    ]
    for one, two in pairs:
        assert one.frames() != two.frames()
        assert kit.fingerprint(groups=(one,)).digest() != kit.fingerprint(groups=(two,)).digest()
    two_groups = kit.fingerprint(groups=(GroupLayout("a", "full", 1), GroupLayout("b", "full", 1)))
    assert two_groups.digest() != kit.fingerprint(groups=(GroupLayout("ab", "full", 1),)).digest()


def test_the_digest_stays_what_it_is() -> None:
    """Old stores must be found again: this vector may only change together with the version in it.

    Mutation: anything in how a digest or a key is spelled.
    """
    digest = Fingerprint(bytes(range(32)), "bfloat16", 16, (FULL,), rank=0, ranks=1).digest()
    assert digest.hex() == "aadd6de6c7a78b92db67737cdbdfbd040805d5b406b172f803666b33b4085ed0"
    assert key_prefix(digest, 0) == f"sapwood:1:{digest.hex()}:0:"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights": "name"}, "weights"),
        ({"weights": b"short"}, "weights"),
        ({"dtype": ""}, "dtype"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"groups": ()}, "groups"),
        ({"groups": [FULL]}, "groups"),
        ({"groups": (FULL, FULL)}, "groups"),
        ({"groups": ("full",)}, "groups"),
        ({"rank": 1}, "rank"),
        ({"ranks": 0}, "ranks"),
    ],
)
def test_a_wrong_fingerprint_is_refused(change: dict[str, Any], field: str) -> None:
    """The message names the field.

    Mutation: `__post_init__` leaves out that field.
    """
    with pytest.raises(ValueError, match=f"^{field} must"):
        kit.fingerprint(**change)


@pytest.mark.parametrize(
    "change", [{"name": ""}, {"family": 3}, {"page_bytes": 0}, {"window": 0}, {"layout": None}, {"name": "\ud800"}]
)
def test_a_wrong_group_is_refused(change: dict[str, Any]) -> None:
    """Mutation: `GroupLayout.__post_init__` leaves out that field."""
    with pytest.raises(ValueError, match=f"^{next(iter(change))} "):
        dataclasses.replace(FULL, **change)


def test_unbroken_run() -> None:
    """A group without a part at a page does not end the run there; no group at all is no run.

    Mutation: `unbroken_run` looks at `ok` only.
    """
    assert unbroken_run({"a": [1, 1, 0, 1]}, {"a": [5, 6, 7, 8]}) == 2
    assert unbroken_run({"a": [1, 1, 1], "b": [0, 0, 1]}, {"a": [1, 2, 3], "b": [0, 0, 9]}) == 3
    assert unbroken_run({"a": [1, 1, 1], "b": [0, 0, 0]}, {"a": [1, 2, 3], "b": [0, 4, 9]}) == 1
    assert unbroken_run({}, {}) == 0
    assert unbroken_run({"a": []}, {"a": []}) == 0
