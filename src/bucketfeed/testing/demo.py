"""The demonstration: train on real data in a mocked S3, cold, warm, killed and resumed; a table and a picture."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketfeed.errors import BucketfeedError, ConfigError
from bucketfeed.platforms.local import start, train_command
from bucketfeed.testing.digits import digits_bucket, digits_options
from bucketfeed.testing.moto import MotoBucket
from bucketfeed.testing.report import Run, draw, table
from bucketfeed.train.records import audit, read_records

EPOCHS = 3
_ACCURACY = 0.97
_RUN_SECONDS = 300.0
_KILL_AT = (1, 15)  # epoch, and batches of it that are done
_SEEN = 1408  # of 1,437 samples: 44 batches of 32; the 29 that fill no batch are left out of each epoch
_MARK = ".bucketfeed-demo"


def demonstrate(run_dir: Path) -> int:
    """Run the demonstration, leave everything in `run_dir`, return 0 if all held."""
    run_dir = emptied(run_dir)
    began = time.monotonic()
    with digits_bucket() as bucket:
        demo = _Demo(run_dir, bucket)
        say("\n1 of 3  cold: 1,437 PNG objects, one request each")
        cold = demo.train("cold", digits_options(bucket))
        say("\n2 of 3  warm: the same again, from the cache")
        warm = demo.train("warm", digits_options(bucket))
        say("\n3 of 3  tars: killed in the middle of the second epoch, resumed in two processes")
        resumed, killed = demo.killed_and_resumed()
    runs = [cold, warm, resumed]
    problems = _problems(runs, run_dir / "killed", killed)
    say("\n" + table(runs))
    draw(runs, run_dir / "report.png", aim=_ACCURACY)
    if not problems:
        say(
            f"Killed by kill -9 after {killed.batches} batches, {killed.saved} of them saved, and resumed: in each "
            f"epoch the model was trained\non {_SEEN:,} samples, on none of them twice."
        )
    for problem in problems:
        say(f"NOT AS IT SHOULD BE: {problem}")
    say(f"{time.monotonic() - began:.0f} s in all. Picture: {near(run_dir / 'report.png')}")
    return 1 if problems else 0


@dataclass(frozen=True)
class _Killed:
    """How the run ended that was killed: its exit code, and the batches it had done and saved."""

    exit_code: int
    batches: int
    saved: int


class _Demo:
    def __init__(self, run_dir: Path, bucket: MotoBucket) -> None:
        self._run_dir = run_dir
        self._bucket = bucket

    def train(self, name: str, options: Sequence[str], *, processes: int = 1) -> Run:
        """Train to the end and return what the run said."""
        process = self._start(name, options, processes)
        try:
            out, _ = process.communicate(timeout=_RUN_SECONDS)
        except subprocess.TimeoutExpired as e:
            raise BucketfeedError(f"the {name} run did not end within {_RUN_SECONDS:.0f} s") from e
        finally:
            _end(process)
        if process.returncode:
            raise BucketfeedError(f"the {name} run ended with exit code {process.returncode}; its last lines say why")
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return Run(name, result, read_records(self._run_dir / name / "metrics.jsonl"))

    def killed_and_resumed(self) -> tuple[Run, _Killed]:
        """Kill a run with SIGKILL in the middle of its second epoch, then start it again on two processes."""
        url, folder = self._bucket.url, self._run_dir / "killed"
        options = [
            *("--data", f"{url}shards/train/", "--test-data", f"{url}shards/test/", "--num-classes", "10"),
            *("--image-size", "16", "--lr", "3e-3", "--audit", "--save-steps", "10"),
            *("--checkpoint-dir", str(folder / "checkpoints")),
        ]
        records = folder / "audit-rank00000.jsonl"
        process = self._start("killed", [*options, "--batch-size", "32"], 1)
        try:
            _wait_for(lambda: reached(records), process)
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)
        finally:
            _end(process)
        batches = len(read_records(records))
        say(f"\nkilled (exit code {process.returncode}) after {batches} batches; starting again, in two processes")
        # The same global batch, on any number of ranks, gives the same order and the same steps.
        resumed = self.train("killed", [*options, "--batch-size", "16"], processes=2)
        return resumed, _Killed(process.returncode, batches, int(resumed.of("start")[-1]["steps"]))

    def _start(self, name: str, options: Sequence[str], processes: int) -> subprocess.Popen[str]:
        arguments = [
            *options,
            *("--epochs", str(EPOCHS), "--seed", "17", "--cache-dir", str(self._run_dir / "cache")),
            *("--cache-limit", "1GB", "--run-dir", str(self._run_dir / name)),
        ]
        # One computing thread: so small a network gains nothing from two, and loses much where others use the cores.
        environment = {**self._bucket.server.environment, "OMP_NUM_THREADS": "1"}
        command = train_command(arguments, processes=processes)
        return start(command, environment, stdout=subprocess.PIPE, text=True)


def emptied(run_dir: Path) -> Path:
    """Return the folder, absolute and empty but for its mark. Only what an earlier demonstration left is removed."""
    run_dir = run_dir.absolute()
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file: name a folder")
    if run_dir.exists() and any(run_dir.iterdir()):
        if not (run_dir / _MARK).exists():
            raise ConfigError(f"{run_dir} has files that no demonstration has put there: name another folder")
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / _MARK).touch()
    return run_dir


def reached(records: Path) -> bool:
    """Whether a run is in the midst of its second epoch, by a rank's audit."""
    epoch, batches = _KILL_AT
    return records.exists() and sum(r["epoch"] == epoch for r in read_records(records)) >= batches


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _RUN_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            raise BucketfeedError("the run to be killed ended, or stood still, before its second epoch")
        time.sleep(0.02)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()  # torchrun ends its processes at this, and only at this
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
    if process.stdout is not None:
        process.stdout.close()


def _problems(runs: list[Run], audited: Path, killed: _Killed) -> list[str]:
    """Return what is not as the demonstration claims."""
    found = [
        f"the {run.name} run's accuracy is {run.result['accuracy']:.4f}, below {_ACCURACY}"
        for run in runs
        if run.result["accuracy"] < _ACCURACY
    ]
    cold, warm, _ = runs
    if warm.result["requests"]:
        found.append(f"the warm run made {warm.result['requests']} requests, not 0")
    if cold.result["order_hash"] != warm.result["order_hash"]:
        found.append("the cold and the warm run had different orders")
    if killed.exit_code != -signal.SIGKILL or not 0 < killed.saved < killed.batches:
        found.append(f"the killed run was not killed between two checkpoints: {killed}")
    epochs = audit(audited)
    if len(epochs) != EPOCHS:
        found.append(f"the killed run has records of {len(epochs)} epochs, not {EPOCHS}")
    for epoch, seen in epochs.items():
        again = sum(times > 1 for times in seen.values())
        if again or len(seen) != _SEEN:
            found.append(f"epoch {epoch} of the killed run: {again} samples twice, {len(seen)} of {_SEEN:,} seen")
    return found


def near(path: Path) -> Path:
    """Return the path as a person here would write it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def say(text: str) -> None:
    """Print a line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
