"""Sequences of different lengths end to end in one tensor, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bucketfeed.data.collate.buffers import Allocate, fresh
from bucketfeed.data.collate.fields import Field, applied, checked_names, gathered, names_of
from bucketfeed.data.collate.stacking import stacked
from bucketfeed.data.collate.values import joined


class Ragged(NamedTuple):
    """Sequences end to end: `values` of shape (total, ...) and `lengths`, int64 of shape (batch,)."""

    values: torch.Tensor
    lengths: torch.Tensor

    @property
    def offsets(self) -> torch.Tensor:
        """Where each sequence starts, and the end of the last; int64 of shape (batch + 1,)."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def split(self) -> tuple[torch.Tensor, ...]:
        """Return each sequence, as a view of `values`."""
        return torch.split(self.values, self.lengths.tolist())

    def nested(self) -> torch.Tensor:
        """Return a `torch.nested` tensor of the jagged layout over the same values."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)


@dataclass(frozen=True, slots=True)
class ragged:
    """Joins sequences (arrays, tensors, lists of numbers) end to end to a `Ragged`; stacks all other fields.

    Args:
        fields: paths of the fields to join; all that are no single numbers where None.
        missing: as in `stack`; a sequence that is None then counts as one of length 0.
        out: gives the memory, see `Buffers`.

    >>> for batch in bf.Loader(ds, batch_size=64, collate=bf.collate.ragged(("tokens",))):
    ...     batch["tokens"].values, batch["tokens"].lengths
    """

    fields: Sequence[str] | str | None = None
    missing: float | Mapping[str, float] | None = None
    out: Allocate = field(default=fresh, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", names_of(self.fields, "ragged"))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return one batch made of `samples`."""
        form = gathered(samples)
        chosen = checked_names(form, self.fields, "ragged")
        return applied(form, lambda field: self._column(field, chosen))

    def _column(self, field: Field, chosen: frozenset[str] | None) -> Any:
        tensors = field.sequences(chosen, self.missing)
        if tensors is None:
            return stacked(field, self.missing, self.out)
        field.check_shapes(tensors, but=0)
        return Ragged(joined(tensors, self.out), torch.tensor([len(tensor) for tensor in tensors]))
