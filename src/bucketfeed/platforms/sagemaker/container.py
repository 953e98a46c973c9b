"""The process of a SageMaker training container: makes options of train.py from what is in /opt/ml, starts the ranks.

Started as `exec python -m bucketfeed.platforms.sagemaker.container`, so that it takes the place of the shell and is the
process that SageMaker sends SIGTERM to.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketfeed.errors import BucketfeedError, ConfigError
from bucketfeed.platforms.local import STOPPED, TRAIN
from bucketfeed.platforms.sagemaker import disks, hyperparameters
from bucketfeed.platforms.sagemaker.job import PROCESSES, SDK_CHANNELS
from bucketfeed.platforms.sagemaker.spawn import Ended, run_ranks

_log = logging.getLogger(__name__)

ROOT = "/opt/ml"
_PORT = 7777  # which SageMaker leaves open between the hosts of a job
_WARM_POOL = "SAGEMAKER_MANAGED_WARMPOOL_CACHE_DIRECTORY"  # outlives the job, where the job runs in a warm pool
_REASON = 1024  # characters of /opt/ml/output/failure that DescribeTrainingJob shows
# A host whose ranks only lost the others lets the host with the true error end first: the job takes its reason.
_AFTER_YOU_SECONDS = 15.0
_EFA_VENDOR = "0x1d0f"  # Amazon, among InfiniBand devices


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of the job, as resourceconfig.json tells them; all in the same order on each of them."""

    current: str
    names: tuple[str, ...]
    interface: str | None
    uneven: bool = False

    @classmethod
    def read(cls, root: Path) -> Hosts:
        """Return what the file under `root` says."""
        found = _json(root / "input/config/resourceconfig.json")
        names = tuple(sorted(found["hosts"], key=lambda name: (len(name), name)))  # algo-2 before algo-10
        kinds = {group["instance_type"] for group in found.get("instance_groups") or []}
        return cls(found["current_host"], names, found.get("network_interface_name"), len(kinds) > 1)

    @property
    def index(self) -> int:
        """Of the current host."""
        return self.names.index(self.current)

    @property
    def first(self) -> str:
        """Address of the host that rank 0 runs on."""
        return "127.0.0.1" if len(self.names) == 1 else self.names[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on this host as its files say; return the exit code, and leave the first error in output/failure."""
    parser = argparse.ArgumentParser(prog="container", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(ROOT), help=f"instead of {ROOT}")
    root = parser.parse_args(arguments).root
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s container: %(message)s", stream=sys.stderr)
    try:
        ended = _train(root, dict(os.environ))
    except ConfigError as e:
        ended = Ended(2, f"container: {e}")
    except (BucketfeedError, OSError) as e:
        ended = Ended(1, f"container: {type(e).__name__}: {e}")
    return _told(root, ended)


def _train(root: Path, environment: dict[str, str]) -> Ended:
    hosts = Hosts.read(root)
    options = train_options(root, environment)
    processes = processes_per_host(hosts, environment)
    command = [sys.executable, "-m", TRAIN, *hyperparameters.arguments(options)]
    environments = [rank_environment(hosts, environment, local, processes) for local in range(processes)]
    numbers = [int(environment["RANK"]) for environment in environments]
    _log.info(
        "host %s, %d of %d, with %d process(es): ranks %d to %d of %d",
        *(hosts.current, hosts.index + 1, len(hosts.names), processes),
        *(numbers[0], numbers[-1], processes * len(hosts.names)),
    )
    return run_ranks(command, environments, numbers)


def train_options(root: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of train.py by name (`batch-size`): those of the place, and over them the job's own.

    The names of channels, given as data, become their folders.
    """
    given = hyperparameters.decode(_json(root / "input/config/hyperparameters.json"))
    own: dict[str, Any] = {
        "checkpoint-dir": str(root / "checkpoints"),
        "model-dir": str(root / "model"),
        "run-dir": str(root / "output/data"),
    }
    options = own | {name: value for name, value in given.items() if value is not None}
    if "cache-dir" not in options:
        volume = _cache_volume(root)
        options["cache-dir"] = _cache_folder(volume, root, environment)
        options.setdefault("cache-limit", volume.limit)
        _log.info(
            "cache: %s on the %s %s, %d bytes of %d free; limit %s",
            *(options["cache-dir"], volume.kind, volume.folder, volume.free, volume.size, options["cache-limit"]),
        )
    return _with_channels(options, root)


def _cache_volume(root: Path) -> disks.Volume:
    avoid = [str(root / name) for name in ("model", "output", "checkpoints", "input/data", "input/config")]
    return disks.choose(disks.volumes(prefer=(str(root), "/tmp"), avoid=avoid))


def _cache_folder(volume: disks.Volume, root: Path, environment: Mapping[str, str]) -> str:
    warm = environment.get(_WARM_POOL)
    if warm and os.path.isdir(warm) and os.stat(warm).st_dev == os.stat(volume.folder).st_dev:
        return os.path.join(warm, "bucketfeed-cache")
    on_volume = os.stat(root).st_dev == os.stat(volume.folder).st_dev
    return os.path.join(root if on_volume else volume.folder, "bucketfeed-cache")


def _with_channels(options: dict[str, Any], root: Path) -> dict[str, Any]:
    config = root / "input/config/inputdataconfig.json"
    channels = _json(config) if config.exists() else {}
    own = {name: about for name, about in channels.items() if name not in SDK_CHANNELS}
    for option in ("data", "test-data"):
        if options.get(option) in own:
            mode = own[options[option]].get("TrainingInputMode", "File")
            if mode == "Pipe":
                raise ConfigError(
                    f"the channel {options[option]} has input mode Pipe, which can't be read at any place; use File or "
                    f"FastFile, or give --{option} its s3:// URL and no channel"
                )
            options[option] = str(root / "input/data" / options[option])
    if "data" not in options:
        names = ", ".join(own) or "none"
        raise ConfigError(f"the job has no hyperparameter data: give a URL, or the name of a channel (there: {names})")
    return options


def processes_per_host(hosts: Hosts, environment: Mapping[str, str]) -> int:
    """Return how many ranks a host runs: what the launcher has set, or one a GPU, or 1."""
    said = environment.get(PROCESSES, "auto")
    if said == "auto":
        if hosts.uneven:
            raise ConfigError(f"the job's instance groups are of several types; set {PROCESSES} to one number for all")
        return max(1, gpus(environment))
    if not said.isdecimal() or int(said) < 1:
        raise ConfigError(f"{PROCESSES} must be auto or a number of at least 1, not {said!r}")
    return int(said)


def gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many GPUs the host has: what the SDK has counted, else the device files, without loading torch."""
    counted = environment.get("SM_NUM_GPUS", "")
    if counted.isdecimal():
        return int(counted)
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))


def rank_environment(
    hosts: Hosts, environment: Mapping[str, str], local: int, processes: int, sys: Path = Path("/sys")
) -> dict[str, str]:
    """Return the environment of the `local`-th process of this host: torchrun's variables, and those of the network.

    Whatever the job sets itself stays.
    """
    ranks = {
        "RANK": hosts.index * processes + local,
        "WORLD_SIZE": len(hosts.names) * processes,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": processes,
        "GROUP_RANK": hosts.index,
        "MASTER_ADDR": hosts.first,
    }
    defaults: dict[str, str] = {"MASTER_PORT": str(_PORT), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if processes > 1:
        defaults["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    if len(hosts.names) > 1 and hosts.interface:
        defaults |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), hosts.interface)
    if len(hosts.names) > 1 and has_efa(sys):
        # EFA's memory must not be shared with processes that workers fork.
        defaults |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}
    return {**defaults, **environment, **{name: str(value) for name, value in ranks.items()}}


def has_efa(sys: Path = Path("/sys")) -> bool:
    """Whether the host has an Elastic Fabric Adapter."""
    vendors = sorted((sys / "class/infiniband").glob("*/device/vendor"))
    return any(vendor.read_text(encoding="utf-8").strip() == _EFA_VENDOR for vendor in vendors)


def _told(root: Path, ended: Ended) -> int:
    """Write the first error where SageMaker looks for it, and say in a last line how it ended."""
    if ended.error is None:
        said = "stopped, and saved; started again, it goes on" if ended.code == STOPPED else "done"
        _log.info("training %s (exit code %d)", said, ended.code)
        return ended.code
    host = socket.gethostname()
    text = f"{ended.error} (on {host})" if "\n" not in ended.error else _placed(ended.error, host)
    if ended.consequence:
        text = f"this host lost the others, one of which has the first error in its log: {text}"
        time.sleep(_AFTER_YOU_SECONDS)
    try:
        failure = root / "output/failure"
        failure.parent.mkdir(parents=True, exist_ok=True)
        failure.write_text(text[:_REASON], encoding="utf-8")
    except OSError as e:
        _log.error("the error could not be written to %s: %s", root / "output/failure", e)
    _log.error("training failed (exit code %d): %s", ended.code, text.splitlines()[0])
    return ended.code


def _placed(error: str, host: str) -> str:
    first, rest = error.split("\n", 1)
    return f"{first} (on {host})\n{rest}"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ConfigError(f"{path} is not there: this runs in a SageMaker training container, or with --root") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON: {e}; SageMaker writes it") from e


if __name__ == "__main__":
    sys.exit(main())
