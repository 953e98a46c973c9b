"""The rules of the house, for everything that is in the repository: what is imported, read, written and promised."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "bucketfeed"
HEAVY = {
    "torch",
    "boto3",
    "botocore",
    "s3fs",
    "obstore",
    "sagemaker",
    "PIL",
    "pandas",
    "pyarrow",
    "moto",
    "cloudpickle",
    "dask",
    "h5py",
    "zarr",
    "zstandard",
}

PUBLIC = [
    "CachedReader",
    "Csv",
    "Cursor",
    "DiskCache",
    "Division",
    "Index",
    "Jsonl",
    "LengthBuckets",
    "Loader",
    "Manifest",
    "MapDataset",
    "Order",
    "Parquet",
    "Range",
    "RangeReader",
    "Stats",
    "StreamDataset",
    "Text",
    "TokenDataset",
    "Topology",
    "Tsv",
    "__version__",
    "build_index",
    "collate",
    "concat",
    "decoders",
    "default_collate",
    "errors",
    "folder_labels",
    "from_dask",
    "join",
    "mix",
    "open_arrays",
    "open_dataset",
    "open_reader",
    "order_hash",
    "rng",
    "write_shards",
]


def modules_after(code: str) -> set[str]:
    """Return the names in `sys.modules` of a fresh interpreter that ran `code`."""
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def repository_texts() -> Iterator[tuple[Path, str]]:
    """Yield path and text of every text file of the repository, found without git."""
    tops = [ROOT / name for name in ("src", "tests", "entrypoints", "benchmarks", "docs", "notebooks", "infra", ".ci")]
    paths = [path for top in tops for path in top.rglob("*")] + list(ROOT.glob("*"))
    for path in paths:
        if path.is_file() and "__pycache__" not in path.parts:
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def the_project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def source_trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"), str(path))


class TestImport:
    def test_importing_bucketfeed_loads_nothing_heavy(self) -> None:
        loaded = {name.partition(".")[0] for name in modules_after("import bucketfeed")}
        assert loaded & HEAVY == set()

    def test_importing_bucketfeed_loads_few_modules(self) -> None:
        more = modules_after("import bucketfeed, bucketfeed.errors") - modules_after("")
        assert len(more) <= 60, sorted(more)

    @pytest.mark.parametrize("name", ["DiskCache", "Manifest", "Index", "Order", "Cursor", "Topology", "errors"])
    def test_a_part_that_needs_no_torch_loads_none(self, name: str) -> None:
        assert "torch" not in modules_after(f"import bucketfeed; bucketfeed.{name}")

    def test_the_pytest_plugin_loads_nothing_heavy_in_every_users_test_run(self) -> None:
        loaded = {name.partition(".")[0] for name in modules_after("import bucketfeed.testing.plugin")}
        assert loaded & (HEAVY - {"cloudpickle"}) == set()


class TestPublicNames:
    def test_are_exactly_these(self) -> None:
        import bucketfeed

        assert sorted(bucketfeed.__all__) == PUBLIC

    def test_all_are_there_and_documented(self) -> None:
        import bucketfeed

        for name in set(PUBLIC) - {"__version__"}:
            assert getattr(bucketfeed, name).__doc__, name

    def test_an_unknown_name_is_an_attribute_error_that_names_it(self) -> None:
        import bucketfeed

        with pytest.raises(AttributeError, match="bucketfed_loader"):
            bucketfeed.bucketfed_loader  # noqa: B018

    def test_version_is_the_distributions(self) -> None:
        import bucketfeed

        assert bucketfeed.__version__ == the_project()["version"]


class TestSources:
    def test_the_environment_is_read_in_platforms_and_topology_only(self) -> None:
        readers = set()
        for path, tree in source_trees():
            for node in ast.walk(tree):
                named = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
                if named in ("environ", "environb", "getenv", "expandvars"):
                    where = path.relative_to(PACKAGE)
                    readers.add("platforms" if where.parts[0] == "platforms" else where.as_posix())
        assert readers <= {"platforms", "sampling/topology.py"}

    def test_every_module_says_what_it_is_for(self) -> None:
        silent = [path for path, tree in source_trees() if tree.body and not ast.get_docstring(tree)]
        assert silent == []

    def test_no_file_is_longer_than_400_lines(self) -> None:
        long = {path.name: n for path, _ in source_trees() if (n := path.read_text().count("\n")) > 400}
        assert long == {}

    def test_no_module_is_called_by_a_word_that_says_nothing(self) -> None:
        names = {path.stem for path, _ in source_trees()}
        assert names & {"utils", "util", "helpers", "helper", "manager", "base", "common", "misc"} == set()

    def test_every_error_carries_one_string(self) -> None:
        """An exception with more arguments loses its text or its life on the way out of a worker."""
        ours = {path.stem: tree for path, tree in source_trees() if path.name == "errors.py"}["errors"]
        classes = {node.name for node in ours.body if isinstance(node, ast.ClassDef)}
        for path, tree in source_trees():
            for node in ast.walk(tree):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    function = node.exc.func
                    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                    if name in classes:
                        assert len(node.exc.args) == 1, f"{path}:{node.lineno}"
                        assert not node.exc.keywords, f"{path}:{node.lineno}"


class TestRepository:
    def test_no_file_names_a_path_of_one_machine_or_a_registry_host(self) -> None:
        folders = "|".join(("work", "root", "farm", r"Users/\w+", r"home/\w+"))
        hosts = "|".join(("pypi" + r"\.org", "python" + "hosted", r"registry\.npm" + "js"))
        machine = re.compile(rf"(?<![\w.}}*-])/(?:{folders})/|{hosts}")
        found = [
            f"{path.relative_to(ROOT)}: {match[0]}"
            for path, text in repository_texts()
            if (match := machine.search(text))
        ]
        assert found == []

    def test_links_between_documents_lead_to_files(self) -> None:
        broken = []
        for path, text in repository_texts():
            if path.suffix == ".md":
                for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
                    if not (path.parent / target).exists():
                        broken.append(f"{path.relative_to(ROOT)}: {target}")
        assert [link for link in broken if "NNNN" not in link] == []


class TestRequirements:
    def pins(self) -> dict[str, str]:
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
        return {name.lower().replace("_", "-"): version for name, version in pairs}

    def requirements(self) -> list[str]:
        project = the_project()
        return [
            requirement
            for group in (project["dependencies"], *project["optional-dependencies"].values())
            for requirement in group
            if not requirement.startswith("bucketfeed")
        ]

    def test_every_one_has_a_floor_and_no_ceiling(self) -> None:
        odd = [r for r in self.requirements() if not re.fullmatch(r"[\w-]+(\[[\w,]+\])?>=[\d.]+", r)]
        assert odd == []

    def test_every_one_is_pinned_for_development_at_or_above_its_floor(self) -> None:
        def numbers(version: str) -> list[int]:
            return [int(part) for part in re.findall(r"\d+", version)]

        pins = self.pins()
        for requirement in self.requirements():
            name, floor = re.sub(r"\[.*\]", "", requirement).split(">=")
            assert numbers(pins[name.lower()]) >= numbers(floor), requirement

    def test_no_pin_has_a_local_version_or_a_url(self) -> None:
        assert [pin for pin in self.pins().items() if not re.fullmatch(r"[\w.]+", pin[1])] == []
