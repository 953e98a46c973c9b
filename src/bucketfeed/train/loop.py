"""The training loop: any number of ranks, mixed precision, checkpoints, resume in the middle of an epoch."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bucketfeed.cache.disk import DiskCache
from bucketfeed.data.dataset import MapDataset, open_dataset, order_hash
from bucketfeed.data.loader import Loader
from bucketfeed.errors import ConfigError
from bucketfeed.sampling.topology import Topology
from bucketfeed.train import random
from bucketfeed.train.checkpoint import Checkpoints
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.memory import PeakMemory
from bucketfeed.train.model import PictureDecode, Step, find_classes, small_cnn
from bucketfeed.train.plugins import call_with_known, resolve
from bucketfeed.train.ranks import StopSignal, largest, process_group, summed
from bucketfeed.train.records import Audit, Records, forget_after

_log = logging.getLogger(__name__)


class Stopped(Exception):
    """The run was asked to stop and has saved where it stands; start it again to go on."""


@dataclass(slots=True)
class _Sums:
    """What an epoch adds up to on this rank."""

    loss: float = 0.0
    right: float = 0.0
    answers: float = 0.0
    batches: float = 0.0

    def add(self, loss: torch.Tensor, right: torch.Tensor, answers: int) -> None:
        self.loss += float(loss.detach())
        self.right += float(right)
        self.answers += answers
        self.batches += 1

    def over_ranks(self, device: torch.device) -> _Sums:
        return _Sums(*summed([self.loss, self.right, self.answers, self.batches], device))

    @property
    def mean_loss(self) -> float | None:
        return self.loss / self.batches if self.batches else None

    @property
    def accuracy(self) -> float | None:
        return self.right / self.answers if self.answers else None


def train(config: TrainConfig, topology: Topology | None = None) -> dict[str, Any]:
    """Train as `config` says and return the results: JSON values, the same on every rank.

    Every process of the run calls it; `topology` says which one this is (found where None). Raises `Stopped` after
    SIGTERM, once the state is saved, and our errors for all that can't work.
    """
    topology = topology or Topology.detect()
    device = _device(config, topology)
    with process_group(topology, device), PeakMemory() as memory, StopSignal() as stop:
        run = _Run(config, topology, device, memory, stop)
        try:
            return run.run()
        finally:
            run.close()


class _Run:
    """One call of `train`."""

    def __init__(
        self, config: TrainConfig, topology: Topology, device: torch.device, memory: PeakMemory, stop: StopSignal
    ) -> None:
        self.config = config
        self.topology = topology
        self.device = device
        self.memory = memory
        self.stop = stop
        self.run_dir = Path(config.run_dir)
        random.seed_all(config.seed + topology.rank)
        self.dataset, self.test = self._datasets()
        self.loader = self._loader(self.dataset, shuffle=True, tail="drop")
        # Each test sample is seen once, whatever the number of ranks.
        self.test_loader = self._loader(self.test, shuffle=False, tail="uneven") if self.test is not None else None
        torch.manual_seed(config.seed)  # the same first weights on every rank
        self.step = Step(self._model()).to(device)
        self.parallel: nn.Module = self.step
        if topology.world_size > 1:
            self.parallel = DistributedDataParallel(self.step, device_ids=[device] if device.type == "cuda" else None)
        random.seed_all(config.seed + topology.rank)
        steps = max(1, math.ceil(len(self.loader) / config.grad_accum) * config.epochs)
        self.optimizer = torch.optim.AdamW(self.step.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _cosine(steps, config.warmup_steps))
        self.autocast, self.scaler = _precision(config, device)
        self.checkpoints = (
            Checkpoints(config.checkpoint_dir, config.storage_options) if config.checkpoint_dir is not None else None
        )
        self.steps = 0
        self.saved_at = time.monotonic()
        self.results: dict[str, Any] = {"accuracy": None}
        resumed = self._resume()
        self.audit = Audit(self.run_dir, topology.rank, keep=resumed) if config.audit else None
        self.records = Records(self.run_dir / "metrics.jsonl", keep=resumed) if topology.rank == 0 else None

    # -- the run

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        config = self.config
        self._record("start", config=repr(config), world_size=self.topology.world_size, samples=len(self.dataset))
        if self.loader.epoch >= config.epochs:
            _log.info("all %d epochs are done already; evaluating", config.epochs)
            self._evaluate()
        while self.loader.epoch < config.epochs:
            self._epoch()
        if self.checkpoints is not None:
            self._save()
        stats = self.loader.stats()
        counted = summed(
            [stats.samples, stats.bytes_fetched, stats.requests, stats.cache_hits, stats.cache_misses], self.device
        )
        self.memory.look()
        wait_seconds, loop_seconds = largest([stats.wait_seconds, stats.seconds], self.device)
        seconds = time.perf_counter() - began
        names = ("samples", "bytes_fetched", "requests", "cache_hits", "cache_misses")
        self.results |= {
            "epochs": config.epochs,
            **{name: int(value) for name, value in zip(names, counted, strict=True)},
            "order_hash": order_hash(self.dataset, config.seed, 0),
            "wait_share": round(wait_seconds / loop_seconds, 4) if loop_seconds else 0.0,
            "seconds": round(seconds, 3),
            "samples_per_second": round(counted[0] / loop_seconds, 1) if loop_seconds else 0.0,
            "peak_pss_mb": round(summed([self.memory.peak_bytes / 1e6], self.device)[0], 1),
            "world_size": self.topology.world_size,
        }
        self._record("end", **self.results)
        return self.results

    def _epoch(self) -> None:
        epoch, before = self.loader.epoch, self.loader.stats()
        sums = _Sums()
        self.parallel.train()
        pending = 0
        batches = len(self.loader)
        for batch in self.loader:
            pending += 1
            last = self.loader.state_dict()["position"] + self._global_batch > len(self.dataset)
            steps_now = pending == self.config.grad_accum or last
            with self._no_sync(not steps_now), self.autocast():
                loss, right, answers = self.parallel(_moved(batch, self.device))
            self.scaler.scale(loss / self.config.grad_accum).backward()
            sums.add(loss, right, answers)
            if self.audit is not None:
                self.audit.took(epoch, self.loader.state_dict()["position"], _keys(batch))
            if steps_now:
                self._optimize()
                pending = 0
                self._save_or_stop()
        totals = sums.over_ranks(self.device)
        self._report(epoch, batches, totals, before)
        self._evaluate()

    def _optimize(self) -> None:
        if self.config.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.step.parameters(), self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.steps += 1

    def _save_or_stop(self) -> None:
        """Save when it is time, and stop when any rank was told to: decided together, so at the same step."""
        due = self.checkpoints is not None and (
            time.monotonic() - self.saved_at > self.config.save_seconds
            or (self.config.save_steps is not None and self.steps % self.config.save_steps == 0)
        )
        stop, due_anywhere = largest([float(self.stop.received is not None), float(due)], self.device)
        if stop or due_anywhere:
            where = self._save() if self.checkpoints is not None else None
            if stop:
                self._record("stopped", signal=self.stop.received, checkpoint=where)
                raise Stopped(
                    f"stopped by {self.stop.received or 'a signal to another rank'} in epoch {self.loader.epoch}; "
                    + (f"saved {where}" if where else "nothing saved: give --checkpoint-dir to be able to go on")
                )

    def _evaluate(self) -> None:
        if self.test_loader is None:
            return
        self.step.eval()
        sums = _Sums()
        with torch.inference_mode(), self.autocast():
            for batch in self.test_loader:
                sums.add(*self.step(_moved(batch, self.device)))
        totals = sums.over_ranks(self.device)
        self.results["accuracy"] = totals.accuracy
        self._record("evaluation", epoch=self.loader.epoch, accuracy=totals.accuracy, loss=totals.mean_loss)
        shown = f"accuracy {totals.accuracy:.4f}" if totals.accuracy is not None else f"loss {totals.mean_loss:.4f}"
        _log.info("epoch %d done: test %s", self.loader.epoch - 1, shown)

    def _report(self, epoch: int, batches: int, sums: _Sums, before: Any) -> None:
        now = self.loader.stats()
        names = ("samples", "bytes_fetched", "requests", "cache_hits", "cache_misses", "retries")
        counts = summed([getattr(now, n) - getattr(before, n) for n in names], self.device)
        seconds, wait = largest([now.seconds - before.seconds, now.wait_seconds - before.wait_seconds], self.device)
        share = wait / seconds if seconds else 0.0
        self._record(
            "epoch",
            epoch=epoch,
            loss=sums.mean_loss,
            accuracy=sums.accuracy,
            batches=batches,
            **{name: int(count) for name, count in zip(names, counts, strict=True)},
            seconds=seconds,
            samples_per_second=counts[0] / seconds if seconds else 0.0,
            wait_share=share,
            lr=self.scheduler.get_last_lr()[0],
            peak_pss_mb=self.memory.peak_bytes / 1e6,
        )
        verdict = "data kept up" if share < 0.05 else "training waited for data"
        _log.info(
            "epoch %d: loss %.4f, %.0f samples/s; %s: %.1f %% of the time spent waiting",
            epoch,
            sums.mean_loss or 0.0,
            counts[0] / seconds if seconds else 0.0,
            verdict,
            100 * share,
        )

    # -- state

    def _save(self) -> str | None:
        """Write a checkpoint. The state is the same on all ranks but for their random generators."""
        assert self.checkpoints is not None
        self.saved_at = time.monotonic()
        generators = random.gathered()
        if self.topology.rank != 0:
            return None
        cursor = self.loader.state_dict()
        state = {
            "model": self.step.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": generators,
            "cursor": cursor,
            "steps": self.steps,
        }
        return self.checkpoints.save(state, cursor["epoch"], cursor["position"])

    def _resume(self) -> bool:
        state = self.checkpoints.load() if self.checkpoints is not None and self.config.resume == "auto" else None
        if state is None:
            return False
        self.loader.load_state_dict(state["cursor"])
        self.step.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.steps = state["steps"]
        if self.topology.rank < len(state["generators"]):
            random.restore(state["generators"][self.topology.rank])
        if self.config.audit and self.topology.rank == 0:
            forget_after(self.run_dir, state["cursor"]["epoch"], state["cursor"]["position"])
        summed([0.0], self.device)  # the others wait until the records are cut
        _log.info("resumed at sample %d of epoch %d", state["cursor"]["position"], state["cursor"]["epoch"])
        return True

    def close(self) -> None:
        for closing in (self.loader, self.test_loader, self.audit, self.records):
            if closing is not None:
                closing.close()

    # -- its parts

    def _datasets(self) -> tuple[MapDataset, MapDataset | None]:
        config = self.config
        cache: DiskCache | Literal["auto"] = "auto"
        if config.cache_dir is not None or config.cache_limit is not None:
            cache = DiskCache(config.cache_dir, config.cache_limit)

        def opened(url: str) -> MapDataset:
            return open_dataset(url, format=config.format, cache=cache, storage_options=config.storage_options)

        dataset = opened(config.data)
        test = opened(config.test_data) if config.test_data is not None else None
        self.classes = find_classes(dataset)
        decode = (
            resolve(config.decode, "--decode")
            if config.decode is not None
            else PictureDecode(self.classes, config.image_size)
        )
        for one in (dataset, test):
            if one is not None:
                one.decode = _Keyed(decode)
        return dataset, test

    def _loader(self, dataset: MapDataset, *, shuffle: bool, tail: Any) -> Loader:
        config = self.config
        return Loader(
            dataset,
            config.batch_size,
            shuffle=shuffle,
            seed=config.seed,
            tail=tail,
            topology=self.topology,
            num_workers=config.num_workers if shuffle else 0,
            read_ahead_bytes=config.read_ahead_bytes,
            streams=config.streams,
            pin_memory=self.device.type == "cuda",
            progress=config.progress and shuffle and self.topology.rank == 0,
        )

    def _model(self) -> nn.Module:
        config = self.config
        num_classes = config.num_classes or len(self.classes)
        if config.model is None:
            if not num_classes:
                raise ConfigError("the number of classes can't be told from tars: give --num-classes")
            return small_cnn(num_classes)
        model = call_with_known(resolve(config.model, "--model"), num_classes=num_classes)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"--model {config.model} must return a torch.nn.Module, not {type(model).__name__}")
        return model

    @property
    def _global_batch(self) -> int:
        return self.config.batch_size * self.topology.world_size

    def _no_sync(self, wanted: bool) -> contextlib.AbstractContextManager[Any]:
        if wanted and isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return contextlib.nullcontext()

    def _record(self, kind: str, **values: Any) -> None:
        if self.records is not None:
            self.records.write(kind=kind, time=round(time.time(), 3), steps=self.steps, **values)


@dataclass(frozen=True, slots=True)
class _Keyed:
    """A decode function whose dicts keep the sample's key, for the audit."""

    decode: Any

    def __call__(self, sample: dict[str, Any]) -> Any:
        decoded = self.decode(sample)
        return {"__key__": sample["__key__"], **decoded} if isinstance(decoded, dict) else decoded


def _device(config: TrainConfig, topology: Topology) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu, or install a CUDA build of torch")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", topology.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _precision(config: TrainConfig, device: torch.device) -> tuple[Any, torch.amp.GradScaler]:
    """Return the autocast context and the scaler: bf16 where the GPU has it, else fp16; nothing on a CPU."""
    kind = config.amp
    if kind == "auto":
        kind = "off" if device.type == "cpu" else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind)

    def autocast() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype) if dtype is not None else contextlib.nullcontext()

    return autocast, torch.amp.GradScaler(device.type, enabled=kind == "fp16" and device.type == "cuda")


def _cosine(steps: int, warmup: int) -> Any:
    """Return the factor of the learning rate by step: a linear rise, then half a cosine down to zero."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * done))

    return factor


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_moved(value, device) for value in batch)
    return batch


def _keys(batch: Any) -> list[str]:
    if not isinstance(batch, dict) or "__key__" not in batch:
        raise ConfigError("--audit needs batches that are dicts with '__key__': let --decode return a dict")
    return batch["__key__"]  # type: ignore[no-any-return]
