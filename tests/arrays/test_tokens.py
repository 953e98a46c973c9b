"""Windows over files of tokens."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bucketfeed as bf
from bucketfeed.errors import ConfigError, FormatError


def test_a_sample_has_tokens_targets_and_what_tells_documents_apart(tmp_path: Path):
    np.array([5, 6, 0, 7, 8, 9, 0, 1, 2], "u2").tofile(tmp_path / "t.bin")
    ds = bf.TokenDataset(tmp_path / "t.bin", window=4, eos=0)
    assert len(ds) == 2
    sample = {name: value if name == "__key__" else value.tolist() for name, value in ds[0].items()}
    assert sample == {
        "__key__": "t.bin[0]",
        "tokens": [5, 6, 0, 7],
        "targets": [6, 0, 7, 8],
        "documents": [0, 0, 0, 1],
        "positions": [0, 1, 2, 0],
        "mask": [True, True, False, True],
    }
    assert ds[1]["tokens"].dtype == np.int64


def test_without_targets_every_whole_window_is_a_sample(tmp_path: Path):
    np.arange(8, dtype="u2").tofile(tmp_path / "t.bin")
    ds = bf.TokenDataset(tmp_path / "t.bin", window=4, targets=False, eos=0, document_mask=False)
    assert len(ds) == 2
    assert list(ds[1]) == ["__key__", "tokens"]


def test_windows_end_with_their_file(tmp_path: Path):
    for shard in range(2):
        np.full(10, shard, "u4").tofile(tmp_path / f"{shard}.bin")
    ds = bf.TokenDataset(tmp_path, dtype="uint32", window=4, stride=1)
    assert len(ds) == 12
    assert [set(s["tokens"].tolist() + s["targets"].tolist()) for s in ds] == [{0}] * 6 + [{1}] * 6


def test_a_bin_that_does_not_hold_whole_tokens_is_refused_by_name(tmp_path: Path):
    (tmp_path / "t.bin").write_bytes(b"123")
    with pytest.raises(FormatError, match=r"t\.bin has 3 bytes"):
        bf.TokenDataset(tmp_path / "t.bin")


@pytest.mark.parametrize("dtype", ["float32", "uint17"])
def test_a_dtype_that_is_none_of_tokens_is_refused(tmp_path: Path, dtype: str):
    (tmp_path / "t.bin").write_bytes(b"1234")
    with pytest.raises(ConfigError, match="dtype"):
        bf.TokenDataset(tmp_path / "t.bin", dtype=dtype)


def test_a_matrix_is_no_file_of_tokens(tmp_path: Path):
    np.save(tmp_path / "t.npy", np.zeros((3, 2), int))
    with pytest.raises(FormatError, match=r"t\.npy has shape \(3, 2\)"):
        bf.TokenDataset(tmp_path / "t.npy")


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    window=st.integers(1, 9),
    stride=st.none() | st.integers(1, 9),
    npy=st.booleans(),
    header=st.integers(0, 5),
)
def test_windows_documents_and_masks_are_those_of_a_plain_loop(tokens, window, stride, npy, header):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("t.npy" if npy else "t.bin")
        data = np.array(tokens, ">u2")
        if npy:
            np.save(path, data)
        else:
            path.write_bytes(b"h" * header + data.tobytes())
        ds = bf.TokenDataset(
            path, dtype=">u2", window=window, stride=stride, eos=0, header_bytes=header, progress=False
        )
        starts = range(0, len(tokens) - window, stride or window)
        assert len(ds) == len(starts)
        if not len(ds):
            return
        batches = list(bf.Loader(ds, batch_size=3, shuffle=True, tail="uneven", chunk_bytes=20))
        seen = {
            key: [b[f][n].tolist() for f in b if f != "__key__"] for b in batches for n, key in enumerate(b["__key__"])
        }
        for at in starts:
            own, document, position = tokens[at : at + window], 0, 0
            documents, positions = [], []
            for token in own:
                documents.append(document)
                positions.append(position)
                document, position = (document + 1, 0) if token == 0 else (document, position + 1)
            expected = [own, tokens[at + 1 : at + window + 1], documents, positions, [token != 0 for token in own]]
            assert seen[f"{path.name}[{at}]"] == expected


def test_a_loop_over_tokens_goes_on_where_it_was(tmp_path: Path):
    np.arange(2000, dtype="u2").tofile(tmp_path / "t.bin")
    ds = bf.TokenDataset(tmp_path / "t.bin", window=16, stride=4)
    loader = bf.Loader(ds, batch_size=8, shuffle=True, chunk_bytes=256)
    whole = [b["tokens"].tolist() for b in loader]
    loader = bf.Loader(ds, batch_size=8, shuffle=True, chunk_bytes=256)
    it = iter(loader)
    first = [next(it)["tokens"].tolist() for _ in range(5)]
    again = bf.Loader(ds, batch_size=8, shuffle=True, chunk_bytes=256, num_workers=2)
    again.load_state_dict(loader.state_dict())
    assert first + [b["tokens"].tolist() for b in again] == whole
    again.close()
