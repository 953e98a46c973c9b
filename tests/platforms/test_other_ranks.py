"""train.py under launchers that are not torchrun: srun starts it, and its ranks meet by MASTER_ADDR."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from bucketfeed.train.records import audit

SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
TASK = ("SLURM_PROCID", "SLURM_LOCALID")


def started(folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    for number in range(32):
        path = folder / "data" / f"class{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            Image.fromarray(np.full((8, 8, 3), 90 * (number % 2), np.uint8)).save(path)
    own = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "bucketfeed.cli.train", "--data", str(folder / "data"), "--batch-size", "4"),
            *("--image-size", "8", "--audit", "--run-dir", str(folder / "run"), "--no-progress"),
        ],
        env=own | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_ranks_of_other_launchers_train_together_and_one_of_them_prints(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [started(tmp_path, SRUN | meeting | dict.fromkeys(TASK, str(rank))) for rank in range(2)]
    (first, out, err), (second, other, other_err) = ended(ranks)
    assert (first, second) == (0, 0), err[-3000:] + other_err[-3000:]
    assert json.loads(out.splitlines()[-1])["world_size"] == 2
    assert other == ""
    assert err.count("this is rank 0 of 2 (0 of 2 on its node), by SLURM_PROCID") == 1
    [seen] = audit(tmp_path / "run").values()
    assert len(seen) == 32
    assert set(seen.values()) == {1}


def test_where_ranks_could_meet_is_asked_for(tmp_path: Path) -> None:
    [(code, _, err)] = ended([started(tmp_path, SRUN | dict.fromkeys(TASK, "1"))])
    assert code == 1
    assert "rank 1 of 2 did not meet the others" in err
    assert "MASTER_ADDR (the node of rank 0) and MASTER_PORT (a free port there)" in err


def test_half_of_a_launchers_variables_ends_with_code_2(tmp_path: Path) -> None:
    [(code, _, err)] = ended([started(tmp_path, {"OMPI_COMM_WORLD_RANK": "1"})])
    assert code == 2
    assert "OMPI_COMM_WORLD_SIZE is not set" in err
