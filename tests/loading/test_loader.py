from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from decodes import FailsOnce, KillsOnce, with_pid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import SAMPLES, flat, keys, payload, write_raw, write_tars

import bucketfeed as bf
from bucketfeed.testing.readers import FailingReader

ALL = sorted(f"{n:05}" for n in range(SAMPLES))


def test_an_epoch_without_shuffle_is_the_data_set_in_its_own_order(tars: bf.MapDataset):
    loader = bf.Loader(tars, batch_size=16)
    assert len(loader) == 8
    assert flat(keys(loader)) == ALL


def test_batches_hold_the_bytes_that_were_written(dataset: bf.MapDataset):
    for batch in bf.Loader(dataset, batch_size=16, shuffle=True):
        assert batch["bin"] == [payload(int(key[-5:])) for key in batch["__key__"]]


def test_every_epoch_has_each_sample_once_in_a_new_order(dataset: bf.MapDataset):
    loader = bf.Loader(dataset, batch_size=16, shuffle=True, seed=17)
    epochs = [flat(keys(loader)) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [ALL] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert loader.epoch == 3


def test_the_order_is_that_of_order_and_depends_on_the_seed_alone(dataset: bf.MapDataset):
    order = bf.Order(dataset.chunks().counts, seed=17, epoch=0, streams=16)
    expected = [dataset[i]["__key__"][-5:] for i in order.samples(np.arange(SAMPLES))]
    for batch_size, threads in ((16, 1), (32, 3), (128, 2)):
        loader = bf.Loader(dataset, batch_size=batch_size, shuffle=True, seed=17, num_threads=threads)
        assert flat(keys(loader)) == expected
    assert flat(keys(bf.Loader(dataset, batch_size=16, shuffle=True, seed=18))) != expected


@pytest.mark.parametrize("chunk_bytes", [600, 5000, "4MiB"])
@pytest.mark.parametrize("read_ahead_bytes", [1, 4000, "1GB"])
def test_any_chunk_size_and_bound_of_reading_ahead_gives_all_samples(
    tars: bf.MapDataset, chunk_bytes: int | str, read_ahead_bytes: int | str
):
    loader = bf.Loader(
        tars, batch_size=8, shuffle=True, chunk_bytes=chunk_bytes, read_ahead_bytes=read_ahead_bytes, streams=4
    )
    assert [sorted(flat(keys(loader))) for _ in range(2)] == [ALL, ALL]


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_worker_processes_change_neither_order_nor_epochs_c045(tars: bf.MapDataset, num_workers: int):
    expected = bf.Loader(tars, batch_size=16, shuffle=True, seed=3)
    loader = bf.Loader(tars, batch_size=16, shuffle=True, seed=3, num_workers=num_workers)
    with loader:
        assert [keys(loader) for _ in range(3)] == [keys(expected) for _ in range(3)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("tail", ["drop", "pad", "uneven"])
def test_ranks_share_an_epoch_by_the_rule_of_its_tail_c047_c049(dataset: bf.MapDataset, world_size: int, tail: str):
    loaders = [
        bf.Loader(dataset, batch_size=10, shuffle=True, tail=tail, topology=bf.Topology(rank, world_size))
        for rank in range(world_size)
    ]
    shares = [keys(loader) for loader in loaders]
    assert [len(share) for share in shares] == [len(loader) for loader in loaders]
    got = flat([flat(share) for share in shares])
    if tail == "uneven":
        assert sorted(got) == ALL
    elif tail == "pad":
        assert {len(share) for share in shares} == {len(shares[0])}
        assert set(got) == set(ALL)
    else:
        assert {len(share) for share in shares} == {SAMPLES // (10 * world_size)}
        assert len(got) == len(set(got)) == SAMPLES // (10 * world_size) * 10 * world_size


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, 7), before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 2, 4]), shuffle=st.booleans()
)
def test_a_run_cut_anywhere_goes_on_at_any_world_size_with_no_sample_lost_or_doubled_c052(
    tars: bf.MapDataset, cut: int, before: int, after: int, shuffle: bool
):
    def run(world_size: int, batches: int | None, state: dict | None) -> tuple[list[str], dict]:
        got, states = [], []
        for rank in range(world_size):
            loader = bf.Loader(
                tars, batch_size=16 // world_size, shuffle=shuffle, seed=1, topology=bf.Topology(rank, world_size)
            )
            if state is not None:
                loader.load_state_dict(state)
            for number, batch in enumerate(loader, start=1):
                got += batch["__key__"]
                if number == batches:
                    break
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert all(s == states[0] for s in states)
        return got, states[0]

    first, state = run(before, cut, None) if cut else ([], bf.Loader(tars, 16, shuffle=shuffle, seed=1).state_dict())
    rest, _ = run(after, None, state)
    assert len(first) == cut * 16
    assert sorted(first + rest) == ALL


