"""Lines as people have them: byte order marks, quoted newlines, ends of every kind, long lines, several frames."""

from __future__ import annotations

import bz2
import csv
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files import PACKED, fields, loaded, opened, put, written

import bucketfeed as bf
from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats.delimited import scan_rows
from bucketfeed.formats.lines import scan_lines
from bucketfeed.formats.window import Whole

DATA = Path(__file__).parents[1] / "data" / "lines"
BOM = b"\xef\xbb\xbf"
ENDED_BY_CR_LF = b'{"id": 0, "t": "x0"}\n{"id": 1, "t": "x1"}\n'


def quoted_newlines() -> tuple[bytes, list[str]]:
    """Return a CSV of 400 rows, some of them of several kB and full of newlines and quotes, and its texts."""
    data = bz2.decompress((DATA / "quoted-newlines.csv.bz2").read_bytes())
    texts = [text for _, text in csv.reader(io.StringIO(data.decode(), newline=""))][1:]
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] == "1a9286a00c61e685"
    return data, texts


def cut_by(data: bytes, block_bytes: int, *, rows: bool) -> list[bytes]:
    """Return the lines or rows found when `data` is searched in blocks of that size."""
    source = Whole(data)
    found = (
        scan_rows(source, "s", ord(","), block_bytes=block_bytes)
        if rows
        else scan_lines(source, "s", blanks=True, block_bytes=block_bytes)
    )
    return [data[a:b] for starts, stops in found for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]


class TestByteOrderMarks:
    def test_c066_the_first_record_behind_one_is_whole(self, tmp_path: Path) -> None:
        data = BOM + b"".join(b'{"id": %d, "t": "x%d"}\n' % (n, n) for n in range(3))
        assert fields(opened(written(tmp_path / "d", bom_jsonl=data)), "id") == [0, 1, 2]

    def test_c066_the_first_column_behind_one_has_its_name(self, tmp_path: Path) -> None:
        dataset = opened(written(tmp_path / "d", bom_csv=BOM + b"id,t\r\n0,x0\r\n1,x1\r\n"))
        assert [list(sample)[1:] for sample in dataset] == [["id", "t"]] * 2
        assert fields(dataset, "t") == ["x0", "x1"]

    def test_c066_a_quoted_first_column_behind_one_has_its_name(self, tmp_path: Path) -> None:
        dataset = opened(written(tmp_path / "d", bom_csv=BOM + b'"i\nd",t\n0,x0\n'))
        assert dataset[0] == {"__key__": "bom.csv@11", "i\nd": "0", "t": "x0"}

    def test_c066_nothing_else_in_the_file_is_no_record(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "d", bom_only_jsonl=BOM, b_jsonl=b"1\n")
        assert fields(opened(folder), "json") == [1]

    def test_c066_one_in_the_middle_of_joined_files_is_passed_over(self, tmp_path: Path) -> None:
        data = BOM + ENDED_BY_CR_LF + BOM + b'{"id": 2, "t": "x2"}\n'
        assert fields(opened(written(tmp_path / "d", joined_jsonl=data)), "id") == [0, 1, 2]

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
    @pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
    def test_c066_other_encodings_are_refused_by_name(self, tmp_path: Path, encoding: str, name: str) -> None:
        text = "{}\n" if encoding != "utf-16-be" else "\ufeff{}\n"
        folder = put(tmp_path / "d", {name: text.encode(encoding)})
        format = {"txt": "text"}.get(name[2:], name[2:])
        with pytest.raises(FormatError, match=rf"{name} is {encoding[:6].upper()}, not UTF-8"):
            opened(folder, format=format)


