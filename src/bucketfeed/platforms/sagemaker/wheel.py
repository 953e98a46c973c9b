"""A wheel of the package that is running, so that a job trains with the same code: from a checkout or from pip."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Iterable
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import bucketfeed
from bucketfeed.errors import ConfigError

NAME = "bucketfeed"
# What a training image brings, built for its drivers: never to be installed again.
_IMAGE = re.compile(r"(?:torch|torchvision|torchaudio|triton|nvidia-[a-z0-9-]+)(?![a-z0-9._-])", re.IGNORECASE)
_KEPT_HEADERS = ("Metadata-Version", "Name", "Version", "Summary", "Requires-Python")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same code gives the same bytes


def is_of_image(requirement: str) -> bool:
    """Whether a line of requirements names a package of the training image, which must stay as it is."""
    return _IMAGE.match(requirement.strip()) is not None


def make_wheel(extras: Iterable[str] = ()) -> tuple[str, bytes]:
    """Return name and bytes of a wheel of this package, which needs what `extras` need too, and never torch.

    Raises `ConfigError` where the package was never installed, so that nobody has written down what it needs.
    """
    try:
        found = distribution(NAME)
    except PackageNotFoundError as e:
        raise ConfigError(f"{NAME} runs here without being installed; install it: pip install -e .") from e
    metadata = _metadata(found.metadata, frozenset(extras))  # type: ignore[arg-type]
    info = f"{NAME}-{found.version}.dist-info"
    files = {f"{NAME}/{path}": data for path, data in _package().items()}
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: true\nTag: py3-none-any\n".encode()
    )
    points = found.read_text("entry_points.txt")
    if points:
        files[f"{info}/entry_points.txt"] = points.encode()
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(zipfile.ZipInfo(path, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"{NAME}-{found.version}-py3-none-any.whl", out.getvalue()


def _package() -> dict[str, bytes]:
    folder = Path(bucketfeed.__file__).parent
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".typed") and path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _metadata(found: Message, extras: frozenset[str]) -> str:
    lines = [f"{header}: {found[header]}" for header in _KEPT_HEADERS if found[header]]
    for needed in found.get_all("Requires-Dist") or []:
        requirement, _, marker = needed.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if (extra is None or extra[1] in extras) and not is_of_image(requirement):
            # A marker beside the extra's is none of ours: pyproject.toml has no such one.
            lines.append(
                f"Requires-Dist: {requirement.strip()}" + (f"; {marker.strip()}" if extra is None and marker else "")
            )
    return "\n".join(lines) + "\n"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