@pytest.mark.parametrize("num_workers", [0, 3])
def test_after_a_resume_near_the_end_later_epochs_are_whole_c054_c055(tars: bf.MapDataset, num_workers: int):
    first = bf.Loader(tars, batch_size=2, shuffle=True, num_workers=num_workers)
    seen = []
    for number, batch in enumerate(first, start=1):
        seen += batch["__key__"]
        if number == 61:
            break
    state = first.state_dict()
    assert len(seen) == 122
    first.close()
    with bf.Loader(tars, batch_size=2, shuffle=True, num_workers=num_workers) as again:
        again.load_state_dict(state)
        epochs = [flat(keys(again)) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [6, 128, 128]
    assert sorted(seen + epochs[0]) == ALL


def test_a_state_taken_after_the_last_batch_starts_the_next_epoch(tars: bf.MapDataset):
    loader = bf.Loader(tars, batch_size=30, shuffle=True)
    it = iter(loader)
    for _ in range(len(loader)):
        next(it)
    again = bf.Loader(tars, batch_size=30, shuffle=True)
    again.load_state_dict(loader.state_dict())
    assert again.epoch == 1
    assert len(keys(again)) == len(loader)


def test_breaking_off_ends_the_epoch_unless_its_state_is_loaded(tars: bf.MapDataset):
    whole = bf.Loader(tars, batch_size=16, shuffle=True)
    epochs = [keys(whole) for _ in range(2)]
    loader = bf.Loader(tars, batch_size=16, shuffle=True)
    for batch in loader:
        assert flat([[k[-5:] for k in batch["__key__"]]]) == epochs[0][0]
        break
    loader.load_state_dict(loader.state_dict())
    assert keys(loader) == epochs[0][1:]
    for _ in loader:
        break
    loader2 = bf.Loader(tars, batch_size=16, shuffle=True)
    for _ in loader2:
        break
    assert keys(loader2) == epochs[1]
    loader2.epoch = 0
    assert keys(loader2) == epochs[0]


def test_an_iteration_overtaken_by_another_says_so(tars: bf.MapDataset):
    loader = bf.Loader(tars, batch_size=16)
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(bf.errors.ConfigError, match="two Loaders"):
        next(old)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 2}, "seed"),
        ({"streams": 4}, "streams"),
        ({"chunk_bytes": 1000}, "chunk_bytes"),
        ({"shuffle": False}, "shuffle"),
    ],
)
def test_a_state_of_another_order_is_refused_with_both_values(tars: bf.MapDataset, change: dict, text: str):
    arguments = {"shuffle": True, "seed": 1}
    state = bf.Loader(tars, 16, **arguments).state_dict()
    with pytest.raises(bf.errors.ResumeError, match=text):
        bf.Loader(tars, 16, **(arguments | change)).load_state_dict(state)


def test_a_state_of_other_data_or_of_no_loader_is_refused(tars: bf.MapDataset, raw: bf.MapDataset):
    state = bf.Loader(raw, 16).state_dict()
    with pytest.raises(bf.errors.ResumeError):
        bf.Loader(tars, 16).load_state_dict(state)
    with pytest.raises(bf.errors.ResumeError):
        bf.Loader(tars, 16).load_state_dict({"what": 1})
    with pytest.raises(bf.errors.ResumeError):
        bf.Loader(tars, 16).load_state_dict(bf.Loader(tars, 16).state_dict() | {"version": 99})


def test_a_warm_epoch_needs_no_request_and_a_cold_one_one_for_each_chunk(tmp_path: Path):
    cache = bf.DiskCache(tmp_path / "cache", "100MB")
    ds = bf.open_dataset(write_tars(tmp_path / "t"), cache=cache)
    keys(cold := bf.Loader(ds, batch_size=16, shuffle=True))
    fetched = cold.stats().requests + ds.stats().requests
    keys(warm := bf.Loader(ds, batch_size=16, shuffle=True))
    assert warm.stats().requests == 0
    assert warm.stats().samples == SAMPLES
    assert warm.stats().cache_hits > 0
    assert fetched <= 2 * len(ds.manifest) + 2


