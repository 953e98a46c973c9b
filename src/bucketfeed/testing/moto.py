"""An S3 of one's own: moto's server in a process of its own, on a free port of this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from bucketfeed.errors import ConfigError
from bucketfeed.testing.server import ServerProcess


class MotoServer(ServerProcess):
    """A mocked S3 that lives as long as its `with` block. Slow: it proves that bytes are right and measures nothing.

    >>> with MotoServer() as server:
    ...     bucket = server.create_bucket("photos")
    ...     bucket.put("cat/1.jpg", data)
    ...     ds = bf.open_dataset(bucket.url, storage_options=server.storage_options)
    """

    def __init__(self) -> None:
        try:
            import moto.server  # noqa: F401
        except ImportError as e:
            raise ConfigError("the mocked S3 needs moto: pip install 'moto[s3,server]'") from e

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

        super().__init__(command, "/moto-api/", "moto's server")

    @property
    def storage_options(self) -> dict[str, Any]:
        """What `open_dataset`, s3fs and pandas need to reach it."""
        return {
            "key": "testing",
            "secret": "testing",
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables, for another process."""
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def session(self) -> Any:
        """Return a boto3 session whose clients, of whatever service, reach this server and nothing else."""
        import boto3

        own = self.endpoint_url

        class Session(boto3.Session):  # type: ignore[misc]
            def client(self, name: str, **options: Any) -> Any:
                return super().client(name, **{"endpoint_url": own, **options})

        return Session(aws_access_key_id="testing", aws_secret_access_key="testing", region_name="us-east-1")

    def client(self) -> Any:
        """Return a boto3 S3 client."""
        return self.session().client("s3")

    def create_role(self, name: str) -> str:
        """Make an IAM role that SageMaker may run jobs under, and return its ARN."""
        trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "*"}
        policy = json.dumps({"Statement": [trust]})
        iam = self.session().client("iam")
        return str(iam.create_role(RoleName=name, AssumeRolePolicyDocument=policy)["Role"]["Arn"])

    def create_bucket(self, name: str) -> MotoBucket:
        """Return a new, empty bucket."""
        client = self.client()
        client.create_bucket(Bucket=name)
        return MotoBucket(name, self, client)


@dataclass(frozen=True)
class MotoBucket:
    """A bucket of a `MotoServer`."""

    name: str
    server: MotoServer
    client: Any

    @property
    def url(self) -> str:
        """`s3://name/`."""
        return f"s3://{self.name}/"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What readers need to reach it."""
        return self.server.storage_options

    def put(self, key: str, data: bytes, **options: Any) -> str:
        """Write an object under exactly this key and return its etag; options as boto3's `put_object`."""
        reply = self.client.put_object(Bucket=self.name, Key=key, Body=data, **options)
        return str(reply["ETag"])

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.client.delete_object(Bucket=self.name, Key=key)
