"""Ray: the same training on a real cluster that loses a node and is stopped, and index builds by its tasks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

import bucketfeed as bf
from bucketfeed.cli import train as train_line
from bucketfeed.cli.launch import main
from bucketfeed.cli.ray import configured
from bucketfeed.errors import ConfigError
from bucketfeed.platforms.ray import RayPlace
from bucketfeed.train.checkpoint import Checkpoints
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.loop import train
from bucketfeed.train.records import audit, read_records

HERE = Path(__file__).parent
SECONDS = 240.0  # bounds a try; a start of workers takes 20 s on two idle cores, most of it to import Ray
TRIES = 2
BOTH_TRIES = pytest.mark.timeout(TRIES * (SECONDS + 90))


@dataclass(frozen=True)
class Runs:
    """What has been done on a cluster, and where."""

    folder: Path
    options: list[str]
    found: dict[str, Any]
    log: str

    def audited(self, name: str) -> dict[int, Counter[str]]:
        return audit(self.folder / name)

    def worlds(self, name: str) -> list[int]:
        """Return how many workers each start of a run had."""
        records = read_records(self.folder / name / "metrics.jsonl")
        return [record["world_size"] for record in records if record["kind"] == "start"]


@contextlib.contextmanager
def two_nodes(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """A cluster of two nodes for the `with` block, which gets its address and the second node; all of it ends then."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "ray_cluster.py")],
        env=environment,
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    started: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        started = psutil.Process(process.pid).children(recursive=True)
        yield told
    finally:
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        for left in psutil.wait_procs(started, timeout=20)[1]:
            left.kill()


def pictures(folder: Path, samples: int = 96) -> None:
    draw = np.random.default_rng(0)
    for number in range(samples):
        path = folder / f"class{number % 3}" / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 60, (8, 8, 3)) + 90 * (number % 3)
        Image.fromarray(pixels.astype(np.uint8)).save(path)


