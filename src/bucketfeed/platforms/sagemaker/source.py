"""What a job is given to run: the user's modules, this package as a wheel, and what is to be installed. No secrets."""

from __future__ import annotations

import fnmatch
import gzip
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bucketfeed.errors import ConfigError
from bucketfeed.platforms.sagemaker.wheel import NAME, is_of_image, make_wheel
from bucketfeed.store.sizes import format_size

REQUIREMENTS = "requirements.txt"
# What SageMaker's tuner starts, which takes no command: the container, without the options that it appends.
START = "bucketfeed_job.py"
_START = "import sys\n\nfrom bucketfeed.platforms.sagemaker.container import main\n\nsys.exit(main([]))\n"

_NEVER = {
    "version control": (".git", ".hg", ".svn"),
    "Python environment": (".venv", "venv", ".tox", ".nox", ".conda", "site-packages"),
    "secrets": (".aws", ".ssh", ".gnupg", ".azure", ".docker", ".kube", ".kaggle", ".config", ".gcloud", "secrets"),
    "caches": ("__pycache__", ".*cache", ".ipynb_checkpoints", "node_modules", ".idea", ".vscode", "*.egg-info"),
}
# In these only modules are taken: packages are called so too.
_DATA_FOLDERS = (
    "data",
    "datasets",
    "checkpoints",
    "runs",
    "outputs",
    "wandb",
    "mlruns",
    "lightning_logs",
    "build",
    "dist",
)
_FILES = {
    "secrets": (
        *(
            ".env",
            ".env.*",
            "*.env",
            ".netrc",
            ".pypirc",
            ".npmrc",
            ".git-credentials",
            ".htpasswd",
            ".pgpass",
            ".boto",
        ),
        *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.ppk", "*.token", "token", "id_rsa*", "id_dsa*"),
        *("id_ecdsa*", "id_ed25519*", "credentials", "credentials.*", "*credentials*.json", "*secret*", "*password*"),
        *("*service?account*.json", "kubeconfig*", "*.tfstate", "*.tfstate.*", "*.tfvars", "application_default*"),
    ),
    "weights": ("*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.onnx", "*.h5", "*.pkl", "*.pickle"),
    "data": (
        *("*.tar", "*.tar.*", "*.tgz", "*.zip", "*.npy", "*.npz", "*.parquet", "*.arrow", "*.tfrecord*", "*.lmdb"),
        *("*.bin", "*.mp4", "*.sqlite", "*.db"),
    ),
    "leftovers": (".DS_Store", "*.pyc", "*.pyo", "*.swp", "core", "nohup.out"),
}
_SECRET = re.compile(
    rb"(?:AKIA|ASIA)[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bgh[pousr]_[A-Za-z0-9]{36}|\bhf_[A-Za-z0-9]{30,}"
    rb"|aws_secret_access_key\s*[=:]\s*['\"]?[A-Za-z0-9/+]{40}",
    re.IGNORECASE,
)
_CODE = (".py", ".pyi")
_SEARCHED = 4 << 20  # bytes of a file that are searched for secrets


@dataclass(frozen=True, slots=True)
class Source:
    """The archive that is uploaded, the files in it with their sizes, and what was left out, with the reason."""

    archive: bytes
    files: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, str], ...]


