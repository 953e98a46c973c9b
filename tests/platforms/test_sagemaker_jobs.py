"""Jobs that are planned without an account, and submitted to a mocked SageMaker, S3 and IAM."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from bucketfeed.cli import launch
from bucketfeed.errors import AccessError, BucketfeedError, ConfigError, NotFoundError
from bucketfeed.platforms.sagemaker import aws, follow, plan, submit
from bucketfeed.platforms.sagemaker.job import Job
from bucketfeed.platforms.sagemaker.source import Source
from bucketfeed.platforms.sagemaker.tuning import Tuning
from bucketfeed.testing.jobs import check_allowed
from bucketfeed.testing.moto import MotoBucket
from bucketfeed.train.lines import METRICS, epoch_line, evaluation_line

ODD = 'it\'s "odd"; $HOME `id` ü'
SERVICE_SAYS = {"TrainingJobName", "RoleArn"}


class Account:
    """A bucket, a role `trainer`, and the means to launch jobs in them."""

    def __init__(self, bucket: MotoBucket) -> None:
        self.bucket = bucket
        self.session = boto3.Session()
        self.role = f"trainer-{bucket.name}"
        self.role_arn = bucket.server.create_role(self.role)

    def job(self, **more: Any) -> Job:
        own = {"bucket": self.bucket.name, "role": self.role, "region": "us-east-1", "name": self.bucket.name[:40]}
        own |= {"hyperparameters": {"data": f"{self.bucket.url}train/", "lr": 1e-4, "audit": True}, "metrics": METRICS}
        return Job(**own | more)

    def objects(self) -> dict[str, int]:
        found = self.bucket.client.list_objects_v2(Bucket=self.bucket.name).get("Contents", [])
        return {entry["Key"]: entry["Size"] for entry in found}

    def described(self, name: str) -> dict[str, Any]:
        return self.session.client("sagemaker").describe_training_job(TrainingJobName=name)


@pytest.fixture
def account(moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch) -> Account:
    for name, value in moto_bucket.server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return Account(moto_bucket)


def command(account: Account, *more: str) -> list[str]:
    return [
        *("sagemaker", "--bucket", account.bucket.name, "--role", account.role, "--name", account.bucket.name[:40]),
        *("--data", f"{account.bucket.url}train/", *more),
    ]


def without_names(value: Any, name: str) -> Any:
    return json.loads(json.dumps(value).replace(name, "NAME"))


def test_what_is_submitted_is_what_was_planned_and_all_of_it_is_uploaded(account: Account, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    job = account.job(
        source=tmp_path,
        instance_count=2,
        spot=True,
        tags={"team": "vision"},
        environment={"A": ODD},
        kms_key="key-1",
        subnets=("subnet-0123",),
        security_groups=("sg-0123",),
        channels={"held_out": f"{account.bucket.url}test/"},
        hyperparameters={"data": f"{account.bucket.url}{ODD}", "test-data": "held_out"},
    )
    planned = plan.plan(job)
    sent: dict[str, Any] = {}
    session = boto3.Session()
    session.events.register(
        "provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: sent.update(params)
    )
    name = submit.submit(job, session=session)
    found = account.described(name)
    assert found["RoleArn"] == account.role_arn
    # What is sent is what was planned. What the service then says is that too, but for what moto forgets or makes up.
    for key in set(planned.request) - SERVICE_SAYS:
        assert without_names(sent[key], name) == without_names(planned.request[key], planned.name), key
    found["Environment"] = sent["Environment"]
    found["AlgorithmSpecification"]["MetricDefinitions"] = sent["AlgorithmSpecification"]["MetricDefinitions"]
    for key in set(planned.request) - SERVICE_SAYS - {"Tags"}:
        assert without_names(found[key], name) == without_names(planned.request[key], planned.name), key
    tags = account.session.client("sagemaker").list_tags(ResourceArn=found["TrainingJobArn"])["Tags"]
    assert tags == [{"Key": "team", "Value": "vision"}] == planned.request["Tags"]
    uploads = {item.url.replace(planned.name, name): len(item.data) for item in planned.uploads}
    assert {f"{account.bucket.url}{key}": size for key, size in account.objects().items()} == uploads
    assert all(url.startswith(f"{account.bucket.url}jobs/{name}/") for url in uploads)


def test_a_dry_run_needs_no_account_and_reaches_nothing(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    # Any request would go to a port that nobody listens on, and be an error.
    environment |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_EC2_METADATA_DISABLED": "true"}
    environment |= {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    (tmp_path / "src" / ".git").mkdir(parents=True)
    (tmp_path / "src" / "mine.py").write_text("x = 1\n")
    options = ["--dry-run", "--bucket", "my-bucket", "--role", "trainer", "--region", "eu-west-1", "--spot"]
    options += ["--instance-type", "ml.g5.2xlarge", "--max-run", "2h", "--data", "s3://my-bucket/train/"]
    options += ["--source", str(tmp_path / "src"), "--image", "1.dkr.ecr.eu-west-1.amazonaws.com/x:cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "bucketfeed.cli.main", "launch", "sagemaker", *options],
        env=environment, capture_output=True, text=True, timeout=100, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    request = json.loads(done.stdout)["CreateTrainingJob"]
    assert request["EnableManagedSpotTraining"] is True
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 14400}
    assert request["CheckpointConfig"]["S3Uri"] == f"s3://my-bucket/checkpoints/{request['TrainingJobName']}"
    for said in ("mine.py", "version control  .git/", "$1.51 an hour, $3.03 at most (2 h)", "would stand idle"):
        assert said in done.stderr
    assert "nothing was uploaded and nothing was started" in done.stderr
    assert "Applying" not in done.stderr


def test_a_dry_run_uploads_nothing_where_it_could(account: Account, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(command(account, "--dry-run")) == 0
    assert account.objects() == {}
    name = json.loads(capsys.readouterr().out)["CreateTrainingJob"]["TrainingJobName"]
    with pytest.raises(ClientError, match="not find"):
        account.described(name)


def test_the_newest_image_is_taken_or_the_one_asked_for(account: Account) -> None:
    gpu = account.job(instance_type="ml.g5.xlarge")
    assert "pytorch-training:2." in plan.image_uri(gpu)
    assert "-gpu-py3" in plan.image_uri(gpu)
    assert "pytorch-training:2.6.0-cpu-py312" in plan.image_uri(account.job(framework_version="2.6"))
    with pytest.raises(ConfigError, match=r"--framework-version 2\.1: .*2\.10\.0"):
        plan.image_uri(account.job(framework_version="2.1"))
    assert plan.image_uri(account.job(image="mine:1")) == "mine:1"


def test_the_metrics_are_those_that_training_logs(account: Account) -> None:
    import re

    definitions = plan.request(account.job())["AlgorithmSpecification"]["MetricDefinitions"]
    said = epoch_line(3, 0.25, 120.5, 0.013) + "\n" + evaluation_line(3, 1.5e-05, 0.875)
    numbers = {d["Name"]: re.search(d["Regex"], said)[1] for d in definitions}  # type: ignore[index]
    assert {name: float(text) for name, text in numbers.items()} == {
        **{"train:loss": 0.25, "train:samples_per_second": 120.5, "train:wait_percent": 1.3},
        **{"test:loss": 1.5e-05, "test:accuracy": 0.875},
    }


def test_tuning_is_submitted_with_its_ranges_and_static_options(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = ["--tune", "lr=1e-4:1e-2:log", "--tune", "batch-size=32:256", "--tune", "model=mine:a|mine:b"]
    assert launch.main(command(account, *tuned, "--tune-jobs", "6", "--tune-parallel", "3", "--epochs", "2")) == 0
    name = capsys.readouterr().out.strip()
    found = account.session.client("sagemaker").describe_hyper_parameter_tuning_job(HyperParameterTuningJobName=name)
    assert found["HyperParameterTuningJobConfig"]["ResourceLimits"] == {
        "MaxNumberOfTrainingJobs": 6,
        "MaxParallelTrainingJobs": 3,
    }
    ranges = found["HyperParameterTuningJobConfig"]["ParameterRanges"]
    assert ranges["ContinuousParameterRanges"][0]["ScalingType"] == "Logarithmic"
    assert [r["Name"] for r in ranges["IntegerParameterRanges"]] == ["batch-size"]
    assert ranges["CategoricalParameterRanges"][0]["Values"] == ["mine:a", "mine:b"]
    static = found["TrainingJobDefinition"]["StaticHyperParameters"]
    assert {"data", "epochs"} <= set(static)
    assert not {"lr", "batch-size", "model"} & set(static)
    key = static["sagemaker_submit_directory"].removeprefix(account.bucket.url)
    assert key in account.objects()
    with pytest.raises(ConfigError, match="each other's checkpoints"):
        plan.plan(account.job(spot=True), Tuning({"lr": "0.1:0.2"}))
    with pytest.raises(ConfigError, match="is no range"):
        Tuning({"lr": "0.2:0.1"})
    with pytest.raises(ConfigError, match="--tune-objective must be one of"):
        plan.plan(account.job(), Tuning({"lr": "0.1:0.2"}, objective="acc"))


# Errors before anything costs money


@pytest.mark.parametrize(
    ("code", "message", "kind", "told"),
    [
        ("ExpiredToken", "is expired", AccessError, "have expired: sign in"),
        ("InvalidClientTokenId", "is invalid", AccessError, "not valid: sign in"),
        ("AccessDeniedException", "not authorized", AccessError, "iam:PassRole"),
        ("ResourceLimitExceeded", "service limit 'ml.g5.xlarge for training' is 0", ConfigError, "Service Quotas"),
        ("ResourceInUse", "name exists", ConfigError, "another --name"),
        ("ValidationException", "Cannot find the ECR image", ConfigError, "check --image"),
        ("ValidationException", "Could not assume role arn:x", ConfigError, "must exist and trust"),
        ("ThrottlingException", "Rate exceeded", BucketfeedError, "try again"),
    ],
)
def test_what_aws_refuses_is_told_with_the_next_step(
    account: Account, code: str, message: str, kind: type[Exception], told: str
) -> None:
    session = boto3.Session()

    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": code, "Message": message}}, "CreateTrainingJob")

    session.events.register("provide-client-params.sagemaker.CreateTrainingJob", refuse)
    made = plan.Plan("CreateTrainingJob", {"TrainingJobName": "mine-1"}, (), Source(b"", (), ()))
    with pytest.raises(kind, match=told) as refused:
        submit.create(made, session)
    assert message in str(refused.value)


def test_without_credentials_nothing_is_uploaded_and_the_next_step_is_told(
    account: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert launch.main(command(account)) == 1
    assert "there are no AWS credentials" in capsys.readouterr().err
    assert account.objects() == {}


def test_a_missing_role_bucket_and_region_are_told_before_the_upload(
    account: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="the role nobody"):
        submit.submit(account.job(role="nobody"), session=account.session)
    with pytest.raises(NotFoundError, match="no-such-bucket of --output-url"):
        submit.submit(account.job(output_url="s3://no-such-bucket/x"), session=account.session)
    with pytest.raises(ConfigError, match=r"--instance-type ml\.g5\.huge"):
        submit.submit(account.job(instance_type="ml.g5.huge"), session=account.session)
    assert account.objects() == {}
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="give --region"):
        aws.session(None)


def test_a_bucket_of_another_region_is_warned_of(account: Account) -> None:
    name = f"{account.bucket.name}-far"
    account.bucket.client.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    job = account.job(hyperparameters={"data": f"s3://{name}/train/"}, role=account.role_arn)
    told = submit.preflight(job, account.session)
    assert [text for text in told if "lies in eu-central-1, the job runs in us-east-1" in text]
    assert submit.preflight(account.job(role=account.role_arn), account.session) == []


def test_a_role_that_may_not_read_the_data_is_refused_before_the_upload(account: Account) -> None:
    session = boto3.Session()

    class Answer:
        status_code = 200

    def decide(params: Any, **_: Any) -> Any:
        return Answer(), {"EvaluationResults": [{"EvalDecision": "implicitDeny"}]}

    session.events.register("before-call.iam.SimulatePrincipalPolicy", decide)
    with pytest.raises(AccessError, match=r"has no s3:GetObject for the data, .*has no s3:PutObject for the outputs"):
        submit.submit(account.job(), session=session)
    assert account.objects() == {}


@pytest.mark.parametrize(("found", "told"), [(None, "is not installed"), ("2.250.0", "in version 2.250.0")])
def test_the_sdk_that_is_needed_is_told_where_it_is_old_or_absent_c101(
    account: Account, monkeypatch: pytest.MonkeyPatch, found: str | None, told: str
) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ConfigError, match=rf"{told}.*pip install 'bucketfeed\[sagemaker\]'"):
        plan.request(account.job())


def test_the_sdk_is_imported_only_where_a_job_is_made_c101() -> None:
    code = (
        "import sys; from bucketfeed.cli import launch; launch.parser(); import bucketfeed.platforms.sagemaker.submit"
    )
    check = "; assert not {'sagemaker', 'torch', 'boto3', 'ray'} & set(sys.modules), 1"
    subprocess.run([sys.executable, "-c", code + check], check=True, timeout=60)


# Stop and follow


def test_stop_asks_for_the_job_and_refuses_one_that_is_not_running(account: Account) -> None:
    asked: list[Any] = []
    session = boto3.Session()

    class Answer:
        status_code = 200

    def stopped(params: dict[str, Any], **_: Any) -> Any:  # moto knows no StopTrainingJob
        asked.append(json.loads(params["body"]))
        return Answer(), {}

    def running(parsed: dict[str, Any], **_: Any) -> None:
        parsed["TrainingJobStatus"] = "InProgress"

    name = submit.submit(account.job(), session=account.session)
    with pytest.raises(ConfigError, match=f"the training job {name} is not running: it is Completed"):
        submit.stop(name, session=account.session)
    session.events.register("before-call.sagemaker.StopTrainingJob", stopped)
    session.events.register("after-call.sagemaker.DescribeTrainingJob", running)
    said: list[str] = []
    submit.stop(name, session=session, say=said.append)
    assert asked == [{"TrainingJobName": name}]
    assert "asked to stop" in said[0]
    with pytest.raises(NotFoundError, match="no training job and no tuning job nothing"):
        submit.stop("nothing", session=account.session)


def test_following_says_phases_and_each_line_once_until_the_end(account: Account) -> None:
    name = submit.submit(account.job(), session=account.session)
    logs = account.session.client("logs")
    group, stream = "/aws/sagemaker/TrainingJobs", f"{name}/algo-1-1700000000"
    looks = 0

    def status(parsed: dict[str, Any], **_: Any) -> None:
        parsed["TrainingJobStatus"] = "Completed" if looks == 2 else "InProgress"

    def put(*lines: str) -> None:
        events = [{"timestamp": int(time.time() * 1000) + looks, "message": text} for text in lines]
        logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)

    def pause() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
                logs.create_log_group(logGroupName=group)
            logs.create_log_stream(logGroupName=group, logStreamName=stream)
            put("epoch 0: train loss 1.2", "noise")
        else:
            put("epoch 1: train loss 0.7")

    session = boto3.Session()
    session.events.register("after-call.sagemaker.DescribeTrainingJob", status)
    said: list[str] = []
    ended = follow.follow(name, session=session, say=said.append, pause=pause)
    assert [text for text in said if text.startswith("algo-1")] == [
        "algo-1: epoch 0: train loss 1.2",
        "algo-1: epoch 1: train loss 0.7",
    ]
    assert ended.status == "Completed"
    assert launch.main(["sagemaker", "--follow", name]) == 0
    everything: list[str] = []
    follow.follow(name, session=session, say=everything.append, logs=True)
    assert "algo-1: noise" in everything


# The whole of it, here


@pytest.mark.timeout(300)
def test_what_would_be_submitted_runs_here_and_its_odd_options_arrive_c094(
    account: Account, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from pictures import picture_tar

    account.bucket.put("train/0.tar", picture_tar(range(24)))
    shutil.copy(Path(__file__).with_name("mine.py"), tmp_path)
    odd = '/opt/ml/output/data/it\'s "odd" $HOME `id`'
    options = ["--num-classes", "3", "--image-size", "8", "--batch-size", "4", "--model", "mine:net", "--run-dir", odd]
    here = ["--local-container", "--source", str(tmp_path), "--cache-limit", "50MB", "--env", "OMP_NUM_THREADS=1"]
    code = launch.main(command(account, *here, *options))
    said = capsys.readouterr().err
    try:
        check_allowed()
    except ConfigError:
        assert code == 2
        assert "gives no namespaces" in said
        return
    assert code == 0, said[-4000:]
    assert "Completed" in said
    results = [key for key in account.objects() if key.startswith("outputs/")]
    assert sorted(key.rsplit("/", 1)[1] for key in results) == ["model.tar.gz", "output.tar.gz"]


def test_a_plan_is_the_same_for_the_same_job(account: Account) -> None:
    from datetime import UTC, datetime

    at = datetime(2026, 1, 2, tzinfo=UTC)
    assert plan.plan(account.job(), now=at) == plan.plan(replace(account.job()), now=at)
