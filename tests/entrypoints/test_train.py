"""train.py as users start it: its manual, its last line, its exit codes, and runs that are killed and go on."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from scripts import TRAIN, Runs, ended, environment

from bucketfeed.testing.moto import MotoBucket
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.records import audit

# Two processes that start, train and are waited for, on a machine that does other things meanwhile.
SLOW = pytest.mark.timeout(300)


def trained_once(runs: Runs, epochs: int = 2, samples: int = 128) -> None:
    seen = audit(runs.run_dir)
    assert list(seen) == list(range(epochs))
    for counts in seen.values():
        assert set(counts.values()) == {1}
        assert len(counts) == samples


def test_the_manual_explains_every_option_and_shows_three_commands() -> None:
    shown = ended([sys.executable, str(TRAIN), "--help"], environment()).out
    own = {"progress": "--no-progress"}
    for field in fields(TrainConfig):
        assert own.get(field.name, "--" + field.name.replace("_", "-")) in shown
    commands = [
        line for line in shown.splitlines() if line.startswith("    ") and "entrypoints/train.py --data" in line
    ]
    assert len(commands) == 3
    assert "exit codes" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--data"),
        (["--data", "s3://b/", "--epoch", "3"], "--epoch"),
        (["--data", "s3://b/", "--epochs", "three"], "--epochs: invalid int value: 'three'"),
        (["--data", "s3://b/", "--epochs", "0"], "epochs must be a whole number of at least 1, not 0"),
        (["--data", "s3://b/", "--storage-options", "{key"], "not JSON"),
        (["--data", "s3://b/", "--storage-options", "[1]"], "must be a JSON object"),
        (["--data", "nfs4://b/x"], "nfs4"),
        (["--data", ""], "the URL is empty"),
    ],
)
def test_wrong_arguments_end_with_code_2_and_say_which(arguments: list[str], told: str, tmp_path: Path) -> None:
    done = ended([sys.executable, str(TRAIN), *arguments, "--run-dir", str(tmp_path)], environment())
    assert done.code == 2, done.err
    assert told in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_data_that_is_not_there_ends_with_code_1_and_is_named(moto_bucket: MotoBucket, tmp_path: Path) -> None:
    arguments = ["--data", f"{moto_bucket.url}nowhere/", "--run-dir", str(tmp_path), "--cache-dir", str(tmp_path / "c")]
    done = ended([sys.executable, str(TRAIN), *arguments], environment(moto_bucket))
    assert done.code == 1
    assert "NotFoundError" in done.err
    assert f"{moto_bucket.url}nowhere/" in done.err
    assert "Traceback" not in done.err


@SLOW
def test_one_process_prints_one_line_of_results_and_the_order_is_that_of_bf_order_hash(runs: Runs) -> None:
    import bucketfeed as bf

    done = runs.start("--batch-size", "8")
    result = done.result
    assert done.out.count("\n") == 1
    assert {"accuracy", "epochs", "samples", "order_hash", "wait_share", "peak_pss_mb"} <= result.keys()
    assert (result["epochs"], result["samples"], result["world_size"]) == (2, 256, 1)
    assert result["requests"] >= 5  # five tars
    ds = bf.open_dataset(f"{runs.bucket.url}train/", storage_options=runs.bucket.storage_options, cache=None)
    assert result["order_hash"] == bf.order_hash(ds, 5, 0)
    trained_once(runs)


@SLOW
def test_credentials_and_endpoint_may_come_by_options_instead_of_the_environment(runs: Runs) -> None:
    secrets = json.dumps({"key": "testing", "secret": "hush-hush", "client_kwargs": {"region_name": "us-east-1"}})
    given = ["--storage-options", secrets, "--endpoint-url", runs.bucket.server.endpoint_url, "--epochs", "1"]
    checkpoints = ["--checkpoint-dir", f"{runs.bucket.url}checkpoints/"]
    done = ended([sys.executable, str(TRAIN), *runs.arguments, *given, *checkpoints], environment())
    assert done.result["samples"] == 128
    assert "hush-hush" not in done.err + done.out + (runs.run_dir / "metrics.jsonl").read_text()
    listed = runs.bucket.client.list_objects_v2(Bucket=runs.bucket.name, Prefix="checkpoints/checkpoint-")
    assert listed["KeyCount"] == 2


@SLOW
@pytest.mark.parametrize("runs", ["moto_bucket", "gcs_bucket"], indirect=True)
def test_c097_two_ranks_one_killed_in_mid_epoch_go_on_as_one_process_without_a_sample_twice(runs: Runs) -> None:
    # 16 steps an epoch; saved at step 18, killed while the 21st is made.
    killed = runs.start(
        *("--batch-size", "4", "--save-steps", "3"),
        processes=2,
        trouble={"signal": "SIGKILL", "rank": 1, "training": 21},
    )
    assert killed.code != 0
    assert len(runs.taken(rank=1)) == 21
    newest = runs.newest_checkpoint()
    assert ".epoch-1.sample-16." in newest  # 18 steps saved: 2 in this epoch, of 2 ranks with 4 samples
    assert max(runs.taken(rank=0)) > (1, 16)
    one = runs.start("--batch-size", "4").result
    assert one["samples"] == 128 - 16
    assert one["world_size"] == 1
    trained_once(runs)
    # c049: nothing is left to train, and each of the 21 test samples is counted once on any number of ranks.
    two = runs.start("--batch-size", "4", processes=2).result
    assert two["samples"] == 0
    assert two["world_size"] == 2
    assert two["accuracy"] == one["accuracy"]
    assert two["order_hash"] == one["order_hash"]


@SLOW
def test_sigterm_to_one_of_two_ranks_stops_both_at_the_same_step(runs: Runs) -> None:
    stopped = runs.start("--batch-size", "4", processes=2, trouble={"signal": "SIGTERM", "rank": 1, "training": 5})
    assert stopped.code == 1  # torchrun's own
    assert runs.taken(rank=0) == runs.taken(rank=1)
    assert runs.taken(rank=0)[-1] == (0, 5 * 8)
    assert stopped.err.count("train.py: stopped by a signal to another rank in epoch 0: saved") == 1
    assert "nothing saved" not in stopped.err
    assert runs.start("--batch-size", "8").result["samples"] == 256 - 40
    trained_once(runs)


@SLOW
def test_sigterm_in_one_process_ends_with_code_75(runs: Runs) -> None:
    stopped = runs.start("--batch-size", "8", trouble={"signal": "SIGTERM", "training": 20})
    assert stopped.code == 75, stopped.err
    assert "stopped by SIGTERM in epoch 1: saved file://" in stopped.err
    assert stopped.out == ""
    assert runs.start("--batch-size", "4", processes=2).result["samples"] == 256 - 160
    trained_once(runs)


@SLOW
def test_an_error_on_one_rank_ends_all_ranks(runs: Runs) -> None:
    bad = bytearray(runs.bucket.client.get_object(Bucket=runs.bucket.name, Key="train/2.tar")["Body"].read())
    bad[512:520] = b"no png!!"
    runs.bucket.put("train/2.tar", bytes(bad))
    done = runs.start("--batch-size", "4", processes=2)
    assert done.code == 1
    assert "DecodeError: decode failed for sample '0064'" in done.err
    assert done.out == ""
