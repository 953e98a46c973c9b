"""Foreign errors, told apart and turned into ours: the one edge where that happens."""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Callable, Iterator

from bucketfeed.errors import (
    AccessError,
    BucketfeedError,
    ConfigError,
    NotFoundError,
    ObjectChangedError,
    ReadError,
    WriteError,
)
from bucketfeed.store.ranges import Range


class Fault(enum.Enum):
    """What kind of failure an error is."""

    MISSING = enum.auto()
    REFUSED = enum.auto()
    CHANGED = enum.auto()
    ARCHIVED = enum.auto()
    PASSING = enum.auto()  # worth another try
    UNTRUSTED = enum.auto()  # a certificate that nobody we know has signed
    LASTING = enum.auto()


class ShortBodyError(Exception):
    """A reply that ended before its range did."""


_BY_CODE = {
    "NoSuchBucket": Fault.MISSING,
    "NoSuchKey": Fault.MISSING,
    "NotFound": Fault.MISSING,
    "PreconditionFailed": Fault.CHANGED,
    "InvalidRange": Fault.CHANGED,  # shorter than the manifest says
    "InvalidObjectState": Fault.ARCHIVED,
    "AccessDenied": Fault.REFUSED,
    "ExpiredToken": Fault.REFUSED,
    "ExpiredTokenException": Fault.REFUSED,
    "InvalidAccessKeyId": Fault.REFUSED,
    "InvalidToken": Fault.REFUSED,
    "SignatureDoesNotMatch": Fault.REFUSED,
    "RequestTimeTooSkewed": Fault.REFUSED,
    "RequestTimeout": Fault.PASSING,
    "SlowDown": Fault.PASSING,
    "InternalError": Fault.PASSING,
    "ServiceUnavailable": Fault.PASSING,
    "Throttling": Fault.PASSING,
    "ThrottlingException": Fault.PASSING,
    "PermanentRedirect": Fault.LASTING,
    "AuthorizationHeaderMalformed": Fault.LASTING,
}
_BY_STATUS = {
    401: Fault.REFUSED,
    403: Fault.REFUSED,
    404: Fault.MISSING,
    408: Fault.PASSING,
    412: Fault.CHANGED,
    416: Fault.CHANGED,
    429: Fault.PASSING,
}
_BY_NAME = {
    "NotFoundError": Fault.MISSING,
    "PermissionDeniedError": Fault.REFUSED,
    "UnauthenticatedError": Fault.REFUSED,
    "PreconditionError": Fault.CHANGED,
    "NoCredentialsError": Fault.REFUSED,
    "PartialCredentialsError": Fault.REFUSED,
    "CredentialRetrievalError": Fault.REFUSED,
    "TokenRetrievalError": Fault.REFUSED,
    "UnauthorizedSSOTokenError": Fault.REFUSED,
    "DefaultCredentialsError": Fault.REFUSED,
    "RefreshError": Fault.REFUSED,
    "NonRetryableError": Fault.REFUSED,  # gcsfs: credentials that can't be refreshed
    "ProfileNotFound": Fault.LASTING,
    "InvalidRegionError": Fault.LASTING,
    "ParamValidationError": Fault.LASTING,
}
_CODE_IN_TEXT = re.compile(r"<Code>(\w+)</Code>")
_ELEMENT = re.compile(r"<(Code|Message|StorageClass)>(.*?)</")
_STATUS_IN_TEXT = re.compile(r"\bstatus(?: code)?:? (\d{3})\b")
# What HTTP libraries raise when a request did not get through, by package and class.
_PASSING_KINDS = {
    "aiohttp.ClientError",
    "botocore.ConnectionError",
    "botocore.HTTPClientError",
    "botocore.IncompleteReadError",
    "google.TransportError",
    "urllib3.HTTPError",
}
# obstore has one class for all of that.
_PASSING_IN_TEXT = re.compile(r"HTTP error|timed? ?out|connection", re.IGNORECASE)


