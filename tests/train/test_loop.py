"""Training in one process: it learns, saves, stops when told, and goes on as if nothing had been."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from training import Training, pictures, write

from bucketfeed.errors import ConfigError, DecodeError, NotFoundError, ResumeError
from bucketfeed.train.records import audit

Make = Callable[[str], Training]


def weights(training: Training) -> dict[str, Any]:
    return training.newest()["model"]


def assert_same(some: dict[str, Any], other: dict[str, Any]) -> None:
    assert some.keys() == other.keys()
    for name in some:
        assert torch.equal(some[name], other[name]), name


def all_once(training: Training, epochs: int = 2, samples: int = 64) -> None:
    seen = audit(training.run_dir)
    assert list(seen) == list(range(epochs))
    for counts in seen.values():
        assert len(counts) == samples
        assert set(counts.values()) == {1}


def test_it_learns_and_tells_what_it_cost(training: Make) -> None:
    run = training("a")
    result = run.run(epochs=6, save_steps=7)
    assert result["accuracy"] >= 0.9
    assert (result["epochs"], result["samples"], result["steps"], result["world_size"]) == (6, 6 * 64, 6 * 16, 1)
    assert len(result["order_hash"]) == 16
    assert 0 <= result["wait_share"] <= 1
    assert result["peak_pss_mb"] > 50
    assert result["cache_misses"] >= 64 + 21
    epochs = run.records("epoch")
    assert [e["epoch"] for e in epochs] == list(range(6))
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    # Nothing is lost between epochs, where reading ahead goes on.
    assert sum(e["cache_misses"] for e in epochs) == 64
    assert [e["epoch"] for e in run.records("evaluation")] == list(range(6))
    assert run.records("end")[0]["accuracy"] == result["accuracy"]
    all_once(run, epochs=6)


@pytest.mark.parametrize("batch", [1, 10, 16, 17, 31])
def test_a_run_stopped_at_any_step_and_resumed_ends_with_the_same_weights(training: Make, batch: int) -> None:
    whole, cut = training("whole"), training("cut")
    result = whole.run()
    said = cut.stopped({"training": batch})
    assert "SIGTERM" in said
    assert "start again to go on" in said
    assert cut.newest()["steps"] == batch
    resumed = cut.run()
    assert_same(weights(whole), weights(cut))
    assert resumed["accuracy"] == result["accuracy"]
    assert resumed["samples"] == 2 * 64 - 4 * batch
    assert resumed["order_hash"] == result["order_hash"]
    all_once(cut)


def test_a_stop_is_heard_during_evaluation_too(training: Make) -> None:
    whole, cut = training("whole"), training("cut")
    whole.run()
    cut.stopped({"evaluation": 2})
    assert (cut.newest()["cursor"]["epoch"], cut.newest()["cursor"]["position"]) == (1, 0)
    cut.run()
    assert_same(weights(whole), weights(cut))
    all_once(cut)


def test_a_stop_in_the_last_evaluation_leaves_only_that_to_do(training: Make) -> None:
    whole, cut = training("whole"), training("cut")
    result = whole.run()
    cut.stopped({"evaluation": 6 + 2})  # 21 samples are 6 batches
    resumed = cut.run()
    assert resumed["samples"] == 0
    assert resumed["accuracy"] == result["accuracy"]
    assert_same(weights(whole), weights(cut))


def test_a_stop_without_a_place_to_save_says_so(training: Make) -> None:
    said = training("a").stopped({"training": 3}, checkpoint_dir=None)
    assert "nothing saved, for want of --checkpoint-dir" in said


def test_the_handlers_of_signals_are_put_back(training: Make) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    training("a").stopped({"training": 1})
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_resume_never_starts_anew_and_a_later_resume_goes_on_from_there(training: Make) -> None:
    run = training("a")
    run.run(epochs=3)
    run.stopped({"training": 5}, epochs=3, resume="never")
    assert run.newest()["steps"] == 5
    assert audit(run.run_dir)[0].total() == 20
    assert run.run(epochs=3)["samples"] == 3 * 64 - 20
    all_once(run, epochs=3)


def test_more_epochs_than_before_go_on_from_the_end(training: Make) -> None:
    run = training("a")
    run.run(epochs=1)
    assert run.run(epochs=3)["samples"] == 2 * 64
    all_once(run, epochs=3)


def test_another_batch_size_goes_on_at_the_same_sample_and_ends_at_a_learning_rate_of_zero(training: Make) -> None:
    run = training("a")
    run.stopped({"training": 10})
    result = run.run(batch_size=8)
    assert result["samples"] == 2 * 64 - 40
    assert result["steps"] == 10 + 3 + 8
    assert run.records("epoch")[-1]["lr"] == pytest.approx(0, abs=1e-9)
    all_once(run)


def test_accumulated_gradients_are_those_of_the_larger_batch(training: Make) -> None:
    small, large = training("small"), training("large")
    options: dict[str, Any] = {"model": "trouble:another_net", "clip_norm": None, "epochs": 1, "test_data": None}
    # 64 samples: 5 steps of 12 and, at the end, one of the 4 that are left.
    one = small.run(batch_size=4, grad_accum=3, **options)
    two = large.run(batch_size=12, **options)
    assert (one["steps"], two["steps"]) == (6, 5)
    assert [e["lr"] for e in small.records("epoch")] == pytest.approx([0], abs=1e-9)
    # The same gradients up to the step that only the smaller batches have.
    small2, large2 = training("small2"), training("large2")
    options |= {"data": str(write(small.folder / "even", pictures(60)))}
    small2.run(batch_size=4, grad_accum=3, **options)
    large2.run(batch_size=12, **options)
    for name, value in weights(small2).items():
        assert torch.allclose(value, weights(large2)[name], atol=1e-5), name


def test_a_stop_waits_for_the_step_that_batches_are_gathered_for(training: Make) -> None:
    whole, cut = training("whole"), training("cut")
    whole.run(grad_accum=3)
    cut.stopped({"training": 4}, grad_accum=3)
    assert cut.newest()["steps"] == 2
    assert cut.newest()["cursor"]["position"] == 6 * 4
    cut.run(grad_accum=3)
    assert_same(weights(whole), weights(cut))
    all_once(cut)


def test_the_first_checkpoint_is_written_before_the_first_step(training: Make) -> None:
    run = training("a")
    (run.folder).mkdir(exist_ok=True)
    run.checkpoints.write_text("a file in the way")
    with pytest.raises(OSError, match=str(run.checkpoints)):
        run.run()
    assert not run.records("epoch")


def test_a_checkpoint_of_another_model_is_told(training: Make) -> None:
    run = training("a")
    run.run(epochs=1)
    with pytest.raises(ResumeError, match=r"another model: .*--resume never"):
        run.run(epochs=2, model="trouble:another_net")


def test_a_checkpoint_of_other_data_or_seed_is_told(training: Make) -> None:
    run, other = training("a"), training("b")
    run.run(epochs=1)
    write(other.folder / "data", pictures(65))
    with pytest.raises(ResumeError):
        run.run(epochs=2, data=str(other.folder / "data"))
    with pytest.raises(ResumeError, match="seed"):
        run.run(epochs=2, seed=6)


def test_a_model_may_reckon_its_own_loss_on_what_the_users_decode_returns(training: Make) -> None:
    run = training("a")
    result = run.run(epochs=3, lr=1.0, model="trouble:OwnStep", decode="trouble:lengths")
    assert result["accuracy"] is None
    assert run.records("evaluation")[-1]["loss"] < run.records("evaluation")[0]["loss"]
    assert all_once(run, epochs=3) is None


def test_decoding_in_worker_processes_gives_the_same_weights_and_counts_their_reads(training: Make) -> None:
    threads, workers = training("threads"), training("workers")
    # A model that draws no random numbers: torch's DataLoader takes its seed for workers from the same generator.
    threads.run(epochs=1, model="trouble:another_net")
    result = workers.run(epochs=1, model="trouble:another_net", num_workers=2)
    all_once(workers, epochs=1)
    assert_same(weights(threads), weights(workers))
    assert result["samples"] == 64
    assert result["cache_misses"] >= 64 + 21  # more where workers read ahead into an epoch that never begins


def test_mixed_precision_trains(training: Make) -> None:
    for amp in ("bf16", "fp16"):
        assert training(amp).run(epochs=6, amp=amp)["accuracy"] >= 0.8


def test_what_cannot_work_is_told(training: Make) -> None:
    run = training("a")
    with pytest.raises(NotFoundError):
        run.run(data=str(run.folder / "nowhere"))
    with pytest.raises(ConfigError, match=r"must return a torch.nn.Module, not str"):
        run.run(model="trouble:nothing")
    with pytest.raises(ConfigError, match="64"):
        run.run(batch_size=65)
    flat = write(run.folder / "flat", {f"{n}.png": data for n, data in enumerate(pictures(8).values())})
    with pytest.raises(ConfigError, match="give --num-classes"):
        run.run(data=str(flat))
    with pytest.raises(DecodeError, match="no class for folder"):
        run.run(data=str(flat), num_classes=3, resume="never")


def test_an_audit_needs_keys_and_says_so(training: Make) -> None:
    with pytest.raises(ConfigError, match="--audit needs batches that are dicts"):
        training("a").run(decode="builtins:len", model="trouble:OwnStep", test_data=None)


def test_a_run_that_waited_for_its_data_is_told_so(training: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        training("a").run(epochs=1)
    assert "of the time waiting for data" in caplog.text


def test_a_run_closes_what_it_has_written_and_the_samples_it_has_read(training: Make) -> None:
    run = training("a")
    run.run(epochs=1)
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.islink(link)]
    own = [path for path in opened if path.startswith(str(run.folder))]
    # The maps of index and manifest may stay: other data sets of the process share them.
    assert [path for path in own if "/indexes/" not in path] == []
