"""The code in the guides runs from top to bottom, and prints what is said behind each `print`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = sorted((Path(__file__).parents[1] / "docs" / "guide").glob("*.md"))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guides_code_prints_what_it_says(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", guide.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    exec(compile(code, str(guide), "exec"), {"__name__": "guide"})
    said = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert len(said) == len(printed) == len(re.findall(r"^ *print\(", code, re.MULTILINE)) > 0
    for line, claim in zip(printed, said, strict=True):
        assert claim.split(": ")[0] == line
