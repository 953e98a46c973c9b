"""Sequences of different lengths to one tensor, filled up to the longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from bucketfeed.data.collate.buffers import Allocate, fresh
from bucketfeed.data.collate.fields import Field, applied, by_path, checked_names, gathered, names_of
from bucketfeed.data.collate.stacking import stacked
from bucketfeed.data.collate.values import held
from bucketfeed.errors import ConfigError
from bucketfeed.store.whole import whole


class Padded(NamedTuple):
    """A padded field that has no dict around it: what `pad` puts beside others by name."""

    values: torch.Tensor
    mask: torch.Tensor | None
    lengths: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class pad:
    """Pads sequences (arrays, tensors, lists of numbers) to the longest of the batch; stacks all other fields.

    A field becomes a tensor of shape (batch, longest, ...), with a mask (True where there is a value) and, if asked
    for, its lengths (int64) beside it in the dict; fields of tuples become a `Padded`.

    Args:
        value: what to fill up with, or one for each field by its path; 0 for those not named.
        fields: paths of the fields to pad (`"tokens"`, `"text.tokens"`); all that are no single numbers where None.
        side: where to fill up.
        dim: the dimension of a sample that differs in length; all others must agree.
        multiple_of: round the length up to a multiple of this.
        max_length: the longest that may be: beyond it is an error, or cut with `truncate=True`, which keeps the start.
        mask: its name, with `{}` for the field's; True is `"{}_mask"`, False gives none. Fields of equal lengths may
            share one name.
        lengths: the same for the lengths; True is `"{}_lengths"`.
        missing: as in `stack`; a sequence that is None then counts as one of length 0.
        out: gives the memory, see `Buffers`.

    >>> bf.collate.pad({"labels": -100}, ("input_ids", "labels"), mask="attention_mask", multiple_of=8)
    """

    value: float | Mapping[str, float] = 0
    fields: Sequence[str] | str | None = None
    _: KW_ONLY
    side: Literal["right", "left"] = "right"
    dim: int = 0
    multiple_of: int = 1
    max_length: int | None = None
    truncate: bool = False
    mask: bool | str = True
    lengths: bool | str = False
    missing: float | Mapping[str, float] | None = None
    out: Allocate = field(default=fresh, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", names_of(self.fields, "pad"))
        if self.side not in ("right", "left"):
            raise ConfigError(f"pad: side must be 'right' or 'left', not {self.side!r}")
        whole("multiple_of", self.multiple_of, 1)
        if self.max_length is not None and whole("max_length", self.max_length, 1) % self.multiple_of:
            raise ConfigError(f"pad: max_length={self.max_length} is no multiple of multiple_of={self.multiple_of}")
        if self.truncate and self.max_length is None:
            raise ConfigError("pad: truncate=True needs max_length, to which to cut")
        if isinstance(self.value, Mapping):
            object.__setattr__(self, "value", dict(self.value))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return one batch made of `samples`."""
        form = gathered(samples)
        chosen = checked_names(form, self.fields, "pad")
        if isinstance(self.value, Mapping):
            checked_names(form, list(self.value), "pad(value=...)")
        return self._spread(applied(form, lambda field: self._column(field, chosen)))

    def _column(self, field: Field, chosen: frozenset[str] | None) -> Any:
        tensors = field.sequences(chosen, self.missing)
        if tensors is None:
            return stacked(field, self.missing, self.out)
        return self.padded(field, tensors)

    def padded(self, field: Field, tensors: list[torch.Tensor]) -> Padded:
        """Return the tensors of one field, filled up."""
        ndim = tensors[0].ndim
        if not -ndim <= self.dim < ndim:
            raise ConfigError(f"pad(dim={self.dim}): field {field.path!r} has shape {tuple(tensors[0].shape)}")
        field.check_shapes(tensors, but=self.dim)
        dim = self.dim % ndim
        sizes = [tensor.shape[dim] for tensor in tensors]
        if self.max_length is not None and max(sizes) > self.max_length:
            if not self.truncate:
                number = sizes.index(max(sizes))
                raise ConfigError(
                    f"field {field.path!r} of sample {field.names[number]} has length {sizes[number]}, more than "
                    f"max_length={self.max_length}; pass truncate=True to cut it, or make max_length larger"
                )
            sizes = [min(size, self.max_length) for size in sizes]
        longest = -(-max(sizes) // self.multiple_of) * self.multiple_of
        shape = list(tensors[0].shape)
        shape[dim] = longest
        batch = self.out((len(tensors), *shape), tensors[0].dtype)
        batch.fill_(held(by_path(self.value, field.path, 0), batch.dtype, field.path))
        for row, tensor, size in zip(batch, tensors, sizes, strict=True):
            row.narrow(dim, 0 if self.side == "right" else longest - size, size).copy_(tensor.narrow(dim, 0, size))
        lengths = torch.tensor(sizes)
        mask = None
        if self.mask:
            places = torch.arange(longest) if self.side == "right" else torch.arange(longest - 1, -1, -1)
            mask = places < lengths[:, None]
        return Padded(batch, mask, lengths if self.lengths else None)

    def _spread(self, batch: Any) -> Any:
        """Put masks and lengths beside their fields."""
        if isinstance(batch, Padded):
            return batch if self.mask or self.lengths else batch.values
        if isinstance(batch, tuple):
            columns = [self._spread(column) for column in batch]
            return type(batch)(*columns) if hasattr(batch, "_fields") else tuple(columns)
        if not isinstance(batch, dict):
            return batch
        spread = {
            key: column.values if isinstance(column, Padded) else self._spread(column) for key, column in batch.items()
        }
        for key, column in batch.items():
            if isinstance(column, Padded):
                for option, given, default in (
                    (self.mask, column.mask, "{}_mask"),
                    (self.lengths, column.lengths, "{}_lengths"),
                ):
                    if given is not None:
                        _add(spread, (option if isinstance(option, str) else default).format(key), given, key, batch)
        return spread


def _add(spread: dict[Any, Any], name: str, given: torch.Tensor, key: Any, batch: dict[Any, Any]) -> None:
    if name in batch:
        raise ConfigError(f"pad: the samples have a field {name!r} already; pass another name, as in mask='{{}}_valid'")
    if name in spread and not torch.equal(spread[name], given):
        raise ConfigError(
            f"pad: {name!r} of field {key!r} differs from that of another field; give each its own, as in '{{}}_mask'"
        )
    spread[name] = given
