"""How to reach S3: one description that boto3, obstore and s3fs are all configured from."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bucketfeed.errors import ConfigError

_CONNECT_SECONDS, _READ_SECONDS = 10, 30  # the second is for silence: a slow body may take its time
_REQUEST_SECONDS = 600
FRESH_SECONDS = 300  # how long obstore keeps credentials before it asks the chain again; the chain renews in time
OBSTORE_CLIENT = {
    "allow_http": True,
    "connect_timeout": f"{_CONNECT_SECONDS}s",
    "read_timeout": f"{_READ_SECONDS}s",
    "timeout": f"{_REQUEST_SECONDS}s",
}
OBSTORE_RETRY: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=_READ_SECONDS)}
_CONNECTIONS = 64
_AWS_HOST = re.compile(r"s3(\.[a-z0-9-]+)?\.amazonaws\.com")  # what obstore can build by itself: no FIPS, no dual stack


@dataclass(frozen=True)
class S3Access:
    """Address and credentials of an S3 store. Where a value is None, botocore's own chain supplies it.

    The chain is the environment, profiles, SSO, web identity, container and instance roles, as for every AWS tool.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    requester_pays: bool = False
    verify: bool | str | None = None  # False, or a file of certificate authorities
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    config: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_options(cls, storage_options: Mapping[str, Any] | None) -> S3Access:
        """Return the access that `storage_options`, spelled as s3fs spells them, describe.

        Raises `ConfigError` for names that s3fs would not know either.
        """
        options = dict(storage_options or {})
        client = dict(options.pop("client_kwargs", None) or {})
        key = options.pop("key", None) or options.pop("username", None) or client.pop("aws_access_key_id", None)
        secret = (
            options.pop("secret", None) or options.pop("password", None) or client.pop("aws_secret_access_key", None)
        )
        token = options.pop("token", None) or client.pop("aws_session_token", None)
        if (key is None) != (secret is None):
            raise ConfigError("storage_options must have both 'key' and 'secret', or neither of them")
        region = client.pop("region_name", None)
        access = cls(
            endpoint_url=options.pop("endpoint_url", None) or client.pop("endpoint_url", None),
            region=options.pop("region", None) or region,
            profile=options.pop("profile", None),
            anonymous=bool(options.pop("anon", False)),
            requester_pays=bool(options.pop("requester_pays", False)),
            verify=options.pop("verify", client.pop("verify", None)),
            key=key,
            secret=secret,
            token=token,
            config=tuple(sorted((options.pop("config_kwargs", None) or {}).items())),
        )
        client.pop("endpoint_url", None)
        client.pop("verify", None)
        unknown = sorted({*options, *client} - {"use_ssl", "asynchronous", "loop", "skip_instance_cache"})
        if unknown:
            raise ConfigError(
                f"unknown storage_options for S3: {', '.join(unknown)}; known are key, secret, token, anon, profile, "
                "endpoint_url, region, requester_pays, verify, client_kwargs and config_kwargs"
            )
        return access

    def session(self) -> Any:
        """Return a boto3 session that looks for credentials anew."""
        import boto3

        return boto3.Session(profile_name=self.profile, region_name=self.region)

    def client(self) -> Any:
        """Return a boto3 S3 client whose only retry rule is ours. Raises `ConfigError` for settings it refuses."""
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        settings = self._settings()
        if self.anonymous:
            settings["signature_version"] = UNSIGNED
        try:
            return self.session().client(
                "s3",
                endpoint_url=self.endpoint_url,
                verify=self.verify,
                aws_access_key_id=self.key,
                aws_secret_access_key=self.secret,
                aws_session_token=self.token,
                config=Config(**settings),
            )
        except (BotoCoreError, ValueError, TypeError) as e:
            raise ConfigError(
                f"no S3 client can be made: {e}; check storage_options (endpoint_url with https://, profile, region, "
                "config_kwargs) and your AWS configuration"
            ) from e

    def resolved(self, bucket: str) -> S3Access:
        """Return this access with endpoint and region filled in, so that other processes need not look them up."""
        client = self.client()
        endpoint = client.meta.endpoint_url
        verify = self.session()._session.get_config_variable("ca_bundle") if self.verify is None else self.verify
        if _AWS_HOST.fullmatch(urlsplit(endpoint).hostname or ""):
            region = self.region or _bucket_region(client, bucket)
            return replace(self, endpoint_url=None, region=region, verify=verify)
        region = self.region or client.meta.region_name or "us-east-1"
        return replace(self, endpoint_url=endpoint, region=region, verify=verify)

    def obstore(self, bucket: str) -> Any:
        """Return an obstore client for `bucket` that asks the same chain for credentials. Call on `resolved` access."""
        from obstore.store import S3Store

        config: Any = {"region": self.region or "us-east-1"}
        if self.endpoint_url is not None:
            style = self._settings()["s3"].get("addressing_style")
            config["endpoint"] = self.endpoint_url
            config["virtual_hosted_style_request"] = style == "virtual"
        if self.anonymous:
            config["skip_signature"] = True
        if self.requester_pays:
            config["request_payer"] = True
        options: Any = dict(OBSTORE_CLIENT)
        if self.verify is False:
            options["allow_invalid_certificates"] = True
        elif isinstance(self.verify, str):
            options["root_certificate"] = Path(self.verify).read_bytes()
        return S3Store(
            bucket,
            config=config,
            client_options=options,
            retry_config=OBSTORE_RETRY,
            credential_provider=None if self.anonymous else self._provider(),
        )

    def asked(self, etag: str) -> dict[str, Any]:
        """Return what obstore is told to get the version `etag` and no other."""
        return {"if_match": etag}

    def version(self, meta: Mapping[str, Any]) -> str | None:
        """Return the version of an object in what obstore tells of it."""
        found: str | None = meta["e_tag"]
        return found

    def fsspec(self) -> tuple[str, dict[str, Any]]:
        """Return protocol and options of the same for fsspec: s3fs goes through aiobotocore and asks the same chain."""
        client = {"region_name": self.region, "verify": self.verify}
        return "s3", {
            "key": self.key,
            "secret": self.secret,
            "token": self.token,
            "anon": self.anonymous,
            "profile": self.profile,
            "endpoint_url": self.endpoint_url,
            "requester_pays": self.requester_pays,
            "client_kwargs": {name: value for name, value in client.items() if value is not None},
            "config_kwargs": self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        """Return botocore's settings: ours, then the user's, then no retries but our own."""
        settings = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "max_pool_connections": _CONNECTIONS,
            "s3": {} if self.endpoint_url is None else {"addressing_style": "path"},
        }
        return settings | dict(self.config) | {"retries": {"total_max_attempts": 1}}

    def _provider(self) -> Any:
        """Return what obstore calls for credentials: those given, or the chain's, looked up at the first call."""
        lock = threading.Lock()  # made with the client, so in the process that uses it

        @functools.cache
        def chain() -> Any:
            found = self.session().get_credentials()
            if found is None:
                from botocore.exceptions import NoCredentialsError

                raise NoCredentialsError
            return found

        def credentials() -> dict[str, Any]:
            if self.key is not None:
                return {
                    "access_key_id": self.key,
                    "secret_access_key": self.secret,
                    "token": self.token,
                    "expires_at": None,
                }
            with lock:
                frozen = chain().get_frozen_credentials()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": datetime.now(UTC) + timedelta(seconds=FRESH_SECONDS),
            }

        return credentials


def _bucket_region(client: Any, bucket: str) -> str | None:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        reply = client.head_bucket(Bucket=bucket)
    except ClientError as e:
        reply = e.response
    except BotoCoreError:
        reply = {}
    headers = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region: str | None = headers.get("x-amz-bucket-region") or client.meta.region_name
    return region
