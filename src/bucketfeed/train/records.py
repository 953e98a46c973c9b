"""What a run writes down: metrics, and on request which samples each batch was made of."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bucketfeed.errors import ConfigError
from bucketfeed.sampling.topology import Topology

_AUDIT = "audit-rank"


class Records:
    """A file of JSON lines, one value each, whole even if the process is killed.

    With `keep`, lines are added to those that are there; half a line that a kill has left is cut off.
    """

    def __init__(self, path: Path, *, keep: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep and path.exists():
            whole = path.read_bytes().rfind(b"\n") + 1
            os.truncate(path, whole)
        self._file = path.open("a" if keep else "w", encoding="utf-8", buffering=1)

    def write(self, **values: Any) -> None:
        """Append a line. Numbers that JSON has not (a loss of NaN) become null."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps(plain) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Metrics:
    """`metrics.jsonl` in a folder, and curves for TensorBoard beside it where that is installed."""

    def __init__(self, run_dir: Path, *, keep: bool) -> None:
        self._records = Records(run_dir / "metrics.jsonl", keep=keep)
        self._board = _board(run_dir)

    def write(self, kind: str, *, steps: int, **values: Any) -> None:
        """Append a line; the numbers of epochs and evaluations become points of curves, by steps."""
        self._records.write(kind=kind, steps=steps, **values)
        if self._board is not None and kind in ("epoch", "evaluation"):
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("epoch", "time"):
                    self._board.add_scalar(f"{kind}/{name}", value, steps)
            self._board.flush()

    def close(self) -> None:
        """Close the files."""
        self._records.close()
        if self._board is not None:
            self._board.close()


def _board(run_dir: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run_dir))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the values of a file of JSON lines; a last line that was cut off by a kill is left out."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Audit:
    """Records which samples this rank took, so that `audit` can prove that none came twice."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._records = Records(run_dir / f"{_AUDIT}{rank:05}.jsonl", keep=True)

    def took(self, epoch: int, position: int, keys: Sequence[str]) -> None:
        """Note a batch; `position` is the loader's after it."""
        self._records.write(epoch=epoch, position=position, keys=list(keys))

    def close(self) -> None:
        """Close the file."""
        self._records.close()


def cut_audit(run_dir: Path, cursor: dict[str, Any] | None, topology: Topology) -> None:
    """Drop the audit records behind `cursor`, or all of them where the run starts anew.

    What lay behind it was lost with the process, and the resumed run takes those samples again. Called by all ranks,
    before any writes: each sees to its own file, and to those of ranks that there are no longer, for the folder may
    be one for all nodes or another one on each.
    """
    for path in _audit_paths(run_dir):
        if int(path.stem.removeprefix(_AUDIT)) % topology.world_size != topology.rank:
            continue
        if cursor is None:
            path.unlink()
            continue
        reached = (cursor["epoch"], cursor["position"])
        kept = [record for record in read_records(path) if (record["epoch"], record["position"]) <= reached]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        os.replace(temporary, path)


def audit(run_dir: str | os.PathLike[str]) -> dict[int, Counter[str]]:
    """Return, for each epoch, how often the run's model was trained on each sample, over all ranks and restarts."""
    paths = _audit_paths(Path(run_dir))
    if not paths:
        raise ConfigError(f"no audit records in {run_dir}; train with --audit")
    seen: dict[int, Counter[str]] = {}
    for path in paths:
        for record in read_records(path):
            seen.setdefault(record["epoch"], Counter()).update(record["keys"])
    return dict(sorted(seen.items()))


def _audit_paths(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob(f"{_AUDIT}*.jsonl"))
