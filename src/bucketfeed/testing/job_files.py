"""The files of a SageMaker job's host: what lies in /opt/ml when it starts, and what is uploaded when it ends."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from bucketfeed.errors import ConfigError
from bucketfeed.store.urls import parse_url

Seen = dict[str, tuple[int, int]]
"""Of files: size and time of change in nanoseconds, by path."""


def lay_out(description: Mapping[str, Any], s3: Any, root: Path, host: str, hosts: Sequence[str]) -> None:
    """Make the folders and configuration files of one host, and download its channels."""
    for name in ("input/config", "input/data", "model", "output/data", "checkpoints"):
        (root / name).mkdir(parents=True, exist_ok=True)
    resources = description["ResourceConfig"]
    kind = resources.get("InstanceType", "")
    group = {"instance_group_name": "homogeneousCluster", "instance_type": kind, "hosts": list(hosts)}
    _write(root, "hyperparameters", dict(description.get("HyperParameters") or {}))
    _write(
        root,
        "resourceconfig",
        {
            "current_host": host,
            "current_instance_type": kind,
            "current_group_name": group["instance_group_name"],
            "hosts": list(hosts),
            "instance_groups": [group],
            "network_interface_name": "lo",
        },
    )
    channels = {}
    for channel in description.get("InputDataConfig") or []:
        name = channel["ChannelName"]
        source = channel["DataSource"].get("S3DataSource")
        if source is None or source.get("S3DataType", "S3Prefix") != "S3Prefix":
            raise ConfigError(
                f"the channel {name} is no S3Prefix, and only these can be given to a job on this machine"
            )
        channels[name] = {
            "TrainingInputMode": channel.get("InputMode") or description["AlgorithmSpecification"]["TrainingInputMode"],
            "S3DistributionType": source.get("S3DataDistributionType", "FullyReplicated"),
            "RecordWrapperType": "None",
        }
        mine = slice(None)
        if channels[name]["S3DistributionType"] == "ShardedByS3Key":
            mine = slice(hosts.index(host), None, len(hosts))
        (root / "input/data" / name).mkdir(exist_ok=True)
        download(s3, source["S3Uri"], root / "input/data" / name, mine)
    _write(root, "inputdataconfig", channels)


def download_checkpoints(description: Mapping[str, Any], s3: Any, root: Path) -> Seen:
    """Download what an earlier run of the job has saved; return what is there now."""
    url = (description.get("CheckpointConfig") or {}).get("S3Uri")
    if url:
        download(s3, url.rstrip("/") + "/", root / "checkpoints")
    return _seen(root / "checkpoints")


def sync_checkpoints(description: Mapping[str, Any], s3: Any, root: Path, before: Seen) -> None:
    """Upload the checkpoints that are new or have changed since; what is gone stays in the bucket."""
    url = (description.get("CheckpointConfig") or {}).get("S3Uri")
    folder = root / "checkpoints"
    for name, state in _seen(folder).items():
        if url and before.get(name) != state:
            bucket, prefix = _parted(url.rstrip("/") + "/")
            s3.upload_file(str(folder / name), bucket, prefix + name)


def upload_results(s3: Any, roots: Sequence[Path], url: str) -> None:
    """Upload what all hosts have left as `model.tar.gz` and `output.tar.gz` below `url`."""
    bucket, prefix = _parted(url)
    for folder, name in (("model", "model.tar.gz"), ("output/data", "output.tar.gz")):
        members = {
            path.relative_to(root / folder).as_posix(): path
            for root in roots
            for path in sorted((root / folder).rglob("*"))
            if path.is_file()
        }
        if not members:
            continue
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            for member, path in members.items():
                archive.add(path, arcname=member)
        s3.put_object(Bucket=bucket, Key=prefix + name, Body=out.getvalue())


def _write(root: Path, name: str, value: Any) -> None:
    (root / "input/config" / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def _parted(url: str) -> tuple[str, str]:
    parsed = parse_url(url)
    if parsed.scheme != "s3":
        raise ConfigError(f"{url} is not in S3, where a job's inputs and outputs are")
    return parsed.bucket, parsed.key


def _objects(s3: Any, bucket: str, prefix: str) -> Iterator[str]:
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get("Contents", []):
            if not found["Key"].endswith("/"):
                yield found["Key"]


def download(s3: Any, url: str, folder: Path, mine: slice = slice(None)) -> None:
    """Write what lies below `url`, or that part of it, into `folder`."""
    bucket, prefix = _parted(url)
    for key in list(_objects(s3, bucket, prefix))[mine]:
        relative = PurePosixPath(key[len(prefix) :].lstrip("/") or key.rsplit("/", 1)[-1])
        if ".." in relative.parts:
            raise ConfigError(f"the key {key!r} in {url} leads out of its channel's folder; rename the object")
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, key, str(path))


def _seen(folder: Path) -> Seen:
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
