"""`pad`, `pack` and `ragged`: every token of every sample once, in its place, and told where."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bucketfeed as bf
from bucketfeed.errors import ConfigError

TOKENS = st.lists(st.lists(st.integers(1, 2**40), max_size=9), min_size=1, max_size=12)


def samples_of(rows: list[list[int]]) -> list[dict]:
    kinds = (list, np.array, torch.tensor)
    made = []
    for number, row in enumerate(rows):
        tokens = kinds[number % 3](row) if row else row
        made.append({"__key__": f"k{number}", "text": {"ids": tokens}, "labels": [-t for t in row], "n": number})
    return made


@settings(deadline=None, max_examples=40)
@given(rows=TOKENS, side=st.sampled_from(["right", "left"]), multiple=st.integers(1, 4))
def test_pad_keeps_every_token_and_its_mask_says_where(rows: list[list[int]], side: str, multiple: int):
    collate = bf.collate.pad({"labels": -100}, side=side, multiple_of=multiple, lengths=True)
    batch = collate(samples_of(rows))
    ids, mask = batch["text"]["ids"], batch["text"]["ids_mask"]
    longest = max(map(len, rows))
    assert ids.shape == mask.shape == (len(rows), -(-longest // multiple) * multiple)
    assert [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)] == rows
    assert (ids[~mask] == 0).all()
    assert (batch["labels"][~batch["labels_mask"]] == -100).all()
    assert batch["text"]["ids_lengths"].tolist() == list(map(len, rows))
    edge = mask[:, :1] if side == "right" else mask[:, -1:]
    assert edge.flatten().tolist() == [bool(row) for row in rows] if longest else True
    assert batch["n"].tolist() == list(range(len(rows)))
    assert batch["__key__"] == [f"k{n}" for n in range(len(rows))]


@settings(deadline=None, max_examples=40)
@given(rows=TOKENS)
def test_ragged_keeps_every_token_in_one_tensor(rows: list[list[int]]):
    batch = bf.collate.ragged()(samples_of(rows))
    ids = batch["text"]["ids"]
    assert ids.values.tolist() == [token for row in rows for token in row]
    assert ids.lengths.tolist() == list(map(len, rows))
    assert [part.tolist() for part in ids.split()] == rows
    assert ids.offsets.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    assert batch["n"].tolist() == list(range(len(rows)))


@settings(deadline=None, max_examples=40)
@given(rows=TOKENS, budget=st.integers(9, 30))
def test_packed_rows_hold_every_sequence_once_and_whole(rows: list[list[int]], budget: int):
    batch = bf.collate.pack(budget, ("text.ids", "labels"), {"labels": -100})(samples_of(rows))
    ids, segments, positions = batch["text"]["ids"], batch["segment_ids"], batch["position_ids"]
    assert ids.shape == batch["labels"].shape == segments.shape == positions.shape
    assert ids.shape[1] == budget
    found = []
    for row, own, at, label in zip(ids, segments, positions, batch["labels"], strict=True):
        for segment in range(1, int(own.max()) + 1):
            found.append(row[own == segment].tolist())
            assert at[own == segment].tolist() == list(range(len(found[-1])))
            assert label[own == segment].tolist() == [-t for t in found[-1]]
        assert (label[own == 0] == -100).all()
        assert (row[own == 0] == 0).all()
    order = batch["n"].tolist()
    assert sorted(order) == list(range(len(rows)))
    assert [row for row in found if row] == [rows[n] for n in order if rows[n]]
    assert len(ids) <= 1 + 2 * sum(map(len, rows)) // budget  # no two rows are less than half full


@settings(deadline=None, max_examples=40)
@given(rows=TOKENS)
def test_a_flat_pack_is_what_flash_attention_takes(rows: list[list[int]]):
    batch = bf.collate.pack(200, "text.ids", flat=True)([{**s, "labels": 0} for s in samples_of(rows)])
    assert batch["text"]["ids"].tolist() == [token for row in rows for token in row]
    assert batch["cu_seqlens"].dtype is torch.int32
    assert batch["cu_seqlens"].tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    assert batch["max_seqlen"] == max(map(len, rows))
    assert batch["position_ids"].tolist() == [place for row in rows for place in range(len(row))]
    assert batch["segment_ids"].tolist() == [n for n, row in enumerate(rows, start=1) for _ in row]


def test_what_does_not_fit_the_budget_is_an_error_or_cut():
    samples = [{"__key__": f"k{n}", "ids": [n] * n} for n in (2, 5, 3)]
    with pytest.raises(ConfigError, match="field 'ids' of sample 'k5' has length 5, more than budget=4"):
        bf.collate.pack(4)(samples)
    assert bf.collate.pack(4, truncate=True)(samples)["ids"].tolist() == [[5] * 4, [3] * 3 + [0], [2, 2, 0, 0]]
    with pytest.raises(ConfigError, match="3 samples have 10 tokens, more than budget=9"):
        bf.collate.pack(9, flat=True)(samples)
    cut = bf.collate.pack(6, flat=True, truncate=True)(samples)
    assert cut["ids"].tolist() == [2, 2, 5, 5, 5, 5]
    assert cut["cu_seqlens"].tolist() == [0, 2, 6, 6]


def test_fields_that_are_packed_together_have_equal_lengths():
    with pytest.raises(ConfigError, match=r"in sample 'k' field 'a' has length 2 and 'b' 3"):
        bf.collate.pack(9)([{"__key__": "k", "a": [1, 2], "b": [1, 2, 3]}])
    assert bf.collate.pack(9, "a")([{"a": [1, 2], "b": np.ones(3)}])["b"].shape == (1, 3)


def test_pad_cuts_at_a_length_only_where_told():
    samples = [{"__key__": "a", "x": [1]}, {"__key__": "b", "x": [1, 2, 3, 4, 5]}]
    with pytest.raises(ConfigError, match="'x' of sample 'b' has length 5, more than max_length=4"):
        bf.collate.pad(max_length=4)(samples)
    batch = bf.collate.pad(max_length=4, multiple_of=4, truncate=True, lengths="n", mask=False)(samples)
    assert {k: v for k, v in batch.items() if k != "x"} == {"__key__": ["a", "b"], "n": batch["n"]}
    assert batch["n"].tolist() == [1, 4]
    assert batch["x"].tolist() == [[1, 0, 0, 0], [1, 2, 3, 4]]


def test_pad_takes_another_dimension_and_keeps_the_type():
    spectra = [torch.ones(2, n, dtype=torch.bfloat16) for n in (1, 3)]
    batch = bf.collate.pad(float("-inf"), dim=-1, mask="{}_valid")([{"s": s} for s in spectra])
    assert batch["s"].dtype is torch.bfloat16
    assert batch["s"][0].tolist() == [[1, float("-inf"), float("-inf")]] * 2
    assert batch["s_valid"].tolist() == [[True, False, False], [True] * 3]
    with pytest.raises(ConfigError, match=r"\(2, 3\).*number 0.*\(4, 3\).*number 1 .*only dimension -1 may differ"):
        bf.collate.pad(dim=-1)([{"s": np.ones((2, 3))}, {"s": np.ones((4, 3))}])


class Pair(NamedTuple):
    ids: list[int]
    label: int


def test_tuples_and_bare_sequences_get_what_has_no_name_in_one_value():
    batch = bf.collate.pad()([Pair([1], 0), Pair([1, 2], 1)])
    assert isinstance(batch, Pair)
    assert batch.label.tolist() == [0, 1]
    assert batch.ids.values.tolist() == [[1, 0], [1, 2]]
    assert batch.ids.mask.tolist() == [[True, False], [True, True]]
    assert bf.collate.pad(mask=False)([[1], [1, 2]]).tolist() == [[1, 0], [1, 2]]
    assert bf.collate.ragged()([np.ones(1), np.ones(2)]).lengths.tolist() == [1, 2]


def test_a_name_for_several_masks_needs_equal_lengths():
    collate = bf.collate.pad(mask="attention_mask")
    assert collate([{"a": [1], "b": [2]}, {"a": [1, 2], "b": [1, 2]}])["attention_mask"].tolist() == [[1, 0], [1, 1]]
    with pytest.raises(ConfigError, match="'attention_mask' of field 'b' differs"):
        collate([{"a": [1], "b": [2, 3]}, {"a": [1, 2], "b": [1, 2]}])
    with pytest.raises(ConfigError, match="have a field 'attention_mask' already"):
        collate([{"a": [1], "attention_mask": 1}])


def test_none_is_an_empty_sequence_where_missing_says_so():
    samples = [{"x": None, "n": None}, {"x": [1, 2], "n": 4}]
    with pytest.raises(ConfigError, match="'x' is list in sample number 1 of the batch and None"):
        bf.collate.pad()(samples)
    batch = bf.collate.pad(missing=-1)(samples)
    assert batch["x_mask"].tolist() == [[False, False], [True, True]]
    assert batch["n"].tolist() == [-1, 4]
    assert bf.collate.ragged(missing={"x": 0, "n": 7})(samples)["x"].lengths.tolist() == [0, 2]


def test_boxes_of_any_number_are_joined_and_padded_with_images_that_have_none():
    samples = [{"boxes": []}, {"boxes": [[1, 2, 3, 4], [5, 6, 7, 8]]}, {"boxes": np.zeros((0, 4))}]
    joined = bf.collate.ragged()(samples)["boxes"]
    assert joined.values.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert joined.lengths.tolist() == [0, 2, 0]
    assert bf.collate.pad()(samples)["boxes"].shape == (3, 2, 4)


def test_ragged_gives_a_nested_tensor():
    nested = bf.collate.ragged()([{"x": np.ones((2, 3), np.float32)}, {"x": np.zeros((1, 3), np.float32)}])[
        "x"
    ].nested()
    assert [tuple(part.shape) for part in nested.unbind()] == [(2, 3), (1, 3)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: bf.collate.pad(side="middle"), "side must be 'right' or 'left'"),
        (lambda: bf.collate.pad(max_length=9, multiple_of=8), "no multiple of multiple_of=8"),
        (lambda: bf.collate.pad(truncate=True), "needs max_length"),
        (lambda: bf.collate.pad(multiple_of=0), "multiple_of must be"),
        (lambda: bf.collate.pack(0), "budget must be"),
        (lambda: bf.collate.ragged(()), "fields must be names"),
        (lambda: bf.collate.pad(fields="y")([{"x": [1]}]), r"pad: no field 'y' in the samples, which have \['x'\]"),
        (lambda: bf.collate.pad({"y": 1})([{"x": [1]}]), r"no field 'y'"),
        (lambda: bf.collate.ragged("x")([{"x": 1}]), "'x' is no sequence: it is int"),
        (lambda: bf.collate.pad(0.5)([{"x": [1]}]), r"'x' is torch.int64, which does not hold 0.5"),
        (lambda: bf.collate.pad(-1)([{"x": np.ones(1, np.uint8)}]), "does not hold -1"),
        (lambda: bf.collate.pad(dim=2)([{"x": [1]}]), r"pad\(dim=2\): field 'x' has shape \(1,\)"),
        (lambda: bf.collate.pack(4)([{"x": 1}]), "no field of arrays"),
        (lambda: bf.collate.pack(4)([[1, 2]]), "pack takes samples that are dicts, not list"),
        (lambda: bf.collate.pack(4)([{"x": [1], "segment_ids": 1}]), "'segment_ids'"),
        (lambda: bf.collate.ragged()([{"x": np.ones((1, 2))}, {"x": np.ones((1, 3))}]), r"\(1, 2\).*\(1, 3\)"),
    ],
)
def test_what_can_not_be_is_named(make: object, text: str):
    with pytest.raises(ConfigError, match=text):
        make()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_goes_through_a_loader_as_it_is(tmp_path: Path, num_workers: int):
    for number in range(8):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * (number + 1))
    ds = bf.open_dataset(tmp_path, cache=None, decode=lambda s: {"ids": np.frombuffer(s["bin"], np.uint8)})
    ids = [[number] * (number + 1) for number in range(8)]

    def first(collate: object) -> dict:
        with bf.Loader(ds, 8, num_workers=num_workers, collate=collate) as loader:
            return next(iter(loader))

    padded = first(bf.collate.pad(lengths=True, out=bf.collate.Buffers()))
    assert [row[:n].tolist() for row, n in zip(padded["ids"], padded["ids_lengths"], strict=True)] == ids
    joined = first(bf.collate.ragged())["ids"]
    assert isinstance(joined, bf.collate.Ragged)
    assert [part.tolist() for part in joined.split()] == ids
    assert first(bf.collate.pack(36, flat=True))["max_seqlen"] == 8
