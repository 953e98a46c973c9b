"""A stack of infra/training.yaml in a mocked account, and an evaluation of the policies that it makes."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws

INFRA = Path(__file__).parents[2] / "infra"
TEMPLATE = INFRA / "training.yaml"
REGION = "us-east-1"
ACCOUNT = "123456789012"  # moto's
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/0e1f"
BUCKET = "photos"
NAME = "bucketfeed"


@dataclass(frozen=True)
class Stack:
    """What is in the account after the deployment."""

    outputs: Mapping[str, str]

    @property
    def role(self) -> str:
        """Name of the execution role."""
        return self.outputs["RoleArn"].rpartition("/")[2]

    def role_policies(self) -> list[dict[str, Any]]:
        """The documents of the execution role."""
        iam = client("iam")
        inline = iam.list_role_policies(RoleName=self.role)["PolicyNames"]
        found = [iam.get_role_policy(RoleName=self.role, PolicyName=name)["PolicyDocument"] for name in inline]
        attached = iam.list_attached_role_policies(RoleName=self.role)["AttachedPolicies"]
        return found + [managed_policy(policy["PolicyArn"]) for policy in attached]

    def launcher_policies(self) -> list[dict[str, Any]]:
        """The documents that launchers get."""
        names = [name for name in ("LauncherPolicyArn", "LauncherKeyPolicyArn") if name in self.outputs]
        return [managed_policy(self.outputs[name]) for name in names]


@functools.cache  # making one takes longer than most requests
def client(service: str, **credentials: str) -> Any:
    return boto3.client(service, region_name=REGION, **credentials)


def managed_policy(arn: str) -> dict[str, Any]:
    iam = client("iam")
    version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
    document: dict[str, Any] = iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"]
    return document


@contextmanager
def account() -> Iterator[None]:
    """An empty mocked account, with credentials that no real one knows."""
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        yield


def deploy(**parameters: str) -> Stack:
    """Create the stack in the mocked account."""
    cloudformation = client("cloudformation")
    given = {"BucketName": BUCKET, **parameters}
    cloudformation.create_stack(
        StackName=NAME,
        TemplateBody=TEMPLATE.read_text(encoding="utf-8"),
        Capabilities=["CAPABILITY_IAM"],
        Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
    )
    stack = cloudformation.describe_stacks(StackName=NAME)["Stacks"][0]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    found = Stack({output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]})
    _as_json(found.role)
    return found


def _as_json(role: str) -> None:
    """Put the role's policies again, as text: moto keeps those of a stack as dicts, which it can't judge by."""
    iam = client("iam")
    for name in iam.list_role_policies(RoleName=role)["PolicyNames"]:
        kept = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
        document = kept if isinstance(kept, dict) else yaml.safe_load(kept)
        iam.put_role_policy(RoleName=role, PolicyName=name, PolicyDocument=json.dumps(document))


def template() -> dict[str, Any]:
    """The template; `!Sub text` and the like read as {"Sub": text}."""

    class Loader(yaml.SafeLoader):
        pass

    def tagged(loader: Any, suffix: str, node: Any) -> dict[str, Any]:
        if isinstance(node, yaml.ScalarNode):
            return {suffix: loader.construct_scalar(node)}
        if isinstance(node, yaml.SequenceNode):
            return {suffix: loader.construct_sequence(node, deep=True)}
        return {suffix: loader.construct_mapping(node, deep=True)}

    Loader.add_multi_constructor("!", tagged)
    loaded: dict[str, Any] = yaml.load(TEMPLATE.read_text(encoding="utf-8"), Loader)
    return loaded


def substituted(value: Any, names: Mapping[str, str]) -> Any:
    """The value with each `!Sub` carried out."""
    if isinstance(value, dict):
        if set(value) == {"Sub"}:
            return re.sub(r"\$\{([^}]+)\}", lambda m: names[m[1]], value["Sub"])
        return {key: substituted(inner, names) for key, inner in value.items()}
    return [substituted(inner, names) for inner in value] if isinstance(value, list) else value


def allowed(documents: list[dict[str, Any]], action: str, resource: str, **context: str) -> bool:
    """Whether the policies allow the action, as IAM decides: a Deny beats an Allow, silence denies.

    `context` are the condition keys of the request, `:` written as `__`.
    """
    keys = {key.replace("__", ":").lower(): value for key, value in context.items()}
    statements = [s for document in documents for s in _list(document["Statement"])]
    effects = {s["Effect"] for s in statements if _applies(s, action, resource, keys)}
    return "Deny" not in effects and "Allow" in effects


def _applies(statement: dict[str, Any], action: str, resource: str, keys: Mapping[str, str]) -> bool:
    known = {"Sid", "Effect", "Action", "Resource", "Condition", "Principal"}
    assert set(statement) <= known, f"this evaluation knows nothing of {set(statement) - known}"
    return (
        any(_like(action.lower(), pattern.lower()) for pattern in _list(statement["Action"]))
        and any(_like(resource, pattern) for pattern in _list(statement["Resource"]))
        and all(
            _holds(operator, wanted, keys.get(key.lower()))
            for operator, tests in statement.get("Condition", {}).items()
            for key, wanted in tests.items()
        )
    )


def _holds(operator: str, wanted: Any, found: str | None) -> bool:
    if found is None:
        return False
    match operator:
        case "StringEquals" | "Bool":
            return found in [str(w) for w in _list(wanted)]
        case "StringLike":
            return any(_like(found, w) for w in _list(wanted))
    raise AssertionError(f"this evaluation knows no condition {operator}")


def _like(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
