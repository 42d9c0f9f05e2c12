"""A cost model made of measured step times."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from sapwood.sim import MeasuredCost

COST = MeasuredCost(
    tokens=((2, 1.0), (10, 5.0)), rows=((1, 2.0), (4, 3.0)), key=0.001, pair=0.0001, own=0.01, kv_bytes=100
)


def seconds(*rows: tuple[int, int], cost: MeasuredCost = COST) -> float:
    """Of a step with rows (start, length)."""
    return cost.seconds(*np.array(rows, np.int32).reshape(-1, 2).T)


def test_what_was_measured_is_predicted():
    """Prefill and decode at sizes that were measured, between them, and beyond the last.

    Mutation: `_at` stays at the last point for all that is larger.
    """
    plain = replace(COST, key=0, pair=0, own=0)
    assert [seconds((0, n), cost=plain) for n in (2, 6, 10, 20)] == [1.0, 3.0, 5.0, 10.0]
    assert [seconds(*[(50, 1)] * n, cost=plain) for n in (1, 4, 8)] == pytest.approx([2.0, 3.0, 6.0])
    assert seconds() == 0


def test_attention_costs_what_rows_read():
    """A row of one token reads its context, and so does each token of a chunk, and what of the chunk is before it.

    Mutation: `begins` is left out; `key` counts rows and not their tokens; `own` takes all rows for one.
    """
    assert seconds((100, 1)) == pytest.approx(2.0 + 0.1)
    assert seconds((100, 10)) == pytest.approx(5.0 + 0.0001 * 1000 + 0.01 * 50)
    assert seconds((0, 5), (100, 5)) == pytest.approx(5.0 + 0.0001 * 500 + 0.01 * 25)


def test_what_is_read_again_costs_less():
    """Where rows share what they read, by as much as was measured; where nothing is known of that, nothing.

    Mutation: `shared` is the share that is read once.
    """
    known = replace(COST, again=0.0004)
    starts, lengths = np.array([100, 100, 0]), np.array([1, 1, 2])
    alone = COST.seconds(starts, lengths)
    assert known.seconds(starts, lengths) == COST.seconds(starts, lengths, 0.25) == alone
    assert known.seconds(starts, lengths, 0.25) == pytest.approx(alone - 50 * 0.0006)
    with pytest.raises(ValueError, match="again must be 0 or more"):
        replace(COST, again=-1.0)


def test_rows_of_one_token_cost_more_beside_a_chunk_too():
    """A mixed step takes what its tokens take in one row, and what decode rows take besides.

    Mutation: `rows` is left out where there are chunks.
    """
    plain = replace(COST, key=0, pair=0, own=0)
    assert seconds((0, 6), *[(9, 1)] * 4, cost=plain) == pytest.approx(5.0 + 3.0 - 2.0)


def test_a_step_takes_as_long_as_what_it_is_filled_up_to():
    """Prompts, decode rows, and both in one step; beyond the largest of these sizes, steps are what they are.

    Mutation: `_filled` takes the size below; what decode rows cost besides is not filled up.
    """
    plain = replace(COST, key=0, pair=0, own=0, padded=(4, 8))
    assert [seconds((0, n), cost=plain) for n in (2, 4, 5, 8, 9)] == [2.0, 2.0, 4.0, 4.0, 4.5]
    assert seconds(*[(50, 1)] * 2, cost=plain) == pytest.approx(3.0)
    assert seconds((0, 3), *[(9, 1)] * 3, cost=plain) == pytest.approx(4.0 + 3.0 - 2.0)


def test_it_is_read_from_a_file_or_refused(tmp_path):
    """What a bench has written, and nothing else.

    Mutation: `MeasuredCost.load` lets a KeyError through; the curves are not checked.
    """
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({"bench": "calibrate", "cost": asdict(COST)}))
    assert MeasuredCost.load(file) == COST
    file.write_text(json.dumps({"cost": asdict(replace(COST, padded=(4, 8)))}))
    assert MeasuredCost.load(file).padded == (4, 8)
    file.write_text(json.dumps({"cost": asdict(replace(COST, again=0.5))}))
    assert MeasuredCost.load(file).again == 0.5
    for wrong in ({}, {"cost": {}}, {"cost": {**asdict(COST), "rows": [[4, 1.0], [1, 2.0]]}}, [1]):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="must be what `sapwood bench calibrate` has written"):
            MeasuredCost.load(file)
    for field, value in (
        ("tokens", ()),
        ("rows", ((0, 1.0),)),
        ("key", -1.0),
        ("pair", float("nan")),
        ("padded", (8, 4)),
    ):
        with pytest.raises(ValueError, match=field):
            replace(COST, **{field: value})
