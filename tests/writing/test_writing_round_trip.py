"""What is written is what is read, by us and by the standard library, and the index beside it is right."""

from __future__ import annotations

import json
import multiprocessing
import tarfile
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import contents, opened, photos, untarred

import bucketfeed as bf
from bucketfeed.errors import ConfigError
from bucketfeed.formats import tar
from bucketfeed.formats.beside import INDEX
from bucketfeed.formats.index import build_index
from bucketfeed.formats.members import header, members
from bucketfeed.formats.window import Whole
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.readers import open_reader

LETTERS = st.characters(exclude_characters="/.\0", exclude_categories=("Cs",))
NAMES = st.text(LETTERS, min_size=1, max_size=12) | st.text("aé", min_size=90, max_size=300)
KEYS = st.tuples(st.lists(NAMES.map("v1.".__add__), max_size=2), NAMES).map(
    lambda parts: "/".join([*parts[0], parts[1]])
)
FIELDS = st.sampled_from(["jpg", "seg.png", "bin", "json", "ü", "a b", "x" * 120])
SAMPLES = st.dictionaries(KEYS, st.dictionaries(FIELDS, st.binary(max_size=1500), min_size=1, max_size=3), min_size=1)


@settings(max_examples=25, deadline=None)
@given(SAMPLES, st.integers(1, 20_000))
def test_any_samples_come_back_byte_for_byte_in_their_order(found: dict[str, Any], limit: int) -> None:
    samples = [{"__key__": key, **fields} for key, fields in found.items()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        written = bf.write_shards(iter(samples), out, max_shard_bytes=limit, progress=False)
        back = opened(out, cache=None)
        assert list(back) == samples
        assert written.samples == len(samples) == sum(len(list(_scan(path))) for path in out.glob("*.tar"))
        assert untarred(out) == {f"{s['__key__']}.{name}": s[name] for s in samples for name in s if name != "__key__"}
        for path in out.glob("*.tar"):
            assert path.stat().st_size <= limit or len(list(_scan(path))) == 1
        anew = build_index(back.manifest, "tar", open_reader(out), path=Path(folder) / "anew", progress=False)
        assert anew.path is not None
        assert anew.path.read_bytes() == (out / INDEX).read_bytes()


def _scan(path: Path) -> Any:
    return tar.scan(Whole(path.read_bytes()), path.name)


def test_sizes_of_8_gib_and_more_are_written_as_they_are_read() -> None:
    for size in (8**11 - 1, 8**11, 3 << 40):
        head = header("a.bin", size)

        class Long:
            def reaches(self, stop: int) -> bool:
                return True

            def view(self, start: int, stop: int, head: bytes = head) -> bytes:
                return head[start:stop]

        [(start, stop)] = tar.scan(Long(), "s.tar")  # type: ignore[arg-type]
        assert (start, stop) == (0, len(head) + size)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=130), st.integers(0, 8**12))
