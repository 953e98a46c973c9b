"""Samples that can't be parsed or decoded: an error that says which, or left out, counted and told of."""

from __future__ import annotations

import logging
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Subset

import bucketfeed as bf
from bucketfeed.errors import ConfigError, DecodeError, FormatError
from bucketfeed.formats import decoders

PICTURES = Path(__file__).parents[1] / "data" / "pictures"
BROKEN = ("half.jpg", "zero.jpg", "html.jpg", "flipped-byte.png", "no-end-mark.jpg")
LINES = 40
BAD = (3, 17, 18)  # numbers of lines that are no JSON, from 0 on


def write_lines(folder: Path, bad: tuple[int, ...] = BAD, lines: int = LINES) -> Path:
    folder.mkdir()
    body = "".join(f'{{"n": {n}' + ("\n" if n in bad else "}\n\n") for n in range(lines))
    (folder / "a.jsonl").write_text(body)
    return folder


def skipping(tmp_path: Path, **options: Any) -> bf.MapDataset:
    folder = write_lines(tmp_path / "d", options.pop("bad", BAD))
    return bf.open_dataset(folder, **{"cache": None, "on_error": "skip", "progress": False, **options})


def numbers(loader: Any) -> list[list[int]]:
    return [[sample["n"] for sample in batch] for batch in loader]


GOOD = [n for n in range(LINES) if n not in BAD]
EPOCH = [[n for n in range(first, first + 8) if n not in BAD] for first in range(0, LINES, 8)]