def pack(folder: Path | None, *, limit_bytes: int, force: bool = False, extras: Iterable[str] = ()) -> Source:
    """Return the source of a job: what is code in `folder`, and this package with what `extras` need.

    Raises `ConfigError` for more than `limit_bytes` unless `force`, and for code with a secret in it.
    """
    files: dict[str, bytes] = {}
    left_out: list[tuple[str, str]] = []
    total = 0
    for name, path, reason in _walked(folder) if folder is not None else ():
        reason = reason or _unwelcome(path)
        if reason:
            left_out.append((name, reason))
            continue
        total += path.stat().st_size
        if total <= limit_bytes or force:
            files[name] = path.read_bytes()
    if total > limit_bytes and not force:
        raise ConfigError(
            f"--source {folder} holds {format_size(total)} to upload, more than {format_size(limit_bytes)}: the "
            f"largest are {_largest(folder)}; move what the job does not need elsewhere, or give --force-source"
        )
    needed, not_needed = _requirements(folder, files.pop(REQUIREMENTS, b""))
    left_out += [(f"{REQUIREMENTS}: {line}", "the image brings it") for line in not_needed]
    wheel, data = make_wheel(extras)
    files |= {wheel: data, REQUIREMENTS: "".join(f"{line}\n" for line in (f"./{wheel}", *needed)).encode()}
    files[START] = _START.encode()
    sizes = tuple((name, len(data)) for name, data in sorted(files.items()))
    return Source(_archive(files), sizes, tuple(left_out))


def _walked(root: Path) -> Iterator[tuple[str, Path, str | None]]:
    """Give all files below `root`, by name from there, and of folders that are left out the folder alone."""
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        inside = here.relative_to(root)
        for name in sorted(folders):
            reason = _never(here / name)
            if reason:
                folders.remove(name)
                yield f"{(inside / name).as_posix()}/", here / name, reason
        folders.sort()
        only_code = any(part.lower() in _DATA_FOLDERS for part in inside.parts)
        for name in sorted(files):
            path = here / name
            data = only_code and path.suffix not in _CODE
            yield (inside / name).as_posix(), path, "data" if data else _outside(path, root)


def _never(folder: Path) -> str | None:
    if folder.is_symlink():
        return "a link to a folder"
    if (folder / "pyvenv.cfg").exists():
        return "Python environment"
    return _matching(folder.name, _NEVER)


def _outside(path: Path, root: Path) -> str | None:
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        return "a link out of the folder"
    return None if path.is_file() else "no plain file"


def _unwelcome(path: Path) -> str | None:
    # The name that a link points to counts as well.
    for name in (path.name, path.resolve().name):
        reason = _matching(name, _FILES)
        if reason and not (reason == "secrets" and path.suffix in _CODE):  # secrets.py may be a module
            return reason
    with path.open("rb") as file:
        if not _SECRET.search(file.read(_SEARCHED)):
            return None
    if path.suffix in _CODE:
        raise ConfigError(
            f"{path} holds what looks like a secret key, so it is not uploaded: let the job's role have the "
            "permission, or read the secret at run time from Secrets Manager"
        )
    return "secrets"


def _matching(name: str, patterns: dict[str, tuple[str, ...]]) -> str | None:
    for reason, known in patterns.items():
        if any(fnmatch.fnmatch(name.lower(), pattern.lower()) for pattern in known):
            return reason
    return None


def _largest(folder: Path | None) -> str:
    assert folder is not None
    sizes = [(path.stat().st_size, name) for name, path, reason in _walked(folder) if not reason]
    return ", ".join(f"{name} ({format_size(size)})" for size, name in sorted(sizes, reverse=True)[:3])


def _requirements(folder: Path | None, text: bytes) -> tuple[list[str], list[str]]:
    """Return the lines that are to be installed, with those of files that they name, and those that must not be."""
    needed: list[str] = []
    not_needed: list[str] = []
    for raw in text.decode("utf-8-sig").replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", raw).strip()
        named = re.match(r"(?:-r|--requirement)[ =]\s*(\S+)", line)
        if named:
            assert folder is not None
            path = folder / named[1]
            if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
                raise ConfigError(
                    f"{REQUIREMENTS} names {named[1]}, which is no file in --source {folder}; put it there"
                )
            for mine, other in zip((needed, not_needed), _requirements(folder, path.read_bytes()), strict=True):
                mine += other
        elif re.match(rf"{NAME}(?![A-Za-z0-9._-])", line, re.IGNORECASE) or is_of_image(line):
            not_needed.append(line)
        elif line:
            needed.append(line)
    return needed, not_needed


def _archive(files: dict[str, bytes]) -> bytes:
    """Return a .tar.gz that is the same for the same files."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()
