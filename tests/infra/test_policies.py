"""What a training job may do and who starts it may do, under the policies of infra/training.yaml.

S3 is asked by requests, signed with the role's own credentials, which moto judges. It knows no conditions, and no
resources outside S3: those are judged by the evaluation in `stacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.core.authorization import ActionAuthenticatorMixin
from stacks import (
    ACCOUNT,
    BUCKET,
    KEY,
    REGION,
    Stack,
    allowed,
    client,
    deploy,
    managed_policy,
    substituted,
    template,
)

from bucketfeed.platforms.sagemaker.job import Job

LOGS = f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs"
OTHERS = "other-peoples-photos"
SAGEMAKER = "sagemaker.amazonaws.com"


@pytest.fixture
def stack() -> Stack:
    found = deploy()
    s3 = client("s3")
    for name in (OTHERS, "more-photos"):
        s3.create_bucket(Bucket=name)
        s3.put_object(Bucket=name, Key="train/1.jpg", Body=b"theirs")
    for key in ("train/1.jpg", "jobs/a/source.tar.gz", "outputs/a/model.tar.gz", "checkpoints/a/1.pt"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"there")
    return found


@contextmanager
def policies_in_force() -> Iterator[None]:
    """From here on moto judges every request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
        patch.setattr(ActionAuthenticatorMixin, "request_count", 0)
        yield


def job(stack: Stack) -> Any:
    """S3 as a training job of the stack finds it."""
    found = client("sts").assume_role(RoleArn=stack.outputs["RoleArn"], RoleSessionName="job")["Credentials"]
    return client(
        "s3",
        aws_access_key_id=found["AccessKeyId"],
        aws_secret_access_key=found["SecretAccessKey"],
        aws_session_token=found["SessionToken"],
    )


def launcher(stack: Stack) -> Any:
    """S3 as one finds it who has only the launcher policy."""
    iam = client("iam")
    iam.create_user(UserName="anna")
    iam.attach_user_policy(UserName="anna", PolicyArn=stack.outputs["LauncherPolicyArn"])
    found = iam.create_access_key(UserName="anna")["AccessKey"]
    return client("s3", aws_access_key_id=found["AccessKeyId"], aws_secret_access_key=found["SecretAccessKey"])


def refused(request: Callable[..., Any], **arguments: Any) -> bool:
    """Whether the request is refused for want of permission; raises whatever else goes wrong."""
    try:
        request(**arguments)
    except ClientError as e:
        if e.response["Error"]["Code"] not in ("AccessDenied", "403"):
            raise
        return True
    return False


