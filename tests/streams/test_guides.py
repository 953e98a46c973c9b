"""The code in the guides prints what the guides say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guide"


@pytest.mark.parametrize("name", ["lines", "streams", "dask"])
def test_a_guides_code_prints_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    [code] = re.findall(r"```python\n(.*?)```", (GUIDES / f"{name}.md").read_text(), re.DOTALL)
    exec(compile(code, name, "exec"), {"__name__": "guide"})
    said = re.findall(r"# ([\d ]+\d)", code)
    assert capsys.readouterr().out.split("\n") == [*said, ""]
