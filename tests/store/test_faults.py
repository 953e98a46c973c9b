from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    BODY,
    ETAG,
    Script,
    all_of_it,
    another_version,
    cut_body,
    good,
    refuse,
    reset,
    scripted_store,
    silent,
)

from bucketfeed import errors
from bucketfeed.errors import AccessError, BucketfeedError, ConfigError, NotFoundError, ObjectChangedError, ReadError
from bucketfeed.store import fetching, s3
from bucketfeed.store.faults import our_error
from bucketfeed.store.fsspec import FsspecReader
from bucketfeed.store.obstore import ObstoreReader
from bucketfeed.store.ranges import Counter, Range
from bucketfeed.store.retry import Retry
from bucketfeed.store.s3 import S3Access

WANTED = Range("s3://bucket/a", 10, 5_000, ETAG)
SLOW_DOWN = refuse(503, "SlowDown")


@pytest.fixture(params=["obstore", "s3fs"])
def open_store(request: pytest.FixtureRequest) -> Callable[[Script], ObstoreReader | FsspecReader]:
    def opened(script: Script, **options: Any) -> ObstoreReader | FsspecReader:
        access = S3Access.from_options({**script.storage_options, **options}).resolved("bucket")
        return ObstoreReader(access) if request.param == "obstore" else FsspecReader(*access.fsspec())

    return opened


@pytest.mark.parametrize(
    "failure",
    [
        SLOW_DOWN,
        refuse(429, "TooManyRequests"),
        refuse(500, "InternalError"),
        refuse(400, "RequestTimeout"),
        cut_body,
        reset,
    ],
)
def test_a_passing_failure_is_tried_again_counted_and_unseen_c027_c029(open_store, failure):
    with scripted_store(failure, failure, good) as script:
        reader = open_store(script)
        assert [bytes(b) for b in reader.read([WANTED])] == [BODY[10:5_000]]
        counts = reader.counter.counts()
        # aiohttp asks once more by itself when a connection is reset.
        assert (
            counts.requests == counts.retries + 1 == (2 if failure is reset and isinstance(reader, FsspecReader) else 3)
        )


def test_a_store_that_falls_silent_is_given_up_and_tried_again_c031(open_store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(s3, "_READ_SECONDS", 1)
    with scripted_store(silent, good) as script:
        reader = open_store(script)
        assert [bytes(b) for b in reader.read([WANTED])] == [BODY[10:5_000]]
        assert reader.counter.counts().retries == 1


@pytest.mark.parametrize("failure", [SLOW_DOWN, cut_body, reset])
def test_what_lasts_ends_in_an_error_that_names_object_range_tries_and_cause(open_store, failure):
    with scripted_store(failure) as script:
        reader = open_store(script)
        fetch = reader._fetch if isinstance(reader, ObstoreReader) else reader._fetch_s3
        policy = Retry(max_tries=4, first_seconds=0.001)
        with pytest.raises(ReadError, match=r"s3://bucket/a \[10:5000\] failed after 4 tries: \S+") as error:
            fetching.read_planned([WANTED], fetch, reader.counter, retry=policy)
        assert len(script.requests) == (8 if failure is reset and isinstance(reader, FsspecReader) else 4)
        assert failure is not SLOW_DOWN or "SlowDown: as scripted" in str(error.value)


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (refuse(404, "NoSuchKey"), NotFoundError, "NoSuchKey"),
        (refuse(403, "AccessDenied"), AccessError, "policy"),
        (refuse(403, "AccessDenied", "not authorized to perform: kms:Decrypt"), AccessError, "kms:Decrypt on the key"),
        (refuse(400, "ExpiredToken"), AccessError, "credentials have expired"),
        (refuse(403, "InvalidObjectState"), AccessError, "archived"),
        (refuse(400, "AuthorizationHeaderMalformed", "expecting eu-west-1"), ConfigError, "another region.*eu-west-1"),
        (refuse(416, "InvalidRange"), ObjectChangedError, "e1"),
    ],
)
def test_what_cannot_pass_is_not_tried_ten_times_and_says_what_to_do_c033_c035_c038(open_store, failure, kind, text):
    with scripted_store(failure) as script:
        with pytest.raises(kind, match=text) as error:
            open_store(script).read([WANTED])
        assert "s3://bucket/a" in str(error.value)
        assert len(script.requests) <= 3


def test_a_redirect_to_another_region_is_named_and_not_tried_on_c038():
    with scripted_store(refuse(301, "PermanentRedirect")) as script:
        access = S3Access.from_options(script.storage_options).resolved("bucket")
        with pytest.raises(ConfigError, match="another region"):
            ObstoreReader(access).read([WANTED])
        assert len(script.requests) == 1


