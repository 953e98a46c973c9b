"""A run that was interrupted, whatever by, goes on where it was, and only that run does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packed import contents, opened, photos

import bucketfeed as bf
from bucketfeed.errors import ConfigError, DecodeError, ResumeError
from bucketfeed.formats.beside import INDEX, JOURNAL
from bucketfeed.formats.index_files import IndexFile


def write(source: Path, out: Path, **options: Any) -> Any:
    return bf.write_shards(opened(source), out, **{"max_shard_bytes": 20_000, "progress": False, **options})


def test_a_run_killed_in_the_middle_is_completed_to_the_result_of_one_that_was_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = photos(tmp_path / "in")
    whole = write(source, tmp_path / "whole")
    killed = f"""
import json, os, threading
import bucketfeed as bf
from bucketfeed.data import packing

record = {str(tmp_path / "out" / JOURNAL)!r}
plain = packing.numbered

def numbered(*given):
    for sample in plain(*given):
        if sample.key == "d/050":
            while not (os.path.exists(record) and json.load(open(record))["parts"]):
                threading.Event().wait(0.01)
            os.kill(os.getpid(), 9)
        yield sample

packing.numbered = numbered
bf.write_shards(bf.open_dataset({str(source)!r}), {str(tmp_path / "out")!r}, max_shard_bytes=20_000, progress=False)
"""
    died = subprocess.run([sys.executable, "-c", killed], timeout=60, capture_output=True, text=True)
    assert died.returncode == -9, died.stderr
    left = json.loads((tmp_path / "out" / JOURNAL).read_text())["parts"]
    assert 0 < len(left) < whole.shards
    assert list((tmp_path / "out").glob(".*.partial")) != []
    assert len(opened(tmp_path / "out")) < 60
    assert "a writing that is not complete" in caplog.text
    completed = write(source, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert 0 < completed.new_shards <= whole.shards - len(left)
    assert (completed.shards, completed.total_bytes) == (whole.shards, whole.total_bytes)
    assert [s["__key__"] for s in opened(tmp_path / "out")] == [s["__key__"] for s in opened(tmp_path / "whole")]
    ours, theirs = (IndexFile.open(tmp_path / name / INDEX).rows for name in ("out", "whole"))
    assert ours.tobytes() == theirs.tobytes()


def failing_at(samples: list[dict[str, Any]], number: int) -> Any:
    yield from samples[:number]
    raise RuntimeError("as told")


def test_samples_that_come_one_by_one_go_on_too_and_must_be_the_same(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i:03}", "bin": bytes([i]) * 1000} for i in range(100)]
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="as told"):
        bf.write_shards(failing_at(samples, 50), out, max_shard_bytes=20_000, progress=False)
    assert len(contents(out)) == 4
    again = bf.write_shards(samples, out, max_shard_bytes=20_000, progress=False)
    assert (again.shards, again.new_shards, again.samples) == (9, 5, 100)
    assert list(opened(out)) == samples
    with pytest.raises(ResumeError, match=r"shard-000003\.tar would become other bytes"):
        bf.write_shards(samples[:40] + samples[41:], out, max_shard_bytes=20_000, progress=False)
    with pytest.raises(ResumeError, match=r"end before .*shard-000003\.tar"):
        bf.write_shards(samples[:36], out, max_shard_bytes=20_000, progress=False)
    assert list(opened(out)) == samples


def test_a_complete_run_asked_again_writes_nothing(tmp_path: Path) -> None:
    source = photos(tmp_path / "in")
    first = write(source, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.name != JOURNAL}
    again = write(source, tmp_path / "out")
    assert (first.new_shards, again.new_shards) == (first.shards, 0)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.name != JOURNAL}


def test_shards_that_were_lost_or_cut_are_written_again(tmp_path: Path) -> None:
    source = photos(tmp_path / "in")
    write(source, tmp_path / "out")
    whole = contents(tmp_path / "out")
    (tmp_path / "out" / "shard-000000.tar").unlink()
    (tmp_path / "out" / "shard-000002.tar").write_bytes(b"")
    assert write(source, tmp_path / "out").new_shards == 2
    assert contents(tmp_path / "out") == whole
    assert len(opened(tmp_path / "out")) == 60


def test_other_arguments_and_another_source_are_refused_unless_forced(tmp_path: Path) -> None:
    source = photos(tmp_path / "in")
    first = write(source, tmp_path / "out")
    with pytest.raises(ResumeError, match="max_shard_bytes 20000, and now it is 50000"):
        write(source, tmp_path / "out", max_shard_bytes=50_000)
    with pytest.raises(ResumeError, match="shuffle None, and now it is 1"):
        write(source, tmp_path / "out", shuffle=1)
    (source / "d" / "000.jpg").write_bytes(b"changed")
    with pytest.raises(ResumeError, match="samples"):
        write(source, tmp_path / "out")
    forced = write(source, tmp_path / "out", max_shard_bytes=50_000, force=True)
    assert forced.new_shards == forced.shards < first.shards
    assert len(contents(tmp_path / "out")) == forced.shards
    assert opened(tmp_path / "out")[0]["jpg"] == b"changed"


def test_a_failure_names_its_sample_and_keeps_what_is_complete(tmp_path: Path) -> None:
    broken = {"d/050"}

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] in broken and (tmp_path / "out").exists():
            raise ValueError("as told")
        return {"__key__": f"{sample['__key__']}-{'cls' if 'cls' in sample else 'jpg'}", "bin": b"x" * 1000}

    dataset = opened(photos(tmp_path / "in"), decode=decode)
    with pytest.raises(DecodeError, match="d/050"):
        bf.write_shards(dataset, tmp_path / "out", max_shard_bytes=20_000, progress=False)
    there = contents(tmp_path / "out")
    assert not any(name.endswith(".partial") for name in there)
    broken.clear()
    written = bf.write_shards(dataset, tmp_path / "out", max_shard_bytes=20_000, progress=False)
    assert written.samples == 120
    assert there.items() <= contents(tmp_path / "out").items()


def test_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    source = photos(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("about")
    (out / "mine.jpg").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"1 other objects, as 'mine\.jpg'"):
        write(source, out, force=True)
    (out / "mine.jpg").rename(out / "shard-000007.tar")
    with pytest.raises(ResumeError, match=r"'shard-000007\.tar' and no record"):
        write(source, out)
    assert (out / "shard-000007.tar").read_bytes() == b"mine"
    write(source, out, force=True)
    assert (out / "README.md").read_text() == "about"
    assert len(opened(out)) == 60


def test_the_source_and_its_shards_must_lie_apart(tmp_path: Path) -> None:
    source = photos(tmp_path / "in")
    with pytest.raises(ConfigError, match="lie in one another"):
        write(source, source / "out")
    with pytest.raises(ConfigError, match="lie in one another"):
        write(source, tmp_path)
    with pytest.raises(ConfigError, match="no samples"):
        bf.write_shards([], tmp_path / "empty", progress=False)
