"""What submitting a job would do, without doing it: the request as the SageMaker SDK makes it, and the uploads.

The SDK's ModelTrainer (or tuner) runs against a session that reaches nothing: what it would upload is kept, and the
request is taken from the event that boto3 raises with the exact parameters, just before it would be sent.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bucketfeed.errors import ConfigError
from bucketfeed.platforms.sagemaker import hyperparameters
from bucketfeed.platforms.sagemaker.job import PROCESSES, Job
from bucketfeed.platforms.sagemaker.source import REQUIREMENTS, START, Source, pack
from bucketfeed.platforms.sagemaker.tuning import Tuning

NEEDED = "SageMaker's SDK v3: pip install 'bucketfeed[sagemaker]', or 'sagemaker>=3'"
COMMAND = "exec $SM_PYTHON_CMD -m bucketfeed.platforms.sagemaker.container"  # exec: SIGTERM reaches process 1 alone
UNKNOWN_ACCOUNT = "000000000000"  # in the ARN of a role that is given by name, until it is looked up
_CONFIG = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
_OPERATIONS = {"CreateTrainingJob": "TrainingJobName", "CreateHyperParameterTuningJob": "HyperParameterTuningJobName"}
_TALKATIVE = ("sagemaker", "sagemaker.config", "sagemaker.core", "sagemaker.train", "sagemaker.telemetry", "botocore")
_NEWEST_OF = "pytorch"
_DATA = ("data", "test-data")


@dataclass(frozen=True, slots=True)
class Upload:
    """An object that is to be written before the job is created."""

    url: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The operation of SageMaker's API, its parameters, the objects that they need, and what these hold."""

    operation: str
    request: Mapping[str, Any]
    uploads: tuple[Upload, ...]
    source: Source

    @property
    def name(self) -> str:
        """Of the job, or of the tuning job."""
        return str(self.request[_OPERATIONS[self.operation]])


class _Seen(BaseException):
    """Ends the SDK's work once the request is known; no `except Exception` of the SDK keeps it."""


def request(job: Job, *, now: datetime | None = None) -> dict[str, Any]:
    """Return the parameters of CreateTrainingJob for `job`. Nothing is uploaded and no account is needed."""
    return dict(plan(job, now=now).request)


def plan(job: Job, tuning: Tuning | None = None, *, now: datetime | None = None) -> Plan:
    """Return what submitting `job` would do. Raises `ConfigError` where SDK, image or source are not as needed."""
    check_sdk()
    if tuning is not None and (job.spot or job.checkpoint_url or job.keep_alive_seconds):
        raise ConfigError(
            "--tune starts many jobs, which must not go on from each other's checkpoints: leave --spot, "
            "--checkpoint-url and --keep-alive away"
        )
    extras = ["gcs"] if any(str(job.hyperparameters.get(n, "")).startswith(("gs://", "gcs://")) for n in _DATA) else []
    source = pack(job.source, limit_bytes=job.source_limit_bytes, force=job.force, extras=extras)
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d%H%M%S")
    made = _Made(job, f"{job.name}-{stamp}", tuning)
    made.uploads.append(Upload(f"s3://{job.bucket}/{made.prefix}source.tar.gz", source.archive))
    with _quiet_sdk():
        made.run()
    return Plan(made.operation, made.request, tuple(made.uploads), source)