def test_headers_are_those_of_the_standard_library(path: str, size: int) -> None:
    member = tarfile.TarInfo(path)
    member.size = size
    assert header(path, size) == member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def test_values_are_written_by_what_their_field_is_called() -> None:
    from PIL import Image

    picture = Image.new("L", (2, 2), 7)
    sample = {
        "__key__": "a",
        "__url__": "not a field",
        "txt": "é",
        "json": {"n": np.float32(0.5), "x": [1, None]},
        "cls": np.int64(3),
        "x.npy": np.arange(3),
        "png": picture,
        "mask.jpg": b"as it is",
    }
    back = tar.sample(b"".join(members(sample).parts), "s.tar")
    assert sorted(back) == ["__key__", "cls", "json", "mask.jpg", "png", "txt", "x.npy"]
    assert (back["txt"], back["cls"], back["mask.jpg"]) == ("é".encode(), b"3", b"as it is")
    assert json.loads(back["json"]) == {"n": 0.5, "x": [1, None]}
    assert bf.decoders.image(back["png"], "L").tolist() == [[[7], [7]], [[7], [7]]]
    assert bf.decoders.npy(back["x.npy"]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        ({"__key__": "a.b", "txt": ""}, "'a.b' has a dot"),
        ({"__key__": "a/", "txt": ""}, "'a/' ends in no name"),
        ({"__key__": "../a", "txt": ""}, "leads out of its folder"),
        ({"txt": ""}, "must be text, not None"),
        ({"__key__": "a"}, "'a' has no fields"),
        ({"__key__": "a", "JPG": b""}, "'JPG' of sample 'a' would be read back as 'jpg'"),
        ({"__key__": "a", "x/y": b""}, "field 'x/y'"),
        ({"__key__": "a", "jpg": "text"}, "field 'jpg' of sample 'a' is str"),
        ({"__key__": "a", "cls": True}, "field 'cls' of sample 'a' is bool"),
        ({"__key__": "a", "json": float("nan")}, "field 'json' of sample 'a' can't be made into bytes"),
        ({"__key__": "a", "npy": np.array([{}])}, "field 'npy' of sample 'a' can't be made into bytes"),
    ],
)
def test_what_would_not_come_back_is_refused_by_name(sample: dict[str, Any], told: str, tmp_path: Path) -> None:
    good = {"__key__": "good", "txt": "x"}
    with pytest.raises(ConfigError, match=told):
        bf.write_shards([good, sample], tmp_path / "out", progress=False)
    assert list((tmp_path / "out").glob("*shard*")) == []


def test_a_key_that_comes_twice_is_refused_or_numbered(tmp_path: Path) -> None:
    samples = [{"__key__": "a", "txt": "x"}, {"__key__": "b", "txt": "x"}, {"__key__": "a", "txt": "y"}]
    with pytest.raises(ConfigError, match="'a' comes twice"):
        bf.write_shards(samples, tmp_path / "own", progress=False)
    bf.write_shards(samples, tmp_path / "numbered", keys="number", progress=False)
    assert [s["__key__"] for s in opened(tmp_path / "numbered")] == ["000000000000", "000000000001", "000000000002"]


def test_objects_of_one_key_become_one_sample_and_dots_give_way(tmp_path: Path) -> None:
    source = photos(tmp_path / "in")
    (source / "d" / "x.01.jpg").write_bytes(b"dotted")
    bf.write_shards(opened(source), tmp_path / "out", max_shard_bytes=20_000, progress=False)
    back = {sample["__key__"]: sample for sample in opened(tmp_path / "out")}
    assert len(back) == 61
    assert back["d/x_01"]["jpg"] == b"dotted"
    for i in range(60):
        jpg, cls = ((source / "d" / f"{i:03}.{end}").read_bytes() for end in ("jpg", "cls"))
        assert back[f"d/{i:03}"] == {"__key__": f"d/{i:03}", "jpg": jpg, "cls": cls}


def test_shards_of_objects_are_full_but_never_too_large(tmp_path: Path) -> None:
    bf.write_shards(opened(photos(tmp_path / "in")), tmp_path / "out", max_shard_bytes=30_000, progress=False)
    sizes = [len(data) for data in contents(tmp_path / "out").values()]
    assert max(sizes) <= 30_000
    assert min(sizes[:-1]) > 30_000 - 5_000  # the next sample did not fit
    assert list(contents(tmp_path / "out")) == [f"shard-{i:06}.tar" for i in range(len(sizes))]


def test_a_shuffle_is_global_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    dataset = opened(photos(tmp_path / "in"))
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        bf.write_shards(dataset, tmp_path / name, max_shard_bytes=30_000, shuffle=seed, progress=False)
    orders = {name: [sample["__key__"] for sample in opened(tmp_path / name)] for name in "abc"}
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert orders["a"] != orders["c"]
    assert sorted(orders["a"]) == sorted(orders["c"]) == [f"d/{i:03}" for i in range(60)]
    assert orders["a"] != sorted(orders["a"])


