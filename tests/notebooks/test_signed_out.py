from __future__ import annotations

from typing import Any

import pytest
from google_store import SignIn, Store, store

import bucketfeed as bf
from bucketfeed.errors import AccessError

OBJECTS = {f"train/{i:03}.bin": bytes([i]) * 10 for i in range(160)}
ENDED = r"not signed in to Google, or the sign-in has ended: run the notebook's sign-in cell .*, then go on"


def opened(bucket: Store, **more: Any) -> bf.MapDataset:
    options = {"token": bucket.signed_in, "endpoint_url": bucket.url, "project": "none"}
    return bf.open_dataset("gs://bucket/train/", storage_options=options, cache=None, **more)


def test_c106_without_a_sign_in_the_error_says_to_run_the_cell_and_afterwards_it_works() -> None:
    with store(OBJECTS, SignIn(ended=True)) as bucket:
        with pytest.raises(AccessError, match=ENDED):
            opened(bucket)
        bucket.sign_in()
        assert len(opened(bucket)) == 160


def test_c106_a_sign_in_that_ends_after_100_reads_is_told_and_training_goes_on_where_it_was() -> None:
    with store(OBJECTS, SignIn(ended=False), reads=100) as bucket:
        dataset = opened(bucket)
        taken: list[str] = []
        with bf.Loader(dataset, batch_size=8, shuffle=True, seed=1) as loader:
            with pytest.raises(AccessError, match=ENDED):
                taken.extend(key for batch in loader for key in batch["__key__"])
            state = loader.state_dict()
        assert state["position"] == len(taken) <= 100
        bucket.sign_in()
        with bf.Loader(dataset, batch_size=8, shuffle=True, seed=1) as again:
            again.load_state_dict(state)
            for batch in again:
                taken += batch["__key__"]
        assert len(taken) == len(set(taken)) == 160
