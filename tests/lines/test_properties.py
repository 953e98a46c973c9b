"""Whatever the bytes, and wherever they are cut: the samples are those that Python's own readers give."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path

import numpy as np
from files import PACKED, put
from hypothesis import given, settings
from hypothesis import strategies as st

import bucketfeed as bf
from bucketfeed.formats.delimited import scan_rows
from bucketfeed.formats.index import build_index
from bucketfeed.formats.lines import scan_lines
from bucketfeed.formats.window import StreamWindow
from bucketfeed.store.manifest import Manifest
from bucketfeed.testing.readers import MemoryReader

PIECES = ["a", "\u00e4", "\U0001f600", "\u2028", " ", "\n", "\r\n", "\ufeff", '"', ","]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
CELLS = st.lists(st.sampled_from(["a", "\u00e4", '"', '""', ",", "\n", "\r\n", "id"]), max_size=6).map("".join)
TABLES = st.lists(st.tuples(CELLS, CELLS).filter(any), max_size=12)


def window(data: bytes, step: int) -> StreamWindow:
    return StreamWindow(data[at : at + step] for at in range(0, len(data), step))


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 50), st.integers(1, 50), st.booleans())
def test_lines_are_those_between_newlines_at_any_block_size(text: str, block: int, step: int, blanks: bool) -> None:
    data = text.encode()
    found = scan_lines(window(data, step), "s", blanks=blanks, block_bytes=block)
    lines = [data[a:b] for starts, stops in found for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    expected = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert lines == [line for line in expected if blanks or line.strip(b" \t\r\n")]


@settings(max_examples=300, deadline=None)
@given(TABLES, st.integers(1, 50), st.integers(1, 50), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_rows_are_those_of_the_csv_module_at_any_block_size(
    table: list[tuple[str, str]], block: int, step: int, end: str, quoted: bool, final: bool
) -> None:
    file = io.StringIO()
    csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL).writerows(table)
    data = file.getvalue().encode()
    data = data if final else data.removesuffix(end.encode())
    found = scan_rows(window(data, step), "s", ord(","), block_bytes=block)
    rows = [data[a:b].decode() for starts, stops in found for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    assert [tuple(next(csv.reader(io.StringIO(row, newline="")))) for row in rows] == table


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 10**6), max_size=12), min_size=1, max_size=4), st.integers(1, 60), st.data())
def test_any_chunks_and_compression_give_the_same_samples(
    shards: list[list[int]], chunk_bytes: int, data: st.DataObject
) -> None:
    objects = {}
    for number, values in enumerate(shards):
        suffix = data.draw(st.sampled_from(list(PACKED)))
        body = "".join(f"{value}\n" for value in values).encode()
        cut = data.draw(st.integers(0, len(body)))
        objects[f"s3://b/{number}.jsonl{suffix}"] = (PACKED[suffix](body[:cut]) + PACKED[suffix](body[cut:]), "e")
    with tempfile.TemporaryDirectory() as folder:
        listed = [(url, len(body), etag) for url, (body, etag) in objects.items()]
        manifest = Manifest.from_objects("s3://b/", listed, folder=Path(folder))
        plain = MemoryReader(objects)
        index = build_index(manifest, "jsonl", plain, folder=Path(folder), chunk_bytes=chunk_bytes, progress=False)
        bodies = {url: b"".join(index.contents([body], url) or [body]) for url, (body, _) in objects.items()}
        samples = [
            index.sample(i, bodies[r.url][r.start : r.stop])["json"]
            for i, r in enumerate(index.ranges(np.arange(len(index))))
        ]
    assert samples == [value for values in shards for value in values]


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 200), st.booleans(), st.sampled_from(list(PACKED)))
def test_ranks_share_all_lines_and_each_comes_once(
    lines: int, ranks: int, chunk_bytes: int, shuffle: bool, packed: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        body = "".join(f"{number}\n" for number in range(lines)).encode()
        path = put(Path(folder) / "d", {f"a.jsonl{packed}": PACKED[packed](body)})
        dataset = bf.open_dataset(path, cache=bf.DiskCache(Path(folder) / "cache", "10MB"), progress=False)
        seen = []
        for rank in range(ranks):
            with bf.Loader(
                dataset,
                batch_size=3,
                shuffle=shuffle,
                tail="uneven",
                topology=bf.Topology(rank, ranks),
                chunk_bytes=chunk_bytes,
                collate=list,
            ) as loader:
                seen += [sample["json"] for batch in loader for sample in batch]
    assert sorted(seen) == list(range(lines))
