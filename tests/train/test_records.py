"""Metrics and audit records: whole lines whatever happens, and an audit that counts what the model was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bucketfeed.errors import ConfigError
from bucketfeed.sampling.topology import Topology
from bucketfeed.train.records import Audit, Metrics, Records, audit, cut_audit, read_records

ONE = Topology()


def test_half_a_line_left_by_a_kill_is_cut_before_going_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3, "los', encoding="utf-8")
    assert read_records(path) == [{"n": 1}, {"n": 2}]
    records = Records(path, keep=True)
    records.write(n=3)
    records.close()
    assert read_records(path) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_new_run_begins_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    for n in (1, 2):
        records = Records(path, keep=False)
        records.write(n=n)
        records.close()
    assert read_records(path) == [{"n": 2}]


def test_every_line_is_json_even_when_the_loss_is_not_a_number(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, keep=False)
    metrics.write("epoch", steps=3, loss=float("nan"), lr=float("inf"), accuracy=0.5, name="schön")
    metrics.close()
    line = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert "NaN" not in line
    assert json.loads(line) == {"kind": "epoch", "steps": 3, "loss": None, "lr": None, "accuracy": 0.5, "name": "schön"}


def took(run_dir: Path, rank: int, batches: list[tuple[int, int, list[str]]]) -> None:
    records = Audit(run_dir, rank)
    for epoch, position, keys in batches:
        records.took(epoch, position, keys)
    records.close()


def test_the_audit_counts_each_sample_by_epoch_over_all_ranks(tmp_path: Path) -> None:
    took(tmp_path, 0, [(0, 4, ["a", "b"]), (1, 4, ["c", "a"])])
    took(tmp_path, 1, [(0, 4, ["c", "a"]), (1, 4, ["b", "d"])])
    assert audit(tmp_path) == {0: {"a": 2, "b": 1, "c": 1}, 1: {"a": 1, "b": 1, "c": 1, "d": 1}}


def test_what_was_taken_after_the_checkpoint_is_forgotten_on_resume(tmp_path: Path) -> None:
    took(tmp_path, 0, [(0, 2, ["a"]), (0, 4, ["c"]), (1, 2, ["a"]), (1, 4, ["c"])])
    took(tmp_path, 1, [(0, 2, ["b"]), (0, 4, ["d"]), (1, 2, ["b"])])
    cut_audit(tmp_path, {"epoch": 1, "position": 2}, ONE)
    assert audit(tmp_path) == {0: dict.fromkeys("abcd", 1), 1: {"a": 1, "b": 1}}
    cut_audit(tmp_path, {"epoch": 1, "position": 0}, ONE)
    assert audit(tmp_path) == {0: dict.fromkeys("abcd", 1)}


def test_a_run_that_starts_anew_forgets_the_ranks_of_the_one_before(tmp_path: Path) -> None:
    took(tmp_path, 0, [(0, 2, ["a"])])
    took(tmp_path, 7, [(0, 2, ["b"])])
    cut_audit(tmp_path, None, ONE)
    took(tmp_path, 0, [(0, 2, ["z"])])
    assert audit(tmp_path) == {0: {"z": 1}}


def test_each_rank_cuts_its_own_records_and_those_of_ranks_that_are_no_more(tmp_path: Path) -> None:
    for rank in range(5):
        took(tmp_path, rank, [(0, 5, ["a"]), (0, 10, ["b"])])
    cut_audit(tmp_path, {"epoch": 0, "position": 5}, Topology(1, 3))
    lines = [len(read_records(tmp_path / f"audit-rank{rank:05}.jsonl")) for rank in range(5)]
    assert lines == [2, 1, 2, 2, 1]
    for rank in (0, 2):
        cut_audit(tmp_path, {"epoch": 0, "position": 5}, Topology(rank, 3))
    assert audit(tmp_path) == {0: {"a": 5}}


@pytest.mark.parametrize("key", ["two\u2028lines", "\x85", "bad-\udcff-bytes", "schön", "a\nb", "\U0001f40d"])
def test_every_key_can_be_recorded(key: str, tmp_path: Path) -> None:
    took(tmp_path, 0, [(0, 2, [key, "b"]), (0, 4, ["c", "d"])])
    cut_audit(tmp_path, {"epoch": 0, "position": 2}, ONE)
    assert audit(tmp_path) == {0: {key: 1, "b": 1}}


def test_an_audit_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--audit"):
        audit(tmp_path)
