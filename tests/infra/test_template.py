"""infra/training.yaml: that AWS would take it, what it makes, and what is left when it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError
from cfnlint.api import lint_file
from cfnlint.config import ManualArgs
from stacks import ACCOUNT, BUCKET, INFRA, KEY, NAME, TEMPLATE, Stack, client, deploy, template


@pytest.fixture
def stack() -> Stack:
    return deploy()


class TestTemplate:
    def test_lint_finds_nothing(self) -> None:
        found = lint_file(
            TEMPLATE, ManualArgs(regions=["us-east-1", "eu-central-1", "cn-north-1"], include_checks=["I"])
        )
        assert [f"{match.rule.id} line {match.linenumber}: {match.message}" for match in found] == []

    def test_has_no_aliases_which_cloudformation_does_not_read(self) -> None:
        kinds = {type(token) for token in yaml.scan(TEMPLATE.read_text(encoding="utf-8"))}
        assert kinds & {yaml.AliasToken, yaml.AnchorToken} == set()

    def test_is_small_enough_to_be_sent_with_the_request(self) -> None:
        assert TEMPLATE.stat().st_size < 51_200

    def test_asks_for_a_bucket_name_and_for_nothing_else(self) -> None:
        required = [name for name, about in template()["Parameters"].items() if "Default" not in about]
        assert required == ["BucketName"]

    def test_every_parameter_and_output_says_what_it_is_for(self) -> None:
        parts = [*template()["Parameters"].items(), *template()["Outputs"].items()]
        assert [name for name, about in parts if name != "BucketName" and not about.get("Description")] == []


class TestBucket:
    """Of its properties moto's CloudFormation sets the encryption; the others are read in the template."""

    properties = template()["Resources"]["Bucket"]["Properties"]

    def test_is_closed_to_the_public(self) -> None:
        assert self.properties["PublicAccessBlockConfiguration"] == dict.fromkeys(
            ["BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"], True
        )

    def test_knows_no_acls(self) -> None:
        assert self.properties["OwnershipControls"]["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]

    def test_is_encrypted(self, stack: Stack) -> None:
        assert encryption() == {"SSEAlgorithm": "AES256"}

    def test_is_encrypted_by_the_key_that_is_given(self) -> None:
        deploy(KmsKeyArn=KEY)
        assert encryption() == {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": KEY}

    def test_forgets_broken_uploads_and_the_inputs_of_old_jobs_and_nothing_else(self) -> None:
        broken, inputs = self.properties["LifecycleConfiguration"]["Rules"]
        assert broken == {
            "Id": "broken-uploads",
            "Status": "Enabled",
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3},
        }
        assert inputs == {
            "Id": "job-inputs",
            "Status": "Enabled",
            "Prefix": "jobs/",
            "ExpirationInDays": {"Ref": "JobInputDays"},
        }


class TestStack:
    def test_tells_what_launch_py_asks_for(self, stack: Stack) -> None:
        assert stack.outputs["RoleArn"].startswith(f"arn:aws:iam::{ACCOUNT}:role/")
        assert stack.outputs["LauncherPolicyArn"].startswith(f"arn:aws:iam::{ACCOUNT}:policy/")
        assert stack.outputs["Bucket"] == BUCKET

    def test_deleted_leaves_the_bucket_and_what_is_in_it(self, stack: Stack) -> None:
        client("s3").put_object(Bucket=BUCKET, Key="train/1.jpg", Body=b"data")
        client("cloudformation").delete_stack(StackName=NAME)
        assert client("s3").get_object(Bucket=BUCKET, Key="train/1.jpg")["Body"].read() == b"data"
        with pytest.raises(ClientError, match="NoSuchEntity"):
            client("iam").get_role(RoleName=stack.role)

    def test_leaves_the_policy_of_the_bucket_as_well(self) -> None:
        for name in ("Bucket", "BucketPolicy"):
            part = template()["Resources"][name]
            assert (part["DeletionPolicy"], part["UpdateReplacePolicy"]) == ("Retain", "Retain"), name

    def test_can_be_made_again_around_the_bucket_that_was_left(self, stack: Stack) -> None:
        client("s3").put_object(Bucket=BUCKET, Key="train/1.jpg", Body=b"data")
        client("cloudformation").delete_stack(StackName=NAME)
        again = deploy(CreateBucket="no")
        assert again.outputs["Bucket"] == BUCKET
        assert client("s3").get_object(Bucket=BUCKET, Key="train/1.jpg")["Body"].read() == b"data"

    def test_is_only_bucket_role_and_policies_unless_asked(self, stack: Stack) -> None:
        assert kinds() == {"AWS::S3::Bucket", "AWS::IAM::Role", "AWS::IAM::ManagedPolicy"}

    def test_gives_the_route_tables_a_way_to_s3(self) -> None:
        ec2 = client("ec2")
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        tables = [ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"] for _ in range(2)]
        deploy(VpcId=vpc, RouteTableIds=",".join(tables))
        (endpoint,) = ec2.describe_vpc_endpoints()["VpcEndpoints"]
        assert endpoint["ServiceName"] == "com.amazonaws.us-east-1.s3"
        assert endpoint["VpcEndpointType"] == "Gateway"
        assert sorted(endpoint["RouteTableIds"]) == sorted(tables)

    def test_makes_no_second_way_to_s3_where_the_vpc_has_one(self) -> None:
        deploy(VpcId="vpc-0123456789abcdef0")
        assert client("ec2").describe_vpc_endpoints()["VpcEndpoints"] == []

    def test_alarms_before_the_budget_is_spent_and_when_it_will_be(self) -> None:
        part = template()["Resources"]["Budget"]
        notes = part["Properties"]["NotificationsWithSubscribers"]
        found = [(n["Notification"]["NotificationType"], n["Notification"]["Threshold"]) for n in notes]
        assert found == [("ACTUAL", 80), ("FORECASTED", 100)]
        assert part["Condition"] == "HasEmail"


class TestReadme:
    text = (INFRA / "README.md").read_text(encoding="utf-8")

    def test_names_every_parameter_and_output(self) -> None:
        named = [*template()["Parameters"], *template()["Outputs"]]
        assert [name for name in named if name not in self.text] == []

    def test_names_files_that_are_there(self) -> None:
        for name in ("infra/training.yaml", "infra/gcp/setup.sh"):
            assert name in self.text
            assert (Path(INFRA).parent / name).is_file()


def encryption() -> Any:
    found = client("s3").get_bucket_encryption(Bucket=BUCKET)["ServerSideEncryptionConfiguration"]["Rules"]
    return found[0]["ApplyServerSideEncryptionByDefault"]


def kinds() -> set[str]:
    found = client("cloudformation").list_stack_resources(StackName=NAME)["StackResourceSummaries"]
    return {resource["ResourceType"] for resource in found if resource["ResourceType"]}  # moto: "" if not made
