"""Runs of the scripts as users start them: processes of their own, on a mocked S3."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketfeed.platforms.local import train_command
from bucketfeed.testing.gcs import GcsBucket
from bucketfeed.testing.moto import MotoBucket
from bucketfeed.train.checkpoint import Checkpoints
from bucketfeed.train.records import read_records

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "entrypoints" / "train.py"
LAUNCH = ROOT / "entrypoints" / "launch.py"
MODELS = ROOT / "tests" / "train"  # where trouble.py lies, as a user's own file
SECONDS = 100.0


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """The last line that it printed."""
        assert self.code == 0, self.err[-3000:]
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


def environment(bucket: MotoBucket | GcsBucket | None = None, **more: str) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "AWS_PROFILE", "TROUBLE")
    own = {name: value for name, value in os.environ.items() if name not in names}
    return own | {"OMP_NUM_THREADS": "1"} | (bucket.server.environment if bucket else {}) | more


def ended(command: list[str], env: dict[str, str], cwd: Path = MODELS) -> Ended:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


class Runs:
    """Runs of train.py in one folder, on the tars of one bucket."""

    def __init__(self, bucket: MotoBucket | GcsBucket, folder: Path) -> None:
        self.bucket = bucket
        self.folder = folder
        self.run_dir = folder / "run"
        in_bucket = isinstance(bucket, GcsBucket)
        self.checkpoints = f"{bucket.url}checkpoints/" if in_bucket else str(folder / "checkpoints")
        self.arguments = [
            *("--data", f"{bucket.url}train/", "--test-data", f"{bucket.url}test/", "--num-classes", "3"),
            *("--image-size", "8", "--seed", "5", "--lr", "0.01", "--epochs", "2", "--no-progress", "--audit"),
            *("--model", "trouble:net", "--cache-dir", str(folder / "cache"), "--cache-limit", "50MB"),
            *("--checkpoint-dir", self.checkpoints, "--run-dir", str(self.run_dir)),
        ]

    def start(self, *more: str, processes: int = 1, trouble: dict[str, Any] | None = None) -> Ended:
        command = train_command([*self.arguments, *more], processes=processes)
        return ended(command, environment(self.bucket, TROUBLE=json.dumps(trouble or {})))

    def newest_checkpoint(self) -> str:
        options = self.bucket.storage_options if self.checkpoints.startswith("gs://") else None
        return Checkpoints(self.checkpoints, options)._names()[-1]

    def taken(self, rank: int) -> list[tuple[int, int]]:
        """Epoch and position after each batch that a rank has trained on."""
        return [(r["epoch"], r["position"]) for r in read_records(self.run_dir / f"audit-rank{rank:05}.jsonl")]
