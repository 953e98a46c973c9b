"""Starts and stops jobs: asks the account first what can be asked, uploads, creates."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bucketfeed.errors import AccessError, BucketfeedError, ConfigError, NotFoundError
from bucketfeed.platforms.sagemaker import checks, plan
from bucketfeed.platforms.sagemaker.aws import told
from bucketfeed.platforms.sagemaker.job import Job
from bucketfeed.platforms.sagemaker.tuning import Tuning
from bucketfeed.store.urls import parse_url

_log = logging.getLogger(__name__)

_CREATE = {
    "CreateTrainingJob": "create_training_job",
    "CreateHyperParameterTuningJob": "create_hyper_parameter_tuning_job",
}


def submit(job: Job, *, session: Any, tuning: Tuning | None = None) -> str:
    """Start `job` (or the tuning of it) with a boto3 session and return its name.

    Raises `AccessError` for credentials and permissions, `NotFoundError` for bucket and role, `ConfigError` for what
    the request has wrong or a quota refuses; all that can be known is known before the first upload.
    """
    job = replace(job, role=resolved_role(job.role, session))
    made = checked(job, tuning)
    for warning in preflight(job, session):
        _log.warning("%s", warning)
    upload(made, session, job.kms_key)
    create(made, session)
    return made.name


def checked(job: Job, tuning: Tuning | None = None) -> plan.Plan:
    """Return what submitting does, once the API's own limits allow it. Needs no account."""
    checks.known_instance_type(job.instance_type)
    made = plan.plan(job, tuning)
    checks.against_model(made.operation, made.request)
    return made


def resolved_role(role: str, session: Any) -> str:
    """Return the ARN of a role; raises `NotFoundError` for one that is not there, `AccessError` without credentials."""
    with told("looking up who you are"):
        account = session.client("sts").get_caller_identity()
    if role.startswith("arn:"):
        return role
    try:
        with told(f"looking up the role {role}"):
            return str(session.client("iam").get_role(RoleName=role)["Role"]["Arn"])
    except AccessError:  # who may start jobs need not be allowed to look at roles
        partition = account["Arn"].split(":")[1]
        return f"arn:{partition}:iam::{account['Account']}:role/{role}"


def preflight(job: Job, session: Any) -> list[str]:
    """Return what the account tells against the job; raises for what makes it impossible."""
    found = []
    s3 = session.client("s3")
    urls = {"--bucket": f"s3://{job.bucket}", "--output-url": job.outputs, "--checkpoint-url": job.checkpoint_url}
    urls |= {f"--{name}": str(job.hyperparameters.get(name, "")) for name in ("data", "test-data")}
    regions: dict[str, str | None] = {}
    for option, url in urls.items():
        if not url or not url.startswith("s3://"):
            continue
        bucket = parse_url(url).bucket
        if bucket not in regions:
            regions[bucket] = _region(s3, bucket, option)
        region = regions[bucket]
        if region is not None and region != job.region:
            found.append(
                f"{option} {url} lies in {region}, the job runs in {job.region}: reading is slow and costs transfer; "
                f"give --region {region}"
            )
    _check_role(job, session)
    return found


def _region(s3: Any, bucket: str, option: str) -> str | None:
    """Return a bucket's region, None where that is not told; raises `NotFoundError` for one that is not there."""
    from botocore.exceptions import ClientError

    try:
        with told(f"looking for the bucket {bucket} of {option}"):
            head = s3.head_bucket(Bucket=bucket)
    except NotFoundError:
        raise
    except BucketfeedError as e:
        headers: Mapping[str, str] = {}
        if isinstance(e.__cause__, ClientError):
            headers = e.__cause__.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return headers.get("x-amz-bucket-region")  # S3 tells the region even of buckets it lets nobody see
    region = head.get("BucketRegion") or head["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
    return None if region is None else str(region)


def _check_role(job: Job, session: Any) -> None:
    """Raise `AccessError` where IAM says that the role may not read data or write results, if that may be asked."""
    from botocore.config import Config

    wanted = [("s3:GetObject", f"{job.hyperparameters.get('data', '')}".rstrip("/") + "/x", "data")]
    wanted += [("s3:PutObject", job.outputs.rstrip("/") + "/x", "outputs")]
    if os.environ.get("SAGEMAKER_VALIDATE_ROLE", "").lower() in ("false", "0", "no"):  # which the SDK reads too
        return
    iam = session.client("iam", config=Config(retries={"total_max_attempts": 2}))
    denied = []
    for action, url, what in wanted:
        if not url.startswith("s3://"):
            continue
        try:
            with told(f"asking whether the role {job.role} reads {url}"):
                reply = iam.simulate_principal_policy(
                    PolicySourceArn=job.role,
                    ActionNames=[action],
                    ResourceArns=[f"arn:{job.role.split(':')[1]}:s3:::{url.removeprefix('s3://')}"],
                )
        except NotFoundError as e:
            raise NotFoundError(f"the role {job.role} does not exist; see infra/README.md for one that fits") from e
        except BucketfeedError as e:
            _log.debug("%s", e)
            return
        decisions = {result["EvalDecision"] for result in reply.get("EvaluationResults", [])}
        if decisions - {"allowed"}:
            denied.append(f"the role {job.role} has no {action} for the {what}, {url[:-1]}")
    if denied:
        raise AccessError(
            f"{'; '.join(denied)}; give it the permission (infra/README.md), or name another --role; "
            "where a bucket's own policy allows it, which IAM does not tell, set SAGEMAKER_VALIDATE_ROLE=false"
        )


def upload(made: plan.Plan, session: Any, kms_key: str | None = None) -> None:
    """Write the objects that the job needs."""
    more = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
    s3 = session.client("s3")
    for item in made.uploads:
        url = parse_url(item.url)
        with told(f"uploading the job's source to {item.url}"):
            s3.put_object(Bucket=url.bucket, Key=url.key, Body=item.data, **more)


def create(made: plan.Plan, session: Any) -> None:
    """Create the job."""
    with told(f"starting the job {made.name}"):
        getattr(session.client("sagemaker"), _CREATE[made.operation])(**made.request)


def stop(name: str, *, session: Any, say: Callable[[str], None] = lambda _: None) -> None:
    """Stop a training job or a tuning job: it gets SIGTERM, and two minutes to save.

    Raises `NotFoundError` where there is none of the name, `ConfigError` where it has already ended.
    """
    client = session.client("sagemaker")
    kind, status = _status(client, name)
    if status != "InProgress":
        raise ConfigError(f"the {kind} {name} is not running: it is {status}")
    with told(f"stopping the {kind} {name}"):
        if kind == "training job":
            client.stop_training_job(TrainingJobName=name)
        else:
            client.stop_hyper_parameter_tuning_job(HyperParameterTuningJobName=name)
    say(f"{name}: asked to stop; it saves, which takes up to two minutes")


def _status(client: Any, name: str) -> tuple[str, str]:
    try:
        with told(f"looking for the training job {name}"):
            return "training job", str(client.describe_training_job(TrainingJobName=name)["TrainingJobStatus"])
    except (NotFoundError, ConfigError):
        pass
    try:
        with told(f"looking for the tuning job {name}"):
            reply = client.describe_hyper_parameter_tuning_job(HyperParameterTuningJobName=name)
            return "tuning job", str(reply["HyperParameterTuningJobStatus"])
    except (NotFoundError, ConfigError) as e:
        raise NotFoundError(
            f"there is no training job and no tuning job {name} in {client.meta.region_name}; check name and --region"
        ) from e
