"""Sequences packed into rows of a fixed number of tokens, or into one row for attention kernels of variable length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from typing import Any

import torch

from bucketfeed.data.collate.buffers import Allocate, fresh
from bucketfeed.data.collate.fields import Field, applied, by_path, checked_names, gathered, names_of
from bucketfeed.data.collate.stacking import stacked
from bucketfeed.data.collate.values import held, joined
from bucketfeed.errors import ConfigError
from bucketfeed.store.whole import whole

_ADDED = ("position_ids", "segment_ids", "cu_seqlens", "max_seqlen")


@dataclass(frozen=True, slots=True)
class pack:
    """Packs the sequences of a batch of dicts; stacks all other fields, in the order in which sequences are packed.

    By default each field becomes a tensor of shape (rows, budget): as few rows as first-fit-decreasing finds. With
    `flat=True` one row of all tokens, shape (total,), at most `budget`. Beside the fields come

    * `position_ids` (int64): from 0 in each sequence;
    * `segment_ids` (int32): the number of the sequence in its row, from 1; 0 where there is none;
    * with `flat=True`, `cu_seqlens` (int32, shape (batch + 1,)) and `max_seqlen` (int), as flash-attn's
      `flash_attn_varlen_func` takes them.

    Args:
        budget: tokens in a row.
        fields: paths of the fields to pack, which have equal lengths in a sample; all that are no single numbers where
            None.
        value: fills up rows; or one for each field, by its path.
        flat: one row without filling. Raises `ConfigError` beyond the budget: `LengthBuckets(max_tokens=budget)` keeps
            to it.
        truncate: cut what does not fit instead of raising: a sequence at `budget`, with `flat` the whole row.
        out: gives the memory, see `Buffers`.

    >>> bf.Loader(ds, batch_size=64, collate=bf.collate.pack(2048, ("input_ids", "labels"), {"labels": -100}))
    """

    budget: int
    fields: Sequence[str] | str | None = None
    value: float | Mapping[str, float] = 0
    _: KW_ONLY
    flat: bool = False
    truncate: bool = False
    out: Allocate = field(default=fresh, compare=False)

    def __post_init__(self) -> None:
        whole("budget", self.budget, 1)
        object.__setattr__(self, "fields", names_of(self.fields, "pack"))

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return one batch made of `samples`."""
        form = gathered(samples)
        if not isinstance(form, dict):
            raise ConfigError(f"pack takes samples that are dicts, not {type(samples[0]).__name__}; see decode=")
        if own := [name for name in _ADDED if name in form]:
            raise ConfigError(f"pack adds {own} to the fields of samples that have them; rename those in decode=")
        sequences = self._sequences(form)
        lengths = self._lengths(sequences)
        rows = [list(range(len(lengths)))] if self.flat else _rows(lengths, self.budget)
        order = [sample for row in rows for sample in row]

        def column(field: Field) -> Any:
            if field.path not in sequences:
                return stacked(field.reordered(order), out=self.out)
            tensors = sequences[field.path][1]
            field.check_shapes(tensors, but=0)
            parts = [[tensors[i][: lengths[i]] for i in row] for row in rows]
            if self.flat:
                return joined(parts[0], self.out)
            return self._filled(field, [joined(part) for part in parts])

        return {**applied(form, column), **self._added([[lengths[i] for i in row] for row in rows])}

    def _sequences(self, form: dict[str, Any]) -> dict[str, tuple[Field, list[torch.Tensor]]]:
        chosen = checked_names(form, self.fields, "pack")
        if isinstance(self.value, Mapping):
            checked_names(form, list(self.value), "pack(value=...)")
        found: dict[str, tuple[Field, list[torch.Tensor]]] = {}

        def look(field: Field) -> None:
            if (tensors := field.sequences(chosen)) is not None:
                found[field.path] = field, tensors

        applied(form, look)
        if not found:
            raise ConfigError("pack: the samples have no field of arrays, tensors or lists of numbers")
        return found

    def _lengths(self, sequences: dict[str, tuple[Field, list[torch.Tensor]]]) -> list[int]:
        (first, tensors), *others = sequences.values()
        lengths = [len(tensor) for tensor in tensors]
        for other, own in others:
            for number, tensor in enumerate(own):
                if len(tensor) != lengths[number]:
                    raise ConfigError(
                        f"pack: in sample {other.names[number]} field {first.path!r} has length {lengths[number]} and "
                        f"{other.path!r} {len(tensor)}; name those that go together by fields="
                    )
        total = sum(lengths) if self.flat else max(lengths)
        if total > self.budget and not self.truncate:
            what = (
                f"{len(lengths)} samples have {total} tokens"
                if self.flat
                else (f"field {first.path!r} of sample {first.names[lengths.index(total)]} has length {total}")
            )
            raise ConfigError(
                f"pack: {what}, more than budget={self.budget}; pass truncate=True to cut, or make "
                + ("smaller batches, as LengthBuckets(max_tokens=budget) does" if self.flat else "the budget larger")
            )
        if not self.flat:
            return [min(length, self.budget) for length in lengths]
        before = [0, *accumulate(lengths)]
        return [max(0, min(length, self.budget - start)) for start, length in zip(before, lengths, strict=False)]

    def _filled(self, field: Field, rows: list[torch.Tensor]) -> torch.Tensor:
        value = held(by_path(self.value, field.path, 0), rows[0].dtype, field.path)
        batch = self.out((len(rows), self.budget, *rows[0].shape[1:]), rows[0].dtype).fill_(value)
        for row, tokens in zip(batch, rows, strict=True):
            row[: len(tokens)] = tokens
        return batch

    def _added(self, rows: list[list[int]]) -> dict[str, Any]:
        """Return what tells the sequences apart, from their lengths in each row."""
        size = sum(rows[0]) if self.flat else self.budget
        positions = torch.zeros(len(rows), size, dtype=torch.int64)
        segments = torch.zeros(len(rows), size, dtype=torch.int32)
        for row, lengths in enumerate(rows):
            counts = torch.tensor(lengths)
            starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
            positions[row, : len(starts)] = torch.arange(len(starts)) - starts
            segments[row, : len(starts)] = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), counts)
        if not self.flat:
            return {"position_ids": positions, "segment_ids": segments}
        ends = torch.tensor([0, *accumulate(rows[0])], dtype=torch.int32)
        added = {"position_ids": positions[0], "segment_ids": segments[0], "cu_seqlens": ends}
        return {**added, "max_seqlen": max(rows[0])}


def _rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return which samples go into each row: the longest first, each into the first row that has room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, left in enumerate(room) if lengths[sample] <= left), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(budget)
        rows[row].append(sample)
        room[row] -= lengths[sample]
    return rows
