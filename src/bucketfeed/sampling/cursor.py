"""How far a run is: a few values that fit any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from bucketfeed.errors import ResumeError

VERSION = 1
_REMEDY = {
    "fingerprint": "the data set was changed since, or is another one: resume with the data it was saved with",
    "length": "the data set was changed since, or is another one: resume with the data it was saved with",
    "seed": "make the Loader with the saved seed",
    "streams": "make the Loader with the saved streams",
    "chunk_bytes": "make the Loader with the saved chunk_bytes",
    "shuffle": "make the Loader with the saved shuffle",
}


@dataclass(frozen=True, slots=True)
class Cursor:
    """`position` samples of `epoch` are done, over all ranks, in the order that the other fields fix."""

    fingerprint: str
    seed: int
    epoch: int
    position: int
    streams: int
    chunk_bytes: int
    shuffle: bool
    length: int
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that `to_dict` wrote. Raises `ResumeError` for anything else."""
        found = state.get("version") if isinstance(state, Mapping) else None
        if found != VERSION:
            raise ResumeError(
                f"not a loader state of version {VERSION}: version is {found!r}; pass what state_dict() of this "
                "version of bucketfeed returned"
            )
        types: dict[str, type] = {"fingerprint": str, "shuffle": bool}
        for field in fields(cls):
            value = state.get(field.name)
            wanted = types.get(field.name, int)
            if type(value) is not wanted or (isinstance(value, int) and value < 0):
                raise ResumeError(
                    f"broken loader state: {field.name} is {value!r}, which is no {wanted.__name__} that "
                    "state_dict() writes"
                )
        cursor = cls(**{field.name: state[field.name] for field in fields(cls)})
        if cursor.position > cursor.length:
            raise ResumeError(f"broken loader state: position {cursor.position} of {cursor.length} samples")
        return cursor

    def check(self, expected: Cursor) -> None:
        """Raise `ResumeError` unless this cursor stands in the same order as `expected`, at whatever position."""
        for name, remedy in _REMEDY.items():
            saved, here = getattr(self, name), getattr(expected, name)
            if saved != here:
                raise ResumeError(f"the saved state has {name}={saved!r}, but here it is {here!r}; {remedy}")
