"""launch.py sagemaker --demo: a spot job's whole life, told as it is, and refused where it can't be."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketfeed.cli import launch
from bucketfeed.errors import ConfigError
from bucketfeed.testing import jobs, spot_demo
from bucketfeed.testing.digits import digits_bucket
from bucketfeed.testing.spot_demo import EPOCHS, SEED, Life, problems
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.data import RunData
from bucketfeed.train.model import small_cnn

LAUNCH = Path(__file__).parents[2] / "entrypoints" / "launch.py"
KEYS = [f"{number:04}" for number in range(1408)]
RANKS = 4


def started(folder: Path, run_dir: Path) -> subprocess.Popen[str]:
    """The command, with an AWS configuration that leads nowhere: whatever asks it fails."""
    home = folder / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws/config").write_text("[profile own]\nregion = eu-west-1\nendpoint_url = http://127.0.0.1:9\n")
    own = {"HOME": str(home), "TMPDIR": str(folder), "AWS_PROFILE": "own", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    own |= {"AWS_ACCESS_KEY_ID": "own", "AWS_SECRET_ACCESS_KEY": "own", "AWS_EC2_METADATA_DISABLED": "true"}
    return subprocess.Popen(
        [sys.executable, LAUNCH, "sagemaker", "--demo", str(run_dir)],
        env={**os.environ, **own},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Any:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def refused() -> bool:
    try:
        jobs.check_allowed()
    except ConfigError:
        return True
    return False


def order_here(folder: Path) -> str:
    with digits_bucket(only_shards=True) as bucket:
        options = {"storage_options": bucket.storage_options, "cache_dir": str(folder / "cache")}
        return RunData(TrainConfig(f"{bucket.url}shards/train/", seed=SEED, num_classes=10, **options)).order_hash()


def running(word: str) -> list[str]:
    """Command lines of processes that were started with the word in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(path.with_name("cmdline").read_text())
    return found


@pytest.mark.timeout(300)
def test_the_life_of_a_spot_job_ends_with_a_table_that_holds(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs"
    run_dir.mkdir()
    (run_dir / ".bucketfeed-demo").touch()
    (run_dir / "left-by-the-last-one").touch()
    with ended(started(tmp_path, run_dir)) as process:
        said, told = process.communicate(timeout=280)
    if refused():
        assert process.returncode == 2
        assert "gives no namespaces" in told
        return
    assert process.returncode == 0, said[-4000:] + told[-4000:]
    table = dict(re.findall(r"^(\w[\w ]*?)  +(\S.*)$", said[said.index("\nsubmitted ") :], re.MULTILINE))
    order = order_here(tmp_path)
    assert table["order hash"] == f"job {order}, local run {order}"
    assert table["seen exactly once"].startswith("1,408, 1,408, 1,408 samples in epochs 0 to 2")
    assert table["interrupted"] == re.sub(", on 4 ranks$", "", table["restarted"])
    sample = int(re.fullmatch(r"at sample ([\d,]+) of epoch 1", table["interrupted"])[1].replace(",", ""))  # type: ignore[index]
    assert 0 < sample < 1408
    assert sample % (RANKS * 8) == 0
    assert f"resumed at sample {sample} of epoch 1" in said
    assert table["finished"] == f"{EPOCHS} epochs, {EPOCHS * 44} steps"
    assert "all of it holds" in said
    assert list(torch.load(run_dir / "model/model.pt", weights_only=True)) == list(small_cnn(10).state_dict())
    assert not (run_dir / "left-by-the-last-one").exists()
    assert [path.name for path in tmp_path.glob("bucketfeed-*")] == []
    assert running(str(tmp_path / "home")) == []


@pytest.mark.timeout(120)
def test_ctrl_c_ends_it_and_leaves_no_process(tmp_path: Path) -> None:
    if refused():
        return
    with ended(started(tmp_path, tmp_path / "runs")) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "container: host algo-1, 1 of 2" in line:  # its ranks come next
                break
        os.killpg(process.pid, signal.SIGINT)
        said, told = process.communicate(timeout=60)
    assert process.returncode == 75, told[-3000:]
    assert "stopped; nothing is left running" in said
    assert running(str(tmp_path)) == []
    assert list(tmp_path.glob("bucketfeed-*")) == []


def test_where_no_namespaces_are_given_that_is_told_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "_unshare", lambda: ["sh", "-c", "echo unshare: Operation not permitted >&2; exit 1"])
    assert launch.main(["sagemaker", "--demo", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr()
    assert "gives no namespaces: unshare: Operation not permitted; run as root on Linux" in said.err
    assert said.out == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "more", [("--bucket", "mine"), ("--instance-count", "3"), ("--local-container",), ("--epochs", "5")]
)
def test_what_contradicts_the_demonstration_is_refused(more: tuple[str, ...], capsys: Any) -> None:
    assert launch.main(["sagemaker", "--demo", *more]) == 2
    assert f"leave away {more[0]}" in capsys.readouterr().err


GOOD = Life(
    interrupted=(1, 480),
    resumed=(1, 480),
    result={"order_hash": "ab", "accuracy": 0.98, "epochs": 3, "steps": 132, "world_size": RANKS},
    seen={epoch: Counter(KEYS) for epoch in range(EPOCHS)},
    model_accuracy=0.98,
    local={"order_hash": "ab", "accuracy": 0.99},
    local_seen={epoch: Counter(KEYS) for epoch in range(EPOCHS)},
)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, []),
        ({"interrupted": (1, 0), "resumed": (1, 0)}, ["at sample 0 of epoch 1, which is not in the midst"]),
        ({"resumed": (1, 512)}, ["interrupted at sample 480 of epoch 1 and resumed at sample 512 of epoch 1"]),
        ({"resumed": None}, ["interrupted at sample 480 of epoch 1 and resumed at no sample"]),
        ({"local": {"order_hash": "cd", "accuracy": 0.99}}, ["the job's order is ab, the local run's cd"]),
        ({"local": {"order_hash": "ab", "accuracy": 0.9}}, ["accuracy is 0.9800: below 0.95, or far from 0.9000"]),
        ({"model_accuracy": 0.1}, ["the model fetched has an accuracy of 0.1, the job's was 0.98"]),
        (
            {"seen": GOOD.seen | {1: Counter([*KEYS, KEYS[0]])}},
            ["epoch 1: 1 samples more than once, 1,408 of 1,408", "epoch 1: the job took other samples"],
        ),
        (
            {"seen": GOOD.seen | {2: Counter(KEYS[1:])}},
            ["epoch 2: 0 samples more than once, 1,407 of 1,408", "epoch 2: the job took other samples"],
        ),
    ],
)
def test_whatever_does_not_hold_is_a_problem_of_its_own(changed: dict[str, Any], told: list[str]) -> None:
    found = problems(replace(GOOD, **changed))
    assert len(found) == len(told)
    assert all(part in problem for part, problem in zip(told, found, strict=True))


def test_a_problem_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    life = replace(GOOD, resumed=(1, 512))
    assert spot_demo.concluded(GOOD, "job", Path("model.pt")) == 0
    assert spot_demo.concluded(life, "job", Path("model.pt")) == 1
    assert "NOT AS IT SHOULD BE: it was interrupted" in capsys.readouterr().out