def check_sdk() -> None:
    """Raise `ConfigError` unless SageMaker's SDK v3 can be imported."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("sagemaker")
    except PackageNotFoundError as e:
        raise ConfigError(f"SageMaker's SDK is not installed; this needs {NEEDED}") from e
    if int(found.split(".")[0]) < 3:
        raise ConfigError(
            f"SageMaker's SDK is installed in version {found}, whose estimators (`fit`) are gone; this needs {NEEDED}"
        )
    try:
        importlib.import_module("sagemaker.train")
    except ImportError as e:
        raise ConfigError(f"SageMaker's SDK {found} can't be imported: {e}; this needs {NEEDED}") from e


def image_uri(job: Job) -> str:
    """Return the URI of the training image: the one named, or AWS's of that PyTorch version, or its newest."""
    if job.image is not None:
        return job.image
    from sagemaker.core import image_uris

    known = image_uris.config_for_framework(_NEWEST_OF)["training"]
    versions = {**known["version_aliases"], **{name: name for name in known["versions"]}}
    usable = [name for name in known["versions"] if tuple(map(int, name.split(".")[:2])) >= (2, 6)]
    wanted = job.framework_version or max(usable, key=lambda name: tuple(map(int, name.split("."))))
    if versions.get(wanted) not in usable:
        raise ConfigError(
            f"--framework-version {wanted}: SageMaker's PyTorch images that bucketfeed runs on are "
            f"{', '.join(usable)}; take one of these, or name your own --image"
        )
    full = versions[wanted]
    try:
        return str(
            image_uris.retrieve(
                _NEWEST_OF,
                job.region,
                version=full,
                py_version=known["versions"][full]["py_versions"][-1],
                instance_type=job.instance_type,
                image_scope="training",
            )
        )
    except (KeyError, ValueError) as e:
        raise ConfigError(f"there is no PyTorch {full} image for {job.instance_type} in {job.region}: {e}") from e


