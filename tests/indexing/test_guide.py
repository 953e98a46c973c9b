"""The code in the guide prints what the guide says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guide"


@pytest.mark.parametrize("name", ["index", "errors"])
def test_the_guides_code_prints_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "\n".join(re.findall(r"```python\n(.*?)```", (GUIDES / f"{name}.md").read_text(), re.DOTALL))
    exec(compile(code, name, "exec"), {"__name__": "guide"})
    said = re.findall(r"print\(.*\)  # (.*)", code)
    assert capsys.readouterr().out.split("\n") == [*said, ""]
