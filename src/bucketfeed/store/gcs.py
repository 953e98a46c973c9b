"""How to reach Google Cloud Storage: one description that gcsfs and obstore are both configured from."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from bucketfeed.errors import ConfigError
from bucketfeed.store.s3 import FRESH_SECONDS, OBSTORE_CLIENT, OBSTORE_RETRY, S3Access

_HOST = "https://storage.googleapis.com"
_HMAC = {"key", "secret"}
# What else gcsfs takes; it drops other names without a word.
_PASSED_ON = {
    "access",
    "block_size",
    "cache_timeout",
    "check_connection",
    "consistency",
    "default_location",
    "requests_timeout",
    "session_kwargs",
    "timeout",
    "use_listings_cache",
    "version_aware",
}


@dataclass(frozen=True)
class GcsAccess:
    """Address and credentials of a Google Cloud Storage. Where a value is None, Google's own chain supplies it.

    The chain is GOOGLE_APPLICATION_CREDENTIALS, gcloud's sign-in, and the metadata server, as for every Google tool. An
    emulator, named by `endpoint_url` or STORAGE_EMULATOR_HOST as http://, is asked without credentials.

    A version of an object is its generation: it is asked for, so that bytes of another one never come.
    """

    endpoint_url: str | None = None
    token: Any = field(default=None, repr=False)  # of gcsfs: a file, a dict, "anon", a google.auth credentials object
    project: str | None = None
    requester_pays: str | bool = False
    more: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_options(cls, storage_options: Mapping[str, Any] | None) -> GcsAccess:
        """Return the access that `storage_options`, spelled as gcsfs spells them, describe; also `anon=True`.

        Raises `ConfigError` for names that gcsfs would not know either.
        """
        options = dict(storage_options or {})
        anonymous = options.pop("anon", False)
        access = cls(
            endpoint_url=options.pop("endpoint_url", None),
            token="anon" if anonymous else options.pop("token", None),
            project=options.pop("project", None),
            requester_pays=options.pop("requester_pays", False),
            more=tuple(sorted((name, value) for name, value in options.items() if name in _PASSED_ON)),
        )
        unknown = sorted({*options} - _PASSED_ON - {"token", "skip_instance_cache"})
        if unknown:
            raise ConfigError(
                f"unknown storage_options for Google Cloud Storage: {', '.join(unknown)}; known are token, anon, "
                f"project, endpoint_url, requester_pays, key and secret (HMAC), {', '.join(sorted(_PASSED_ON))}"
            )
        if access.requester_pays is True and not access.project:
            raise ConfigError("requester_pays needs the project that pays: pass storage_options={'project': ...} too")
        return access

    def resolved(self, bucket: str) -> GcsAccess:
        """Return this access with endpoint filled in, and anonymous where this machine has no credentials."""
        access = self._located()
        signed_in = access.filesystem().credentials.credentials is not None
        return access if signed_in else replace(access, token="anon")

    def filesystem(self) -> Any:
        """Return a new gcsfs file system that leaves tries to our one rule: its own take long to say "signed out".

        Raises `ConfigError` for a token that is none.
        """
        _, options = self._located().fsspec()
        # Not gcsfs.GCSFileSystem, which asks by gRPC what kind of bucket it is: after that no process can fork.
        from gcsfs.core import GCSFileSystem

        try:
            files = GCSFileSystem(**options, skip_instance_cache=True)
        except Exception as e:  # of google.auth, requests, json: whatever the token was taken for
            raise ConfigError(
                f"the credentials for Google Cloud Storage can't be used: {type(e).__name__}: {e}; storage_options' "
                "'token' is a service account's file, a dict of its content, or a google.auth credentials object"
            ) from e
        once = getattr(GCSFileSystem._request, "__wrapped__", None)
        if once is not None:
            files._request = functools.partial(once, files)
        return files

    def obstore(self, bucket: str) -> Any:
        """Return an obstore client for `bucket` that asks the same chain for credentials. Call on `resolved` access."""
        from obstore.store import GCSStore

        config: Any = {}
        client: Any = dict(OBSTORE_CLIENT)
        if self.endpoint_url not in (None, _HOST):
            config["base_url"] = self.endpoint_url
        if self.token == "anon":
            config["skip_signature"] = True
        if self.requester_pays:
            payer = self.project if self.requester_pays is True else self.requester_pays
            client["default_headers"] = {"x-goog-user-project": payer}
        return GCSStore(
            bucket,
            config=config,
            client_options=client,
            retry_config=OBSTORE_RETRY,
            credential_provider=None if self.token == "anon" else self._provider(),
        )

    def asked(self, etag: str) -> dict[str, Any]:
        """Return what obstore is told to get the version `etag` and no other."""
        return {"version": etag}

    def version(self, meta: Mapping[str, Any]) -> str | None:
        """Return the version of an object in what obstore tells of it."""
        found: str | None = meta["version"]
        return found

    def fsspec(self) -> tuple[str, dict[str, Any]]:
        """Return protocol and options of the same for fsspec."""
        options = {name: getattr(self, name) for name in ("endpoint_url", "token", "project", "requester_pays")}
        return "gs", {**dict(self.more), **{name: value for name, value in options.items() if value is not None}}

    def _located(self) -> GcsAccess:
        try:
            from gcsfs.core import _location
        except ImportError as e:
            raise ConfigError(f"gs:// needs another package ({e}): pip install 'bucketfeed[gcs]'") from e
        endpoint = self.endpoint_url or _location()
        token = "anon" if self.token is None and endpoint.startswith("http://") else self.token
        return replace(self, endpoint_url=endpoint, token=token)

    def _provider(self) -> Any:
        """Return what obstore calls for a token: gcsfs's own credentials, which renew themselves in time."""
        lock = threading.Lock()  # made with the client, so in the process that uses it

        @functools.cache
        def chain() -> Any:
            return self.filesystem().credentials

        def token() -> dict[str, Any]:
            with lock:
                found = chain()
                found.maybe_refresh()
            return {
                "token": found.credentials.token,
                "expires_at": datetime.now(UTC) + timedelta(seconds=FRESH_SECONDS),
            }

        return token


def google_access(storage_options: Mapping[str, Any] | None) -> GcsAccess | S3Access:
    """Return the access to `gs://`: Google's own, or, for HMAC keys, that of its S3 side."""
    options = dict(storage_options or {})
    if not _HMAC & options.keys():
        return GcsAccess.from_options(options)
    # boto3 asks for checksums that Google does not know, unless told to ask only where it must.
    checksums = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
    config = checksums | dict(options.pop("config_kwargs", None) or {})
    return S3Access.from_options({"endpoint_url": _HOST, "region": "auto", **options, "config_kwargs": config})


def media_url(files: Any, bucket: str, key: str, generation: str | None) -> str:
    """Return the address of an object's bytes for a gcsfs file system: of exactly this key, and generation if given."""
    version = f"&generation={generation}" if generation else ""
    return f"{files._location}/download/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media{version}"
