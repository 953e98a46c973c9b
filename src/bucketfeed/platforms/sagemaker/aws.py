"""The one edge between boto3 and SageMaker's launcher: sessions, and what AWS refuses in words of the launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bucketfeed.errors import AccessError, BucketfeedError, ConfigError, NotFoundError, ReadError

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_UNKNOWN_KEY = {"InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch", "InvalidAccessKeyId"}
_DENIED = {"AccessDenied", "AccessDeniedException", "403", "UnauthorizedOperation"}
_MISSING = {"404", "NoSuchBucket", "NoSuchKey", "NoSuchEntity", "ResourceNotFound", "ResourceNotFoundException"}
_SIGN_IN = "sign in (`aws sso login` or `aws configure`), or set AWS_PROFILE, or look first with --dry-run"


def session(region: str | None, profile: str | None = None) -> Any:
    """Return a boto3 session that has a region; raises `ConfigError` where none is set."""
    import boto3
    from botocore.exceptions import ProfileNotFound

    try:
        made = boto3.Session(region_name=region, profile_name=profile)
    except ProfileNotFound as e:
        raise ConfigError(f"{e}; see `aws configure list-profiles`") from e
    if made.region_name is None:
        raise ConfigError("no AWS region is set: give --region, or set AWS_DEFAULT_REGION or your profile's region")
    return made


def variables(session: Any) -> dict[str, str]:
    """Return the session's region, credentials and endpoint as variables for another process."""
    found = {"AWS_DEFAULT_REGION": session.region_name}
    credentials = session.get_credentials()
    if credentials is not None:
        keys = credentials.get_frozen_credentials()
        found |= {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}
        if keys.token:
            found["AWS_SESSION_TOKEN"] = keys.token
    if "AWS_ENDPOINT_URL" in os.environ:
        found["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    return found


@contextmanager
def told(doing: str) -> Iterator[None]:
    """Raise what boto3 raises in the block as an error of ours: what was being done, what AWS said, what to do next."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        CredentialRetrievalError,
        EndpointConnectionError,
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
        SSOError,
        TokenRetrievalError,
    )
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as e:
        raise _of_service(doing, e) from e
    except (NoCredentialsError, PartialCredentialsError) as e:
        raise AccessError(f"{doing}: there are no AWS credentials ({e}); {_SIGN_IN}") from e
    except (SSOError, TokenRetrievalError, CredentialRetrievalError) as e:
        raise AccessError(f"{doing}: the AWS credentials can't be renewed ({e}); {_SIGN_IN}") from e
    except ParamValidationError as e:
        raise ConfigError(f"{doing}: {e}; correct the option that gave it") from e
    except EndpointConnectionError as e:
        raise ReadError(f"{doing}: {e}; check --region and the network") from e
    except (BotoCoreError, ResponseParserError) as e:
        raise ReadError(f"{doing}: {e}; try again") from e


def _of_service(doing: str, e: Any) -> BucketfeedError:
    code = str(e.response.get("Error", {}).get("Code", ""))
    said = str(e.response.get("Error", {}).get("Message", e))
    text = f"{doing}: AWS says {code}: {said}"
    if code in _EXPIRED:
        return AccessError(f"{text}; your AWS credentials have expired: {_SIGN_IN}")
    if code in _UNKNOWN_KEY:
        return AccessError(f"{text}; your AWS credentials are not valid: {_SIGN_IN}")
    if code == "ResourceLimitExceeded":
        quota = re.search(r"service limit '([^']+)'", said)
        return ConfigError(
            f"{text}; ask for more of {quota[1] if quota else 'this type'} at Service Quotas > Amazon SageMaker in the "
            "job's region, or take another --instance-type or a smaller --instance-count; trying again changes nothing"
        )
    if code == "ResourceInUse":
        return ConfigError(f"{text}; a job of this name exists: give another --name, or start again in a second")
    if code in _DENIED:
        who = "sagemaker:CreateTrainingJob and iam:PassRole for the role" if "job" in doing else "this"
        return AccessError(f"{text}; you need the permission for {who}: infra/README.md has a policy for launchers")
    if code in _MISSING:
        return NotFoundError(f"{text}; check the name and the region")
    if re.search(r"(?i)\bimage\b|ecr", said) and code.startswith("Validation"):
        return ConfigError(f"{text}; check --image: its account, region and tag, and that the role may pull it")
    if re.search(r"(?i)could not assume|role", said) and code.startswith("Validation"):
        return ConfigError(f"{text}; the role must exist and trust sagemaker.amazonaws.com: see infra/README.md")
    if code.startswith("Validation"):
        return ConfigError(f"{text}; correct the option that gave it")
    return ReadError(f"{text}; try again")
