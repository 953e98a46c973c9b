"""The data of a run: opened, and made into what its model takes."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from bucketfeed.cache.disk import DiskCache
from bucketfeed.data.dataset import STREAMS, MapDataset, open_dataset
from bucketfeed.data.loader import Loader
from bucketfeed.errors import ConfigError
from bucketfeed.sampling.order import Order
from bucketfeed.sampling.topology import Topology
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.model import PictureDecode, find_classes, small_cnn
from bucketfeed.train.plugins import call_with_known, resolve


class RunData:
    """What a run reads, as its configuration names it: the training samples, and those to test on, if any."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.train = self._opened(config.data)
        self.test = self._opened(config.test_data) if config.test_data is not None else None
        decode = (
            PictureDecode(self.classes, config.image_size, self.num_classes)
            if config.decode is None
            else resolve(config.decode, "--decode")
        )
        for dataset in (self.train, self.test):
            if dataset is not None:
                dataset.decode = _Keyed(decode)

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the folders of the training data. Looks at every key, so only asked for where needed."""
        return find_classes(self.train)

    @property
    def num_classes(self) -> int:
        """The number given, or that of the folders. Raises `ConfigError` where there is neither."""
        found = self._config.num_classes or len(self.classes)
        if not found:
            raise ConfigError(
                f"the number of classes can't be told: {self._config.data} has no folder for each class; give "
                "--num-classes"
            )
        return found

    @property
    def fingerprint(self) -> str:
        """A name of the objects, and how they are cut into samples."""
        parts = [self.train.index.fingerprint, self.test.index.fingerprint if self.test is not None else "-"]
        return "+".join(parts)

    def model(self) -> nn.Module:
        """Return the model that the configuration names, new."""
        name = self._config.model
        if name is None:
            return small_cnn(self.num_classes)
        make = resolve(name, "--model")
        model = call_with_known(make, num_classes=lambda: self.num_classes)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"--model {name} must return a torch.nn.Module, not {type(model).__name__}")
        return model

    def loader(self, topology: Topology, *, pin_memory: bool) -> Loader:
        """Return the loader of the training samples: shuffled, the same number of batches on every rank."""
        config = self._config
        return Loader(
            self.train,
            config.batch_size,
            shuffle=True,
            seed=config.seed,
            tail="drop",
            topology=topology,
            num_workers=config.num_workers,
            read_ahead_bytes=config.read_ahead_bytes,
            streams=config.streams,
            pin_memory=pin_memory,
            progress=config.progress and topology.rank == 0 and sys.stderr.isatty(),
        )

    def test_loader(self, topology: Topology, *, pin_memory: bool) -> Loader | None:
        """Return a loader that gives each test sample once, whatever the number of ranks."""
        if self.test is None:
            return None
        config = self._config
        return Loader(
            self.test,
            config.batch_size,
            tail="uneven",
            topology=topology,
            read_ahead_bytes=config.read_ahead_bytes,
            pin_memory=pin_memory,
        )

    def order_hash(self) -> str:
        """Return the name of the first epoch's order: `bf.order_hash`, but of the streams configured."""
        config = self._config
        counts = self.train.chunks().counts
        return Order(counts, seed=config.seed, epoch=0, streams=config.streams or STREAMS).hash()

    def _opened(self, url: str) -> MapDataset:
        config = self._config
        cache: DiskCache | Literal["auto"] = "auto"
        if config.cache_dir is not None or config.cache_limit is not None:
            cache = DiskCache(config.cache_dir, config.cache_limit)
        return open_dataset(
            url, format=config.format, cache=cache, storage_options=config.storage_options, progress=config.progress
        )


@dataclass(frozen=True, slots=True)
class _Keyed:
    """A decode function whose dicts keep the sample's key, for the audit."""

    decode: Any

    def __call__(self, sample: dict[str, Any]) -> Any:
        decoded = self.decode(sample)
        return {"__key__": sample["__key__"], **decoded} if isinstance(decoded, dict) else decoded