def test_a_store_that_ignores_if_match_is_found_out_by_its_reply(open_store):
    with scripted_store(another_version) as script, pytest.raises(ObjectChangedError, match=r'"e1".*"e2"'):
        open_store(script).read([WANTED])


def test_a_store_that_ignores_ranges_is_named_at_once(open_store):
    with scripted_store(all_of_it) as script:
        with pytest.raises(ReadError, match="range"):
            open_store(script).read([WANTED])
        assert len(script.requests) == 1


def test_new_keys_in_the_chain_are_taken_up_when_the_old_have_expired_c033(
    open_store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def keys(name: str) -> None:
        (tmp_path / "credentials").write_text(
            f"[default]\naws_access_key_id = {name}\naws_secret_access_key = x\naws_session_token = y\n"
        )

    keys("OLD")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with scripted_store(good, refuse(400, "ExpiredToken"), good) as script:
        reader = open_store(script, key=None, secret=None)
        assert [bytes(b) for b in reader.read([WANTED])] == [BODY[10:5_000]]
        keys("NEW")
        assert [bytes(b) for b in reader.read([WANTED])] == [BODY[10:5_000]]
        assert script.requests == ["OLD", "OLD", "NEW"]


def test_waits_grow_are_jittered_and_bounded(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    monkeypatch.setattr("bucketfeed.store.retry.time.sleep", waits.append)

    def fail() -> None:
        raise ConnectionResetError("gone")

    for _ in range(50):
        with pytest.raises(ReadError, match="after 8 tries: ConnectionResetError: gone"):
            Retry(max_tries=8, first_seconds=0.1, longest_seconds=2.0).call(fail, "x", Counter())
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    for k, bound in enumerate(bounds):
        drawn = waits[k :: len(bounds)]
        assert max(drawn) <= bound
        assert max(drawn) - min(drawn) > bound / 2
    with pytest.raises(ReadError, match="x failed: ConnectionResetError"):
        Retry(total_seconds=0.0).call(fail, "x", Counter())


def botocore_errors() -> Iterator[BaseException]:
    from botocore.exceptions import ClientError, HTTPClientError
    from s3fs.utils import FileExpired

    reply = {"Error": {"Code": "AccessDenied", "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    yield ClientError(reply, "GetObject")
    yield HTTPClientError(error=ValueError("why"))
    yield FileExpired(filename="a", e_tag="b")
    yield ConnectionResetError(104, "reset")


@pytest.mark.parametrize("cause", list(botocore_errors()), ids=lambda e: type(e).__name__)
def test_our_errors_survive_the_trip_out_of_a_worker_with_type_and_the_cause_s_text_c016(cause: BaseException):
    ours = our_error(cause, str(WANTED), etag=ETAG, tries=3)
    copy = pickle.loads(pickle.dumps(ours))
    assert (type(copy), str(copy), copy.args) == (type(ours), str(ours), (str(ours),))
    assert "s3://bucket/a [10:5000]" in str(copy)
    assert any(word in str(copy) for word in ("AccessDenied", "why", "FileExpired", "reset"))


def test_every_error_is_one_text_and_the_builtin_that_fits():
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, BucketfeedError):
            assert str(pickle.loads(pickle.dumps(kind("text")))) == "text"


def test_an_error_that_the_caller_is_handling_does_not_colour_ours():
    try:
        raise PermissionError("something else")
    except PermissionError:
        with pytest.raises(ReadError, match="after 2 tries"):
            Retry(max_tries=2, first_seconds=0.0).call(_reset, "x", Counter())


def _reset() -> None:
    raise ConnectionResetError("gone")


def test_user_settings_reach_the_clients_and_retries_stay_ours():
    access = S3Access.from_options(
        {
            "endpoint_url": "http://127.0.0.1:9",
            "verify": False,
            "config_kwargs": {
                "read_timeout": 5,
                "s3": {"addressing_style": "virtual"},
                "retries": {"max_attempts": 99},
            },
        }
    )
    config = access.client().meta.config
    assert (config.read_timeout, config.s3["addressing_style"]) == (5, "virtual")
    assert config.retries["total_max_attempts"] == 1
    assert access.obstore("bucket").config["virtual_hosted_style_request"] in (True, "true")
    assert access.fsspec()[1]["client_kwargs"]["verify"] is False
    path_style = replace(access, config=()).obstore("bucket").config["virtual_hosted_style_request"]
    assert path_style in (False, "false")