class TestJobInS3:
    """The execution role."""

    def test_reads_and_lists_data(self, stack: Stack) -> None:
        s3 = job(stack)
        with policies_in_force():
            assert s3.get_object(Bucket=BUCKET, Key="train/1.jpg", Range="bytes=1-3")["Body"].read() == b"her"
            assert s3.head_object(Bucket=BUCKET, Key="train/1.jpg")["ContentLength"] == 5
            assert s3.list_objects_v2(Bucket=BUCKET, Prefix="train/")["KeyCount"] == 1

    @pytest.mark.parametrize("key", ["outputs/a/model.tar.gz", "outputs/b/output.tar.gz", "checkpoints/a/2.pt"])
    def test_writes_outputs_and_checkpoints(self, stack: Stack, key: str) -> None:
        s3 = job(stack)
        with policies_in_force():
            s3.put_object(Bucket=BUCKET, Key=key, Body=b"new")
            assert s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"new"

    def test_writes_a_large_model_in_parts_and_drops_one_that_broke(self, stack: Stack) -> None:
        s3 = job(stack)
        at = {"Bucket": BUCKET, "Key": "outputs/a/large.tar.gz"}
        with policies_in_force():
            upload = s3.create_multipart_upload(**at)["UploadId"]
            part = s3.upload_part(**at, UploadId=upload, PartNumber=1, Body=b"part")
            parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
            s3.complete_multipart_upload(**at, UploadId=upload, MultipartUpload={"Parts": parts})
            s3.abort_multipart_upload(**at, UploadId=s3.create_multipart_upload(**at)["UploadId"])
            assert s3.get_object(**at)["Body"].read() == b"part"

    @pytest.mark.parametrize(
        "key", ["train/1.jpg", "train/2.jpg", "jobs/a/source.tar.gz", "outputs", "outputs2/x", "xoutputs/x"]
    )
    def test_writes_nothing_else(self, stack: Stack, key: str) -> None:
        s3 = job(stack)
        with policies_in_force():
            assert refused(s3.put_object, Bucket=BUCKET, Key=key, Body=b"new")
        assert key not in ("train/1.jpg", "jobs/a/source.tar.gz") or content(key) == b"there"

    def test_prunes_its_checkpoints(self, stack: Stack) -> None:
        s3 = job(stack)
        with policies_in_force():
            s3.delete_object(Bucket=BUCKET, Key="checkpoints/a/1.pt")
            assert s3.list_objects_v2(Bucket=BUCKET, Prefix="checkpoints/")["KeyCount"] == 0

    @pytest.mark.parametrize("key", ["train/1.jpg", "outputs/a/model.tar.gz", "jobs/a/source.tar.gz"])
    def test_deletes_nothing_else(self, stack: Stack, key: str) -> None:
        s3 = job(stack)
        with policies_in_force():
            assert refused(s3.delete_object, Bucket=BUCKET, Key=key)
        assert content(key) == b"there"

    def test_sees_no_other_bucket(self, stack: Stack) -> None:
        s3 = job(stack)
        with policies_in_force():
            assert refused(s3.get_object, Bucket=OTHERS, Key="train/1.jpg")
            assert refused(s3.list_objects_v2, Bucket=OTHERS)
            assert refused(s3.list_objects_v2, Bucket="more-photos")

    def test_reads_the_data_bucket_that_is_given_and_writes_nothing_there(self) -> None:
        documents = deploy(DataBucketName="more-photos").role_policies()
        there = "arn:aws:s3:::more-photos"
        assert allowed(documents, "s3:ListBucket", there)
        assert allowed(documents, "s3:GetObject", f"{there}/train/1.jpg")
        for action in ("s3:PutObject", "s3:DeleteObject"):
            for key in ("train/1.jpg", "outputs/x", "checkpoints/x"):
                assert not allowed(documents, action, f"{there}/{key}")

    @pytest.mark.parametrize("change", ["delete_bucket", "delete_bucket_policy", "delete_public_access_block"])
    def test_leaves_the_bucket_as_it_is(self, stack: Stack, change: str) -> None:
        s3 = job(stack)
        with policies_in_force():
            assert refused(getattr(s3, change), Bucket=BUCKET)


class TestLauncherInS3:
    """One who has the launcher policy and nothing else."""

    def test_uploads_source_and_fetches_the_model(self, stack: Stack) -> None:
        s3 = launcher(stack)
        with policies_in_force():
            s3.put_object(Bucket=BUCKET, Key="jobs/b/source.tar.gz", Body=b"new")
            assert s3.get_object(Bucket=BUCKET, Key="outputs/a/model.tar.gz")["Body"].read() == b"there"
            assert s3.list_objects_v2(Bucket=BUCKET, Prefix="checkpoints/")["KeyCount"] == 1

    def test_changes_neither_data_nor_results_and_deletes_nothing(self, stack: Stack) -> None:
        s3 = launcher(stack)
        with policies_in_force():
            for key in ("train/1.jpg", "checkpoints/a/1.pt", "outputs/a/model.tar.gz"):
                assert refused(s3.put_object, Bucket=BUCKET, Key=key, Body=b"new")
            for key in ("train/1.jpg", "checkpoints/a/1.pt", "outputs/a/model.tar.gz", "jobs/a/source.tar.gz"):
                assert refused(s3.delete_object, Bucket=BUCKET, Key=key)


class TestLaunchPy:
    """What `launch.py sagemaker --bucket ... --role ...` asks for when nothing else is said."""

    def test_writes_where_the_policies_let_it(self, stack: Stack) -> None:
        submitted = default_job(stack)
        for url in (submitted.outputs, submitted.checkpoints("bucketfeed-1")):
            arn = f"arn:aws:s3:::{url.removeprefix('s3://').rstrip('/')}/file"
            assert allowed(stack.role_policies(), "s3:PutObject", arn)
            assert allowed(stack.launcher_policies(), "s3:GetObject", arn)

    def test_names_jobs_so_that_they_may_be_started(self, stack: Stack) -> None:
        submitted = default_job(stack)
        assert allowed(stack.launcher_policies(), "sagemaker:CreateTrainingJob", training_job(f"{submitted.name}-1"))


