from __future__ import annotations

import ast
import json
import re
import uuid
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from kernels import NOTEBOOK, ROOT, executed, pictures, said, surroundings

import bucketfeed as bf
from bucketfeed.testing.digits import digits
from bucketfeed.testing.moto import MotoServer

SLOW = pytest.mark.timeout(300)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_is_valid_and_stripped_of_outputs(notebook: Any) -> None:
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
        assert set(cell.metadata) <= {"tags", "cellView"}


def test_the_badge_opens_this_notebook(notebook: Any) -> None:
    link = re.search(r"\]\((https://colab\.research\.google\.com/github/\S+)\)", notebook.cells[0].source)
    assert link is not None
    assert link[1].split("/blob/main/")[1] == NOTEBOOK.relative_to(ROOT).as_posix()


def test_what_it_costs_is_said_before_anything_runs(notebook: Any) -> None:
    assert "Colab is not in AWS" in notebook.cells[0].source
    assert "9 US cents a GB" in notebook.cells[0].source


def test_the_first_code_cell_is_the_form_and_papermills_parameters(notebook: Any) -> None:
    form, *others = code_cells(notebook)
    assert form.metadata["tags"] == ["parameters"]
    assignments = [line for line in form.source.splitlines() if not line.startswith("#")]
    assert all("#@param" in line for line in assignments)
    assert all("parameters" not in cell.metadata.get("tags", []) for cell in others)
    known = papermill.inspect_notebook(str(NOTEBOOK))
    assert known["source"]["default"] == '"demo"'
    assert {"data", "test_data", "checkpoint_dir", "epochs", "work_dir", "bucketfeed_from"} <= known.keys()


def test_cells_are_short_for_their_logic_is_in_the_package(notebook: Any) -> None:
    for cell in code_cells(notebook)[1:]:
        assert cell.source.startswith("#@title ")
        assert cell.source.count("\n") < 14
        assert not [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.FunctionDef)]


@SLOW
def test_untouched_in_plain_jupyter_it_trains_on_the_demo_and_goes_on_without_its_disk(
    notebook: Any, tmp_path: Path
) -> None:
    with surroundings(colab=False, folder=tmp_path):
        done = executed(notebook, tmp_path)
    text = said(done)
    assert "nothing, all is here" in text
    assert "1,437 samples in 8 objects under s3://digits-demo/shards/train/" in text
    assert "they cost nothing" in text
    assert "Data kept up" in text or "Training waited for data" in text
    assert "resumed at sample 0 of epoch 3" in text
    assert float(re.findall(r"accuracy (0\.\d+)", text)[-1]) > 0.95
    assert pictures(done) == 2
    assert (tmp_path / "runs" / "notebook" / "model" / "model.pt").exists()


@SLOW
def test_on_colab_it_trains_on_a_bucket_by_the_notebooks_secrets_in_the_order_of_any_other_place(
    moto_server: MotoServer, tmp_path: Path
) -> None:
    bucket = moto_server.create_bucket(f"own-{uuid.uuid4().hex[:8]}")
    for digit in digits()[:200]:
        bucket.put(f"{digit.part}/{digit.label}/{digit.name}.png", digit.png)
    parameters = {
        **{"source": "s3", "data": f"{bucket.url}train/", "test_data": f"{bucket.url}test/"},
        **{"checkpoint_dir": f"{bucket.url}run-1/", "epochs": 2, "seed": 5, "work_dir": str(tmp_path / "content")},
    }
    secrets = {f"SECRET_{name}": f" {value}\n" for name, value in moto_server.environment.items()}
    secrets["SECRET_AWS_SECRET_ACCESS_KEY"] = "hush-hush"
    out = tmp_path / "out.ipynb"
    with surroundings(colab=True, folder=tmp_path, **secrets):
        done = papermill.execute_notebook(
            str(NOTEBOOK), str(out), parameters, kernel_name="here", cwd=str(tmp_path), progress_bar=False
        )
    text = said(done)
    assert "S3, by this notebook's secrets" in text
    assert "Colab is not in AWS" in text
    assert "WARNING" not in text
    assert "epoch 1: test loss" in text
    assert pictures(done) == 2
    assert "hush-hush" not in out.read_text(encoding="utf-8")
    same = bf.open_dataset(f"{bucket.url}train/", storage_options=bucket.storage_options, cache=None)
    assert f"Order hash: {bf.order_hash(same, 5, 0)}" in text
    listed = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix="run-1/checkpoint-")
    assert listed["KeyCount"] > 0
    assert json.loads((tmp_path / "content" / "model" / "model.json").read_text())["finished"] is True
