"""Google Cloud Storage: who asks, how it is listed, and that its data have the order they have elsewhere."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import google.oauth2.credentials
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google_store import SignIn, Store, store

import bucketfeed as bf
from bucketfeed.errors import ConfigError, ObjectChangedError
from bucketfeed.store import listing
from bucketfeed.store.gcs import GcsAccess
from bucketfeed.store.ranges import Range
from bucketfeed.store.readers import open_reader
from bucketfeed.testing.gcs import GcsBucket
from bucketfeed.testing.moto import MotoBucket

OBJECTS = {"train/a.bin": b"0123456789", "train/b.bin": b"9876543210"}


def service_account(bucket: Store) -> dict[str, Any]:
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key": key.decode(),
        "client_email": "trainer@p.iam.gserviceaccount.com",
        "token_uri": f"{bucket.url}/token",
    }


def read_all(options: dict[str, Any]) -> dict[str, bytes]:
    dataset = bf.open_dataset("gs://bucket/train/", storage_options=options, cache=None)
    assert [sample["bin"] for sample in pickle.loads(pickle.dumps(dataset))] == [s["bin"] for s in dataset]
    other = dataset.reader._other  # gcsfs, as forked children read
    bodies = [bytes(b) for b in other.read([dataset.manifest.range(i) for i in range(len(dataset))])]
    assert bodies == [sample["bin"] for sample in dataset]
    return {f"train/{sample['__key__']}.bin": sample["bin"] for sample in dataset}


@pytest.mark.parametrize("kind", ["dict", "file", "environment"])
def test_a_service_account_signs_in_as_a_dict_a_file_or_by_the_environment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store(OBJECTS, SignIn(ended=False)) as bucket:
        account = service_account(bucket)
        (tmp_path / "account.json").write_text(json.dumps(account))
        options: dict[str, Any] = {"endpoint_url": bucket.url}
        if kind == "environment":
            monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
            options["token"] = "google_default"
        else:
            options["token"] = account if kind == "dict" else str(tmp_path / "account.json")
        assert read_all(options) == OBJECTS
        assert set(bucket.grants) == {"urn:ietf:params:oauth:grant-type:jwt-bearer"}


def test_a_users_sign_in_renews_itself_and_who_pays_is_told() -> None:
    with store(OBJECTS, SignIn(ended=False)) as bucket:
        user = google.oauth2.credentials.Credentials(
            None, refresh_token="r", token_uri=f"{bucket.url}/token", client_id="c", client_secret="s"
        )
        options = {"endpoint_url": bucket.url, "token": user, "project": "mine", "requester_pays": True}
        assert read_all(options) == OBJECTS
        assert set(bucket.grants) == {"refresh_token"}
        assert bucket.payers == {"mine"}


def test_hmac_keys_go_by_the_s3_side_of_google(moto_bucket: MotoBucket) -> None:
    for key, data in OBJECTS.items():
        moto_bucket.put(key, data)
    url = f"gs://{moto_bucket.name}/train/"
    options = {"key": "testing", "secret": "testing", "endpoint_url": moto_bucket.server.endpoint_url}
    dataset = bf.open_dataset(url, storage_options=options, cache=None)
    assert [sample["bin"] for sample in dataset] == list(OBJECTS.values())
    assert dataset.manifest.object_url(0) == f"{url}a.bin"
    access = bf.open_reader(url, {"key": "k", "secret": "s"})._access
    assert (access.endpoint_url, access.region) == ("https://storage.googleapis.com", "auto")


def test_an_emulator_needs_no_more_than_its_address_in_the_environment(
    gcs_bucket: GcsBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = gcs_bucket.put("a.bin", b"abc")
    for name, value in gcs_bucket.server.environment.items():
        monkeypatch.setenv(name, value)
    for options in (None, {"anon": True}):
        reader = open_reader(gcs_bucket.url, options)
        for one in (reader, reader._other):
            assert bytes(one.read([Range(f"{gcs_bucket.url}a.bin", 0, 3, generation)])[0]) == b"abc"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokken": "x"}, "tokken"),
        ({"requester_pays": True}, "project that pays"),
        ({"token": {"type": "something"}}, "service account's file"),
        ({"key": "a"}, "both 'key' and 'secret'"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        open_reader("gs://bucket/", options)


def test_secrets_stay_out_of_reprs() -> None:
    assert "s3cr3t" not in repr(open_reader("gs://b/", {"token": google.oauth2.credentials.Credentials("s3cr3t")}))
    assert "s3cr3t" not in repr(GcsAccess.from_options({"token": {"private_key": "s3cr3t"}}))


def test_listings_come_page_by_page_and_full_folders_at_the_same_time(
    gcs_bucket: GcsBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_PAGE", 10)
    keys = [f"train/{n % 3}/{n:05}" for n in range(105)] + ["train/top", "train/empty/"]
    for key in keys:
        gcs_bucket.put(key, b"" if key.endswith("/") else b"x")
    gcs_bucket.put("trainer/other", b"x")
    manifest = bf.Manifest.from_url(gcs_bucket.url + "train", storage_options=gcs_bucket.storage_options)
    assert sorted("train/" + manifest.key(i) for i in range(len(manifest))) == sorted(keys[:-1])


def test_an_object_with_the_same_bytes_written_anew_is_another_generation(gcs_bucket: GcsBucket) -> None:
    gcs_bucket.put("a.bin", b"abc")
    dataset = bf.open_dataset(gcs_bucket.url, storage_options=gcs_bucket.storage_options, cache=None)
    found = gcs_bucket.put("a.bin", b"abc")
    with pytest.raises(ObjectChangedError, match=f"found {found}"):
        dataset[0]
    again = bf.open_dataset(gcs_bucket.url, storage_options=gcs_bucket.storage_options, cache=None)
    assert again[0]["bin"] == b"abc"


def test_data_have_one_order_on_gcs_on_s3_and_on_disk_and_a_state_goes_on_in_the_middle(
    gcs_bucket: GcsBucket, moto_bucket: MotoBucket, tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    for number in range(64):
        for bucket in (gcs_bucket, moto_bucket):
            bucket.put(f"train/{number:03}.bin", bytes([number]) * 50)
        (tmp_path / "train" / f"{number:03}.bin").write_bytes(bytes([number]) * 50)
    places = [(b.url + "train/", b.storage_options) for b in (gcs_bucket, moto_bucket)]
    places.append((str(tmp_path / "train"), None))
    datasets = [bf.open_dataset(url, storage_options=options, cache=None) for url, options in places]
    assert len({bf.order_hash(dataset, seed=3, epoch=1) for dataset in datasets}) == 1

    def keys(dataset: bf.MapDataset, batch_size: int, batches: int, state: dict[str, Any] | None = None) -> Any:
        with bf.Loader(dataset, batch_size=batch_size, shuffle=True, seed=3) as loader:
            if state is not None:
                loader.load_state_dict(state)
            taken = [key for _, batch in zip(range(batches), loader, strict=False) for key in batch["__key__"]]
            return taken, loader.state_dict()

    whole, _ = keys(datasets[2], 8, 8)
    first, state = keys(datasets[0], 8, 3)
    rest, _ = keys(datasets[0], 20, 2, state)
    assert first + rest == whole
    assert sorted(whole) == [f"{number:03}" for number in range(64)]