def test_stats_count_what_the_loop_took(dataset: bf.MapDataset):
    loader = bf.Loader(dataset, batch_size=16)
    for _ in loader:
        break
    stats = loader.stats()
    assert (stats.samples, stats.batches) == (16, 1)
    assert 0 < stats.wait_seconds <= stats.seconds
    keys(loader)
    assert loader.stats().batches == 9


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_comes_in_order_with_its_type_and_the_samples_name_c016(tmp_path: Path, num_workers: int):
    def decode(sample):
        if sample["__key__"] == "00040":
            raise OSError("broken sample")
        return sample

    ds = bf.open_dataset(write_tars(tmp_path / "t"), decode=decode, cache=None)
    loader = bf.Loader(ds, batch_size=16, num_workers=num_workers)
    seen = []
    with pytest.raises(bf.errors.DecodeError, match=r"'00040'.*broken sample"):  # noqa: PT012
        for batch in loader:
            seen += batch["__key__"]
    assert seen == ALL[:32]
    loader.close()


def test_a_failed_fetch_reaches_the_loop_and_the_next_epoch_tries_again(tars: bf.MapDataset):
    failing = bf.MapDataset(tars.index, FailingReader(bf.open_reader(tars.manifest.url), fail_first=1))
    loader = bf.Loader(failing, batch_size=16, shuffle=True)
    with pytest.raises(bf.errors.BucketfeedError):
        keys(loader)
    loader.epoch = 0
    assert sorted(flat(keys(loader))) == ALL


def test_functions_of_the_script_itself_reach_the_workers(tmp_path: Path):
    add = 5
    ds = bf.open_dataset(write_raw(tmp_path / "r"), decode=lambda s: {"n": len(s["bin"]) + add}, cache=None)
    with bf.Loader(ds, 64, num_workers=2, collate=lambda samples: [s["n"] for s in samples]) as loader:
        got = flat([*loader])
    assert sorted(got) == sorted(len(payload(n)) + add for n in range(SAMPLES))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_random_draws_differ_by_sample_and_epoch_and_repeat_by_seed_c044(tmp_path: Path, num_workers: int):
    def decode(sample):
        return {"__key__": sample["__key__"], "draw": bf.rng().integers(1 << 60)}

    ds = bf.open_dataset(write_tars(tmp_path / "t"), decode=decode, cache=None)

    def draws(workers: int, seed: int) -> list[dict[str, int]]:
        with bf.Loader(ds, 16, shuffle=True, seed=seed, num_workers=workers) as loader:
            return [
                {k: d for b in loader for k, d in zip(b["__key__"], b["draw"].tolist(), strict=True)} for _ in range(2)
            ]

    here = draws(num_workers, 1)
    assert len({*here[0].values(), *here[1].values()}) == 2 * SAMPLES
    assert here == draws(0, 1)
    assert here[0] != draws(0, 2)[0]


def test_global_generators_in_workers_repeat_neither_by_worker_nor_epoch_c044(tmp_path: Path):
    def decode(sample):
        import random

        return {"draw": np.array([np.random.random(), random.random(), float(torch.rand(()))])}

    ds = bf.open_dataset(write_tars(tmp_path / "t"), decode=decode, cache=None)

    def run() -> np.ndarray:
        with bf.Loader(ds, 16, num_workers=3) as loader:
            return np.concatenate([batch["draw"].numpy() for _ in range(2) for batch in loader])

    first, second = run(), run()
    assert all(len(set(column)) == 2 * SAMPLES for column in first.T)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": SAMPLES + 1}, f"{SAMPLES + 1}|{SAMPLES}"),
        ({"batch_size": 8, "topology": bf.Topology(0, SAMPLES)}, str(SAMPLES)),
        ({"batch_size": 8, "num_workers": -1}, "num_workers"),
        ({"batch_size": 8, "read_ahead_bytes": "many"}, "read_ahead_bytes"),
        ({"batch_size": 8, "tail": "keep"}, "keep"),
        ({"batch_size": 8, "streams": 0}, "streams"),
    ],
)
def test_bad_arguments_are_named(tars: bf.MapDataset, arguments: dict, text: str):
    with pytest.raises(bf.errors.ConfigError, match=text):
        bf.Loader(tars, **arguments)


