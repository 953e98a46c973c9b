"""What a run writes down: metrics, and on request which samples each step took."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bucketfeed.errors import ConfigError


class Records:
    """A file of JSON lines, one value each, whole even if the process is killed."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if keep else "w", encoding="utf-8", buffering=1)

    def write(self, **values: Any) -> None:
        """Append a line."""
        self._file.write(json.dumps(values, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the values of a file of JSON lines; a last line that was cut off by a kill is left out."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Audit:
    """Records which samples this rank took, so that `audit` can prove that each came once."""

    def __init__(self, run_dir: Path, rank: int, *, keep: bool) -> None:
        self._records = Records(_audit_path(run_dir, rank), keep=keep)

    def took(self, epoch: int, position: int, keys: Sequence[str]) -> None:
        """Note a batch; `position` is the loader's after it."""
        self._records.write(epoch=epoch, position=position, keys=list(keys))

    def close(self) -> None:
        """Close the file."""
        self._records.close()


def forget_after(run_dir: Path, epoch: int, position: int) -> None:
    """Drop the audit records of all ranks behind a cursor: a resumed run takes those samples again.

    Called by one rank, before any writes.
    """
    for path in run_dir.glob("audit-rank*.jsonl"):
        kept = [r for r in read_records(path) if (r["epoch"], r["position"]) <= (epoch, position)]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept), encoding="utf-8")
        os.replace(temporary, path)


def audit(run_dir: str | os.PathLike[str]) -> dict[int, Counter[str]]:
    """Return, for each epoch, how often the run's model has seen each sample, over all ranks and restarts."""
    paths = sorted(Path(run_dir).glob("audit-rank*.jsonl"))
    if not paths:
        raise ConfigError(f"no audit records in {run_dir}; train with --audit")
    seen: dict[int, Counter[str]] = {}
    for path in paths:
        for record in read_records(path):
            seen.setdefault(record["epoch"], Counter()).update(record["keys"])
    return dict(sorted(seen.items()))


def _audit_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"audit-rank{rank:05}.jsonl"