def tars(folder: Path) -> None:
    folder.mkdir()
    for number in range(4):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for sample in range(20):
                member = tarfile.TarInfo(f"{number}/{sample:03}.bin")
                member.size = 1000 * (sample + 1)
                tar.addfile(member, io.BytesIO(bytes(member.size)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All that is done on one cluster: starting one, and each process that imports Ray, takes seconds.

    Ray may be late on a busy machine, and start the first workers on one node only: then there is another try.
    """
    for left in reversed(range(TRIES)):
        try:
            done = all_runs(tmp_path_factory.mktemp("ray"))
        except TimeoutError:
            if not left:
                raise
        else:
            if done.worlds("falls") == [2, 1]:
                break
    return done


def all_runs(folder: Path) -> Runs:
    """Do all that is done on a cluster, with `folder` for data and outcome. Raises `TimeoutError`."""
    pictures(folder / "data")
    for name in ("good", "bad"):
        tars(folder / name)
    (folder / "bad" / "2.tar").write_bytes(b"\xff" * 5000)
    options = [
        *("--data", str(folder / "data"), "--audit", "--model", "falling:net", "--image-size", "8"),
        *("--batch-size", "4", "--seed", "5", "--lr", "0.01", "--save-steps", "5"),
    ]
    own = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets may not be long
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in launchers} | {
        "RAY_TMPDIR": own,
        "RAY_AUTH_MODE": "disabled",  # else a token is written to the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        # After a node's death Ray asks once more for as many workers as before, and waits this long for the room.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "4",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "FALLING": str(folder),
    }
    log = folder / "log"
    try:
        with two_nodes(environment) as told, open(log, "wb") as stderr:
            (folder / "doomed").write_text(told["second"])
            done = subprocess.run(
                [sys.executable, str(HERE / "ray_runs.py"), told["address"], str(folder), *options],
                env=environment,
                cwd=HERE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired as e:
        raise TimeoutError(f"{e}; the end of its log: {log.read_text()[-5000:]}") from e
    finally:
        shutil.rmtree(own, ignore_errors=True)
    assert done.returncode == 0, log.read_text()[-5000:]
    return Runs(folder, options, json.loads(done.stdout.splitlines()[-1]), log.read_text())


@BOTH_TRIES
def test_a_run_that_loses_a_node_goes_on_with_fewer_workers_and_takes_every_sample_once(runs: Runs) -> None:
    assert (runs.folder / "fallen").exists()
    assert runs.found["falls"]["code"] == 0, runs.log[-5000:]
    assert runs.worlds("falls") == [2, 1]
    assert len(list((runs.folder / "falls").glob("audit-rank*.jsonl"))) == 2
    seen = runs.audited("falls")
    assert list(seen) == [0, 1, 2, 3]
    assert all(len(counts) == 96 and set(counts.values()) == {1} for counts in seen.values())


def test_the_last_line_is_the_result_and_its_order_is_that_of_every_place(runs: Runs) -> None:
    result = json.loads(runs.found["falls"]["last"])
    dataset = bf.open_dataset(str(runs.folder / "data"), cache=None)
    assert result["order_hash"] == bf.order_hash(dataset, seed=5, epoch=0)
    assert result["world_size"] == 1
    assert not runs.found["falls"]["connected"]  # a connection of the launcher's own is closed


def test_rays_record_of_the_run_has_the_result_and_our_checkpoints(runs: Runs) -> None:
    record = json.loads((runs.folder / "storage" / "falls" / "checkpoint_manager_snapshot.json").read_text())
    [kept] = record["checkpoint_results"]
    assert kept["metrics"] == json.loads(runs.found["falls"]["last"])
    newest = Checkpoints(str(runs.folder / "storage" / "falls" / kept["checkpoint_dir_name"])).load()
    assert newest is not None
    assert {"model", "cursor"} <= set(newest)
    assert newest["cursor"]["epoch"] == 4


@BOTH_TRIES
def test_a_run_that_is_stopped_saves_and_goes_on_where_there_is_no_ray(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs.found["stops"] == {"code": 75, "last": "", "connected": True}  # the connection was the caller's
    assert "launch.py: stopped by SIGTERM in epoch" in runs.log
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("FALLING", str(runs.folder))
    reached = max(runs.audited("stops"))
    values = train_line.values(
        [*runs.options, "--epochs", str(reached + 1), "--run-dir", str(runs.folder / "stops"), "--no-progress"]
    )
    train(TrainConfig(**{**values, "checkpoint_dir": str(runs.folder / "storage" / "stops" / "checkpoints")}))
    seen = runs.audited("stops")
    assert list(seen) == list(range(reached + 1))
    assert all(len(counts) == 96 and set(counts.values()) == {1} for counts in seen.values())
    assert runs.worlds("stops") == [1, 1]


@BOTH_TRIES
def test_an_index_built_on_ray_is_the_one_that_is_built_here(runs: Runs) -> None:
    found = dict(runs.found["index"])
    error = found.pop("error")
    assert error.startswith("bucketfeed.errors.FormatError: ")
    assert "2.tar" in error
    assert found == {
        "samples": 80,
        "same bytes": True,
        "same counts": True,
        "cancelled": True,
        "raises": True,
        "works on": [3, 1],
    }


def test_workers_that_all_refuse_need_no_restart_and_one_alone_brings_the_others_down(runs: Runs) -> None:
    assert runs.found["refusals"] == [[True, True], False, "ConfigError('no such module')"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"workers": 0}, "--num-workers must be at least 1, not 0"),
        ({"workers": 2, "min_workers": 3}, "--min-workers must be from 1 to --num-workers, which is 2, not 3"),
        ({"cpus_per_worker": 0.0}, "--cpus-per-worker must be greater than 0"),
        ({"gpus_per_worker": 2}, "a rank uses one GPU"),
        ({"max_failures": -2}, "--max-failures"),
        ({"address": "ray://head:10001"}, "--address ray://head:10001 .*ray job submit"),
    ],
    ids=str,
)
def test_what_cannot_work_is_told_before_ray_is_asked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RayPlace(**options)


def test_workers_get_plain_values_that_hold_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = RayPlace(storage="runs", name="one")
    values = configured(["--data", "s3://b/t/", "--test-data", "test/", "--run-dir", "r"], place, place.folder())
    assert json.loads(json.dumps(values)) == values
    assert values["data"] == "s3://b/t/"
    assert values["test_data"] == f"{tmp_path}/test/"
    assert values["run_dir"] == f"{tmp_path}/r"
    assert values["checkpoint_dir"] == f"{tmp_path}/runs/one/checkpoints"
    assert values["cache_dir"] is None
    elsewhere = RayPlace(storage="s3://bucket/ray", name="one").folder()
    assert configured(["--data", "d"], place, elsewhere)["checkpoint_dir"] == "s3://bucket/ray/one/checkpoints"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data", "d", "--device", "cuda"], "--gpus-per-worker 1"),
        (["--data", "d", "--epochs", "0"], "epochs must be"),
        (["--data", "d", "--num-workers", "0"], "--num-workers must be at least 1"),
    ],
    ids=str,
)
def test_wrong_options_end_with_code_2_and_without_ray(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ray", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_ray_absent_is_told_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["ray", "--data", str(tmp_path), "--storage", str(tmp_path)]) == 2
    assert "pip install 'bucketfeed[ray]'" in capsys.readouterr().err


def test_the_options_of_ray_and_its_manual_need_no_ray() -> None:
    code = (
        "import sys\nfrom bucketfeed.cli.launch import main\n"
        "try: main(['ray', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'ray', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--min-workers" in done.stdout
