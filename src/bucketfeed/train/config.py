"""All that a training run is told, as one value: whoever starts one (a shell, SageMaker, a notebook) builds this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bucketfeed.errors import ConfigError
from bucketfeed.store.sizes import parse_size
from bucketfeed.store.whole import whole

Amp = Literal["auto", "off", "bf16", "fp16"]
Resume = Literal["auto", "never"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Options of `train`; `entrypoints/train.py --help` explains each.

    Raises `ConfigError` for values that can't work.
    """

    data: str
    test_data: str | None = None
    epochs: int = 1
    batch_size: int = 64
    seed: int = 0
    format: str = "auto"
    storage_options: dict[str, Any] | None = field(default=None, repr=False)
    cache_dir: str | None = None
    cache_limit: int | str | None = None
    checkpoint_dir: str | None = None
    resume: Resume = "auto"
    save_seconds: float = 300.0
    save_steps: int | None = None
    model: str | None = None
    decode: str | None = None
    num_classes: int | None = None
    image_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 20
    grad_accum: int = 1
    clip_norm: float | None = 1.0
    amp: Amp = "auto"
    device: Device = "auto"
    num_workers: int = 0
    streams: int | None = None
    read_ahead_bytes: int | str | None = None
    run_dir: str = "runs/train"
    model_dir: str | None = None
    audit: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        least = {
            **dict.fromkeys(("epochs", "batch_size", "grad_accum", "image_size"), 1),
            **dict.fromkeys(("num_classes", "save_steps", "streams"), 1),
            **dict.fromkeys(("seed", "warmup_steps", "num_workers"), 0),
        }
        for name, bound in least.items():
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), bound)
        if not self.weight_decay >= 0:  # comparisons that NaN fails too
            raise ConfigError(f"weight_decay must be at least 0, not {self.weight_decay}")
        for name in ("lr", "save_seconds", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, not {value}")
        for name, known in (("amp", Amp), ("resume", Resume), ("device", Device)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(known))}, not {getattr(self, name)!r}")
        for name in ("cache_limit", "read_ahead_bytes"):
            if getattr(self, name) is not None:
                parse_size(getattr(self, name), name)
