"""How far a run is: a few values that fit any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from bucketfeed.errors import ResumeError

VERSION = 1
_KIND: dict[type, str] = {str: "string", bool: "truth value", int: "whole number of at least 0"}
_REMEDY = {
    "fingerprint": "the data set was changed since, or is another one: resume with the data it was saved with",
    "length": "the data set was changed since, or is another one: resume with the data it was saved with",
    "seed": "make the Loader (or start train.py) with the saved seed",
    "streams": "make the Loader with the saved streams",
    "chunk_bytes": "make the Loader with the saved chunk_bytes",
    "shuffle": "make the Loader with the saved shuffle",
    "batches": "make the Loader with the saved batches=, of the same lengths, and tail=",
}


@dataclass(frozen=True, slots=True)
class Cursor:
    """`position` samples of `epoch` are done, over all ranks, in the order that the other fields fix.

    Where `batches` names how batches are made, `position` counts those.
    """

    fingerprint: str
    seed: int
    epoch: int
    position: int
    streams: int
    chunk_bytes: int
    shuffle: bool
    length: int
    version: int = VERSION
    batches: str = ""

    def __post_init__(self) -> None:
        types: dict[str, type] = {"fingerprint": str, "shuffle": bool, "batches": str}
        for field in fields(self):
            value, wanted = getattr(self, field.name), types.get(field.name, int)
            # type() rather than isinstance: True is an int, and neither numpy's numbers nor it would survive JSON.
            if type(value) is not wanted or (isinstance(value, int) and value < 0):
                raise ResumeError(f"broken loader state: {field.name} is {value!r}, not a {_KIND[wanted]}")
        if self.position > self.length:
            raise ResumeError(f"broken loader state: position {self.position} of {self.length} samples")

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "batches" or value}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that `to_dict` wrote. Raises `ResumeError` for anything else."""
        found = state.get("version") if isinstance(state, Mapping) else None
        if found != VERSION:
            raise ResumeError(
                f"not a loader state of version {VERSION}: version is {found!r}; pass what state_dict() of this "
                "version of bucketfeed returned"
            )
        try:
            names = [field.name for field in fields(cls) if field.name != "batches" or "batches" in state]
            return cls(**{name: state[name] for name in names})
        except KeyError as e:
            raise ResumeError(f"broken loader state: it has no {e}; pass what state_dict() returned") from None

    def check(self, expected: Cursor) -> None:
        """Raise `ResumeError` unless this cursor stands in the same order as `expected`, at whatever position."""
        for name, remedy in _REMEDY.items():
            saved, here = getattr(self, name), getattr(expected, name)
            if saved != here:
                raise ResumeError(f"the saved state has {name}={saved!r}, but here it is {here!r}; {remedy}")