class TestTls:
    @pytest.mark.parametrize("resource", [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/train/1.jpg"])
    @pytest.mark.parametrize("action", ["s3:GetObject", "s3:PutObject", "s3:ListBucket", "s3:DeleteBucketPolicy"])
    def test_whatever_comes_without_it_is_refused_whoever_asks(self, action: str, resource: str) -> None:
        part = template()["Resources"]["BucketPolicy"]["Properties"]["PolicyDocument"]
        document = substituted(part, {"AWS::Partition": "aws", "BucketName": BUCKET})
        assert [s["Principal"] for s in document["Statement"]] == ["*"]
        root = {"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
        assert allowed([root, document], action, resource, aws__SecureTransport="true")
        assert not allowed([root, document], action, resource, aws__SecureTransport="false")


class TestJobElsewhere:
    def test_writes_its_own_log_and_no_other(self, stack: Stack) -> None:
        documents = stack.role_policies()
        for action in ("logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"):
            assert allowed(documents, action, f"{LOGS}:log-stream:bucketfeed-1/algo-1")
            assert not allowed(
                documents, action, f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/lambda/x:log-stream:y"
            )

    def test_puts_metrics_under_the_names_of_sagemaker_alone(self, stack: Stack) -> None:
        documents = stack.role_policies()
        assert allowed(documents, "cloudwatch:PutMetricData", "*", cloudwatch__namespace="/aws/sagemaker/TrainingJobs")
        assert not allowed(documents, "cloudwatch:PutMetricData", "*", cloudwatch__namespace="Billing")

    def test_pulls_pytorch_images_of_aws_and_all_of_its_own_account(self, stack: Stack) -> None:
        documents = stack.role_policies()
        aws, own = ("arn:aws:ecr:us-east-1:763104351884:repository", f"arn:aws:ecr:us-east-1:{ACCOUNT}:repository")
        assert allowed(documents, "ecr:GetAuthorizationToken", "*")
        assert allowed(documents, "ecr:BatchGetImage", f"{aws}/pytorch-training")
        assert allowed(documents, "ecr:BatchGetImage", f"{own}/mine")
        assert not allowed(documents, "ecr:BatchGetImage", f"{aws}/tensorflow-training")
        assert not allowed(documents, "ecr:PutImage", f"{own}/mine")

    @pytest.mark.parametrize(
        "action", ["sagemaker:CreateTrainingJob", "iam:PassRole", "sts:AssumeRole", "ec2:RunInstances"]
    )
    def test_starts_nothing(self, stack: Stack, action: str) -> None:
        for resource in ("*", stack.outputs["RoleArn"], training_job("bucketfeed-1")):
            assert not allowed(stack.role_policies(), action, resource, iam__PassedToService=SAGEMAKER)

    def test_touches_network_and_keys_only_where_it_was_given_some(self) -> None:
        interface = f"arn:aws:ec2:us-east-1:{ACCOUNT}:network-interface/eni-1"
        without = deploy(BucketName="without").role_policies()
        assert not allowed(without, "ec2:CreateNetworkInterface", interface)
        assert not allowed(without, "kms:Decrypt", KEY)
        client("cloudformation").delete_stack(StackName="bucketfeed")
        documents = deploy(VpcId="vpc-01234567", KmsKeyArn=KEY).role_policies()
        assert allowed(documents, "ec2:CreateNetworkInterface", interface)
        assert allowed(documents, "ec2:DescribeSubnets", "*")
        assert not allowed(documents, "ec2:DeleteSubnet", f"arn:aws:ec2:us-east-1:{ACCOUNT}:subnet/subnet-1")
        assert allowed(documents, "kms:GenerateDataKey", KEY)
        assert not allowed(documents, "kms:Decrypt", KEY + "2")
        assert allowed(documents, "kms:CreateGrant", KEY, kms__GrantIsForAWSResource="true")
        assert not allowed(documents, "kms:CreateGrant", KEY, kms__GrantIsForAWSResource="false")

    def test_allows_on_any_resource_only_actions_that_know_none(self) -> None:
        documents = deploy(VpcId="vpc-01234567", KmsKeyArn=KEY, DataBucketName=OTHERS).role_policies()
        wide = [a for s in statements(documents) if "*" in listed(s["Resource"]) for a in listed(s["Action"])]
        describes = ["DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs"]
        expected = ["cloudwatch:PutMetricData", "ecr:GetAuthorizationToken", *(f"ec2:Describe{d}" for d in describes)]
        assert sorted(wide) == sorted(expected)

    def test_names_every_action_in_full(self, stack: Stack) -> None:
        documents = stack.role_policies() + stack.launcher_policies()
        assert [a for s in statements(documents) for a in listed(s["Action"]) if "*" in a] == []

    def test_is_assumed_by_sagemaker_for_this_account_alone(self, stack: Stack) -> None:
        document = client("iam").get_role(RoleName=stack.role)["Role"]["AssumeRolePolicyDocument"]
        (statement,) = document["Statement"]
        assert statement["Principal"] == {"Service": SAGEMAKER}
        assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": ACCOUNT}}


class TestLauncher:
    @pytest.mark.parametrize("verb", ["Create", "Describe", "Stop"])
    def test_starts_watches_and_stops_jobs_under_its_prefix_alone(self, stack: Stack, verb: str) -> None:
        documents = stack.launcher_policies()
        for action, job_arn in ((f"{verb}TrainingJob", training_job), (f"{verb}HyperParameterTuningJob", tuning_job)):
            assert allowed(documents, f"sagemaker:{action}", job_arn("bucketfeed-2026-01-01"))
            assert not allowed(documents, f"sagemaker:{action}", job_arn("production-1"))
            assert not allowed(documents, f"sagemaker:{action}", job_arn("x-bucketfeed-1"))

    def test_takes_another_prefix_that_is_given(self) -> None:
        documents = deploy(JobNamePrefix="vision-").launcher_policies()
        assert allowed(documents, "sagemaker:CreateTrainingJob", training_job("vision-1"))
        assert not allowed(documents, "sagemaker:CreateTrainingJob", training_job("bucketfeed-1"))

    def test_tags_its_jobs(self, stack: Stack) -> None:
        for job_arn in (training_job, tuning_job):
            assert allowed(stack.launcher_policies(), "sagemaker:AddTags", job_arn("bucketfeed-1"))
            assert not allowed(stack.launcher_policies(), "sagemaker:AddTags", job_arn("production-1"))

    def test_passes_the_role_of_the_stack_to_sagemaker_and_no_other_role_to_no_other_service(
        self, stack: Stack
    ) -> None:
        documents, role = stack.launcher_policies(), stack.outputs["RoleArn"]
        admin = f"arn:aws:iam::{ACCOUNT}:role/Admin"
        assert allowed(documents, "iam:PassRole", role, iam__PassedToService=SAGEMAKER)
        assert not allowed(documents, "iam:PassRole", role, iam__PassedToService="ec2.amazonaws.com")
        assert not allowed(documents, "iam:PassRole", role)
        assert not allowed(documents, "iam:PassRole", admin, iam__PassedToService=SAGEMAKER)

    def test_checks_the_role_and_changes_it_not(self, stack: Stack) -> None:
        documents, role = stack.launcher_policies(), stack.outputs["RoleArn"]
        assert allowed(documents, "iam:GetRole", role)
        assert allowed(documents, "iam:SimulatePrincipalPolicy", role)
        for action in ("iam:PutRolePolicy", "iam:AttachRolePolicy", "iam:UpdateAssumeRolePolicy", "sts:AssumeRole"):
            assert not allowed(documents, action, role)

    def test_reads_the_logs_of_training_jobs(self, stack: Stack) -> None:
        documents = stack.launcher_policies()
        assert allowed(documents, "logs:DescribeLogStreams", f"{LOGS}:log-stream:")
        assert allowed(documents, "logs:GetLogEvents", f"{LOGS}:log-stream:bucketfeed-1/algo-1")
        assert not allowed(documents, "logs:GetLogEvents", f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/lambda/x")

    def test_uses_the_key_where_there_is_one(self) -> None:
        stack = deploy(KmsKeyArn=KEY)
        assert allowed(stack.launcher_policies(), "kms:GenerateDataKey", KEY)
        assert not allowed([managed_policy(stack.outputs["LauncherPolicyArn"])], "kms:GenerateDataKey", KEY)


def default_job(stack: Stack) -> Job:
    data = {"data": f"s3://{BUCKET}/train/"}
    return Job(bucket=BUCKET, role=stack.outputs["RoleArn"], hyperparameters=data, region=REGION)


def training_job(name: str) -> str:
    return f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/{name}"


def tuning_job(name: str) -> str:
    return f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:hyper-parameter-tuning-job/{name}"


def content(key: str) -> bytes:
    body: bytes = client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return body


def statements(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [statement for document in documents for statement in document["Statement"]]


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
