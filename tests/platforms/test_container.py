"""The container's own decisions: ranks over hosts, network, disks, channels, and which error was the first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bucketfeed.errors import CacheError, ConfigError
from bucketfeed.platforms.sagemaker import container, disks, hyperparameters, spawn
from bucketfeed.platforms.sagemaker.container import Hosts, gpus, has_efa, processes_per_host, rank_environment
from bucketfeed.platforms.sagemaker.disks import Volume, choose, volumes
from bucketfeed.platforms.sagemaker.spawn import Ended, last_words, run_ranks

GB = 10**9
THREE = Hosts("algo-2", ("algo-1", "algo-2", "algo-10"), "eth0")


def laid_out(root: Path, options: dict[str, Any], channels: dict[str, Any] | None = None, **resources: Any) -> Path:
    config = root / "input/config"
    config.mkdir(parents=True)
    told = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0", **resources}
    files = {
        "hyperparameters": hyperparameters.encode(options),
        "resourceconfig": told,
        "inputdataconfig": channels or {},
    }
    for name, value in files.items():
        (config / f"{name}.json").write_text(json.dumps(value))
    return root


class TestRanks:
    def test_hosts_have_the_same_order_on_each_of_them(self, tmp_path: Path) -> None:
        root = laid_out(tmp_path, {}, current_host="algo-2", hosts=["algo-10", "algo-2", "algo-1"])
        assert Hosts.read(root) == THREE
        assert (THREE.index, THREE.first) == (1, "algo-1")

    def test_ranks_go_on_from_host_to_host_c101(self) -> None:
        found = rank_environment(THREE, {"HOME": "/"}, local=3, processes=4, sys=Path("/nowhere"))
        ranks = {"RANK": "7", "WORLD_SIZE": "12", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "algo-1"}
        assert found.items() >= ranks.items()
        assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"] == "eth0"
        assert "FI_PROVIDER" not in found

    def test_one_host_needs_no_interface_and_what_the_job_sets_stays(self) -> None:
        alone = Hosts("algo-1", ("algo-1",), "eth0")
        found = rank_environment(alone, {"MASTER_PORT": "1", "OMP_NUM_THREADS": "3"}, local=0, processes=2)
        assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["OMP_NUM_THREADS"]) == ("127.0.0.1", "1", "3")
        assert "NCCL_SOCKET_IFNAME" not in found

    def test_efa_is_used_where_the_host_has_it(self, tmp_path: Path) -> None:
        device = tmp_path / "class/infiniband/rdmap0s6/device"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x15b3\n")  # another maker's
        assert not has_efa(tmp_path)
        (device / "vendor").write_text("0x1d0f\n")
        assert rank_environment(THREE, {}, 0, 8, sys=tmp_path)["FI_PROVIDER"] == "efa"
        assert rank_environment(THREE, {"FI_PROVIDER": "tcp"}, 0, 8, sys=tmp_path)["FI_PROVIDER"] == "tcp"

    def test_there_is_a_process_for_each_gpu_or_as_many_as_were_asked_for(self, tmp_path: Path) -> None:
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            (tmp_path / name).touch()
        assert gpus({}, tmp_path) == 2
        assert gpus({"SM_NUM_GPUS": "8"}, tmp_path) == 8
        assert processes_per_host(THREE, {"SM_NUM_GPUS": "8"}) == 8
        assert processes_per_host(THREE, {"SM_NUM_GPUS": "0"}) == 1
        assert processes_per_host(THREE, {container.PROCESSES: "3", "SM_NUM_GPUS": "8"}) == 3
        for wrong in ("0", "two", "-1", ""):
            with pytest.raises(ConfigError, match="must be auto or a number of at least 1"):
                processes_per_host(THREE, {container.PROCESSES: wrong})

    def test_groups_of_several_types_need_one_number_for_all(self, tmp_path: Path) -> None:
        groups = [{"instance_type": kind} for kind in ("ml.g5.xlarge", "ml.g5.12xlarge")]
        hosts = Hosts.read(laid_out(tmp_path, {}, instance_groups=groups))
        with pytest.raises(ConfigError, match="of several types; set BUCKETFEED_NPROC_PER_NODE"):
            processes_per_host(hosts, {})
        assert processes_per_host(hosts, {container.PROCESSES: "2"}) == 2


class TestDisks:
    SMALL_ROOT = Volume("/", 5 * GB, 20 * GB, root=True)
    EBS = Volume("/opt/ml", 200 * GB, 250 * GB)
    NVME = Volume("/tmp", 90 * GB, 100 * GB, instance_store=True)

    def test_the_instance_store_comes_before_volumes_and_the_root_disk_last_c099(self) -> None:
        assert choose([self.SMALL_ROOT, self.EBS, self.NVME]) == self.NVME
        assert choose([self.SMALL_ROOT, self.EBS]) == self.EBS
        assert choose([self.SMALL_ROOT]) == self.SMALL_ROOT
        assert choose([Volume("/", 500 * GB, 900 * GB, root=True), self.EBS]) == self.EBS
        with pytest.raises(CacheError, match="give --cache-dir"):
            choose([])

    def test_a_full_or_tiny_volume_is_passed_over_c099(self) -> None:
        full = Volume("/tmp", 3 * GB, 100 * GB, instance_store=True)
        assert choose([self.EBS, full]) == self.EBS
        root = Volume("/", 100 * GB, 120 * GB, root=True)
        assert choose([root, Volume("/data", 1 * GB, 250 * GB)]) == root

    def test_room_is_kept_free_c099(self) -> None:
        assert self.EBS.limit == 175 * GB
        assert self.NVME.limit == 90 * GB - (10 << 30)
        assert self.SMALL_ROOT.limit == 5 * GB // 2

    def test_volumes_are_found_in_the_kernels_files_c099(self, tmp_path: Path) -> None:
        named = ("nvme store", "ml", "ml/checkpoints", "ml/input", "ml/input/data", "memory", "network")
        folders = {name: tmp_path / name for name in named}
        for folder in folders.values():
            folder.mkdir(parents=True)
        (tmp_path / "file").touch()
        told = [
            ("0:50", "/", "overlay"),
            ("259:3", str(folders["ml"]), "ext4"),
            ("259:3", str(folders["ml/input"]), "ext4"),
            ("259:9", str(folders["ml/checkpoints"]), "ext4"),
            ("9:0", str(folders["nvme store"]).replace(" ", "\\040"), "xfs"),
            ("0:60", str(folders["memory"]), "tmpfs"),
            ("0:61", str(folders["network"]), "nfs4"),
            ("259:4", str(tmp_path / "file"), "ext4"),
        ]
        mounts = tmp_path / "mountinfo"
        mounts.write_text("".join(f"1 2 {d} / {f} rw shared:1 - {kind} /dev/x rw\n" for d, f, kind in told))
        system = tmp_path / "sys"
        for name, model in (("nvme0n1", "Amazon Elastic Block Store"), ("nvme1n1", "Amazon EC2 NVMe Instance Storage")):
            (system / "block" / name / "device").mkdir(parents=True)
            (system / "block" / name / "device" / "model").write_text(f"{model}   \n")
        (system / "block/nvme0n1/nvme0n1p1").mkdir()
        (system / "block/nvme0n1/nvme0n1p1/partition").write_text("1\n")
        (system / "block/md0/slaves").mkdir(parents=True)
        (system / "block/md0/slaves/nvme1n1").symlink_to(system / "block/nvme1n1")
        (system / "dev/block").mkdir(parents=True)
        (system / "dev/block/259:3").symlink_to(system / "block/nvme0n1/nvme0n1p1")
        (system / "dev/block/9:0").symlink_to(system / "block/md0")
        found = volumes(
            [str(folders["ml"])],
            [str(folders["ml/checkpoints"])],
            mounts=mounts,
            sys=system,
            usage=lambda folder: (100, 50),
        )
        assert sorted(found, key=lambda v: v.folder) == sorted(
            [
                Volume("/", 50, 100, root=True),
                Volume(str(folders["ml"]), 50, 100),
                Volume(str(folders["nvme store"]), 50, 100, instance_store=True),
            ],
            key=lambda v: v.folder,
        )

    def test_this_machines_own_disks_are_found(self) -> None:
        assert all(os.path.isdir(volume.folder) and 0 <= volume.free <= volume.size for volume in volumes())


class TestOptions:
    @pytest.fixture(autouse=True)
    def _disks(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        volume = Volume(str(tmp_path), 200 * GB, 250 * GB)
        monkeypatch.setattr(disks, "volumes", lambda **_: [Volume("/", GB, 2 * GB, root=True), volume])

    def test_the_place_gives_folders_and_the_job_has_the_last_word_c099(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        root = laid_out(tmp_path / "ml", {"data": "s3://b/k", "run-dir": "here", "audit": True, "model": None})
        assert container.train_options(root, {}) == {
            "data": "s3://b/k",
            "audit": True,
            "run-dir": "here",
            "checkpoint-dir": str(root / "checkpoints"),
            "model-dir": str(root / "model"),
            "cache-dir": str(root / "bucketfeed-cache"),
            "cache-limit": 175 * GB,
        }
        assert f"on the volume {tmp_path}, {200 * GB} bytes of {250 * GB} free" in caplog.text

    def test_a_warm_pools_own_folder_keeps_the_cache_for_the_next_job(self, tmp_path: Path) -> None:
        warm = tmp_path / "warmpoolcache"
        warm.mkdir()
        root = laid_out(tmp_path / "ml", {"data": "s3://b/k"})
        found = container.train_options(root, {"SAGEMAKER_MANAGED_WARMPOOL_CACHE_DIRECTORY": str(warm)})
        assert found["cache-dir"] == str(warm / "bucketfeed-cache")

    def test_a_channels_name_is_its_folder(self, tmp_path: Path) -> None:
        channels = {"training": {"TrainingInputMode": "FastFile"}, "code": {"TrainingInputMode": "File"}}
        root = laid_out(tmp_path / "ml", {"data": "training", "test-data": "code", "cache-dir": "c"}, channels)
        found = container.train_options(root, {})
        assert found["data"] == str(root / "input/data/training")
        assert found["test-data"] == "code"  # the SDK's own: a folder of that name is meant

    def test_pipes_and_a_job_without_data_are_told(self, tmp_path: Path) -> None:
        root = laid_out(tmp_path / "a", {"data": "x", "cache-dir": "c"}, {"x": {"TrainingInputMode": "Pipe"}})
        with pytest.raises(ConfigError, match=r"input mode Pipe, .* use File or FastFile"):
            container.train_options(root, {})
        root = laid_out(tmp_path / "b", {"cache-dir": "c"}, {"x": {}})
        with pytest.raises(ConfigError, match=r"no hyperparameter data: .*\(there: x\)"):
            container.train_options(root, {})

    def test_outside_of_a_container_it_says_so_and_ends_with_code_2(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert container.main(["--root", str(tmp_path)]) == 2
        assert "this runs in a SageMaker training container, or with --root" in caplog.text
        assert "resourceconfig.json is not there" in (tmp_path / "output/failure").read_text()


def ranks(*programs: str) -> Ended:
    """Run each program as a rank of its own."""
    runner = "import os; exec(os.environ['PROGRAM'])"
    environments = [{**os.environ, "PROGRAM": program} for program in programs]
    return run_ranks([sys.executable, "-c", runner], environments, range(len(programs)))


FOREVER = "import signal\nwhile True: signal.pause()"
STOPS = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
TELLS_PARENT = "import os, signal, sys\nos.kill(os.getppid(), signal.SIGTERM)\n"


class TestSpawn:
    def test_all_ranks_that_end_well_are_exit_code_0(self) -> None:
        assert ranks("pass", "pass") == Ended(0)

    @pytest.mark.parametrize("code", [1, 2, 3])
    def test_the_exit_code_is_the_failed_ranks_and_its_last_line_the_error(self, code: int) -> None:
        program = f"import sys; print('train.py: no such bucket', file=sys.stderr); print('x'); sys.exit({code})"
        assert ranks("pass", program) == Ended(code, "rank 1: train.py: no such bucket")

    def test_an_exception_is_told_with_its_traceback(self) -> None:
        ended = ranks("raise ValueError('odd')")
        assert ended.code == 1
        assert ended.error is not None
        assert ended.error.startswith("rank 0: ValueError: odd\nTraceback (most recent call last):\n  File")

    def test_what_a_rank_says_because_another_one_is_gone_is_not_the_first_error(self) -> None:
        victim = "raise RuntimeError('[..pair.cc:547] Connection closed by peer [127.0.0.1]:1234')"
        slower = "import time\ntime.sleep(0.5)\nraise KeyError('cause')"  # the victim ends first
        ended = ranks(victim, slower)
        assert ended.error is not None
        assert ended.error.startswith("rank 1: KeyError: 'cause'")
        assert not ended.consequence
        assert ranks(victim).consequence

    def test_ranks_that_wait_for_a_failed_one_are_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spawn, "FAILED_SECONDS", 0.2)
        ended = ranks(FOREVER, "raise ValueError('odd')")
        assert (ended.code, str(ended.error).splitlines()[0]) == (1, "rank 1: ValueError: odd")

    def test_a_rank_that_was_killed_is_told_by_the_signal(self) -> None:
        ended = ranks("import os; os.kill(os.getpid(), 9)")
        assert ended == Ended(137, "rank 0: ended by SIGKILL; most often the host's memory was full")

    def test_a_stop_reaches_all_ranks_and_is_exit_code_75(self) -> None:
        waits = STOPS + FOREVER
        assert ranks(waits, STOPS + TELLS_PARENT + FOREVER) == Ended(75)

    def test_a_rank_that_was_not_yet_listening_is_no_failure_of_a_stop(self) -> None:
        assert ranks(TELLS_PARENT + FOREVER) == Ended(75)

    def test_an_error_while_stopping_is_one(self) -> None:
        program = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('disk full'))\n"
        assert ranks(program + TELLS_PARENT + FOREVER) == Ended(1, "rank 0: disk full")

    def test_who_ignores_a_stop_is_killed_before_sagemaker_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spawn, "STOP_SECONDS", 0.2)
        ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        ended = ranks(ignores + TELLS_PARENT + FOREVER)
        assert ended.code == 137
        assert ended.error is not None
        assert "ended by SIGKILL" in ended.error

    def test_handlers_are_as_before_and_orphans_are_reaped(self) -> None:
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
        code = (
            "import ctypes, sys\n"
            "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"  # PR_SET_CHILD_SUBREAPER: inherits orphans, as PID 1 does
            "from bucketfeed.platforms.sagemaker.spawn import run_ranks\n"
            "import os\n"
            "rank = 'import os, time; os.fork() and os._exit(0); time.sleep(0.1)'\n"  # the child outlives it
            "other = 'import time; time.sleep(0.5)'\n"
            "print(run_ranks([sys.executable, '-c', 'import os; exec(os.environ[\"P\"])'],"
            " [{**os.environ, 'P': rank}, {**os.environ, 'P': other}], [0, 1]))\n"
            "try: os.waitpid(-1, os.WNOHANG)\n"
            "except ChildProcessError: print('none left')\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines() == ["Ended(code=0, error=None, consequence=False)", "none left"]
        assert ranks("pass").code == 0
        assert before == {number: signal.getsignal(number) for number in before}


def test_last_words_are_the_last_exception_without_what_was_said_after() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        "KeyError: 'first'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "a.py", line 3, in <module>',
        "[rank1]: ValueError: second",
        "W ProcessGroupNCCL.cpp: destroy_process_group() was not called",
    ]
    expected = 'ValueError: second\nTraceback (most recent call last):\n  File "a.py", line 3, in <module>'
    assert last_words(lines) == expected
    assert last_words(["I x: fine", "train.py: AccessError: no", "leaked semaphore"]) == "train.py: AccessError: no"
    assert last_words(["one", "", "two", " "]) == "two"
    assert last_words([]) == ""
