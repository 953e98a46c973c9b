"""Jobs as CreateTrainingJob is given them, with this package and `mine.py` as their source, on a mocked S3."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from pictures import picture_tar

import bucketfeed
from bucketfeed.errors import ConfigError
from bucketfeed.platforms.sagemaker import hyperparameters
from bucketfeed.testing.jobs import JobResult, check_allowed, run_training_job
from bucketfeed.testing.moto import MotoBucket

SAMPLES = 96
EPOCHS = 2
START = "exec python3 -m bucketfeed.platforms.sagemaker.container"


def source() -> bytes:
    """The package and the user's own file, in one archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        package = Path(bucketfeed.__file__).parent
        archive.add(package, "bucketfeed", filter=lambda m: None if "__pycache__" in m.name else m)
        archive.add(Path(__file__).with_name("mine.py"), "mine.py")
    return out.getvalue()


class Jobs:
    """Jobs on the samples of one bucket; each run has a folder of its own below `folder`."""

    def __init__(self, bucket: MotoBucket, folder: Path) -> None:
        self.bucket, self.folder = bucket, folder
        self.runs = 0
        self.options: dict[str, Any] = {
            **{"data": f"{bucket.url}train/", "test-data": "held-out", "num-classes": 3, "image-size": 8},
            **{"model": "mine:net", "epochs": EPOCHS, "batch-size": 4, "seed": 5, "lr": 0.01, "cache-limit": "50MB"},
        }
        for shard in range(3):
            bucket.put(f"train/{shard}.tar", picture_tar(range(32 * shard, 32 * (shard + 1)), seed=shard))
        bucket.put("test/0.tar", picture_tar(range(12), seed=9))
        bucket.put("code/source.tar.gz", source())

    def description(
        self,
        options: dict[str, Any] | None = None,
        *,
        hosts: int = 1,
        processes: int = 1,
        mine: dict[str, Any] | None = None,
        before: str = "",
        command: str | None = None,
        seconds: int = 100,
    ) -> dict[str, Any]:
        """What DescribeTrainingJob says of the job."""
        shell = f"cd /opt/ml/input/data/code && tar -xzf source.tar.gz && {before}{START}"
        name = f"job-{self.bucket.name}"
        return {
            "TrainingJobName": name,
            "HyperParameters": hyperparameters.encode(self.options | (options or {})),
            "AlgorithmSpecification": {
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["/bin/bash"],
                "ContainerArguments": ["-c", command or shell],
            },
            "InputDataConfig": [self._channel("code", "code/"), self._channel("held-out", "test/")],
            "OutputDataConfig": {"S3OutputPath": f"{self.bucket.url}out"},
            "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": hosts, "VolumeSizeInGB": 30},
            "StoppingCondition": {"MaxRuntimeInSeconds": seconds},
            "CheckpointConfig": {"S3Uri": f"{self.bucket.url}checkpoints/{name}"},
            "Environment": {
                **{"BUCKETFEED_NPROC_PER_NODE": str(processes), "OMP_NUM_THREADS": "1"},
                **({"MINE": json.dumps(mine)} if mine else {}),
            },
        }

    def run(self, description: dict[str, Any], **more: Any) -> JobResult | None:
        """Run it; None where this machine allows no namespaces, which must then have been told."""
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        more = {"s3": self.bucket.client, "environment": self.bucket.server.environment, **more}
        try:
            check_allowed()
        except ConfigError:
            with pytest.raises(ConfigError, match="gives no namespaces"):
                run_training_job(description, folder, **more)
            return None
        return run_training_job(description, folder, **more)

    def uploaded(self, name: str) -> dict[str, bytes]:
        """Return the files of an archive that the job has left, by name."""
        key = f"out/job-{self.bucket.name}/output/{name}"
        body = self.bucket.client.get_object(Bucket=self.bucket.name, Key=key)["Body"].read()
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]

    def _channel(self, name: str, prefix: str) -> dict[str, Any]:
        where = {"S3DataType": "S3Prefix", "S3Uri": f"{self.bucket.url}{prefix}"}
        return {"ChannelName": name, "DataSource": {"S3DataSource": where}}