class TestQuotedNewlines:
    def test_c068_rows_are_those_of_the_csv_module_with_the_header_dropped_once(self, tmp_path: Path) -> None:
        data, texts = quoted_newlines()
        dataset = opened(written(tmp_path / "d", a_csv=data, b_csv=data))
        assert fields(dataset, "text") == texts * 2
        assert fields(dataset, "id") == [str(n) for n in range(400)] * 2
        assert texts.count("id,text") == 40

    @pytest.mark.parametrize("block_bytes", [1, 2, 3, 256, 4096, 65536, 1 << 30])
    def test_c068_any_block_size_finds_the_same_rows(self, block_bytes: int) -> None:
        data, texts = quoted_newlines()
        found = cut_by(data, block_bytes, rows=True)
        rows = [next(csv.reader(io.StringIO(row.decode(), newline=""))) for row in found]
        assert [text for _, text in rows[1:]] == texts

    def test_c068_ranks_and_workers_share_the_rows(self, tmp_path: Path) -> None:
        data, texts = quoted_newlines()
        dataset = opened(written(tmp_path / "d", a_csv=data))
        parts = [loaded(dataset, "text", topology=bf.Topology(rank, 3), chunk_bytes=3000) for rank in range(3)]
        assert sorted(text for part in parts for text in part) == sorted(texts)
        assert loaded(dataset, "text", num_workers=2, chunk_bytes=3000) == texts

    def test_c068_quotes_never_closed_are_an_error_that_names_the_row(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "d", open_csv=b'id,text\n1,"never closed\n2,b\n3,c\n')
        with pytest.raises(FormatError, match=r"open\.csv: .*quotes opened in line 2, at byte 10,"):
            opened(folder)

    def test_quotes_within_a_field_that_began_without_are_text(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "d", a_csv=b'id,t\n1,5" nail\n2,"x\n""y"\n3,""\n')
        assert fields(opened(folder), "t") == ['5" nail', 'x\n"y', ""]


class TestLineEnds:
    @pytest.mark.parametrize(
        ("data", "values"),
        [
            (b'{"a":1}\r\n{"a":2}\r\n', [1, 2]),
            (b'{"a":1}\n{"a":2}', [1, 2]),
            (b'\n{"a":1}\n\n   \n{"a":2}\n\n\n', [1, 2]),
            (b'\r\n{"a":1}\r\n\r\n{"a":2}\r', [1, 2]),
            ('{"a":"x\u2028y\x85"}\n{"a":"\u2029"}'.encode(), ["x\u2028y\x85", "\u2029"]),
        ],
        ids=["crlf", "no final newline", "blank lines", "blank with returns", "separators that end no line"],
    )
    def test_c069_jsonl(self, tmp_path: Path, data: bytes, values: list[Any]) -> None:
        dataset = opened(written(tmp_path / "d", a_jsonl=data))
        assert len(dataset) == len(values)
        assert fields(dataset, "a") == values

    @pytest.mark.parametrize(
        ("data", "lines"),
        [
            (b"one\r\ntwo\r\n", ["one", "two"]),
            (b"a\n\n\nb\n", ["a", "", "", "b"]),
            (b"\n\n\n", ["", "", ""]),
            (b"a\nb\r\nc\rd\ne", ["a", "b", "c\rd", "e"]),
            ("\u00e4\u2028\n\U0001f600".encode(), ["\u00e4\u2028", "\U0001f600"]),
        ],
        ids=["crlf", "blank", "only newlines", "mixed", "multibyte"],
    )
    def test_c069_text(self, tmp_path: Path, data: bytes, lines: list[str]) -> None:
        assert fields(opened(written(tmp_path / "d", a_txt=data), format="text"), "text") == lines
        for block_bytes in range(1, len(data) + 1):
            found = [line.decode().removesuffix("\r") for line in cut_by(data, block_bytes, rows=False)]
            assert found == lines

    def test_c069_an_empty_shard_has_no_samples_and_ends_nothing(self, tmp_path: Path) -> None:
        dataset = opened(written(tmp_path / "d", a_jsonl=b"1\n", b_jsonl=b"", c_jsonl=b"2\n"))
        assert loaded(dataset, "json") == [1, 2]

    def test_c069_rows_ended_by_returns_alone_are_refused(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "d", lone_csv=b"id,t\r1,a\r2,b\r")
        with pytest.raises(FormatError, match=r"lone\.csv: .*write \\n or \\r\\n"):
            opened(folder)

    def test_blank_rows_are_passed_over(self, tmp_path: Path) -> None:
        assert fields(opened(written(tmp_path / "d", a_csv=b"\r\n\nid\n\n1\r\n\r\n2\n\r")), "id") == ["1", "2"]


