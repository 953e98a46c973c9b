"""launch.py: which command it starts, that stops reach it, and what the demonstration shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from scripts import LAUNCH, MODELS, SECONDS, Runs, ended, environment

from bucketfeed.errors import ConfigError
from bucketfeed.platforms.local import run, train_command
from bucketfeed.testing import demo
from bucketfeed.testing.digits import digits
from bucketfeed.testing.report import Run, draw, table


def test_one_process_is_started_plainly_and_several_by_torchrun() -> None:
    assert train_command(["--data", "x"]) == [sys.executable, "-m", "bucketfeed.cli.train", "--data", "x"]
    several = train_command(["--data", "x"], processes=3)
    assert several[1:3] == ["-m", "torch.distributed.run"]
    assert "--nproc-per-node=3" in several
    assert several[-4:] == ["-m", "bucketfeed.cli.train", "--data", "x"]


def test_what_cannot_be_started_is_told() -> None:
    with pytest.raises(ConfigError, match="--nproc-per-node must be at least 1, not 0"):
        train_command([], processes=0)


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_the_exit_code_is_that_of_the_command(code: int) -> None:
    assert run([sys.executable, "-c", f"import sys; sys.exit({code})"]) == code


def test_the_command_sees_the_environment_given_and_the_launchers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN", "1")
    code = "import os, sys; sys.exit(int(os.environ['OWN'] + os.environ['GIVEN']))"
    assert run([sys.executable, "-c", code], {"GIVEN": "2"}) == 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_reaches_the_command_and_is_waited_for(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    # The command stops its launcher, which is this process, and ends by what comes back, as torchrun does: with 1.
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "signal.pause()\n"
    )
    assert run([sys.executable, "-c", code]) == 75
    assert signal.getsignal(number) == before


def test_unknown_places_and_options_end_with_code_2() -> None:
    for arguments in ([], ["moon"], ["demo", "--epochs", "3"], ["local", "--nproc-per-node", "0"]):
        assert ended([sys.executable, str(LAUNCH), *arguments], environment()).code == 2


@pytest.mark.timeout(300)
def test_all_other_options_go_to_train_py_and_a_stop_of_two_ranks_ends_with_code_75(runs: Runs) -> None:
    command = [sys.executable, str(LAUNCH), "local", "--nproc-per-node", "2", *runs.arguments, "--epochs", "10000"]
    process = subprocess.Popen(
        command, env=environment(runs.bucket), cwd=MODELS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + SECONDS
        while not (runs.run_dir / "audit-rank00001.jsonl").exists() or len(runs.taken(rank=1)) < 3:
            assert process.poll() is None, process.communicate()[1][-3000:]
            assert time.monotonic() < end
            os.sched_yield()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 75, err[-3000:]
    assert out == ""
    assert err.count("train.py: stopped by SIGTERM") == 1
    assert runs.taken(rank=0) == runs.taken(rank=1)


def test_the_digits_are_parted_the_same_each_time() -> None:
    found = digits()
    assert sum(d.part == "train" for d in found) == 1437
    assert sum(d.part == "test" for d in found) == 360
    assert {d.label for d in found if d.part == "test"} == set(range(10))
    assert found == digits()


def test_the_demonstration_removes_only_what_it_made(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="name another folder"):
        demo.emptied(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    own = tmp_path / "runs" / "demo"
    (demo.emptied(own) / "cold").mkdir()
    assert [path.name for path in demo.emptied(own).iterdir()] == [demo._MARK]


def finished(name: str, starts: int = 1) -> Run:
    counts = {"bytes_fetched": 2048, "requests": 1437, "cache_hits": 3, "cache_misses": 1}
    records: list[dict[str, Any]] = [
        {"kind": "start", "world_size": 1 + n, "bytes_fetched": 100, "requests": 8} for n in range(starts)
    ]
    for epoch in range(3):
        records.append(
            {"kind": "epoch", "epoch": epoch, "loss": 1 / (1 + epoch), "samples_per_second": 500.0, **counts}
        )
        records.append({"kind": "evaluation", "epoch": epoch, "accuracy": 0.95 + epoch / 50})
    result = {"accuracy": 0.99, "seconds": 12.3, "samples_per_second": 500.0, "wait_share": 0.0123}
    return Run(name, result | {"peak_pss_mb": 400.0, "order_hash": "0123456789abcdef"}, records)


def test_the_table_has_a_column_a_run_and_the_picture_is_drawn(tmp_path: Path) -> None:
    runs = [finished("cold"), finished("warm"), finished("killed", starts=2)]
    shown = table(runs)
    body = [line for line in shown.splitlines()[:13] if not line.startswith("-")]
    assert len({len(line) for line in body}) == 1  # aligned
    assert "8 + 1,437 / 1,437 / 1,437" in shown
    assert "16 + 1,437 / 1,437 / 1,437" in shown
    assert "1 -> 2" in shown
    assert "1.2%" in shown
    draw(runs, tmp_path / "report.png", aim=0.97)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert json.dumps(runs[0].result)
