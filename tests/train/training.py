"""Small pictures of three classes, and ways to train on them in this process."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bucketfeed.train.config import TrainConfig
from bucketfeed.train.loop import Stopped, train


def pictures(samples: int, seed: int = 0) -> dict[str, bytes]:
    """Keys `<class>/<number>.png`; each class has its own brightness, so that it can be learned."""
    draw = np.random.default_rng(seed)
    found = {}
    for number in range(samples):
        label = number % 3
        pixels = draw.integers(0, 60, (8, 8, 3)) + 90 * label
        png = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(png, "PNG")
        found[f"class{label}/{number:04}.png"] = png.getvalue()
    return found


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for key, data in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    return folder


class Training:
    """Runs of one configuration in one folder, in this process."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path
        self.run_dir = tmp_path / "run"
        self.checkpoints = tmp_path / "checkpoints"
        self._monkeypatch = monkeypatch
        self._data = write(tmp_path / "data", pictures(64))
        self._test = write(tmp_path / "test", pictures(21, seed=1))

    def config(self, **options: Any) -> TrainConfig:
        given = {
            "data": str(self._data),
            "test_data": str(self._test),
            "epochs": 2,
            "batch_size": 4,
            "seed": 5,
            "lr": 0.01,
            "image_size": 8,
            "model": "trouble:net",
            "cache_dir": str(self.folder / "cache"),
            "cache_limit": "50MB",
            "checkpoint_dir": str(self.checkpoints),
            "run_dir": str(self.run_dir),
            "audit": True,
            "progress": False,
        }
        return TrainConfig(**{**given, **options})

    def run(self, trouble: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Train to the end and return the results."""
        self._monkeypatch.setenv("TROUBLE", json.dumps(trouble or {}))
        return train(self.config(**options))

    def stopped(self, trouble: dict[str, Any], **options: Any) -> str:
        """Train until the signal that `trouble` tells; return what the run said."""
        with pytest.raises(Stopped) as caught:
            self.run({"signal": "SIGTERM", **trouble}, **options)
        return str(caught.value)

    def newest(self) -> dict[str, Any]:
        from bucketfeed.train.checkpoint import Checkpoints

        state = Checkpoints(str(self.checkpoints)).load()
        assert state is not None
        return state

    def records(self, kind: str) -> list[dict[str, Any]]:
        from bucketfeed.train.records import read_records

        return [r for r in read_records(self.run_dir / "metrics.jsonl") if r["kind"] == kind]