def test_an_executors_processes_write_the_bytes_that_this_one_writes(tmp_path: Path) -> None:
    dataset = opened(photos(tmp_path / "in"))
    here = bf.write_shards(dataset, tmp_path / "here", max_shard_bytes=30_000, shuffle=1, progress=False)
    told: list[tuple[int, int | None]] = []
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        there = bf.write_shards(
            dataset,
            tmp_path / "there",
            max_shard_bytes=30_000,
            shuffle=1,
            executor=pool,
            progress=lambda *done: told.append(done),
        )
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    assert (here.shards, here.samples, here.total_bytes) == (there.shards, there.samples, there.total_bytes)
    assert told[-1][0] == there.total_bytes


def test_lines_and_rows_become_json_and_lines_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    lines = ['{"b": 1.50, "a": "\\u00e9"}', "[1,2 ]"]
    (tmp_path / "in" / "x.jsonl").write_text("\r\n".join(lines))
    (tmp_path / "y.csv").write_text("name,age\nAda,36\n")
    bf.write_shards(opened(tmp_path / "in"), tmp_path / "a", progress=False)
    assert [sample["json"].decode() for sample in opened(tmp_path / "a")] == lines
    bf.write_shards(opened(tmp_path / "y.csv"), tmp_path / "b", progress=False)
    [row] = opened(tmp_path / "b")
    assert (row["__key__"], json.loads(row["json"])) == ("y_csv@9", {"name": "Ada", "age": "36"})


def test_arrays_become_npy_fields(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
    bf.write_shards(bf.open_arrays(tmp_path / "x.npy"), tmp_path / "out", progress=False)
    fields = [
        {name: value for name, value in sample.items() if name != "__key__"} for sample in opened(tmp_path / "out")
    ]
    assert [bf.decoders.npy(field[name]).tolist() for field in fields for name in field] == [[0, 1], [2, 3], [4, 5]]


def test_samples_that_turn_out_larger_than_estimated_take_more_shards_that_sort_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(300):
        (folder / f"{i:03}.bin").write_bytes(bytes(100 if i < 200 else 1))

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        number = int(sample["__key__"])
        return {"__key__": sample["__key__"], "bin": bytes(20_000 if number in range(101, 104) else 1)}

    bf.write_shards(opened(folder, decode=decode), tmp_path / "out", max_shard_bytes=30_000, progress=False)
    names = list(contents(tmp_path / "out"))
    assert any("_001" in name for name in names)
    assert all(len(data) <= 30_000 for data in contents(tmp_path / "out").values())
    assert [sample["__key__"] for sample in opened(tmp_path / "out")] == [f"{i:03}" for i in range(300)]


def test_the_index_beside_the_shards_is_taken_and_nothing_is_scanned(tmp_path: Path) -> None:
    bf.write_shards(opened(photos(tmp_path / "in")), tmp_path / "out", max_shard_bytes=30_000, progress=False)
    back = opened(tmp_path / "out")
    assert back.stats().requests <= 1  # the index
    assert back.manifest.total_bytes == sum(map(len, contents(tmp_path / "out").values()))
    (tmp_path / "out" / "more.tar").write_bytes((tmp_path / "out" / "shard-000000.tar").read_bytes())
    assert len(opened(tmp_path / "out")) > 60  # with shards of others it is not the whole index


def test_a_shard_that_was_replaced_is_indexed_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bf.write_shards([{"__key__": key, "txt": key} for key in "ab"], out, progress=False)
    bf.write_shards([{"__key__": "longer", "txt": "x" * 2000}], tmp_path / "other", progress=False)
    (out / "shard-000000.tar").write_bytes((tmp_path / "other" / "shard-000000.tar").read_bytes())
    assert [sample["__key__"] for sample in opened(out)] == ["longer"]


def test_manifest_of_written_shards_pickles_and_lists_only_shards(tmp_path: Path) -> None:
    bf.write_shards([{"__key__": "a", "txt": "x"}], tmp_path / "out", progress=False)
    assert [opened(tmp_path / "out").manifest.key(0)] == ["shard-000000.tar"]
    assert len(Manifest.from_url(tmp_path / "out")) == 3