def fault_of(error: BaseException) -> Fault:
    """Return what kind of failure `error`, or the cause it hides, is."""
    for e in _causes(error):  # what the store itself said, before what a library made of it
        code, status = _code(e)
        if code in _BY_CODE:
            return _BY_CODE[code]
        if status is not None:
            return _BY_STATUS.get(status, Fault.PASSING if status >= 500 else Fault.LASTING)
    for e in reversed(list(_causes(error))):
        if type(e).__name__ in _BY_NAME:
            return _BY_NAME[type(e).__name__]
        if isinstance(e, ShortBodyError | TimeoutError | ConnectionError):
            return Fault.PASSING
        if isinstance(e, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return Fault.MISSING
        if isinstance(e, PermissionError) or (type(e) is OSError and str(e).startswith("Forbidden: ")):  # gcsfs's 403
            return Fault.REFUSED
        if isinstance(e, OSError) and e.errno in (errno.EIO, errno.ESTALE):  # of mounted stores, such as Drive
            return Fault.PASSING
    for e in _causes(error):
        kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(e).__mro__}
        if kinds & _PASSING_KINDS or ("obstore.GenericError" in kinds and _PASSING_IN_TEXT.search(_brief(e))):
            return Fault.UNTRUSTED if "certificate" in str(e).lower() else Fault.PASSING
    return Fault.LASTING


def our_error(error: BaseException, what: str, *, etag: str | None = None, tries: int = 1) -> BucketfeedError:
    """Return our error for a failure in reading `what`, with the cause's own words and the next step."""
    said = said_by(error)
    match fault_of(error):
        case Fault.MISSING:
            return NotFoundError(
                f"{what} is not there ({said}); check the URL, or open the data set again if objects were deleted"
            )
        case Fault.CHANGED:
            wanted = f"; wanted etag {etag}" if etag else ""
            return ObjectChangedError(
                f"{what} is no longer the object that was listed{wanted} ({said}); open the data set again"
            )
        case Fault.ARCHIVED:
            return AccessError(f"{what} is archived ({said}); restore it to a readable storage class first")
        case Fault.REFUSED:
            remedy = _google_remedy(error) if what.startswith("gs://") else _remedy(said)
            return AccessError(f"{what} may not be read: {said}; {remedy}")
        case Fault.UNTRUSTED:
            return ConfigError(
                f"{what} can't be reached: the store's certificate is not trusted ({said}); "
                "pass storage_options={'verify': 'authorities.pem'}"
            )
        case Fault.LASTING if type(error).__name__ == "ProfileNotFound":
            return ConfigError(f"{said}: name a profile of your AWS configuration")
        case Fault.LASTING if "redirect" in said.lower() or "AuthorizationHeaderMalformed" in said:
            return ConfigError(
                f"{what} lies in another region than was asked ({said}); pass storage_options="
                "{'client_kwargs': {'region_name': ...}}"
            )
    times = f" after {tries} tries" if tries > 1 else ""
    return ReadError(f"reading {what} failed{times}: {said}; check the network, endpoint_url and the store's state")


def write_error(error: BaseException, what: str, *, etag: str | None = None, tries: int = 1) -> BucketfeedError:
    """Return our error for a failure in `what`, a step such as "completing s3://..."; `etag` says nothing here."""
    said = said_by(error)
    kept = "then do the same again: what was finished is kept"
    match fault_of(error):
        case Fault.MISSING:
            return NotFoundError(f"{what} failed, its place is not there ({said}); make the bucket, or name another")
        case Fault.REFUSED:
            return AccessError(f"{what} is not allowed: {said}; let this account write there, or name another place")
        case Fault.UNTRUSTED:
            return our_error(error, what)
    times = f" after {tries} tries" if tries > 1 else ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteError(f"{what} failed: {said}; make room, {kept}")
    return WriteError(f"{what} failed{times}: {said}; see to the network or the store's state, {kept}")


