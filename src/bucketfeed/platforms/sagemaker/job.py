"""All that is asked of a SageMaker training job, as one value that is valid from birth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucketfeed.errors import ConfigError
from bucketfeed.store.sizes import parse_size
from bucketfeed.store.urls import parse_url

_LONGEST_RUN = 28 * 24 * 3600  # seconds, SageMaker's bound
_LONGEST_POOL = 3600
_STAMP = 16  # characters that SageMaker's SDK appends to a name, and some more
_CHANNEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SDK_CHANNELS = frozenset({"code", "sm_drivers", "recipe"})
PROCESSES = "BUCKETFEED_NPROC_PER_NODE"  # the variable that tells the container what `Job.processes` is


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job before it has a name of its own. `hyperparameters` are options of train.py without dashes.

    Args:
        bucket: where what is not told otherwise goes: code to jobs/, results to outputs/, checkpoints to checkpoints/.
        role: name or ARN of the execution role.
        processes: ranks on each host; "auto": one a GPU, or one.
        spot: managed spot training, for at most `max_wait_seconds` in all.
        keep_alive_seconds: how long a warm pool stays after the job; 0: none.
        channels: S3 URLs that SageMaker brings to the hosts, by the name that `data` then has.
        metrics: regular expressions by name, whose one group is a number in the log.
        source: folder with the user's own model and decode modules.
        source_limit_bytes: more than this is not uploaded unless `force`.

    Raises `ConfigError` for what can't work.
    """

    bucket: str
    role: str
    hyperparameters: Mapping[str, Any]
    region: str
    name: str = "bucketfeed"
    instance_type: str = "ml.m5.xlarge"
    instance_count: int = 1
    processes: int | str = "auto"
    image: str | None = None
    framework_version: str | None = None
    output_url: str | None = None
    checkpoint_url: str | None = None
    spot: bool = False
    max_run_seconds: int = 24 * 3600
    max_wait_seconds: int | None = None
    keep_alive_seconds: int = 0
    volume_gb: int = 100
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    encrypt_traffic: bool = False
    kms_key: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    channels: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    source: Path | None = None
    source_limit_bytes: int = 50_000_000
    force: bool = False

    def __post_init__(self) -> None:
        self._check_names()
        self._check_times()
        if self.processes != "auto" and not (isinstance(self.processes, int) and self.processes >= 1):
            raise ConfigError(f"--nproc-per-node must be auto or at least 1, not {self.processes!r}")
        for option, value in (("--instance-count", self.instance_count), ("--volume-gb", self.volume_gb)):
            if value < 1:
                raise ConfigError(f"{option} must be at least 1, not {value}")
        if self.image is not None and self.framework_version is not None:
            raise ConfigError(
                f"--image {self.image} and --framework-version {self.framework_version} both choose the image; keep one"
            )
        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError(
                f"a VPC needs both --subnet ({', '.join(self.subnets) or 'none given'}) and --security-group "
                f"({', '.join(self.security_groups) or 'none given'})"
            )
        if self.source is not None and not self.source.is_dir():
            raise ConfigError(f"--source {self.source} is no folder; name the one that holds your modules")
        if PROCESSES in self.environment:
            raise ConfigError(f"the variable {PROCESSES} is set by --nproc-per-node; give that instead")

    def _check_names(self) -> None:
        longest = 63 - _STAMP
        if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", self.name) or len(self.name) > longest:
            raise ConfigError(
                f"--name {self.name!r} can't begin a job's name: letters, digits and single hyphens between them, "
                f"at most {longest}"
            )
        for option, url in (("--output-url", self.output_url), ("--checkpoint-url", self.checkpoint_url)):
            if url is not None and parse_url(url).scheme != "s3":
                raise ConfigError(f"{option} must be an s3:// URL, for SageMaker writes nowhere else, not {url}")
        for name, url in self.channels.items():
            # The SDK's script makes a shell variable of the name.
            if not _CHANNEL.fullmatch(name) or name in SDK_CHANNELS:
                raise ConfigError(
                    f"--channel {name}: a channel's name is letters, digits and _, and none of SageMaker's own"
                )
            if parse_url(url).scheme != "s3":
                raise ConfigError(f"--channel {name}={url} must be an s3:// URL; give other data as --data")

    def _check_times(self) -> None:
        if not 1 <= self.max_run_seconds <= _LONGEST_RUN:
            raise ConfigError(f"--max-run must be 1 second to 28 days, not {self.max_run_seconds} s")
        if self.max_wait_seconds is not None and not self.spot:
            raise ConfigError(f"--max-wait {self.max_wait_seconds} s is for --spot; add it, or leave --max-wait away")
        if self.spot and not self.max_run_seconds <= self.wait_seconds:
            raise ConfigError(
                f"--max-wait ({self.wait_seconds} s) counts waiting and running together, so it must be at least "
                f"--max-run ({self.max_run_seconds} s)"
            )
        if not 0 <= self.keep_alive_seconds <= _LONGEST_POOL:
            raise ConfigError(f"--keep-alive must be 0 to 1 hour, not {self.keep_alive_seconds} s")
        if self.spot and self.keep_alive_seconds:
            raise ConfigError("SageMaker keeps no warm pool of spot instances; leave --spot or --keep-alive away")
        never = "checkpoint-dir" in self.hyperparameters and parse_url(
            str(self.hyperparameters["checkpoint-dir"])
        ).scheme in ("file",)
        if self.spot and (self.hyperparameters.get("resume") == "never" or never):
            raise ConfigError(
                "--spot without checkpoints begins at step 0 after every interruption: leave away --resume never and "
                "a --checkpoint-dir of the container's own; checkpoints then go to --checkpoint-url"
            )

    @property
    def wait_seconds(self) -> int:
        """Longest time from the first start to the end, with waiting for spot instances; twice the run's by default."""
        if self.max_wait_seconds is not None:
            return self.max_wait_seconds
        return min(2 * self.max_run_seconds, _LONGEST_RUN)

    @property
    def outputs(self) -> str:
        """Where results go."""
        return self.output_url or f"s3://{self.bucket}/outputs"

    def checkpoints(self, job_name: str) -> str:
        """Where checkpoints of the job with this name go: a place of its own, or the one that was named."""
        return self.checkpoint_url or f"s3://{self.bucket}/checkpoints/{job_name}"

    @property
    def cache_limit_bytes(self) -> int | None:
        """What the training's cache may take of a host's disk, if it was told."""
        limit = self.hyperparameters.get("cache-limit")
        return None if limit is None else parse_size(limit, "--cache-limit")
