from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from bucketfeed.errors import ResumeError
from bucketfeed.sampling.cursor import Cursor

HERE = Cursor(
    fingerprint="ab12", seed=17, epoch=2, position=640, streams=16, chunk_bytes=4 << 20, shuffle=True, length=1_797
)


def test_a_cursor_survives_json():
    assert Cursor.from_dict(json.loads(json.dumps(HERE.to_dict()))) == HERE
    assert HERE.to_dict() == {
        "version": 1,
        "fingerprint": "ab12",
        "seed": 17,
        "epoch": 2,
        "position": 640,
        "streams": 16,
        "chunk_bytes": 4_194_304,
        "shuffle": True,
        "length": 1_797,
    }


def test_another_epoch_and_position_of_the_same_order_pass_the_check():
    HERE.check(replace(HERE, epoch=0, position=0))


@pytest.mark.parametrize(
    ("field", "value"),
    [("fingerprint", "cd34"), ("length", 2_000), ("seed", 18), ("streams", 8), ("chunk_bytes", 1), ("shuffle", False)],
)
def test_another_order_is_refused_with_both_values_and_the_way_out(field, value):
    here = replace(HERE, **{field: value})
    with pytest.raises(ResumeError) as caught:
        HERE.check(here)
    text = str(caught.value)
    assert f"{field}={getattr(HERE, field)!r}" in text
    assert repr(value) in text
    assert "saved with" in text or f"the saved {field}" in text


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"version": "1"}, None, [], "state", 7], ids=str)
def test_a_state_of_another_version_or_kind_is_refused(state):
    with pytest.raises(ResumeError, match="version 1"):
        Cursor.from_dict(state)


@pytest.mark.parametrize("field", [field for field in HERE.to_dict() if field != "version"])
def test_a_state_without_one_field_is_refused_by_name(field):
    state = HERE.to_dict()
    del state[field]
    with pytest.raises(ResumeError, match=field):
        Cursor.from_dict(state)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position", -1),
        ("position", 1_798),
        ("position", 1.0),
        ("position", True),
        ("position", np.int64(1)),
        ("epoch", None),
        ("shuffle", 1),
        ("fingerprint", 5),
    ],
    ids=str,
)
def test_a_cursor_that_stands_nowhere_cannot_be_made(field, value):
    with pytest.raises(ResumeError, match=field):
        Cursor.from_dict({**HERE.to_dict(), field: value})
    with pytest.raises(ResumeError, match=field):
        replace(HERE, **{field: value})


def test_a_cursor_does_not_change():
    with pytest.raises(FrozenInstanceError):
        HERE.position = 0
