"""The surroundings of a notebook, turned into arguments of training: folders, disk, GPU, warnings, costs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bucketfeed.errors import ConfigError
from bucketfeed.store.sizes import format_size
from bucketfeed.store.urls import parse_url

_CONTENT = Path("/content")  # Colab's local disk
_DRIVE_MOUNTS = (Path("/content/drive"), Path("/content/gdrive"))
_SMI_SECONDS = 20
_SAVE_SECONDS = 60  # a runtime may vanish at any time, and with it all since the last checkpoint

# Data transfer out of us-east-1 to the internet, first 10 TB of a month, US dollars a GB (10^9 bytes); as of 2025.
S3_DOLLARS_A_GB = 0.09


def on_colab() -> bool:
    """Return whether this is a Colab runtime."""
    try:
        return importlib.util.find_spec("google.colab") is not None
    except ModuleNotFoundError:  # not even `google`
        return False


def work_dir(chosen: str = "") -> Path:
    """Return the folder for cache and results: `chosen`, else Colab's local disk, else `runs/notebook` here."""
    if chosen:
        return Path(chosen).absolute()
    return _CONTENT / "bucketfeed" if on_colab() and _CONTENT.is_dir() else Path.cwd() / "runs" / "notebook"


def gpu() -> str | None:
    """Return name and memory of the first GPU, as nvidia-smi tells them; None where there is none.

    Not asked of torch: that would take some of the GPU's memory for the notebook, which does not train.
    """
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split("\n")
    return lines[0].strip() or None if done.returncode == 0 else None


def machine(device: str = "auto") -> str:
    """Return one line on GPU, processors and free disk. Raises `ConfigError` for `device` "cuda" without a GPU."""
    found = gpu()
    if device == "cuda" and found is None:
        raise ConfigError(
            "device is 'cuda', but this runtime has no GPU: choose one in Runtime > Change runtime type, or set "
            "device to 'auto'"
        )
    trains_on = found if found and device != "cpu" else "no GPU: training runs on the CPU, slowly"
    free = shutil.disk_usage(Path.cwd()).free
    return f"{trains_on}; {os.cpu_count()} processors; {format_size(free)} of disk free"


def on_drive(path: str | os.PathLike[str]) -> bool:
    """Return whether a local path, or what it links to, lies on mounted Google Drive. URLs do not."""
    url = parse_url(path)
    if url.scheme != "file":
        return False
    real = Path(os.path.realpath(url.key))
    return any(real.is_relative_to(mount) for mount in (*_DRIVE_MOUNTS, *_drives()))


@dataclass(frozen=True, slots=True)
class Place:
    """A notebook's place for training: where data, checkpoints, cache and results are.

    `checkpoint_dir` should be in a bucket: what lies on the runtime's disk is gone with the runtime. `more` are
    further options that the data need.
    """

    data: str
    work_dir: Path
    test_data: str = ""
    checkpoint_dir: str = ""
    device: str = "auto"
    anonymous: bool = False
    more: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for url in (self.data, *filter(None, (self.test_data, self.checkpoint_dir))):
            parse_url(url)

    @property
    def run_dir(self) -> Path:
        """Where training writes metrics.jsonl."""
        return self.work_dir / "run"

    @property
    def cache_dir(self) -> Path:
        """The disk cache."""
        return self.work_dir / "cache"

    @property
    def cache_limit_bytes(self) -> int:
        """A share of the disk that is free, with some kept free whatever happens."""
        from bucketfeed.cache.disk import default_limit  # here: the notebook imports this before it installs

        self.cache_dir.mkdir(parents=True, exist_ok=True)
        return default_limit(self.cache_dir)

    def arguments(self) -> list[str]:
        """Return the options of train.py that this place sets."""
        given = {
            "--data": self.data,
            "--test-data": self.test_data,
            "--checkpoint-dir": self.checkpoint_dir or str(self.work_dir / "checkpoints"),
            "--save-seconds": str(_SAVE_SECONDS),
            "--cache-dir": str(self.cache_dir),
            "--cache-limit": str(self.cache_limit_bytes),
            "--run-dir": str(self.run_dir),
            "--model-dir": str(self.work_dir / "model"),
            "--device": self.device,
            "--storage-options": '{"anon": true}' if self.anonymous else "",
        }
        return [*(part for name, value in given.items() if value for part in (name, value)), *self.more]

    def summary(self) -> str:
        """Return in one line where the cache is, and how large it may become."""
        limit, free = self.cache_limit_bytes, shutil.disk_usage(self.cache_dir).free
        return f"cache in {self.cache_dir}: at most {format_size(limit)}, of {format_size(free)} free on its disk"

    def forget(self) -> None:
        """Remove cache and records, as a runtime that is disconnected does; what is in a bucket stays."""
        for folder in (self.cache_dir, self.run_dir):
            shutil.rmtree(folder, ignore_errors=True)

    def warnings(self) -> list[str]:
        """Return what will go wrong later, each with what to do."""
        found = []
        if on_drive(self.data):
            found.append(
                f"the data {self.data} are on Google Drive, which fails under many small reads (Errno 5, hours of "
                "listing): put them into a bucket"
            )
        if on_drive(self.work_dir):
            found.append(
                f"cache and results in {self.work_dir} are on Google Drive, which is slow and has quotas: use a "
                "folder of the runtime's own disk"
            )
        if not self.checkpoint_dir:
            found.append(
                "checkpoints stay on this machine: a runtime that is disconnected takes them along. Set "
                "checkpoint_dir to a folder in a bucket that you may write to"
            )
        return found


def costs(source: str, total_bytes: int, cache_limit_bytes: int) -> str:
    """Return what reading `total_bytes` from `source` ("demo", "s3", "gcs") costs from here."""
    size = format_size(total_bytes)
    if source == "demo":
        return f"The data are {size}, on this machine: they cost nothing."
    over = total_bytes - cache_limit_bytes
    again = (
        "once, for all of it fits into the cache"
        if over <= 0
        else f"in the first epoch; {format_size(over)} exceed the cache and come again in each epoch"
    )
    if source == "gcs":
        return (
            f"The data are {size}, read {again}. Google charges for what leaves the bucket's location, and you can't "
            "choose where a Colab runtime is."
        )
    where = "Colab is not in AWS" if on_colab() else "Outside AWS"
    return (
        f"The data are {size}. {where}: to read them from S3 costs the bucket's owner about "
        f"{total_bytes / 1e9 * S3_DOLLARS_A_GB:,.2f} US dollars ({S3_DOLLARS_A_GB} a GB, list price of us-east-1 in "
        f"2025), {again}."
    )


def _drives() -> list[Path]:
    """Return where Drive is mounted under other names."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    mounts = [line.split(" ") for line in lines]
    return [Path(fields[1].replace("\\040", " ")) for fields in mounts if len(fields) > 2 and "drive" in fields[2]]