def test_more_ranks_than_samples_still_evaluate_each_once(tmp_path: Path):
    ds = bf.open_dataset(write_raw(tmp_path / "r", 3), cache=None)
    shares = [keys(bf.Loader(ds, 2, tail="uneven", topology=bf.Topology(rank, 5))) for rank in range(5)]
    assert sorted(flat([flat(share) for share in shares])) == ["00000", "00001", "00002"]


def test_close_and_the_end_of_the_loader_leave_no_thread(tars: bf.MapDataset):
    def ours() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("bucketfeed-") and "store" not in t.name}

    before = ours()
    loader = bf.Loader(tars, batch_size=16, shuffle=True)
    for _ in loader:
        break
    started = ours() - before
    loader.close()
    for thread in started:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in started)


def test_workers_without_a_cache_fetch_each_chunk_once_together(bucket, tmp_path: Path):
    for path in sorted(write_tars(tmp_path / "t").iterdir()):
        bucket.put(f"t/{path.name}", path.read_bytes())
    ds = bf.open_dataset(bucket.url + "t/", storage_options=bucket.storage_options, cache=None)
    with bf.Loader(ds, batch_size=16, shuffle=True, num_workers=3) as loader:
        assert [sorted(flat(keys(loader))) for _ in range(2)] == [ALL, ALL]
        # 7 shards of one chunk; a chunk cut by the border of two streams is read by both, from the common file.
        # The first batch of each worker does not wait for whole chunks.
        assert loader.stats().requests <= 7 + 3 * 16


