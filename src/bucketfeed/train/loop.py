"""The training loop: any number of ranks, mixed precision, checkpoints, resume in the middle of an epoch."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bucketfeed.errors import ConfigError, ResumeError
from bucketfeed.sampling.topology import Topology
from bucketfeed.store.urls import parse_url
from bucketfeed.train import random
from bucketfeed.train.checkpoint import Checkpoints, save_model
from bucketfeed.train.compute import Sums, choose_device, cosine, moved, precision
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.data import RunData
from bucketfeed.train.lines import epoch_line, evaluation_line
from bucketfeed.train.memory import PeakMemory
from bucketfeed.train.model import Outcome, Step
from bucketfeed.train.pace import Pace
from bucketfeed.train.ranks import Ranks, StopSignal, joined
from bucketfeed.train.records import Audit, Metrics, cut_audit

_log = logging.getLogger(__name__)

_COUNTED = ("samples", "bytes_fetched", "requests", "cache_hits", "cache_misses", "retries")


class Stopped(Exception):
    """The run was asked to stop and has saved where it stands; start it again to go on."""


def train(config: TrainConfig, topology: Topology | None = None) -> dict[str, Any]:
    """Train as `config` says and return the results: JSON values, the same on every rank.

    Every process of the run calls it; `topology` says which one this is (found where None). Raises `Stopped` after
    SIGTERM, once the state is saved, and our errors for all that can't work.
    """
    topology = topology or Topology.detect()
    device = choose_device(config, topology)
    with (
        joined(topology, device) as ranks,
        PeakMemory() as memory,
        StopSignal() as stop,
        contextlib.ExitStack() as stack,
    ):
        return _Run(config, ranks, device, memory, stop, stack).run()


class _Run:
    """One call of `train`; all that must be closed goes onto `stack`."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        device: torch.device,
        memory: PeakMemory,
        stop: StopSignal,
        stack: contextlib.ExitStack,
    ) -> None:
        self.began = time.perf_counter()
        self.config, self.ranks, self.device, self.memory, self.stop = config, ranks, device, memory, stop
        topology = ranks.topology
        self.data = RunData(config)
        self.opening = self.data.train.stats()
        ranks.check_same("the data set", self.data.fingerprint)
        pin = device.type == "cuda"
        self.loader = stack.enter_context(self.data.loader(topology, pin_memory=pin))
        self.test_loader = self.data.test_loader(topology, pin_memory=pin)
        self.test_rounds = 0
        if self.test_loader is not None:
            stack.enter_context(self.test_loader)
            # Uneven: all ranks go round as often as the one with most batches, so that they can agree to stop.
            self.test_rounds = int(ranks.largest([len(self.test_loader)])[0])
        random.seed_all(config.seed)  # the same first weights on every rank
        self.step = Step(self.data.model()).to(device)
        self.parallel: nn.Module = self.step
        if topology.world_size > 1:
            self.parallel = DistributedDataParallel(self.step, device_ids=[device] if pin else None)
        random.seed_all(config.seed + topology.rank)
        self.autocast, self.scaler = precision(config, device)
        self.optimizer = torch.optim.AdamW(self.step.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.checkpoints = _checkpoints(config) if ranks.is_first else None
        # Read once, by rank 0: the folder may be another one on each node.
        state = ranks.from_first(self._newest)
        left_out = len(self.data.train) - len(self.loader) * config.batch_size * topology.world_size
        if left_out and ranks.is_first:
            _log.info(
                "%d of %d samples fill no batch and are left out, others in each epoch", left_out, len(self.data.train)
            )
        self.steps = 0
        self.accuracy: float | None = None
        self.told = self.loader.stats()  # up to the last report; reading ahead goes on between epochs
        if state is not None:
            self.loader.load_state_dict(state["cursor"])
            self.steps = state["steps"]
        # Spread over what is left: a run resumed on another number of ranks takes more or fewer steps.
        total = self.steps + self._steps_left()
        factor = cosine(total, min(config.warmup_steps, total // 2))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        if state is not None:
            self._restore(state)
        run_dir = Path(config.run_dir)
        self.metrics = Metrics(run_dir, keep=state is not None) if ranks.is_first else None
        if self.metrics is not None:
            stack.callback(self.metrics.close)
        self.audit: Audit | None = None
        if config.audit:
            cut_audit(run_dir, state and state["cursor"], topology)
            ranks.wait_for_all()
            self.audit = Audit(run_dir, topology.rank)
            stack.callback(self.audit.close)
        self.pace: Pace | None = None
        if config.progress and ranks.is_first and not sys.stderr.isatty():
            self.pace = Pace(self.loader.stats)
        self.saved_at = time.monotonic()
        if state is None:
            self._save()  # a place that can't be written to is told now, not in an hour

    def run(self) -> dict[str, Any]:
        """Train, evaluate, save; return the results."""
        self._record(
            "start",
            config=repr(self.config),
            world_size=self._world_size,
            samples=len(self.data.train),
            bytes_fetched=self.opening.bytes_fetched,
            requests=self.opening.requests,
        )
        if self.loader.epoch >= self.config.epochs:
            _log.info("all %d epochs are done already; evaluating", self.config.epochs)
            self._evaluate()
        while self.loader.epoch < self.config.epochs:
            self._epoch()
            self._evaluate()
        self._save()
        self._save_model(finished=True)
        results = self._results()
        self._record("end", **results)
        return results

    # -- an epoch

    def _epoch(self) -> None:
        epoch = self.loader.epoch
        sums = Sums(self.device)
        self.parallel.train()
        left = self._batches_left()
        taken = group = 0
        for batch in self.loader:
            if taken == group:  # the last batches of an epoch may make a smaller step
                taken, group = 0, min(self.config.grad_accum, left)
            taken, left = taken + 1, left - 1
            complete = taken == group
            if self.audit is not None:
                self.audit.took(epoch, self.loader.state_dict()["position"], _keys(batch))
            with self._no_sync(not complete):
                with self.autocast():
                    outcome: Outcome = self.parallel(moved(batch, self.device))
                self.scaler.scale(outcome.loss / group).backward()  # type: ignore[no-untyped-call]
            sums.add(outcome)
            if complete:
                self._optimize()
                self._save_or_stop()
            if self.pace is not None:
                self.pace.batch(epoch, len(self.loader) - left, len(self.loader))
        self._report(epoch, sums)

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
        due = time.monotonic() - self.saved_at > self.config.save_seconds or (
            self.config.save_steps is not None and self.steps % self.config.save_steps == 0
        )
        stop, save = self.ranks.largest([self.stop.received is not None, due])
        if stop:
            self._stop()
        elif save:
            self._save()

    def _stop(self) -> None:
        where = self._save()
        self._save_model(finished=False)
        by = self.stop.received or "a signal to another rank"
        self._record("stopped", signal=by, checkpoint=where)
        saved = f"saved {where}; start again to go on" if where else "nothing saved, for want of --checkpoint-dir"
        raise Stopped(f"stopped by {by} in epoch {self.loader.epoch}: {saved}")

    def _evaluate(self) -> None:
        if self.test_loader is None:
            return
        self.step.eval()
        # Each rank has the running means of its own last batch; the checkpoint has those of rank 0.
        self.ranks.copy_from_first(self.step.buffers())
        sums = Sums(self.device)
        with torch.inference_mode(), self.autocast():
            for _, batch in itertools.zip_longest(range(self.test_rounds), self.test_loader):
                if batch is not None:
                    sums.add(self.step(moved(batch, self.device)))
                if self.ranks.largest([self.stop.received is not None])[0]:
                    self._stop()
        loss, self.accuracy = sums.means(self.ranks)
        epoch = self.loader.epoch - 1
        self._record("evaluation", epoch=epoch, accuracy=self.accuracy, loss=loss)
        _log.info("%s", evaluation_line(epoch, loss, self.accuracy))

    # -- what it tells

    def _report(self, epoch: int, sums: Sums) -> None:
        before, now = self.told, self.loader.stats()
        self.told = now
        seconds, wait = self.ranks.largest([now.seconds - before.seconds, now.wait_seconds - before.wait_seconds])
        counts = self.ranks.summed([getattr(now, name) - getattr(before, name) for name in _COUNTED])
        loss, accuracy = sums.means(self.ranks)
        share = wait / seconds if seconds else 0.0
        speed = counts[0] / seconds if seconds else 0.0
        self._record(
            "epoch",
            epoch=epoch,
            loss=loss,
            accuracy=accuracy,
            **{name: int(count) for name, count in zip(_COUNTED, counts, strict=True)},
            seconds=round(seconds, 3),
            samples_per_second=round(speed, 1),
            wait_share=round(share, 4),
            lr=self.scheduler.get_last_lr()[0],
        )
        _log.info("%s", epoch_line(epoch, loss, speed, share))

    def _results(self) -> dict[str, Any]:
        stats = self.loader.stats()
        # Of the store, all that this run has asked: to open and index, to train, to test.
        asked = [self.opening, stats] + ([self.data.test.stats()] if self.data.test is not None else [])
        counts = self.ranks.summed(
            [
                stats.samples,
                *(sum(getattr(s, name) for s in asked) for name in _COUNTED[1:]),
                self.memory.look(),
            ]
        )
        seconds, wait = self.ranks.largest([stats.seconds, stats.wait_seconds])
        return {
            "accuracy": self.accuracy,
            "epochs": self.config.epochs,
            **{name: int(count) for name, count in zip(_COUNTED, counts[:-1], strict=True)},
            "order_hash": self.data.order_hash(),
            "wait_share": round(wait / seconds, 4) if seconds else 0.0,
            "samples_per_second": round(counts[0] / seconds, 1) if seconds else 0.0,
            "peak_pss_mb": round(counts[-1] / 1e6, 1),
            "seconds": round(self.ranks.largest([time.perf_counter() - self.began])[0], 3),
            "steps": self.steps,
            "world_size": self._world_size,
        }

    def _record(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, **{"time": round(time.time(), 3), "steps": self.steps, **values})

    # -- its state

    def _save(self) -> str | None:
        """Write a checkpoint, if there is a place for it; return where on every rank, once it is whole."""
        self.saved_at = time.monotonic()
        # The state is the same on all ranks but for their random generators.
        generators = self.ranks.gathered(random.state())

        def write() -> str | None:
            if self.checkpoints is None:
                return None
            cursor = self.loader.state_dict()
            state = {
                "model": self.step.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "generators": generators,
                "cursor": cursor,
                "steps": self.steps,
            }
            return self.checkpoints.save(state, cursor["epoch"], cursor["position"])

        return self.ranks.from_first(write)

    def _save_model(self, *, finished: bool) -> None:
        """Write the weights alone, for who uses them: of a stopped run too, which a place may take as its result."""
        folder = self.config.model_dir

        def write() -> None:
            if folder is not None:
                about = {"finished": finished, "steps": self.steps, "accuracy": self.accuracy}
                save_model(Path(folder), self.step.model, about)

        self.ranks.from_first(write)

    def _newest(self) -> dict[str, Any] | None:
        if self.checkpoints is None or self.config.resume == "never":
            return None
        return self.checkpoints.load()

    def _restore(self, state: dict[str, Any]) -> None:
        try:
            self.step.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as e:
            raise ResumeError(
                f"the checkpoint in {self.config.checkpoint_dir} is of another model: {' '.join(str(e).split())}; "
                "name the same --model, or start anew with --resume never"
            ) from e
        self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        rank, cursor = self.ranks.topology.rank, state["cursor"]
        if rank < len(state["generators"]):
            random.restore(state["generators"][rank])
        _log.info("resumed at sample %d of epoch %d", cursor["position"], cursor["epoch"])

    # -- arithmetic

    @property
    def _world_size(self) -> int:
        return self.ranks.topology.world_size

    def _batches_left(self) -> int:
        """Of this epoch, on each rank."""
        left = len(self.data.train) - int(self.loader.state_dict()["position"])
        return left // (self.config.batch_size * self._world_size)

    def _steps_left(self) -> int:
        """Until the end of the run."""
        epochs = self.config.epochs - self.loader.epoch
        if epochs <= 0:
            return 0
        accum = self.config.grad_accum
        return -(-self._batches_left() // accum) + (epochs - 1) * -(-len(self.loader) // accum)

    def _no_sync(self, wanted: bool) -> contextlib.AbstractContextManager[Any]:
        if wanted and isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return contextlib.nullcontext()


def _checkpoints(config: TrainConfig) -> Checkpoints | None:
    if config.checkpoint_dir is None:
        return None
    # Options for the store of the data say nothing to another store.
    same = parse_url(config.checkpoint_dir).scheme == parse_url(config.data).scheme
    return Checkpoints(config.checkpoint_dir, config.storage_options if same else None)


def _keys(batch: Any) -> list[str]:
    if not isinstance(batch, dict) or "__key__" not in batch:
        raise ConfigError("--audit needs batches that are dicts with '__key__': let --decode return a dict")
    return batch["__key__"]  # type: ignore[no-any-return]
