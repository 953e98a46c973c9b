"""What is trained where the user names nothing else: pictures by class, and a small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn

from bucketfeed.data.dataset import MapDataset
from bucketfeed.errors import ConfigError
from bucketfeed.formats import decoders

_PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif", "ppm", "pgm")


@dataclass(frozen=True, slots=True)
class PictureDecode:
    """Makes {"__key__", "image": uint8 (3, size, size), "label": int} of a sample with a picture.

    The label is the field `cls`, else the folder that the sample's key lies in, by its place in `classes`.
    """

    classes: tuple[str, ...]
    size: int
    num_classes: int

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the decoded sample. Raises `ConfigError` where it has no picture or no label."""
        name = next((field for field in sample if field in _PICTURES), None)
        if name is None:
            fields = ", ".join(f for f in sample if f != "__key__")
            raise ConfigError(f"no picture among the fields {fields}; name your own function by --decode")
        picture = Image.fromarray(decoders.image(sample[name]))
        if picture.size != (self.size, self.size):
            # The middle square, then to size: nothing is stretched.
            width, height = picture.size
            side = min(width, height)
            left, top = (width - side) // 2, (height - side) // 2
            box = (left, top, left + side, top + side)
            picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))
        return {"__key__": sample["__key__"], "image": pixels, "label": self._label(sample)}

    def _label(self, sample: dict[str, Any]) -> int:
        if "cls" in sample:
            label = decoders.cls(sample["cls"])
            if not 0 <= label < self.num_classes:
                raise ConfigError(f"the label is {label}, but --num-classes is {self.num_classes}: 0 is the first")
            return label
        folder = folder_of(sample["__key__"])
        if folder not in self.classes:
            known = ", ".join(self.classes) or "no folders, and the sample no field cls"
            raise ConfigError(f"no class for folder {folder!r}; the training data has {known}")
        return self.classes.index(folder)


def folder_of(key: str) -> str:
    """Return the name of the folder that a key lies in; "" at the top."""
    return key.rpartition("/")[0].rpartition("/")[2]


def find_classes(dataset: MapDataset) -> tuple[str, ...]:
    """Return the names of the folders that hold objects, sorted: the classes of raw pictures.

    Empty for tars, and where all objects lie at the top.
    """
    if dataset.index.format != "raw":
        return ()
    return tuple(sorted({folder_of(dataset.manifest.key(i)) for i in range(len(dataset.manifest))} - {""}))


def small_cnn(num_classes: int) -> nn.Module:
    """Return a convolutional network of 0.3 million parameters for pictures of any size."""

    def block(into: int, out: int) -> Sequence[nn.Module]:
        return nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)

    return nn.Sequential(
        *block(3, 32),
        *block(32, 64),
        nn.MaxPool2d(2, ceil_mode=True),
        *block(64, 128),
        nn.MaxPool2d(2, ceil_mode=True),
        *block(128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )


class Outcome(NamedTuple):
    """What a model made of a batch: the mean loss, how many samples it stands for, how many answers were right."""

    loss: torch.Tensor
    weight: int
    right: torch.Tensor | None  # None where there is no telling


class Step(nn.Module):
    """From a batch to its `Outcome`: what runs under DDP and mixed precision.

    A model with a method `training_step(batch) -> loss` is asked for its loss; any other gets `batch["image"]` (or
    `batch[0]`) as floats and is trained by cross entropy on `batch["label"]` (or `batch[1]`).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Outcome:
        """Return the outcome of `batch`. Raises `ConfigError` where it has no image or label."""
        own_step: Any = getattr(self.model, "training_step", None)
        if own_step is not None:
            return Outcome(own_step(batch), 1, None)
        try:
            inputs, labels = (batch["image"], batch["label"]) if isinstance(batch, dict) else (batch[0], batch[1])
        except (KeyError, IndexError, TypeError) as e:
            raise ConfigError(
                f"the model needs a batch with 'image' and 'label' (or a pair), not {_shape(batch)}; let --decode "
                "return these, or give the model a training_step(batch)"
            ) from e
        if inputs.dtype == torch.uint8:
            inputs = inputs.float().div(127.5).sub(1)
        logits = self.model(inputs)
        right = (logits.argmax(1) == labels).sum()
        return Outcome(nn.functional.cross_entropy(logits, labels), len(labels), right)


def _shape(batch: Any) -> str:
    return f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, dict) else type(batch).__name__
