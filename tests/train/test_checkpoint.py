"""Checkpoints: whole or not there, newest first, and never lost to a crash in the middle."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketfeed.errors import AccessError, CacheError, NotFoundError, ReadError, ResumeError
from bucketfeed.testing.gcs import GcsBucket
from bucketfeed.testing.moto import MotoBucket
from bucketfeed.train.checkpoint import Checkpoints


@pytest.fixture(params=["folder", "memory", "moto_bucket", "gcs_bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any] | None]:
    if request.param == "folder":
        return str(tmp_path / "check points#1"), None
    if request.param == "memory":
        return f"memory://checkpoints/{tmp_path.name}", None
    bucket: MotoBucket | GcsBucket = request.getfixturevalue(request.param)
    return f"{bucket.url}run 1/checkpoints/", bucket.storage_options


def state(number: int) -> dict[str, Any]:
    return {"number": number, "weights": torch.full((3,), float(number))}


def files(checkpoints: Checkpoints) -> list[str]:
    return checkpoints._names()


def test_what_is_saved_last_is_loaded_and_the_last_two_are_kept(place: tuple[str, Any]) -> None:
    checkpoints = Checkpoints(*place)
    assert checkpoints.load() is None
    urls = [checkpoints.save(state(n), epoch=n // 2, position=10 * n) for n in range(12)]
    loaded = Checkpoints(*place).load()
    assert loaded is not None
    assert loaded["number"] == 11
    assert torch.equal(loaded["weights"], torch.full((3,), 11.0))
    assert files(checkpoints) == [url.rsplit("/", 1)[1] for url in urls[-2:]]


def test_a_run_that_starts_anew_in_the_same_place_comes_after_what_it_finds(place: tuple[str, Any]) -> None:
    checkpoints = Checkpoints(*place)
    for epoch in (7, 8, 9):
        checkpoints.save(state(epoch), epoch, 0)
    Checkpoints(*place).save(state(0), 0, 0)
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded["number"] == 0


@pytest.mark.parametrize("damage", ["cut", "emptied", "one bit"])
def test_c097_a_broken_newest_checkpoint_gives_way_to_the_one_before(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(state(1), 0, 10)
    newest = Path(checkpoints.save(state(2), 0, 20).removeprefix("file://"))
    data = bytearray(newest.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "emptied":
        data = bytearray()
    else:
        data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        loaded = checkpoints.load()
    assert loaded is not None
    assert loaded["number"] == 1
    assert newest.name in caplog.text
    assert "trying the checkpoint before it" in caplog.text
    # And what is saved next is the newest, before the broken one.
    checkpoints.save(state(3), 0, 15)
    after = checkpoints.load()
    assert after is not None
    assert after["number"] == 3


def test_where_all_are_broken_the_run_does_not_silently_start_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    for number in (1, 2):
        Path(checkpoints.save(state(number), 0, number).removeprefix("file://")).write_bytes(b"")
    with pytest.raises(ResumeError, match=r"none of the 2 checkpoints .* --resume never"):
        checkpoints.load()


def test_what_a_killed_save_has_left_is_no_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".saving-abc"
    left.mkdir()
    (left / "state").write_bytes(b"half of it")
    checkpoints = Checkpoints(str(tmp_path))
    assert checkpoints.load() is None
    checkpoints.save(state(1), 0, 1)
    assert [path.name for path in tmp_path.iterdir()] == files(checkpoints)


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best.pt").write_bytes(b"the user's own")
    checkpoints = Checkpoints(str(tmp_path))
    for number in range(4):
        checkpoints.save(state(number), 0, number)
    assert (tmp_path / "checkpoint-best.pt").read_bytes() == b"the user's own"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((CacheError, NotFoundError), match=rf"{tmp_path}/file/checkpoints.* name another"):
        Checkpoints(str(tmp_path / "file" / "checkpoints")).save(state(1), 0, 0)


def test_a_missing_bucket_is_named_at_the_first_save(moto_bucket: MotoBucket) -> None:
    checkpoints = Checkpoints("s3://no-such-bucket-here/run/", moto_bucket.storage_options)
    with pytest.raises(NotFoundError, match="s3://no-such-bucket-here/run"):
        checkpoints.save(state(1), 0, 0)


def test_a_store_that_does_not_answer_is_an_error_and_no_reason_to_start_anew() -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises((ReadError, AccessError), match="s3://bucket/run"):
        Checkpoints("s3://bucket/run/", options).load()