class TestLongLines:
    @pytest.mark.parametrize("packed", PACKED)
    def test_c071_a_line_longer_than_a_chunk(self, tmp_path: Path, packed: str) -> None:
        lines = [json.dumps({"i": i, "t": t}) for i, t in enumerate(["s", "y" * (4 << 20), "e"])]
        dataset = opened(put(tmp_path / "d", {f"a.jsonl{packed}": PACKED[packed]("\n".join(lines).encode())}))
        assert [len(text) for text in fields(dataset, "t")] == [1, 4 << 20, 1]

    def test_c071_a_field_wider_than_the_csv_modules_limit(self, tmp_path: Path) -> None:
        dataset = opened(written(tmp_path / "d", wide_csv=b'id,t\n1,"' + b"z" * 200_000 + b'"\n2,b\n'))
        assert [len(text) for text in fields(dataset, "t")] == [200_000, 1]

    def test_c071_block_edges_within_it_change_nothing(self) -> None:
        data = b"s\n" + b"y" * 5000 + b"\ne\n"
        assert {tuple(map(len, cut_by(data, size, rows=False))) for size in (7, 256, 4096, 9999)} == {(1, 5000, 1)}


class TestFrames:
    @pytest.mark.parametrize("name", ["three-frames.jsonl.zst", "no-size.jsonl.zst"])
    def test_c073_all_frames_of_zstd_are_read(self, tmp_path: Path, name: str) -> None:
        dataset = opened(put(tmp_path / "d", {name: (DATA / name).read_bytes()}))
        assert fields(dataset, "i") == list(range(30))

    def test_c073_a_cut_frame_is_an_error_that_names_the_file(self, tmp_path: Path) -> None:
        folder = put(tmp_path / "d", {"cut.jsonl.zst": (DATA / "cut.jsonl.zst").read_bytes()})
        with pytest.raises(FormatError, match=r"cut\.jsonl\.zst: the zstd data ends early, after 164"):
            opened(folder)


class TestTables:
    def test_dtypes_columns_and_delimiter(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "d", a_csv=b"n;x;ok;s\n1;2.5;true;a\n-3;1e3;0;b\n")
        format = bf.Csv(delimiter=";", columns=("ok", "n", "x"), dtypes={"n": "int32", "x": "float32", "ok": "bool"})
        dataset = opened(folder, format=format)
        assert list(dataset[0]) == ["__key__", "ok", "n", "x"]
        assert [(type(dataset[0][name]), fields(dataset, name)) for name in ("n", "x", "ok")] == [
            (np.int32, [1, -3]),
            (np.float32, [2.5, 1000.0]),
            (np.bool_, [True, False]),
        ]

    def test_tabs_and_no_header(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "d", a_tsv=b"1\tx,y\n2\tz\n")
        dataset = opened(folder, format=bf.Tsv(header=False, columns=("id", "t")))
        assert fields(dataset, "t") == ["x,y", "z"]

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"delimiter": "ab"}, "delimiter must be one character"),
            ({"header": False}, "needs columns="),
            ({"columns": "id"}, "columns must be"),
            ({"dtypes": {"id": "int33"}}, "no NumPy dtype"),
        ],
    )
    def test_options_that_cannot_work_are_named(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            bf.Csv(**options)

    def test_columns_that_are_not_there_are_named(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "d", a_csv=b"id,t\n1,x\n")
        with pytest.raises(ConfigError, match=r"columns names 'text', and .* has the columns id, t"):
            opened(folder, format=bf.Csv(columns=("text",)))

    def test_shards_of_different_columns_are_refused(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "d", a_csv=b"id,t\n1,x\n", b_csv=b"t,id\nx,1\n")
        with pytest.raises(FormatError, match=r"b\.csv has the columns t, id"):
            opened(folder)
