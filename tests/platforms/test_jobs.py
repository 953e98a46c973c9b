"""Jobs that are executed as SageMaker would: on one host and on two, interrupted, failing, with a full disk."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from container_jobs import EPOCHS, SAMPLES, Jobs

import bucketfeed.testing
from bucketfeed.errors import ConfigError
from bucketfeed.platforms.sagemaker.job import Job
from bucketfeed.testing import jobs as module
from bucketfeed.testing.job_files import download
from bucketfeed.testing.moto import MotoBucket
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.data import RunData
from bucketfeed.train.records import audit

SLOW = pytest.mark.timeout(300)  # bounds a job; each takes seconds on a machine that does nothing else
ODD = "it's \"odd\"; $HOME `id` \\n\n\tü€ {'a': 1} --audit"


@pytest.fixture
def jobs(moto_bucket: MotoBucket, tmp_path: Path) -> Jobs:
    return Jobs(moto_bucket, tmp_path)


def order_here(jobs: Jobs, tmp_path: Path) -> str:
    """Name of the order that a run on this machine has."""
    config = TrainConfig(
        f"{jobs.bucket.url}train/",
        seed=5,
        num_classes=3,
        storage_options=jobs.bucket.storage_options,
        cache_dir=str(tmp_path / "cache"),
    )
    return RunData(config).order_hash()


def spot_job(jobs: Jobs, options: dict[str, Any]) -> dict[str, Any]:
    """Submit a spot job of two hosts with two processes each; return what DescribeTrainingJob says of it."""
    source = jobs.folder / "source"
    source.mkdir()
    shutil.copy(Path(__file__).with_name("mine.py"), source)
    job = Job(
        bucket=jobs.bucket.name,
        role=jobs.bucket.server.create_role(f"trainer-{jobs.bucket.name}"),
        region="us-east-1",
        hyperparameters={**jobs.options, "test-data": f"{jobs.bucket.url}test/", **options},
        instance_count=2,
        processes=2,
        spot=True,
        source=source,
        environment={"OMP_NUM_THREADS": "1"},
    )
    return module.submitted(job, jobs.bucket.server.session())


def with_variable(description: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    return {**description, "Environment": {**description["Environment"], name: value}}


@SLOW
def test_a_job_of_one_host_has_the_order_of_a_local_run_and_leaves_model_and_records_c094(
    jobs: Jobs, tmp_path: Path
) -> None:
    description = jobs.description({"run-dir": f"/opt/ml/output/data/{ODD}"})
    done = jobs.run(description)
    if done is None:
        return
    assert done.status == "Completed", done.text()[-3000:]
    result = done.result()
    assert result["order_hash"] == order_here(jobs, tmp_path)
    assert result["epochs"] == EPOCHS
    assert result["accuracy"] > 0.3
    model = jobs.uploaded("model.tar.gz")
    assert sorted(model) == ["model.json", "model.pt"]
    assert set(torch.load(io.BytesIO(model["model.pt"]))) == {
        f"net.{n}.{p}" for n in (2, 3) for p in ("weight", "bias")
    }
    assert json.loads(model["model.json"])["finished"] is True
    assert list(jobs.uploaded("output.tar.gz")) == [f"{ODD}/metrics.jsonl"]
    assert len(list((done.folders["algo-1"] / "checkpoints").iterdir())) <= 2
    assert (done.folders["algo-1"] / "bucketfeed-cache").is_dir()


@SLOW
def test_a_submitted_spot_job_of_two_hosts_interrupted_in_mid_epoch_takes_each_sample_once_c097(
    jobs: Jobs, tmp_path: Path
) -> None:
    records = "/opt/ml/checkpoints/run"
    steps = SAMPLES // 16
    description = spot_job(jobs, {"audit": True, "run-dir": records, "save-seconds": 3600})
    waits = json.dumps({"at": steps + 2, "rank": 1})
    first = jobs.run(
        with_variable(description, "MINE", waits), stop_when=lambda _, line: "waiting for the stop" in line
    )
    if first is None:
        return
    assert first.status == "Interrupted"
    assert first.exit_codes == {"algo-1": 75, "algo-2": 75}, first.text()[-3000:]
    assert first.stop_seconds is not None
    assert first.stop_seconds < 60
    assert not any((folder / "output/failure").exists() for folder in first.folders.values())
    second = jobs.run(description)
    assert second is not None
    assert second.status == "Completed", second.text()[-3000:]
    assert f"resumed at sample {2 * 16} of epoch 1" in second.text()
    assert second.result()["world_size"] == 4
    assert second.result()["order_hash"] == order_here(jobs, tmp_path)
    run = tmp_path / "run"
    download(jobs.bucket.client, f"{description['CheckpointConfig']['S3Uri']}/run/", run)
    seen = audit(run)
    counts = {epoch: (len(keys), max(keys.values())) for epoch, keys in seen.items()}
    assert counts == dict.fromkeys(range(EPOCHS), (SAMPLES, 1))


@SLOW
def test_the_first_error_of_whatever_rank_is_the_reason_of_failure(jobs: Jobs) -> None:
    text = "the picture 'ü' is \"odd\""
    done = jobs.run(jobs.description(processes=2, mine={"at": 2, "rank": 1, "raise": text}))
    if done is None:
        return
    assert (done.status, done.exit_codes) == ("Failed", {"algo-1": 1}), done.text()[-3000:]
    assert done.failure_reason.startswith(f"AlgorithmError: rank 1: ValueError: {text} (on algo-1)\nTraceback")
    assert done.failure_reason.endswith("exit code: 1")
    assert done.logs[-1][1].endswith(f"training failed (exit code 1): rank 1: ValueError: {text} (on algo-1)")


@SLOW
def test_a_disk_that_fills_up_in_mid_run_fails_the_job_with_a_clear_last_line_c099(jobs: Jobs) -> None:
    small = "mount -t tmpfs -o size=6m none /opt/ml/checkpoints && "
    # Weights of 2 MB are saved at the start; with the optimizer's two moments they are 6 MB.
    done = jobs.run(jobs.description({"save-steps": 1}, mine={"width": 10_000}, before=small))
    if done is None:
        return
    assert (done.status, done.exit_codes) == ("Failed", {"algo-1": 1}), done.text()[-3000:]
    last = done.logs[-1][1]
    assert "the checkpoint could not be written to" in last
    assert "free space, or name another place" in last
    assert "the checkpoint could not be written to" in done.failure_reason


def test_who_does_not_stop_is_killed_after_the_grace_and_leaves_nothing_running(jobs: Jobs) -> None:
    stubborn = "trap '' TERM; sleep 1000 & echo up; while :; do wait; done"
    done = jobs.run(
        jobs.description(command=stubborn, hosts=2), stop_when=lambda host, line: line == "up", grace_seconds=0.3
    )
    if done is None:
        return
    assert done.status == "Interrupted"
    assert set(done.exit_codes.values()) == {-signal.SIGKILL}
    assert done.stop_seconds is not None
    assert 0.3 <= done.stop_seconds < 10
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(str(jobs.folder).encode() in command for command in running)


def test_the_runtime_that_was_asked_for_is_the_most_that_a_job_gets(jobs: Jobs) -> None:
    waits = "trap 'echo told; exit 75' TERM; sleep 1000 & wait"
    done = jobs.run(jobs.description(command=waits, seconds=1))
    if done is None:
        return
    assert (done.status, done.exit_codes, done.logs) == ("Stopped", {"algo-1": 75}, (("algo-1", "told"),))


def test_each_host_is_process_1_of_a_name_of_its_own_and_finds_the_others(jobs: Jobs) -> None:
    command = "echo $$ $(hostname) $(getent hosts algo-2 | cut -d' ' -f1) $(ls /opt/ml/input/data); exit 0"
    done = jobs.run(jobs.description(command=command, hosts=2))
    if done is None:
        return
    assert sorted(done.logs) == [
        ("algo-1", "1 algo-1 127.0.0.2 code held-out"),
        ("algo-2", "1 algo-2 127.0.0.2 code held-out"),
    ]


def test_the_image_has_every_package_but_bucketfeed_and_pip_fetches_nothing(jobs: Jobs) -> None:
    command = (
        "! python3 -c 'import bucketfeed' && pip install 'torch>=2' boto3 && ! pip install surely-not-installed-here "
        "&& python3 -c 'import importlib.metadata as m; print(m.version(\"torch\"))'"
    )
    done = jobs.run(jobs.description(command=command))
    if done is None:
        return
    assert done.status == "Completed", done.text()
    assert "No module named 'bucketfeed'" in done.text()
    assert done.logs[-1][1] == version("torch")


def test_where_no_namespaces_are_given_that_is_told_with_the_next_step(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "gives no namespaces: .*(Operation not permitted|is not installed); run as root on Linux"
    for command in (["sh", "-c", "echo unshare: Operation not permitted >&2; exit 1"], ["no-such-unshare"]):
        monkeypatch.setattr(module, "_unshare", lambda command=command: command)
        with pytest.raises(ConfigError, match=told):
            bucketfeed.testing.run_training_job(jobs.description(), tmp_path / "run", s3=jobs.bucket.client)


def test_who_is_not_root_and_has_no_folder_to_mount_on_is_told_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_unshare", lambda: [])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(module, "_ROOT", str(tmp_path / "ml"))
    with pytest.raises(ConfigError, match=r"is not there to be mounted on: sudo mkdir -p .*/ml"):
        module.check_allowed()
    (tmp_path / "ml").mkdir()
    module.check_allowed()


def test_a_folder_with_files_and_a_channel_of_another_kind_are_refused(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    description = jobs.description()
    expected = "not empty"
    try:
        module.check_allowed()
    except ConfigError:
        expected = "no namespaces"
    with pytest.raises(ConfigError, match=expected):
        module.run_training_job(description, tmp_path / "old", s3=jobs.bucket.client)
    description["InputDataConfig"][1]["DataSource"]["S3DataSource"]["S3DataType"] = "ManifestFile"
    with pytest.raises(ConfigError, match=r"held-out is no S3Prefix|no namespaces"):
        module.run_training_job(description, tmp_path / "run", s3=jobs.bucket.client)
