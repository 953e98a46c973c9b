"""The Python in docs/guide/collate.md runs from top to bottom and says what it claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "collate.md"


def test_the_guides_python_runs(capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), str(GUIDE), "exec"), {"__name__": "guide"})
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("True")
    assert said[1].startswith("128 ")
    assert said[-1] == "torch.Size([16, 50])"
