"""What a job is made of, without any server: hyperparameters, source, wheel, prices, checks."""

from __future__ import annotations

import io
import json
import math
import re
import tarfile
import zipfile
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketfeed.cli import sagemaker as line
from bucketfeed.cli import train
from bucketfeed.errors import ConfigError
from bucketfeed.platforms.sagemaker import checks, prices, wheel
from bucketfeed.platforms.sagemaker.hyperparameters import arguments, decode, encode
from bucketfeed.platforms.sagemaker.job import Job
from bucketfeed.platforms.sagemaker.source import REQUIREMENTS, START, pack

LIMIT = 1_000_000
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.just("json"), inner, max_size=3),
    max_leaves=6,
)


def job(**more: Any) -> Job:
    own = {"bucket": "b", "role": "r", "region": "us-east-1", "hyperparameters": {"data": "s3://b/data/"}}
    return Job(**own | more)


# Hyperparameters


@given(st.dictionaries(st.sampled_from(["data", "model", "storage-options", "x-y"]), VALUES))
def test_hyperparameters_come_back_with_their_values_and_types_c094(options: dict[str, Any]) -> None:
    texts = encode(options)
    back = decode(texts)
    assert json.dumps(back) == json.dumps(options)
    # The SDK's script decodes each once and writes it between single quotes, alone and within one object.
    for text in texts.values():
        assert text.isascii()
        assert "'" not in json.dumps(json.loads(text), ensure_ascii=False)


@pytest.mark.parametrize("value", [True, False, None, 0, 1e-4, "1", "0012", "s3://b/k?x", [1, 2], {"a": 1}, "a b", ""])
def test_each_reported_value_keeps_its_type_c094(value: Any) -> None:
    back = decode(encode({"x": value}))["x"]
    assert back == value
    assert type(back) is type(value)


def test_what_the_tuner_and_consoles_write_is_understood_c094() -> None:
    texts = {"model": "mine:net", "lr": "1.0E-4", "batch-size": "32", "sagemaker_program": "x.py"}
    texts["_tuning_objective_metric"] = "loss"
    assert decode(texts) == {"model": "mine:net", "lr": 1e-4, "batch-size": 32}


def test_the_command_line_of_decoded_hyperparameters_is_what_train_parses_c094() -> None:
    given = ["--data", 's3://b/it\'s "odd"; $HOME `id`\nü', "--lr", "1e-4", "--audit", "--no-progress"]
    given += ["--storage-options", '{"anon": true, "n": [1, "a\'b"]}', "--run-dir=--x", "--seed", "0"]
    options = line.hyperparameters(given)
    assert options["lr"] == 1e-4
    assert options["audit"] is True
    assert options["no-progress"] is True
    assert set(options) == {"data", "lr", "audit", "no-progress", "storage-options", "run-dir", "seed"}
    assert train.values(arguments(decode(encode(options)))) == train.values(given)


def test_an_unknown_name_is_refused_before_anything_is_submitted_c094(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        line.hyperparameters(["--data", "s3://b/", "--epoch", "3"])
    assert ended.value.code == 2
    assert "--epoch" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="epochs must be a whole number of at least 1"):
        line.hyperparameters(["--data", "s3://b/", "--epochs", "0"])


@pytest.mark.parametrize("value", [math.nan, (1, 2), {1: 2}, "a\0b", "\ud800", "x" * 2500, object()])
def test_a_value_that_would_not_arrive_as_it_is_is_refused_with_its_name_c094(value: Any) -> None:
    with pytest.raises(ConfigError, match="--model"):
        encode({"model": value})


# Source


def tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def unpacked(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def test_git_environments_data_weights_and_secrets_stay_here_and_are_named_c096(tmp_path: Path) -> None:
    key = b"-----BEGIN RSA PRIVATE KEY-----"
    unwanted = {
        **{".git/config": b"x", ".venv/lib/big.so": b"x" * LIMIT, "my/pyvenv.cfg": b"", "my/x.py": b"x"},
        **{"data/big.bin": b"x" * LIMIT, ".env": b"A=1", ".aws/credentials": b"k", "weights.pt": b"w"},
        **{"checkpoints/step1": b"c", "server.pem": b"k", "sub/id_rsa": b"k", "notes.txt": key, "sa.json": key},
        **{"old.yaml": b"id: AKIAIOSFODNN7EXAMPLE", "__pycache__/a.pyc": b"x", "gcp-service-account.json": b"{}"},
    }
    wanted = {"mine.py": b"m", "data/decode.py": b"d", "secrets.py": b"s", "tokenizer.json": b"t", "conf/a.yaml": b"y"}
    folder = tree(tmp_path / "source", unwanted | wanted)
    (folder / "passwd.txt").symlink_to("/etc/passwd")
    (folder / "elsewhere").symlink_to("/etc")
    source = pack(folder, limit_bytes=LIMIT)
    files = unpacked(source.archive)
    own = {REQUIREMENTS, START, next(name for name in files if name.endswith(".whl"))}
    assert set(files) == set(wanted) | own
    assert dict(source.files) == {name: len(data) for name, data in files.items()}
    named = dict(source.left_out)
    assert named[".git/"] == "version control"
    assert named[".venv/"] == named["my/"] == "Python environment"
    assert named[".env"] == named[".aws/"] == named["notes.txt"] == named["sub/id_rsa"] == "secrets"
    assert named["data/big.bin"] == named["checkpoints/step1"] == "data"
    assert named["weights.pt"] == "weights"
    assert named["passwd.txt"] == "a link out of the folder"
    assert not any(secret in source.archive for secret in (key, b"AKIAIOSFODNN7EXAMPLE"))
    assert pack(folder, limit_bytes=LIMIT).archive == source.archive


def test_a_secret_within_a_module_is_refused_for_without_the_module_the_job_would_fail(tmp_path: Path) -> None:
    tree(tmp_path, {"mine.py": b'KEY = "AKIAIOSFODNN7EXAMPLE"'})
    with pytest.raises(ConfigError, match=r"mine\.py holds what looks like a secret key"):
        pack(tmp_path, limit_bytes=LIMIT)


def test_more_than_the_limit_is_refused_with_the_largest_files_unless_forced_c096(tmp_path: Path) -> None:
    tree(tmp_path, {"big.txt": b"x" * 3000, "mine.py": b"m"})
    with pytest.raises(ConfigError, match=r"2\.93 KiB to upload, more than 1000 B.*big\.txt \(2\.93 KiB\)"):
        pack(tmp_path, limit_bytes=1000)
    assert "big.txt" in unpacked(pack(tmp_path, limit_bytes=1000, force=True).archive)


def test_requirements_install_this_package_and_the_users_and_never_torch(tmp_path: Path) -> None:
    text = b"# mine\ntorch>=2.1  # old\ntorchvision\ntorchmetrics==1.0\n-r more.txt\nbucketfeed[gcs]\n"
    tree(tmp_path, {REQUIREMENTS: text, "more.txt": b"nvidia-cublas-cu12\neinops\n"})
    source = pack(tmp_path, limit_bytes=LIMIT)
    lines = unpacked(source.archive)[REQUIREMENTS].decode().split()
    assert lines[0].startswith("./bucketfeed-")
    assert lines[1:] == ["torchmetrics==1.0", "einops"]
    assert [name for name, why in source.left_out if why == "the image brings it"] == [
        f"{REQUIREMENTS}: {line}" for line in ("torch>=2.1", "torchvision", "nvidia-cublas-cu12", "bucketfeed[gcs]")
    ]


def test_the_wheel_holds_the_package_that_runs_and_needs_all_but_torch() -> None:
    name, data = wheel.make_wheel(["gcs"])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {entry: archive.read(entry) for entry in archive.namelist()}
    assert files["bucketfeed/platforms/sagemaker/wheel.py"] == Path(wheel.__file__).read_bytes()
    metadata = next(text.decode() for entry, text in files.items() if entry.endswith("METADATA"))
    needed = [text.split(": ")[1] for text in metadata.splitlines() if text.startswith("Requires-Dist")]
    assert any(text.startswith("boto3") for text in needed)
    written = [text for text in requires("bucketfeed") or [] if "extra" not in text or re.search("extra == .gcs", text)]
    assert {re.split("[ ;>]", text)[0] for text in written} - {"torch"} == {
        re.split("[ ;>]", text)[0] for text in needed
    }
    assert not any(text.startswith(("torch", "ray", "moto", "sagemaker", "pytest")) for text in needed)
    assert any(b"nodecache" in text for entry, text in files.items() if entry.endswith("entry_points.txt"))
    assert name.endswith("-py3-none-any.whl")


# Jobs, prices, checks


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"spot": True, "max_run_seconds": 100, "max_wait_seconds": 50}, "--max-wait .50 s.*at least --max-run .100 s"),
        ({"max_wait_seconds": 50}, "is for --spot"),
        ({"spot": True, "keep_alive_seconds": 60}, "no warm pool of spot"),
        ({"spot": True, "hyperparameters": {"data": "s3://b/", "resume": "never"}}, "--spot without checkpoints"),
        ({"spot": True, "hyperparameters": {"data": "s3://b/", "checkpoint-dir": "/tmp/x"}}, "--spot without checkpo"),
        ({"image": "x", "framework_version": "2.9"}, "both choose the image"),
        ({"subnets": ("s",)}, "--security-group .none given"),
        ({"source": Path("/no/such")}, "--source /no/such is no folder"),
        ({"name": "a_b"}, "can't begin a job's name"),
        ({"output_url": "gs://b/x"}, "must be an s3:// URL"),
        ({"channels": {"held-out": "s3://b/"}}, "--channel held-out"),
        ({"processes": 0}, "--nproc-per-node"),
        ({"environment": {"BUCKETFEED_NPROC_PER_NODE": "2"}}, "give that instead"),
    ],
)
def test_a_job_that_can_t_work_is_refused_with_both_values(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        job(**wrong)


def test_the_cost_is_hosts_times_hours_with_the_date_of_its_prices() -> None:
    found = prices.cost(job(instance_type="ml.g5.2xlarge", instance_count=2, max_run_seconds=7200, spot=True))
    assert found.hour == pytest.approx(3.03)
    assert found.at_most == pytest.approx(6.06)
    assert prices.AS_OF in found.text
    assert "spot" in found.text
    volume = prices.cost(job(instance_type="ml.m5.large", volume_gb=730)).hour
    assert volume == pytest.approx(0.115 + 0.14)
    assert prices.cost(job(), runs=10, parallel=2).at_most == pytest.approx(10 * prices.cost(job()).at_most)
    assert prices.cost(job(instance_type="ml.m7i.large")).hour is None


@pytest.mark.parametrize(
    ("more", "image", "told"),
    [
        ({}, "x/pytorch-training:2.10.0-gpu-py313", "is for GPUs, and ml.m5.xlarge has none"),
        ({"instance_type": "ml.g5.xlarge"}, "x/pytorch-training:2.10.0-cpu-py313", "would stand idle"),
        ({}, "1.dkr.ecr.eu-west-1.amazonaws.com/x:1", "the image lies in eu-west-1"),
        ({"volume_gb": 50, "hyperparameters": {"data": "s3://b/", "cache-limit": "100GB"}}, "x", "volume of 50 GiB"),
        ({"hyperparameters": {"data": "/srv/pictures"}}, "x", "a path of this machine"),
        ({"hyperparameters": {"data": "s3://b/", "storage-options": {"secret": "x"}}}, "x", "anyone who may describe"),
        ({"environment": {"WANDB_TOKEN": "x"}}, "x", "--env WANDB_TOKEN"),
        ({"instance_type": "ml.g5.12xlarge", "processes": 1}, "x", "has 4 GPU"),
    ],
)
def test_what_looks_wrong_is_warned_of(more: dict[str, Any], image: str, told: str) -> None:
    assert any(told in text for text in checks.warnings(job(**more), image))
    assert checks.warnings(job(), "pytorch-training:2.10.0-cpu-py313") == []


def test_an_unknown_instance_type_is_refused_with_those_that_are_near() -> None:
    with pytest.raises(ConfigError, match=r"did you mean: ml\.g5\.xlarge\?"):
        checks.known_instance_type("g5.xlarge")
    with pytest.raises(ConfigError, match=r"ml\.g5\.2xlarge, .*ml\.g5\.48xlarge\?"):
        checks.known_instance_type("ml.g5.3xlarge")
    checks.known_instance_type("ml.g5.xlarge")


def test_a_table_price_belongs_to_a_type_that_exists() -> None:
    for family, sizes in prices._PRICES.items():
        for size in sizes:
            checks.known_instance_type(f"{family}.{size}")


def test_what_the_api_would_refuse_is_told_by_its_own_rules() -> None:
    request = {"TrainingJobName": "a_b", "Environment": {"A": "x" * 513}, "Nonsense": 1}
    request["Tags"] = [{"Key": "k" * 129, "Value": "v"}]
    with pytest.raises(ConfigError) as refused:
        checks.against_model("CreateTrainingJob", request)
    for part in ("TrainingJobName is 'a_b'", r"Environment[A]", "Tags[0].Key", "Nonsense is not known"):
        assert part in str(refused.value)
