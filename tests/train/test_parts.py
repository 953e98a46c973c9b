"""The parts of a run: configuration, the user's functions, decoding, learning rate, sums."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from training import pictures

from bucketfeed.errors import ConfigError
from bucketfeed.sampling.topology import Topology
from bucketfeed.train.compute import Sums, choose_device, cosine, moved, precision
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.model import Outcome, PictureDecode, Step, small_cnn
from bucketfeed.train.plugins import call_with_known, resolve
from bucketfeed.train.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"batch_size": -3}, "batch_size must be a whole number of at least 1, not -3"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"num_classes": 0}, "num_classes must be a whole number of at least 1, not 0"),
        ({"save_steps": 0}, "save_steps must be a whole number of at least 1, not 0"),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 1, not 1.5"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0, not nan"),
        ({"lr": 0.0}, "lr must be greater than 0, not 0.0"),
        ({"lr": float("nan")}, "lr must be greater than 0, not nan"),
        ({"clip_norm": -1.0}, "clip_norm must be greater than 0, not -1.0"),
        ({"amp": "fp8"}, "amp must be one of auto, off, bf16, fp16, not 'fp8'"),
        ({"resume": "yes"}, "resume must be one of auto, never, not 'yes'"),
        ({"cache_limit": "many"}, "cache_limit"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_name_and_value(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(data="s3://bucket/", **options)
    assert told in str(caught.value)


def test_the_configuration_does_not_show_secrets() -> None:
    config = TrainConfig(data="s3://bucket/", storage_options={"key": "AKIA", "secret": "hush"})
    assert "hush" not in repr(config)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("trouble", "must be written package.module:function"),
        ("trouble:", "must be written package.module:function"),
        ("no_such_module:net", "No module named 'no_such_module'"),
        ("trouble:nett", "has no 'nett'; it has .*net"),
        ("os:environ", "not a function"),
    ],
)
def test_a_function_that_cannot_be_found_is_told_with_what_was_looked_for(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(ConfigError, match=told) as caught:
        resolve(name, "--model")
    assert str(caught.value).startswith("--model")


def test_a_function_gets_the_arguments_that_it_has_parameters_for_and_no_others_are_made() -> None:
    def never() -> int:
        raise AssertionError("made without need")

    assert call_with_known(lambda: "none", num_classes=never) == "none"
    assert call_with_known(lambda num_classes: num_classes, num_classes=lambda: 7) == 7
    assert call_with_known(lambda **more: more, num_classes=lambda: 7) == {"num_classes": 7}


def sample(**fields: bytes) -> dict[str, Any]:
    return {"__key__": "train/cat/0001", **fields}


PNG = pictures(1)["class0/0000.png"]


def test_a_picture_is_cut_to_a_square_and_labelled_by_its_folder() -> None:
    decoded = PictureDecode(("bird", "cat"), 16, 2)(sample(png=PNG))
    assert decoded["image"].shape == (3, 16, 16)
    assert decoded["image"].dtype == "uint8"
    assert decoded["label"] == 1
    assert decoded["__key__"] == "train/cat/0001"


def test_the_field_cls_is_the_label_where_there_is_one() -> None:
    assert PictureDecode((), 8, 10)(sample(png=PNG, cls=b"9"))["label"] == 9


@pytest.mark.parametrize(
    ("fields", "classes", "told"),
    [
        ({"txt": b"x"}, ("cat",), "no picture among the fields txt; .*--decode"),
        ({"png": PNG, "cls": b"10"}, (), "the label is 10, but --num-classes is 10"),
        ({"png": PNG, "cls": b"-1"}, (), "the label is -1"),
        ({"png": PNG}, ("bird", "dog"), "no class for folder 'cat'; the training data has bird, dog"),
    ],
)
def test_a_sample_without_picture_or_label_is_told(fields: dict[str, bytes], classes: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PictureDecode(classes, 8, 10)(sample(**fields))


@pytest.mark.parametrize("side", [1, 8, 33])
def test_the_small_network_takes_pictures_of_any_size(side: int) -> None:
    assert small_cnn(5)(torch.zeros(2, 3, side, side)).shape == (2, 5)


def test_a_step_tells_loss_weight_and_right_answers() -> None:
    logits = torch.tensor([[5.0, 0.0], [0.0, 5.0], [5.0, 0.0]])
    step = Step(torch.nn.Identity())
    outcome = step((logits, torch.tensor([0, 1, 1])))
    assert outcome.weight == 3
    assert int(outcome.right) == 2
    assert float(outcome.loss) == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 1])))
    )


def test_a_batch_that_the_model_cannot_take_is_told_with_its_fields() -> None:
    with pytest.raises(ConfigError, match=r"'image' and 'label' .*not a dict of __key__, jpg; let --decode"):
        Step(torch.nn.Identity())({"__key__": ["a"], "jpg": [b""]})


def test_the_learning_rate_rises_in_a_line_and_falls_as_half_a_cosine() -> None:
    factor = cosine(steps=110, warmup=10)
    assert [factor(step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert [round(factor(step), 6) for step in (10, 60, 110, 500)] == [1.0, 0.5, 0.0, 0.0]
    assert cosine(steps=0, warmup=0)(0) == 1.0


def test_sums_weigh_each_sample_the_same_and_know_what_no_batch_had() -> None:
    ranks, sums = Ranks(Topology()), Sums(CPU)
    assert sums.means(ranks) == (None, None)
    sums.add(Outcome(torch.tensor(1.0), 30, torch.tensor(15)))
    sums.add(Outcome(torch.tensor(5.0), 10, torch.tensor(5)))
    assert sums.means(ranks) == (2.0, 0.5)
    losses = Sums(CPU)
    losses.add(Outcome(torch.tensor(3.0), 1, None))
    assert losses.means(ranks) == (3.0, None)


def test_tensors_are_moved_wherever_they_lie_in_a_batch() -> None:
    Pair = namedtuple("Pair", "x name")
    meta = torch.device("meta")
    batch = {"a": torch.zeros(2), "b": [torch.zeros(1), "text"], "c": Pair(torch.zeros(3), "n"), "d": (1, None)}
    there = moved(batch, meta)
    assert (there["a"].device, there["b"][0].device, there["c"].x.device) == (meta, meta, meta)
    assert (there["b"][1], there["c"].name, there["d"]) == ("text", "n", (1, None))
    assert isinstance(there["c"], Pair)


@pytest.mark.parametrize(
    ("amp", "dtype", "scales"), [("off", "float32", 0), ("bf16", "bfloat16", 0), ("fp16", "float16", 1)]
)
def test_mixed_precision_computes_in_its_type_and_only_fp16_scales(amp: Any, dtype: str, scales: int) -> None:
    autocast, scaler = precision(TrainConfig(data="d", amp=amp), CPU)
    with autocast():
        assert str((torch.zeros(2, 2) @ torch.zeros(2, 2)).dtype) == f"torch.{dtype}"
    assert scaler.is_enabled() == bool(scales)


def test_on_a_cpu_auto_computes_in_full_precision() -> None:
    autocast, scaler = precision(TrainConfig(data="d"), CPU)
    with autocast():
        assert (torch.zeros(2, 2) @ torch.zeros(2, 2)).dtype == torch.float32
    assert not scaler.is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="--device cuda: torch finds no GPU"):
        choose_device(TrainConfig(data="d", device="cuda"), Topology())
