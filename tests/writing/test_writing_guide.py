"""The code in the guide prints what the guide says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "writing.md"


def test_the_guides_code_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    exec(compile(code, "writing", "exec"), {"__name__": "guide"})
    assert capsys.readouterr().out.split("\n") == [*re.findall(r"# ([\d ]+\d)", code), ""]