def test_a_cache_of_half_the_data_is_hit_by_half_in_new_orders(tmp_path: Path, bucket):
    for path in sorted(write_tars(tmp_path / "t", samples=640, per_shard=10).iterdir()):
        bucket.put(f"t/{path.name}", path.read_bytes())
    options = bucket.storage_options
    index = bf.open_dataset(bucket.url + "t/", storage_options=options, cache=None).index
    cache = bf.DiskCache(tmp_path / "cache", 64 * 24_576 // 2 + 65_536)  # of 64 shards of 24 KiB in blocks, and its own
    ds = bf.open_dataset(bucket.url + "t/", storage_options=options, cache=cache, index=index)
    loader = bf.Loader(ds, batch_size=32, shuffle=True, streams=2, read_ahead_bytes="100KB")
    rates = []
    for _ in range(5):
        before = loader.stats()
        assert len(set(flat(keys(loader)))) == 640
        after = loader.stats()
        hits, misses = after.cache_hits - before.cache_hits, after.cache_misses - before.cache_misses
        rates.append(hits / (hits + misses))
    assert sum(rates[1:]) / 4 > 0.35  # last use would leave about 0.15


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_failed_comes_when_the_loop_goes_on_at_its_place(
    tars: bf.MapDataset, tmp_path: Path, num_workers: int
):
    tars.decode = FailsOnce(tmp_path / "failed", "00050")
    loader = bf.Loader(tars, batch_size=16, num_workers=num_workers)
    seen: list[str] = []
    with pytest.raises(bf.errors.DecodeError, match="00050"):
        seen.extend(key for batch in loader for key in batch["__key__"])
    assert len(seen) == 48
    loader.load_state_dict(loader.state_dict())
    seen += [key for batch in loader for key in batch["__key__"]]
    assert [key[-5:] for key in seen] == ALL
    loader.close()


def test_a_worker_that_was_killed_is_an_error_that_says_what_to_do_and_the_loader_goes_on(
    tars: bf.MapDataset, tmp_path: Path
):
    tars.decode = KillsOnce(tmp_path / "killed", "00050")
    loader = bf.Loader(tars, batch_size=16, num_workers=1)
    with pytest.raises(bf.errors.BucketfeedError, match=r"exited unexpectedly.*fewer num_workers"):
        list(loader)
    loader.load_state_dict(loader.state_dict())
    assert sum(len(batch["__key__"]) for batch in loader) >= 80
    loader.close()


@pytest.mark.parametrize("wrong", [{"topology": (0, 1)}, {"collate": "stack"}])
def test_a_topology_or_collate_of_another_kind_is_refused_by_name(tars: bf.MapDataset, wrong: dict[str, object]):
    with pytest.raises(bf.errors.ConfigError, match=f"{next(iter(wrong))} must be"):
        bf.Loader(tars, 16, **wrong)


def test_workers_end_when_their_loaders_process_is_killed(tmp_path: Path):
    write_tars(tmp_path / "tars")
    program = tmp_path / "loads.py"
    program.write_text(
        "import os, sys, bucketfeed as bf\n"
        "def pid(sample):\n"
        "    return {**sample, 'pid': os.getpid()}\n"
        "loader = bf.Loader(bf.open_dataset(sys.argv[1], cache=None, decode=pid), 16, num_workers=1)\n"
        "print(int(next(iter(loader))['pid'][0]), flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [sys.executable, str(program), str(tmp_path / "tars")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        ended, _, _ = select.select([worker], [], [], 20)
        os.close(worker)
    assert ended == [worker]


def test_local_tars_written_anew_in_the_same_size_are_indexed_anew(tmp_path: Path):
    cache = bf.DiskCache(tmp_path / "cache", "100MB")

    def written(names: list[str]) -> bf.MapDataset:
        with tarfile.open(tmp_path / "new.tar", "w") as tar:
            for name in names:
                member = tarfile.TarInfo(f"{name}.bin")
                member.size = 3
                tar.addfile(member, io.BytesIO(name.encode() * 3))
        os.replace(tmp_path / "new.tar", tmp_path / "tars" / "a.tar")
        return bf.open_dataset(tmp_path / "tars", cache=cache)

    (tmp_path / "tars").mkdir()
    for names in (["a", "b"], ["p", "q", "r", "s"], ["t"]):
        dataset = written(names)
        assert [dataset[i]["__key__"] for i in range(len(dataset))] == names


def test_ranks_that_have_nothing_left_of_an_uneven_epoch_stay_in_it(raw: bf.MapDataset):
    state = bf.Loader(raw, 7, tail="uneven").state_dict() | {"position": SAMPLES - 1}
    seen = []
    for rank in range(3):
        loader = bf.Loader(raw, 7, tail="uneven", topology=bf.Topology(rank, 3))
        loader.load_state_dict(state)
        assert loader.epoch == 0
        seen.append(flat(keys(loader)))
        assert loader.epoch == 1
    assert [len(part) for part in seen] == [1, 0, 0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_that_raises_stop_iteration_is_an_error_not_an_end(tars: bf.MapDataset, num_workers: int):
    def collate(samples: list[dict[str, object]]) -> object:
        return next(iter([])) if samples[0]["__key__"] == "00032" else samples

    loader = bf.Loader(tars, 16, num_workers=num_workers, collate=collate)
    with pytest.raises(RuntimeError, match="collate raised StopIteration"):
        list(loader)
    loader.close()


def test_a_loader_that_is_closed_while_a_loop_waits_ends_the_loop(tars: bf.MapDataset):
    entered, go_on = threading.Event(), threading.Event()

    def slow(sample: dict[str, object]) -> dict[str, object]:
        entered.set()
        go_on.wait(30)
        return sample

    tars.decode = slow
    loader = bf.Loader(tars, 16)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: next(iter(loader)))
        assert entered.wait(30)
        loader.close()
        with pytest.raises(bf.errors.BucketfeedError, match="closed while"):
            waits.result(timeout=20)
        go_on.set()


def test_numbers_of_numpy_are_as_good_as_pythons(tars: bf.MapDataset):
    topology = bf.Topology(np.int64(0), np.int32(1))
    loader = bf.Loader(tars, np.int64(16), seed=np.int64(3), streams=np.int64(4), topology=topology, shuffle=True)
    loader.epoch = np.int64(2)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["position"], state["seed"]) == (2, 16, 3)
    with pytest.raises(bf.errors.ConfigError, match="shuffle must be"):
        bf.Loader(tars, 16, shuffle="no")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_killed_in_the_middle_of_a_large_batch_does_not_hang_the_loop(tmp_path: Path, num_workers: int):
    folder = tmp_path / "large"
    folder.mkdir()
    for number in range(32):
        (folder / f"{number:02}.bin").write_bytes(bytes([number]) * (1 << 20))
    dataset = bf.open_dataset(folder, cache=None, decode=with_pid)
    loader = bf.Loader(dataset, 4, num_workers=num_workers)
    batches = iter(loader)
    pids = {int(next(batches)["pid"][0]) for _ in range(num_workers)}
    deadline = time.monotonic() + 20
    while not any(_writes_to_a_pipe(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)  # the pipe is full: a batch is 4 MiB
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(bf.errors.BucketfeedError, match="exited unexpectedly"):
        list(batches)
    loader.close()


def _writes_to_a_pipe(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return any("pipe_write" in (task / "wchan").read_text() for task in tasks)
