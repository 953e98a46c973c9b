"""Which volume of a host the cache goes to, and how much of it the cache may take."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bucketfeed.errors import CacheError

# Of file systems that lie on a disk of this host. Not tmpfs (it is memory), nor nfs, lustre and fuse (the network).
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs"})
_INSTANCE_STORE = "Instance Storage"  # the model that EC2's local NVMe disks give; EBS volumes are NVMe devices too
_KEPT_FREE = 10 << 30
_KEPT_SHARE = 0.1
_MUCH_LARGER = 8  # times; then a volume is taken before the instance store


@dataclass(frozen=True, slots=True)
class Volume:
    """A mounted local volume: a folder on it that may be written, its sizes in bytes, and what it is."""

    folder: str
    free: int
    size: int
    instance_store: bool = False
    root: bool = False

    @property
    def limit(self) -> int:
        """Bytes that a cache may take: what is free less a tenth of the volume, at least 10 GiB; or half, if more."""
        kept = max(_KEPT_FREE, int(self.size * _KEPT_SHARE))
        return max(self.free - kept, self.free // 2)

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "instance store" if self.instance_store else "root disk" if self.root else "volume"


def choose(volumes: Sequence[Volume]) -> Volume:
    """Return where the cache goes: the instance store, else the largest volume, else the root disk.

    Each goes by the room that is free; an instance store that is small beside a volume is passed over.
    Raises `CacheError` where there is none.
    """
    if not volumes:
        raise CacheError("no local disk can be written to here, so there is no place for the cache; give --cache-dir")
    ranked = sorted(volumes, key=lambda v: (not v.root, v.free), reverse=True)
    best = ranked[0]
    if best.root or best.free < _KEPT_FREE:  # a root disk only where nothing else has room
        best = max(volumes, key=lambda v: v.free)
    stores = [v for v in ranked if v.instance_store and v.free * _MUCH_LARGER >= best.free]
    return stores[0] if stores else best


def volumes(
    prefer: Sequence[str] = (),
    avoid: Sequence[str] = (),
    *,
    mounts: str | os.PathLike[str] = "/proc/self/mountinfo",
    sys: str | os.PathLike[str] = "/sys",
    usage: Callable[[str], tuple[int, int]] | None = None,
) -> list[Volume]:
    """Return the local volumes that can be written to, one folder each.

    Of several folders on one volume those in `prefer` come first, in that order; `avoid` and all below it is
    never taken: there a place keeps what it uploads. `usage` gives total and free bytes of a folder; `mounts` and
    `sys` stand in for the kernel's own files.
    """
    usage = usage or _usage
    order = list(prefer)
    found: dict[str, Volume] = {}
    mounted = [_Mount.parsed(line) for line in Path(mounts).read_text(encoding="utf-8").splitlines()]
    visible = {mount.folder: mount for mount in mounted}  # a later mount hides the one before
    on_root = visible["/"].device if "/" in visible else ""
    candidates = [mount for mount in visible.values() if _taken(mount, avoid)]
    for mount in sorted(candidates, key=lambda m: _preference(m.folder, order)):
        if mount.device in found:
            continue
        size, free = usage(mount.folder)
        store = _is_instance_store(Path(sys), mount.device)
        found[mount.device] = Volume(mount.folder, free, size, store, root=mount.device == on_root)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Mount:
    device: str  # major:minor
    folder: str
    kind: str

    @classmethod
    def parsed(cls, line: str) -> _Mount:
        """Read a line of mountinfo; see proc(5)."""
        before, _, after = line.partition(" - ")
        fields = before.split()
        folder = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        return cls(fields[2], folder, after.split()[0])


def _taken(mount: _Mount, avoid: Sequence[str]) -> bool:
    if mount.kind not in _LOCAL and not (mount.kind == "overlay" and mount.folder == "/"):
        return False
    if any(mount.folder == path or mount.folder.startswith(path.rstrip("/") + "/") for path in avoid):
        return False
    return os.path.isdir(mount.folder) and os.access(mount.folder, os.W_OK)


def _preference(folder: str, order: Sequence[str]) -> tuple[int, int, str]:
    return (order.index(folder) if folder in order else len(order), len(folder), folder)


def _usage(folder: str) -> tuple[int, int]:
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _is_instance_store(sys: Path, device: str) -> bool:
    """Whether a block device, or every disk that a RAID or logical volume is made of, is EC2's instance store."""
    block = sys / "dev" / "block" / device
    if not block.exists():
        return False
    block = block.resolve()
    if (block / "partition").exists():
        block = block.parent
    parts = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    models = [part.resolve() / "device" / "model" for part in parts] or [block / "device" / "model"]
    return all(model.exists() and _INSTANCE_STORE in model.read_text(encoding="utf-8") for model in models)