def test_c069_a_bad_line_is_named_by_file_and_line_and_may_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "bad-line-3.jsonl").write_bytes(b'{"a":1}\n{"a":2}\n{"a":3\n{"a":4}\n')
    dataset = bf.open_dataset(tmp_path / "d", cache=None)
    with pytest.raises(
        FormatError, match=r"bad-line-3\.jsonl: no JSON in the line at byte 16.*\(line 3 of the object\)"
    ):
        dataset[2]
    with pytest.raises(FormatError, match=r"bad-line-3\.jsonl.*\(line 3 of the object\)"):
        dataset.__getitems__([0, 2])
    skipping = bf.open_dataset(tmp_path / "d", cache=None, on_error="skip")
    assert [sample["a"] for sample in skipping.__getitems__(range(4))] == [1, 2, 4]
    assert (skipping.stats().samples, skipping.stats().skipped) == (3, 1)


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".zst"])
def test_rows_and_decode_functions_name_the_line_in_compressed_files_too(tmp_path: Path, packed: str) -> None:
    import bz2
    import gzip

    import zstandard

    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.ZstdCompressor().compress}[packed]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / f"a.csv{packed}").write_bytes(pack(b'id,t\n\n1,"x\ny"\n2,z,3\n4,u\n'))
    dataset = bf.open_dataset(tmp_path / "d", cache=None, decode=lambda sample: int(sample["t"]))
    with pytest.raises(FormatError, match=r"has 3 fields, not 2: .*\(line 5 of the object\)"):
        dataset[1]
    with pytest.raises(DecodeError, match=r"ValueError.*'u'.*\(line 6 of the object\)"):
        dataset[2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_leaves_out_what_fails_and_counts_it(tmp_path: Path, num_workers: int, caplog: Any) -> None:
    dataset = skipping(tmp_path)
    with bf.Loader(dataset, batch_size=8, collate=list, num_workers=num_workers) as loader:
        assert numbers(loader) == EPOCH
        assert numbers(loader) == EPOCH
        stats = loader.stats()
    assert (stats.samples, stats.skipped, stats.batches) == (2 * len(GOOD), 2 * len(BAD), 10)
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == len(BAD)
    assert all("left out sample" in text and "a.jsonl" in text for text in told)
    assert "(line 7 of the object)" in told[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_in_the_middle_as_without_the_break(tmp_path: Path, num_workers: int) -> None:
    dataset = skipping(tmp_path)
    options = {"batch_size": 4, "shuffle": True, "seed": 5, "collate": list, "num_workers": num_workers}
    with bf.Loader(dataset, **options) as loader:
        whole = numbers(loader)
    with bf.Loader(dataset, **options) as loader:
        batches = iter(loader)
        first = [[sample["n"] for sample in next(batches)] for _ in range(4)]
        state = loader.state_dict()
    with bf.Loader(dataset, **options) as loader:
        loader.load_state_dict(state)
        assert first + numbers(loader) == whole
    assert sorted(n for batch in whole for n in batch) == GOOD


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_than_the_limit_is_an_error_that_says_how_many(tmp_path: Path, num_workers: int) -> None:
    dataset = skipping(tmp_path, max_errors=2)
    with bf.Loader(dataset, batch_size=8, collate=list, num_workers=num_workers) as loader:
        batches = iter(loader)
        assert [[sample["n"] for sample in next(batches)] for _ in range(2)] == EPOCH[:2]
        with pytest.raises(DecodeError, match=r"3 samples failed, and max_errors is 2.*The last one: .*a\.jsonl"):
            next(batches)
        assert loader.state_dict()["position"] == 16


def test_one_that_fails_in_every_epoch_counts_once_against_the_limit(tmp_path: Path) -> None:
    dataset = skipping(tmp_path, max_errors=3)
    loader = bf.Loader(dataset, batch_size=8, collate=list)
    assert [numbers(loader) for _ in range(4)] == [EPOCH] * 4
    assert loader.stats().skipped == 12


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_of_which_nothing_is_left_is_an_error(tmp_path: Path, num_workers: int) -> None:
    dataset = skipping(tmp_path, bad=tuple(range(8, 12)))
    failed = pytest.raises(DecodeError, match=r"all 4 samples of a batch failed.*The last one: .*a\.jsonl")
    with bf.Loader(dataset, batch_size=4, collate=list, num_workers=num_workers) as loader, failed:
        numbers(loader)
    with pytest.raises(DecodeError, match="all 2 samples"):
        dataset.__getitems__([8, 9])
    assert dataset.__getitems__([]) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_stock_dataloader_gets_shorter_batches(tmp_path: Path, num_workers: int) -> None:
    dataset = skipping(tmp_path)
    options = {"multiprocessing_context": "forkserver"} if num_workers else {}
    loader = DataLoader(dataset, batch_size=8, collate_fn=list, num_workers=num_workers, **options)
    assert numbers(loader) == EPOCH
    assert numbers(DataLoader(Subset(dataset, range(16, 24)), batch_size=8, collate_fn=list)) == [EPOCH[2]]
    if not num_workers:
        assert dataset.stats().skipped == 5


def test_one_sample_alone_raises_and_copies_do_as_their_original(tmp_path: Path) -> None:
    dataset = pickle.loads(pickle.dumps(skipping(tmp_path, max_errors=1)))
    with pytest.raises(FormatError, match="line 7 of"):
        dataset[3]
    assert [sample["n"] for sample in dataset.__getitems__([2, 3])] == [2]
    assert [sample["n"] for sample in dataset.__getitems__([3, 4])] == [4]
    with pytest.raises(DecodeError, match="2 samples failed, and max_errors is 1"):
        dataset.__getitems__([16, 17])


def test_only_the_first_few_are_told_of(tmp_path: Path, caplog: Any) -> None:
    dataset = skipping(tmp_path, bad=tuple(range(0, 40, 2)))
    assert len(numbers(bf.Loader(dataset, batch_size=8, collate=list))) == 5
    told = [record.message for record in caplog.records if "left out" in record.message]
    assert len(told) == 5
    assert "others are counted only" in told[-1]


@pytest.mark.parametrize(
    ("options", "text"), [({"on_error": "ignore"}, "'ignore'"), ({"max_errors": -1}, "at least 0")]
)
def test_options_that_cannot_work_are_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        skipping(tmp_path, **options)


def pictures(folder: Path, kind: str) -> Path:
    """Return a folder with nine good pictures and the broken ones, as objects or in one tar."""
    folder.mkdir()
    named = {f"{number:02}-good.jpg": "good.jpg" for number in range(9)} | {f"9-{name}": name for name in BROKEN}
    if kind == "raw":
        for name, source in named.items():
            (folder / name).write_bytes((PICTURES / source).read_bytes())
    else:
        with tarfile.open(folder / "shard.tar", "w") as tar:
            for name, source in named.items():
                tar.add(PICTURES / source, name)
    return folder


@pytest.mark.parametrize("kind", ["raw", "tar"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_c091_broken_pictures_are_counted_and_the_epoch_goes_on(tmp_path: Path, kind: str, num_workers: int) -> None:
    dataset = bf.open_dataset(pictures(tmp_path / "d", kind), cache=None, decode=decoders.auto, on_error="skip")
    with bf.Loader(dataset, batch_size=14, collate=list, num_workers=num_workers, shuffle=True) as loader:
        (batch,) = list(loader)
        assert loader.stats().skipped == len(BROKEN)
    assert len(batch) == 9
    assert all(np.array_equal(sample["jpg"], batch[0]["jpg"]) for sample in batch)


@pytest.mark.parametrize("kind", ["raw", "tar"])
def test_c091_the_error_names_the_object_or_shard_and_the_sample(tmp_path: Path, kind: str) -> None:
    dataset = bf.open_dataset(pictures(tmp_path / "d", kind), cache=None, decode=decoders.auto)
    found = []
    for i in range(len(dataset)):
        try:
            dataset[i]
        except DecodeError as e:
            found.append(str(e))
    assert len(found) == len(BROKEN)
    for name in BROKEN:
        key, where = f"'9-{name.rsplit('.')[0]}'", f"9-{name}" if kind == "raw" else "shard.tar ["
        assert any(key in text and where in text and "picture" in text for text in found), (name, found)


@pytest.mark.parametrize("kind", ["raw", "tar"])
def test_c087_a_picture_stands_upright_whatever_it_comes_from(tmp_path: Path, kind: str) -> None:
    (tmp_path / "d").mkdir()
    data = (PICTURES / "exif-6.jpg").read_bytes()
    if kind == "raw":
        (tmp_path / "d" / "exif-6.jpg").write_bytes(data)
    else:
        with tarfile.open(tmp_path / "d" / "s.tar", "w") as tar:
            tar.add(PICTURES / "exif-6.jpg", "exif-6.jpg")
    sample = bf.open_dataset(tmp_path / "d", cache=None, decode=decoders.auto)[0]
    assert sample["jpg"].shape == (48, 32, 3)
    assert np.array_equal(sample["jpg"], decoders.image(data))
