from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

import bucketfeed as bf


class Pair(NamedTuple):
    image: np.ndarray
    label: int


def test_text_and_bytes_stay_lists_and_arrays_and_numbers_become_tensors():
    batch = bf.default_collate(
        [
            {
                "__key__": f"k{i}",
                "jpg": b"x" * i,
                "a": np.full((2, 3), i, ">f4"),
                "n": i,
                "f": i / 2,
                "t": torch.ones(2),
            }
            for i in range(3)
        ]
    )
    assert batch["__key__"] == ["k0", "k1", "k2"]
    assert batch["jpg"] == [b"", b"x", b"xx"]
    assert batch["a"].shape == (3, 2, 3)
    assert batch["a"].dtype == torch.float32
    assert batch["a"][2, 0, 0] == 2
    assert torch.equal(batch["n"], torch.tensor([0, 1, 2]))
    assert torch.equal(batch["f"], torch.tensor([0, 0.5, 1], dtype=torch.float64))
    assert batch["t"].shape == (3, 2)


def test_tuples_named_tuples_and_nested_dicts_keep_their_shape():
    batch = bf.default_collate([(Pair(np.zeros(4, np.uint16), 1), {"meta": {"name": "a", "none": None}})] * 2)
    assert isinstance(batch[0], Pair)
    assert batch[0].image.shape == (2, 4)
    assert batch[1] == {"meta": {"name": ["a", "a"], "none": [None, None]}}


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([{"__key__": "a", "x": np.zeros(2)}, {"__key__": "b", "x": np.zeros(3)}], r"'x'.*\(2,\).*'a'.*\(3,\).*'b'"),
        ([{"x": {"y": torch.zeros(2)}}, {"x": {"y": torch.zeros(1)}}], r"'x\.y'.*number 0.*number 1"),
        ([{"__key__": "a", "x": 1, "y": 1}, {"__key__": "b", "x": 1}], r"'a'.*'y'.*'b' has \['__key__', 'x'\]"),
        ([(1, 2), (1,)], "different lengths"),
    ],
)
def test_what_does_not_fit_is_named_with_both_shapes_and_samples_c092(samples: list, text: str):
    with pytest.raises(bf.errors.ConfigError, match=text):
        bf.default_collate(samples)