class _Made:
    """One run of the SDK: what it would upload, and what it asks for in the end."""

    def __init__(self, job: Job, name: str, tuning: Tuning | None) -> None:
        self.job, self.name, self.tuning = job, name, tuning
        self.prefix = f"jobs/{name}/"
        self.uploads: list[Upload] = []
        self.operation = ""
        self.request: dict[str, Any] = {}

    def run(self) -> None:
        import boto3

        boto = boto3.Session(aws_access_key_id="none", aws_secret_access_key="none", region_name=self.job.region)
        boto.events.register("before-call.iam", _allowed)
        boto.events.register("before-send", _not_sent)
        for operation in _OPERATIONS:
            boto.events.register(f"provide-client-params.sagemaker.{operation}", self._see)
        trainer = self._trainer(self._session(boto))
        with suppress(_Seen):  # the SDK's telemetry decorator may have swallowed it
            if self.tuning is None:
                trainer.train(wait=False, logs=False)
            else:
                self.tuning.tuner(trainer, self.job.metrics).tune(
                    trainer.input_data_config, job_name=self.tuning.job_name(self.name), wait=False
                )
        if not self.request:
            raise ConfigError("SageMaker's SDK asked for no job; this needs a version of it between 3 and 4")

    def _see(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.operation, self.request = model.name, params
        if "TrainingJobName" in params:
            # The SDK counts its seconds itself; one name stands in the request and in the uploads' URLs.
            self.request = {**params, "TrainingJobName": self.name}
        else:
            self._complete(params["TrainingJobDefinition"])
        raise _Seen

    def _complete(self, definition: dict[str, Any]) -> None:
        """Add what the SDK's tuner forgets of a trainer."""
        if self.job.kms_key:
            definition["ResourceConfig"]["VolumeKmsKeyId"] = self.job.kms_key
        if self.job.encrypt_traffic:
            definition["EnableInterContainerTrafficEncryption"] = True

    def _session(self, boto: Any) -> Any:
        from sagemaker.core.helper.session_helper import Session

        made = self

        class Recorder(Session):  # type: ignore[misc]
            """Uploads into a list, below the job's own prefix."""

            def default_bucket(self) -> str:
                return made.job.bucket

            def upload_data(self, path: str, bucket: Any = None, key_prefix: str = "", **more: Any) -> str:
                top = Path(path)
                url = f"s3://{made.job.bucket}/{made.prefix}{key_prefix.rsplit('/', 1)[-1]}"
                for file in sorted(top.rglob("*")):
                    if file.is_file() and "__pycache__" not in file.parts:
                        made.uploads.append(Upload(f"{url}/{file.relative_to(top).as_posix()}", file.read_bytes()))
                return url

        return Recorder(boto_session=boto, default_bucket=self.job.bucket, sagemaker_config=_CONFIG)

    def _trainer(self, session: Any) -> Any:
        from sagemaker.core.shapes import Channel, MetricDefinition, StoppingCondition, Tag
        from sagemaker.core.training.configs import (
            CheckpointConfig,
            Compute,
            Networking,
            OutputDataConfig,
            SourceCode,
        )
        from sagemaker.train import ModelTrainer

        job = self.job
        start = {"command": COMMAND} if self.tuning is None else {"entry_script": START}
        networking = Networking(
            subnets=list(job.subnets) or None,
            security_group_ids=list(job.security_groups) or None,
            enable_inter_container_traffic_encryption=job.encrypt_traffic or None,
        )
        trainer = ModelTrainer(
            sagemaker_session=session,
            role=role_arn(job.role),
            base_job_name=job.name,
            training_image=image_uri(job),
            source_code=SourceCode(source_dir=self.uploads[0].url, requirements=REQUIREMENTS, **start),
            compute=Compute(
                instance_type=job.instance_type,
                instance_count=job.instance_count,
                volume_size_in_gb=job.volume_gb,
                volume_kms_key_id=job.kms_key,
                keep_alive_period_in_seconds=job.keep_alive_seconds or None,
                enable_managed_spot_training=job.spot,
            ),
            networking=networking if job.subnets or job.encrypt_traffic else None,
            stopping_condition=StoppingCondition(
                max_runtime_in_seconds=job.max_run_seconds,
                **({"max_wait_time_in_seconds": job.wait_seconds} if job.spot else {}),
            ),
            output_data_config=OutputDataConfig(s3_output_path=job.outputs, kms_key_id=job.kms_key),
            checkpoint_config=None if self.tuning else CheckpointConfig(s3_uri=job.checkpoints(self.name)),
            input_data_config=[Channel(**_channel(name, url)) for name, url in job.channels.items()],
            environment={PROCESSES: str(job.processes), "PYTHONUNBUFFERED": "1", **job.environment},
            hyperparameters=hyperparameters.encode(job.hyperparameters),
            tags=[Tag(key=key, value=value) for key, value in job.tags.items()] or None,
        )
        return trainer.with_metric_definitions(
            [MetricDefinition(name=name, regex=regex) for name, regex in job.metrics.items()]
        )


def _channel(name: str, url: str) -> dict[str, Any]:
    where = {"s3_data_type": "S3Prefix", "s3_uri": url, "s3_data_distribution_type": "FullyReplicated"}
    return {"channel_name": name, "data_source": {"s3_data_source": where}, "input_mode": "File"}


def role_arn(role: str) -> str:
    """Return the ARN that `role` is or would have: a name alone tells no account."""
    return role if role.startswith("arn:") else f"arn:aws:iam::{UNKNOWN_ACCOUNT}:role/{role}"


def _allowed(model: Any, params: Any, **_: Any) -> tuple[Any, dict[str, Any]]:
    """Answer the SDK's questions about the role: they are asked of the account itself, where there is one."""

    class _Answer:
        status_code = 200

    trust = {"Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "*"}]}
    decision = {"EvalDecision": "allowed", "EvalActionName": "any"}
    return _Answer(), {"EvaluationResults": [decision], "Role": {"AssumeRolePolicyDocument": json.dumps(trust)}}


def _not_sent(request: Any, **_: Any) -> None:
    raise ConfigError(f"SageMaker's SDK would reach {request.url} to plan a job; this needs another version of it")


@contextmanager
def _quiet_sdk() -> Iterator[None]:
    """Keep the SDK's advice about roles and names out of the log while the block runs."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
