"""Credentials of a notebook: Colab's secrets, Google's sign-in, whatever this machine has, or none."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bucketfeed.errors import AccessError, ConfigError
from bucketfeed.platforms.colab.place import Place, on_colab, work_dir

Source = Literal["demo", "s3", "gcs"]

_SCHEMES = {"demo": "s3://", "s3": "s3://", "gcs": "gs://"}

_NEEDED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_AS_OPTIONS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "token",
    "AWS_DEFAULT_REGION": "region",
    "AWS_ENDPOINT_URL": "endpoint_url",
}


@dataclass(frozen=True, slots=True)
class Access:
    """How training gets at the bucket: `environment` for its process; secrets never become arguments.

    `bucket_url` is that of the demonstration's own bucket.
    """

    source: Source
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    anonymous: bool = False
    bucket_url: str = ""

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ConfigError(f"source must be one of {', '.join(get_args(Source))}, not {self.source!r}")

    def __str__(self) -> str:
        name = {"s3": "S3", "gcs": "Google Cloud Storage", "demo": "the demo"}[self.source]
        if self.source == "demo":
            return f"a mocked S3 on this machine, with a bucket of digits: {self.bucket_url}"
        if self.anonymous:
            return f"{name}, anonymously: public buckets only"
        if self.environment:
            return f"{name}, by this notebook's secrets: {', '.join(sorted(self.environment))}"
        return f"{name}, signed in to Google" if on_colab() else f"{name}, as this machine is configured"

    @property
    def storage_options(self) -> dict[str, Any]:
        """The same for `bf.open_dataset` in the notebook itself."""
        if self.anonymous:
            return {"anon": True}
        return {_AS_OPTIONS[name]: value for name, value in self.environment.items() if name in _AS_OPTIONS}

    def place(self, data: str = "", test_data: str = "", checkpoint_dir: str = "", **more: Any) -> Place:
        """Return the place where these data are trained on; `more` as the fields of `Place`.

        The demonstration fills in what is empty. Raises `ConfigError` for data that are not in the source chosen.
        """
        if self.source == "demo" and not data:
            data, test_data = f"{self.bucket_url}shards/train/", f"{self.bucket_url}shards/test/"
            checkpoint_dir = checkpoint_dir or f"{self.bucket_url}checkpoints/"
            more["more"] = ("--num-classes", "10")
        scheme = _SCHEMES[self.source]
        if not data.startswith(scheme):
            raise ConfigError(f"source is {self.source!r}, so data must begin with {scheme}, not {data!r}")
        more["work_dir"] = work_dir(str(more.get("work_dir") or ""))
        return Place(data, test_data=test_data, checkpoint_dir=checkpoint_dir, anonymous=self.anonymous, **more)


def sign_in(source: Source, *, anonymous: bool = False) -> Access:
    """Sign in to where the data are, and return the access. Run it again when a sign-in has ended.

    On Colab, S3's keys come from the notebook's secrets (the key symbol on the left) by the names of their
    environment variables, and Google's from `auth.authenticate_user()`. Elsewhere both come from where their tools
    look. Raises `AccessError` where there are none, with what to do.
    """
    access = Access(source, anonymous=anonymous)
    if source == "demo":
        return _demo()
    if anonymous or not on_colab():
        return access
    if source == "gcs":
        _google_sign_in()
        return access
    return Access(source, _secrets())


@functools.cache  # checkpoints are in it: a cell that is run again finds the same bucket
def _demo() -> Access:
    """Start a mocked S3 with a bucket of digits, which ends with this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's, where there is no ipywidgets: its bars are text then
        from bucketfeed.testing.digits import digits_bucket

    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    bucket = stack.enter_context(digits_bucket(only_shards=True))
    return Access("demo", bucket.server.environment, bucket_url=bucket.url)


def _google_sign_in() -> None:
    from google.colab import auth

    try:
        auth.authenticate_user()
    except Exception as e:  # closed window, refused consent, no gcloud: each has a class of its own
        raise AccessError(
            f"not signed in to Google: {type(e).__name__}: {e}; run the sign-in cell again and allow access, or tick "
            "`anonymous` for a public bucket"
        ) from e


def _secrets() -> dict[str, str]:
    from google.colab import userdata

    found = {}
    for name in _AS_OPTIONS:
        value = _secret(userdata.get, userdata.SecretNotFoundError, userdata.NotebookAccessError, name)
        if value:
            found[name] = value
    missing = [name for name in _NEEDED if name not in found and name not in os.environ]
    if missing:
        raise AccessError(
            f"not signed in to S3: no secret {' and no secret '.join(missing)}; add them by the key symbol on the "
            "left and allow this notebook to read them, or tick `anonymous` for a public bucket"
        )
    return found


def _secret(get: Callable[[str], str], absent: type[Exception], closed: type[Exception], name: str) -> str:
    try:
        return get(name).strip()  # pasted, so often with a line's end, which no signature survives
    except absent:
        return ""
    except closed as e:
        raise AccessError(
            f"the secret {name} is closed to this notebook: allow `Notebook access` beside it (the key symbol on the "
            "left), then run this cell again"
        ) from e
