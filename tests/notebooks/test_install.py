from __future__ import annotations

import logging

import pytest

from bucketfeed.platforms.colab import install_command

NEEDED = [
    "boto3>=1.40",
    "fsspec>=2026.2",
    "numpy>=2.0",
    "obstore>=0.10",
    "s3fs>=2026.2",
    "torch>=2.6",
    'gcsfs>=2026.2; extra == "gcs"',
    'moto[s3,server]>=5.1; extra == "demo"',
]
COLAB = {"torch": "2.8.0+cu126", "numpy": "2.0.2", "fsspec": "2026.4.0", "gcsfs": "2026.4.0", "datasets": "4.0.0"}


def test_what_the_runtime_came_with_is_named_with_its_version_so_that_pip_keeps_it() -> None:
    command = install_command(NEEDED, COLAB)
    assert command[:2] == ["install", "--quiet"]
    assert set(command[2:]) == {
        *("boto3>=1.40", "obstore>=0.10", "s3fs==2026.4.0"),
        *("torch==2.8.0+cu126", "numpy==2.0.2", "fsspec==2026.4.0", "gcsfs==2026.4.0", "datasets==4.0.0"),
    }


def test_s3fs_of_another_fsspec_is_replaced_by_the_matching_one_and_boto3_chosen_along() -> None:
    found = COLAB | {"s3fs": "2026.2.0", "boto3": "1.41.0", "obstore": "0.11.0"}
    command = install_command(NEEDED, found)
    assert "s3fs==2026.4.0" in command
    assert "boto3>=1.40" in command


def test_an_older_fsspec_stays_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    command = install_command(NEEDED, COLAB | {"fsspec": "2025.3.0", "gcsfs": "2025.3.0"})
    assert "fsspec==2025.3.0" in command
    assert "s3fs==2025.3.0" in command
    assert "fsspec 2025.3.0 is what this runtime came with and stays" in caplog.text


def test_extras_are_added_where_asked_for() -> None:
    assert "moto[s3,server]>=5.1" not in install_command(NEEDED, COLAB)
    assert "moto[s3,server]>=5.1" in install_command(NEEDED, COLAB, ("demo",))
    bare = {"torch": "2.8.0", "fsspec": "2026.4.0"}
    assert "gcsfs==2026.4.0" in install_command(NEEDED, bare, ("gcs",))


def test_nothing_is_installed_where_all_is_there() -> None:
    there = COLAB | {"boto3": "1.41.0", "obstore": "0.11.0", "s3fs": "2026.4.0"}
    assert install_command(NEEDED, there) == []
    assert install_command(NEEDED, there, ("gcs",)) == []


def test_nothing_is_pinned_that_is_not_there() -> None:
    assert install_command(["torch>=2.6", "obstore>=0.10"], {}) == ["install", "--quiet", "torch>=2.6", "obstore>=0.10"]
