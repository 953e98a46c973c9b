from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import shutil
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import STUB
from PIL import Image

import bucketfeed as bf
from bucketfeed.cli.train import parser
from bucketfeed.errors import AccessError, BucketfeedError, ConfigError
from bucketfeed.platforms import colab
from bucketfeed.platforms.colab import place as places
from bucketfeed.store.faults import our_error
from bucketfeed.testing.digits import digits
from bucketfeed.testing.moto import MotoBucket

GIB = 1 << 30
Disk = namedtuple("Disk", "total used free")


@pytest.fixture
def on_colab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Colab's package can be imported, and forgets afterwards that it was."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(STUB))
    yield
    os.environ.pop("GOOGLE_APPLICATION_CREDENTIALS", None)
    for name in [name for name in sys.modules if name.startswith("google.colab")]:
        del sys.modules[name]


@pytest.fixture
def digit_folder(tmp_path: Path) -> Path:
    for digit in digits()[:120]:
        path = tmp_path / "digits" / str(digit.label) / f"{digit.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(digit.png)
    return tmp_path / "digits"


class TestSignIn:
    def test_without_colabs_package_this_is_not_colab(self) -> None:
        assert not colab.on_colab()

    @pytest.mark.usefixtures("on_colab")
    def test_secrets_become_the_environment_of_training_and_never_its_arguments(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("SECRET_AWS_ACCESS_KEY_ID", "AKIA")
        monkeypatch.setenv("SECRET_AWS_SECRET_ACCESS_KEY", "hush-hush\n")
        assert colab.on_colab()
        access = colab.sign_in("s3")
        assert access.environment == {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "hush-hush"}
        assert access.storage_options == {"key": "AKIA", "secret": "hush-hush"}
        arguments = access.place("s3://bucket/", work_dir=tmp_path).arguments()
        assert "hush" not in repr(access) + str(access) + repr(arguments)

    @pytest.mark.usefixtures("on_colab")
    def test_missing_and_closed_secrets_are_named_with_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(AccessError, match="not signed in to S3: no secret AWS_ACCESS_KEY_ID and no secret AWS_SEC"):
            colab.sign_in("s3")
        monkeypatch.setenv("SECRET_AWS_ACCESS_KEY_ID", "closed")
        with pytest.raises(AccessError, match=r"AWS_ACCESS_KEY_ID is closed to this notebook: allow `Notebook access`"):
            colab.sign_in("s3")

    @pytest.mark.usefixtures("on_colab")
    def test_google_is_signed_in_to_by_colab(self, monkeypatch: pytest.MonkeyPatch) -> None:
        access = colab.sign_in("gcs")
        assert os.environ["GOOGLE_APPLICATION_CREDENTIALS"] == "/content/.adc/adc.json"  # inherited by training
        assert access.storage_options == {}
        monkeypatch.setenv("REFUSE_SIGN_IN", "1")
        with pytest.raises(AccessError, match=r"not signed in to Google: .* run the sign-in cell again"):
            colab.sign_in("gcs")

    @pytest.mark.usefixtures("on_colab")
    def test_a_public_bucket_needs_no_sign_in(self, tmp_path: Path) -> None:
        access = colab.sign_in("s3", anonymous=True)
        arguments = access.place("s3://public/", work_dir=tmp_path).arguments()
        assert parser().parse_args(arguments).storage_options == {"anon": True}
        assert access.storage_options == {"anon": True}

    @pytest.mark.parametrize(
        ("source", "data", "told"),
        [
            ("s3", "", "source is 's3', so data must begin with s3://, not ''"),
            ("gcs", "s3://bucket/", "source is 'gcs', so data must begin with gs://, not 's3://bucket/'"),
            ("s3", "s3:///a", "names no bucket"),
        ],
    )
    def test_data_that_are_not_in_the_source_are_refused(self, source: Any, data: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            colab.sign_in(source).place(data)

    def test_an_unknown_source_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="source must be one of demo, s3, gcs, not 'azure'"):
            colab.sign_in("azure")  # type: ignore[arg-type]


class TestPlace:
    def test_all_its_arguments_are_options_of_training(self, tmp_path: Path) -> None:
        place = colab.Place("s3://b/train/", tmp_path, test_data="s3://b/test/", checkpoint_dir="s3://b/run/")
        given = parser().parse_args(place.arguments())
        assert (given.data, given.test_data, given.checkpoint_dir) == ("s3://b/train/", "s3://b/test/", "s3://b/run/")
        assert Path(given.cache_dir).is_relative_to(tmp_path)
        assert given.save_seconds <= 60
        assert int(given.cache_limit) == place.cache_limit_bytes

    def test_c104_the_default_cache_is_a_share_of_free_space_with_a_floor_kept_free_and_logged(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        for free, limit in ((34, 17), (8, 3), (5.5, 0.55), (2, 0.2)):
            usage = Disk(70 * GIB, int((70 - free) * GIB), int(free * GIB))
            monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
            cache = bf.DiskCache(tmp_path / str(free))
            assert cache.limit_bytes == pytest.approx(limit * GIB, abs=1 << 20)
            assert colab.Place("s3://b/", tmp_path / str(free)).cache_limit_bytes == cache.limit_bytes
        assert f"cache in {tmp_path / '34'}: at most 17 GiB, of 34 GiB free" in caplog.text
        assert "at most 200 MiB" not in colab.Place("s3://b/", tmp_path).summary()
        assert "of 2 GiB free on its disk" in colab.Place("s3://b/", tmp_path).summary()

    def test_c102_data_and_cache_on_google_drive_are_warned_of_also_behind_a_link(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        drive = tmp_path / "drive"
        (drive / "MyDrive" / "data").mkdir(parents=True)
        monkeypatch.setattr(places, "_DRIVE_MOUNTS", (drive,))
        link = tmp_path / "data"
        link.symlink_to(drive / "MyDrive" / "data")
        for data in (str(link), str(drive / "MyDrive" / "data"), f"file://{link}"):
            assert colab.on_drive(data)
        assert not colab.on_drive("s3://content/drive/")
        told = colab.Place(str(link), drive / "work", checkpoint_dir="s3://b/run/").warnings()
        assert [("Google Drive" in text, "bucket" in text or "own disk" in text) for text in told] == [(True, True)] * 2
        assert colab.Place("s3://b/", tmp_path, checkpoint_dir="s3://b/run/").warnings() == []

    def test_checkpoints_that_would_be_lost_with_the_runtime_are_warned_of(self, tmp_path: Path) -> None:
        assert "checkpoint_dir" in colab.Place("s3://b/", tmp_path).warnings()[0]

    @pytest.mark.usefixtures("on_colab")
    def test_egress_from_s3_is_said_in_dollars(self) -> None:
        assert "about 9.00 US dollars" in colab.costs("s3", 100 * 10**9, 200 * 10**9)
        assert "Colab is not in AWS" in colab.costs("s3", 10**9, 1)
        assert "once, for all of it fits" in colab.costs("s3", 10**9, 2 * 10**9)
        assert "953.67 MiB exceed the cache" in colab.costs("s3", 2 * 10**9, 10**9)
        assert "nothing" in colab.costs("demo", 10**9, 1)
        assert "leaves the bucket's location" in colab.costs("gcs", 10**9, 1)

    def test_a_gpu_that_is_wanted_but_not_there_is_told_before_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert "no GPU" in colab.machine("auto")
        with pytest.raises(ConfigError, match="Change runtime type"):
            colab.machine("cuda")

    def test_a_gpu_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho 'Tesla T4, 15360 MiB'\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert colab.gpu() == "Tesla T4, 15360 MiB"
        assert colab.machine("cuda").startswith("Tesla T4")


def test_c102_an_input_output_error_of_a_mounted_store_is_tried_again_and_named(
    monkeypatch: pytest.MonkeyPatch, digit_folder: Path
) -> None:
    opened, refused, real = [0], [0], os.open

    def every_50th_fails(path: Any, *more: Any, **options: Any) -> int:
        if str(path).endswith(".png"):
            opened[0] += 1
            if opened[0] % 50 == 0:
                refused[0] += 1
                raise OSError(errno.EIO, "Input/output error", path)
        return real(path, *more, **options)

    dataset = bf.open_dataset(digit_folder, cache=None)
    monkeypatch.setattr(os, "open", every_50th_fails)
    assert len({dataset[i]["__key__"] for i in range(len(dataset))}) == 120
    assert refused[0] == 2
    assert "Input/output error" in str(our_error(OSError(errno.EIO, "Input/output error"), "file:///a", tries=10))


class TestTrain:
    def arguments(self, digit_folder: Path, tmp_path: Path) -> list[str]:
        place = colab.Place(str(digit_folder), tmp_path / "work")
        return [*place.arguments(), "--image-size", "8", "--batch-size", "8", "--seed", "3", "--device", "cpu"]

    def test_stopped_by_the_notebooks_button_it_saves_and_goes_on_when_run_again(
        self, digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        arguments = [*self.arguments(digit_folder, tmp_path), "--epochs", "400"]
        lines: list[str] = []

        def button(line: str) -> None:
            lines.append(line)
            if "epoch 1: train" in line:
                raise KeyboardInterrupt

        with pytest.raises(BucketfeedError, match="stopped; run this cell again to go on"):
            colab.train(arguments, show=button)
        assert any("stopped by SIGTERM" in line and "saved" in line for line in lines)
        epoch = max(int(line.split("epoch ")[1].split(":")[0]) for line in lines if ": train loss" in line) + 1
        again = colab.train([*arguments[:-1], str(epoch + 1)], show=lines.append)
        assert again["epochs"] == epoch + 1
        assert any("resumed at sample" in line for line in lines)
        assert again["steps"] == (epoch + 1) * 15

    def test_an_error_stops_the_notebook_with_what_training_said_last(self, tmp_path: Path) -> None:
        lines: list[str] = []
        with pytest.raises(BucketfeedError, match=r"exit code 1; what it said last:\n(.*\n)*.*NotFoundError"):
            colab.train(["--data", str(tmp_path / "nowhere"), "--run-dir", str(tmp_path)], show=lines.append)
        assert "NotFoundError" in lines[-1]

    def test_refused_credentials_point_to_the_sign_in_cell_c106(
        self, moto_bucket: MotoBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        server = moto_bucket.server.environment
        none = {name: value for name, value in server.items() if "KEY" not in name}
        refused = none | {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
        with pytest.raises(BucketfeedError, match=r"run the sign-in cell, then this one; it goes on where it was"):
            colab.train(["--data", moto_bucket.url, "--run-dir", str(tmp_path)], refused, show=lambda line: None)


class TestPictures:
    def test_samples_are_shown_from_all_over_the_data(self, digit_folder: Path) -> None:
        picture = Image.open(io.BytesIO(colab.sample_pictures(bf.open_dataset(digit_folder, cache=None))))
        assert picture.width > 900
        assert len(np.unique(np.asarray(picture))) > 20

    def test_samples_without_a_picture_are_shown_by_their_fields(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("no picture")
        assert colab.sample_pictures(bf.open_dataset(tmp_path, cache=None))[:4] == b"\x89PNG"

    @pytest.mark.parametrize(
        ("share", "hits", "misses", "told"),
        [
            (0.01, 0, 100, "Data kept up: 1.0%"),
            (0.4, 10, 100, "Training waited for data: 40.0% .* a second epoch, from the cache, is faster"),
            (0.4, 100, 10, "Training waited for data: 40.0% .* --num-workers"),
        ],
    )
    def test_the_verdict_says_who_waited_and_what_to_do(
        self, share: float, hits: int, misses: int, told: str, tmp_path: Path
    ) -> None:
        record = {"kind": "epoch", "epoch": 0, "loss": None, "accuracy": 0.5, "samples_per_second": 10.0}
        lines = [record | {"wait_share": share, "cache_hits": hits, "cache_misses": misses}]
        lines.append({"kind": "evaluation", "epoch": 0, "loss": 0.5, "accuracy": None})
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "ep')
        assert re.match(told, colab.verdict(tmp_path))
        assert colab.curves(tmp_path)[:4] == b"\x89PNG"

    def test_without_a_run_they_say_so(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="train first"):
            colab.verdict(tmp_path)
        (tmp_path / "metrics.jsonl").touch()
        assert colab.verdict(tmp_path) == "No epoch is finished yet."
        assert colab.curves(tmp_path)[:4] == b"\x89PNG"
