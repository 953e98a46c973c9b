"""A hyperparameter tuning job: several trainings with values that SageMaker chooses within ranges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bucketfeed.errors import ConfigError

_LONGEST_NAME = 32  # of a tuning job


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is tried: ranges by option name, how often, and by which of the logged numbers it is judged.

    A range is text: `lr=1e-4:1e-2` (numbers between, tried evenly in their logarithm with `:log` after it),
    `batch-size=32:256` (whole numbers) or `model=mine:small|mine:large` (one of these).
    """

    ranges: Mapping[str, str]
    objective: str = "test:accuracy"
    jobs: int = 10
    parallel: int = 2

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ConfigError("--tune needs a range, such as --tune lr=1e-4:1e-2")
        if not 1 <= self.parallel <= self.jobs:
            raise ConfigError(f"--tune-parallel must be 1 to --tune-jobs ({self.jobs}), not {self.parallel}")
        for name, text in self.ranges.items():
            _range(name, text)

    @property
    def examples(self) -> dict[str, Any]:
        """One value within each range."""
        return {name: _range(name, text)[1][0] for name, text in self.ranges.items()}

    def job_name(self, name: str) -> str:
        """Return a name that is short enough: SageMaker appends to it."""
        prefix, _, stamp = name.rpartition("-")
        return f"{prefix[: _LONGEST_NAME - len(stamp) - 1].rstrip('-')}-{stamp}"

    def tuner(self, trainer: Any, metrics: Mapping[str, str]) -> Any:
        """Return the SDK's tuner for `trainer`; raises `ConfigError` unless the objective is one of `metrics`."""
        if self.objective not in metrics:
            raise ConfigError(f"--tune-objective must be one of {', '.join(metrics)}, not {self.objective}")
        from sagemaker.train.tuner import HyperparameterTuner

        return HyperparameterTuner(
            model_trainer=trainer,
            objective_metric_name=self.objective,
            objective_type="Minimize" if self.objective.endswith("loss") else "Maximize",
            hyperparameter_ranges={name: _sdk_range(name, text) for name, text in self.ranges.items()},
            metric_definitions=[{"Name": name, "Regex": pattern} for name, pattern in metrics.items()],
            max_jobs=self.jobs,
            max_parallel_jobs=self.parallel,
        )


def _range(name: str, text: str) -> tuple[str, list[Any]]:
    """Return the kind of a range and its ends, or all its values."""
    if "|" in text:
        return "one of", [_plain(value) for value in text.split("|")]
    ends = text.split(":")
    scale = "Logarithmic" if ends[2:] == ["log"] else "Auto" if len(ends) == 2 else None
    try:
        low, high = (json.loads(end) for end in ends[:2])
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
    except ValueError:
        numbers = False
    if scale is None or not numbers or not low < high:
        raise ConfigError(
            f"--tune {name}={text} is no range: write {name}=LOW:HIGH, {name}=LOW:HIGH:log, or {name}=THIS|THAT"
        )
    return scale, [low, high]


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _sdk_range(name: str, text: str) -> Any:
    from sagemaker.core.parameter import CategoricalParameter, ContinuousParameter, IntegerParameter

    kind, values = _range(name, text)
    if kind == "one of":
        return CategoricalParameter([json.dumps(value) if not isinstance(value, str) else value for value in values])
    whole = all(isinstance(value, int) for value in values)
    return (IntegerParameter if whole else ContinuousParameter)(values[0], values[1], scaling_type=kind)
