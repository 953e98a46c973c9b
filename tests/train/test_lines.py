"""What a run tells in its log and leaves as its model: numbers that can be read out, a line a minute, whole files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from training import Training

from bucketfeed.data.stats import Stats
from bucketfeed.errors import CacheError
from bucketfeed.train.checkpoint import save_model
from bucketfeed.train.lines import METRICS, epoch_line, evaluation_line, pace_line
from bucketfeed.train.pace import Pace


def read(line: str) -> dict[str, float]:
    """What CloudWatch would read out of a line."""
    found = {name: re.findall(pattern, line) for name, pattern in METRICS.items()}
    return {name: float(values[0]) for name, values in found.items() if values}


@pytest.mark.parametrize("loss", [1.25, 0.00001234, 123456.0, 2e8])
def test_the_numbers_of_a_line_are_read_out_as_they_are(loss: float) -> None:
    prefix = "I bucketfeed.train.loop: "
    trained = read(prefix + epoch_line(12, loss, 1234.56, 0.0321))
    assert trained == {
        "train:loss": pytest.approx(loss, rel=1e-3),
        "train:samples_per_second": 1234.6,
        "train:wait_percent": 3.2,
    }
    assert read(prefix + evaluation_line(12, loss, 0.98765)) == {
        "test:loss": pytest.approx(loss, rel=1e-3),
        "test:accuracy": 0.9877,
    }


def test_lines_that_hold_no_such_number_give_none() -> None:
    assert read(pace_line(3, 10, 20, 55.5, 0.5)) == {}
    assert "test:accuracy" not in read(evaluation_line(0, 0.5, None))
    for nothing in (None, math.nan, math.inf):
        assert "train:loss" not in read(epoch_line(0, nothing, 1.0, 0.0))


def test_a_stall_is_told_as_one() -> None:
    assert "50.0 % of the time waiting for data: it is the bottleneck" in epoch_line(0, 1.0, 1.0, 0.5)
    assert "4.9 % of the time waiting for data: it kept up" in epoch_line(0, 1.0, 1.0, 0.049)


def test_a_long_epoch_has_one_line_a_minute_of_what_was_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = 0.0
    totals: Iterator[Stats] = iter(
        [Stats(samples=600, seconds=60.0, wait_seconds=6.0), Stats(samples=1800, seconds=120.0, wait_seconds=36.0)]
    )
    pace = Pace(lambda: next(totals), clock=lambda: now)
    for batch in range(1, 130):
        now = float(batch)
        pace.batch(epoch=2, batches=batch, of=500)
    assert caplog.messages == [pace_line(2, 60, 500, 10.0, 0.1), pace_line(2, 120, 500, 20.0, 0.5)]


def test_a_run_leaves_its_weights_and_what_they_are(training: Callable[[str], Training], tmp_path: Path) -> None:
    run = training("a")
    result = run.run(model_dir=str(tmp_path / "model"))
    weights = torch.load(tmp_path / "model" / "model.pt", weights_only=True)
    saved = run.newest()["model"]
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in weights)
    about = json.loads((tmp_path / "model" / "model.json").read_text())
    assert about == {"finished": True, "steps": result["steps"], "accuracy": result["accuracy"]}
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.json", "model.pt"]


def test_a_stopped_run_leaves_its_weights_too_and_says_that_it_is_not_finished(
    training: Callable[[str], Training], tmp_path: Path
) -> None:
    training("a").stopped({"training": 3}, model_dir=str(tmp_path / "model"))
    about = json.loads((tmp_path / "model" / "model.json").read_text())
    assert about == {"finished": False, "steps": 3, "accuracy": None}


def test_a_model_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"the model could not be written to .*file"):
        save_model(tmp_path / "file", torch.nn.Linear(1, 1), {})
