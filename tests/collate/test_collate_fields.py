"""What `default_collate` and `stack` make of a field, and what they say where its values do not fit together."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest
import torch

import bucketfeed as bf
from bucketfeed.errors import ConfigError


def column(*values: object) -> object:
    return bf.default_collate([{"x": value} for value in values])["x"]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((1, np.int32(2)), torch.int64),
        ((np.int8(1), np.int32(2)), torch.int32),
        ((1, np.array(2, ">i2")), torch.int64),
        ((True, 2), torch.int64),
        ((1, torch.tensor(2.0)), torch.float32),
        ((1, 2.5), torch.float64),
        ((np.float32(1), 2.0), torch.float64),
        ((1, np.uint16(2)), torch.int64),
        ((np.uint16(1), np.int16(2)), torch.int32),
        ((torch.tensor(1, dtype=torch.bfloat16), 2), torch.bfloat16),
        ((np.bool_(True), np.bool_(False)), torch.bool),
        ((np.complex64(1), 2.0), torch.complex128),
    ],
    ids=str,
)
def test_numbers_of_several_types_become_one_tensor_of_the_type_torch_promotes_them_to(
    values: tuple, dtype: torch.dtype
):
    batch = column(*values)
    assert batch.dtype is dtype
    assert batch.tolist() == [complex(v) if dtype.is_complex else float(v) for v in values]


def test_arrays_of_several_types_and_tensors_become_one_tensor():
    batch = column(np.arange(3, dtype=np.uint8), torch.ones(3), np.arange(3, dtype=">i4")[::-1])
    assert batch.tolist() == [[0, 1, 2], [1, 1, 1], [2, 1, 0]]
    assert batch.dtype is torch.float32


def test_arrays_that_can_not_be_written_to_are_copied_without_a_warning(recwarn: pytest.WarningsRecorder):
    frozen = np.frombuffer(b"\x01\x02", np.uint8)
    assert column(frozen, frozen).tolist() == column(frozen, torch.from_numpy(frozen.copy())).tolist() == [[1, 2]] * 2
    assert not recwarn.list


def test_bfloat16_text_bytes_none_and_nested_dicts_each_have_their_form():
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    samples = [{"a": {"half": half, "none": None}, "name": "n", "raw": b"r", "maybe": m} for m in ("m", None)]
    batch = bf.default_collate(samples)
    assert torch.equal(batch.pop("a").pop("half"), torch.stack([half, half]))
    assert batch == {"name": ["n", "n"], "raw": [b"r", b"r"], "maybe": ["m", None]}


def test_tensors_are_stacked_as_data_whatever_made_them():
    assert column(torch.ones(2, requires_grad=True), torch.ones(2)).requires_grad is False
    sparse = torch.eye(3).to_sparse()
    assert column(sparse, sparse).to_dense().tolist() == [torch.eye(3).tolist()] * 2


def test_numpys_text_and_dates_become_lists_of_pythons():
    day = np.datetime64("2024-01-02", "D")
    assert column(np.str_("a"), np.str_("b")) == ["a", "b"]
    assert column(day, day) == [day.item()] * 2
    assert column(np.array(["a", "b"]), np.array(["c", "d"])) == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1, None), "'x' is int in sample 'k0' and None in sample 'k1'"),
        ((None, np.zeros(2)), r"'x' is ndarray of shape \(2,\) in sample 'k1' and None in sample 'k0'"),
        ((1, "2"), "'x' is int in sample 'k0' and str in sample 'k1'"),
        ((np.zeros(2), [1, 2]), r"'x' is ndarray of shape \(2,\) in sample 'k0' and list in sample 'k1'"),
        ((np.uint64(1), 2), r"'x' is torch.uint64 in sample 'k0' and torch.int64 in sample 'k1'; no type holds both"),
        ((1, 2**70), "'x' of sample 'k1' makes no tensor"),
        ((np.zeros(2), 1), r"'x' has shape \(2,\) in sample 'k0' and \(\) in sample 'k1'"),
    ],
    ids=str,
)
def test_values_that_make_no_one_tensor_are_named_with_both_samples(values: tuple, text: str):
    with pytest.raises(ConfigError, match=text):
        bf.default_collate([{"__key__": f"k{i}", "x": value} for i, value in enumerate(values)])


def test_c092_the_error_names_the_fields_path_both_shapes_and_both_samples():
    def samples(*shapes: int) -> list[dict]:
        return [{"__key__": f"s{n}", "a": ({"x": np.zeros(n)}, 1)} for n in shapes]

    with pytest.raises(ConfigError) as caught:
        bf.default_collate(samples(2, 2, 3))
    assert str(caught.value) == (
        "field 'a[0].x' has shape (2,) in sample 's2' and (3,) in sample 's3'; a batch needs one shape: resize in "
        "decode=, or pass collate=bf.collate.pad() or ragged()"
    )
    with pytest.raises(ConfigError, match=r"'s2' has \['__key__', 'a'\], number 1 of the batch has \['a'\]"):
        bf.default_collate([*samples(2), {"a": 1}])
    padded = bf.collate.pad(lengths=True)([{"x": {"y": [1, 2]}}, {"x": {"y": [3, 4, 5]}}])["x"]
    assert padded["y"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert padded["y_mask"].tolist() == [[True, True, False], [True] * 3]
    assert padded["y_lengths"].tolist() == [2, 3]


def test_an_empty_batch_says_so():
    with pytest.raises(ConfigError, match="at least one sample"):
        bf.default_collate([])


def test_stack_puts_a_number_in_the_place_of_none():
    samples = [{"label": 3, "score": None, "box": None}, {"label": None, "score": 0.5, "box": np.ones(2)}]
    batch = bf.collate.stack(missing=-1)(samples)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "label": [3, -1],
        "score": [-1, 0.5],
        "box": [[-1, -1], [1, 1]],
    }
    assert batch["label"].dtype is torch.int64
    with pytest.raises(ConfigError, match="'score' is float in sample number 1 of the batch and None"):
        bf.collate.stack(missing={"label": -1, "box": 0})(samples)
    with pytest.raises(ConfigError, match=r"'label' is torch.int64, which does not hold 0.5"):
        bf.collate.stack(missing=0.5)(samples)


def test_a_batch_in_buffers_stays_as_it_is_while_held_and_then_gives_its_memory_to_another():
    collate = bf.collate.stack()
    samples = [{"x": np.full((64, 1024), n, np.float32)} for n in range(2)]
    first = collate(samples)["x"]
    row, address = first[1], first.data_ptr()
    del first
    gc.collect()
    second = collate(samples[::-1])["x"]  # row still lies in the first batch's memory
    assert second.data_ptr() != address
    assert (row == 1).all()
    assert (second[1] == 0).all()
    over = row.numpy()
    del row
    assert collate(samples)["x"].data_ptr() != address
    assert (over == 1).all()
    del over
    gc.collect()
    assert collate(samples)["x"].data_ptr() == address


def test_a_function_of_ones_own_may_take_out():
    out = bf.collate.Buffers()
    batch = out((3, 50_000), torch.bfloat16)
    assert (batch.shape, batch.dtype) == ((3, 50_000), torch.bfloat16)
    assert out((0, 4), torch.int64).shape == (0, 4)
    assert out((), torch.int64).shape == ()


@pytest.mark.parametrize(
    "collate",
    [
        bf.collate.stack(missing={"x": 1}),
        bf.collate.pad({"x": 1}, "x", mask="m", out=bf.collate.Buffers()),
        bf.collate.pack(8, ("x",), flat=True),
        bf.collate.ragged(("x",)),
    ],
    ids=lambda c: type(c).__name__,
)
def test_each_is_a_small_value_that_pickles(collate: object):
    dumped = pickle.dumps(collate)
    assert len(dumped) < 600
    assert pickle.loads(dumped) == collate