def changed_error(url: str, wanted: str | None, found: str | None) -> ObjectChangedError:
    """Return the error for an object that has another version than was listed."""
    now = f"found {found}" if found else "it is gone"
    return ObjectChangedError(
        f"{url} changed after it was listed: wanted etag {wanted}, {now}; open the data set again"
    )


def raise_if_changed(error: Exception, range: Range, look_up: Callable[[], str | None]) -> None:
    """Raise `ObjectChangedError` where `error` says so; `look_up` returns the version that is there now.

    S3 refuses another version than was asked for; to GCS one that was replaced is missing.
    """
    fault = fault_of(error)
    if fault is Fault.CHANGED:
        raise changed_error(range.url, range.etag, look_up()) from error
    if fault is Fault.MISSING and range.etag:
        try:
            found = look_up()
        except Exception:
            return  # it is gone, as the error says
        raise changed_error(range.url, range.etag, found) from error


def check_version(range: Range, found: str | None) -> None:
    """Raise `ObjectChangedError` unless `found` is the version that `range` asks for. Quotes say nothing."""
    if range.etag and found != range.etag and (found or "").strip('"') != range.etag.strip('"'):
        raise changed_error(range.url, range.etag, found)


def _remedy(said: str) -> str:
    low = said.lower()
    if "kms" in low:
        return "allow kms:Decrypt on the key that the object is encrypted with"
    if "expired" in low:
        return "the credentials have expired: use a source that renews them (a profile or role), or set new ones"
    if "credential" in low or "locate" in low:
        return (
            "set AWS_ACCESS_KEY_ID and so on, a profile, or a role; for a public bucket storage_options={'anon': True}"
        )
    return "check the policy of user and bucket; for a public bucket pass storage_options={'anon': True}"


def _google_remedy(error: BaseException) -> str:
    if any(_code(e)[1] == 401 or type(e).__module__.startswith("google.auth") for e in _causes(error)):
        return (
            "not signed in to Google, or the sign-in has ended: run the notebook's sign-in cell (elsewhere: gcloud "
            "auth application-default login), then go on; for a public bucket pass storage_options={'anon': True}"
        )
    return "let the account read the bucket (roles/storage.objectViewer); is it the account that you meant?"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    # Not `__context__`: that may be any error which the caller happens to be handling.
    while error is not None:
        yield error
        error = error.__cause__


def _code(error: BaseException) -> tuple[str | None, int | None]:
    response = getattr(error, "response", None)  # botocore's ClientError
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = response.get("Error", {}).get("Code")
        return code, status if isinstance(status, int) else None
    if type(error).__module__ == "gcsfs.retry" and isinstance(getattr(error, "code", None), int):
        return None, error.code  # type: ignore[attr-defined]
    if type(error).__module__.startswith("obstore"):
        text = str(error)
        code_match, status_match = _CODE_IN_TEXT.search(text), _STATUS_IN_TEXT.search(text)
        return code_match and code_match[1], int(status_match[1]) if status_match else None
    return None, None


def said_by(error: BaseException) -> str:
    """Return the store's own words, else the library's."""
    for last in _causes(error):
        response = getattr(last, "response", None)  # botocore's ClientError
        if isinstance(response, dict) and "Error" in response:
            said = response["Error"]
            return _told(said.get("Code"), said.get("Message"), said.get("StorageClass"))
    text = _brief(last)
    reply = dict(_ELEMENT.findall(text))
    if "Code" in reply:
        return _told(reply["Code"], reply.get("Message"), reply.get("StorageClass"))
    return f"{type(last).__name__}: {text[:400]}"


def _brief(error: BaseException) -> str:
    """Return the error's text in one line, without the debug tree that obstore appends."""
    return " ".join(str(error).split("\n\nDebug source:")[0].split()) or "no further text"


def _told(code: str | None, message: str | None, storage_class: str | None) -> str:
    told = f"{code}: {message or 'no further text'}"
    return f"{told} (storage class {storage_class})" if storage_class else told
