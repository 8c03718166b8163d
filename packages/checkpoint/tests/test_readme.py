"""The README's examples run as they stand."""

import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest


def readme() -> str:
    file = Path(__file__).parents[1] / "README.md"
    return file.read_text() if file.is_file() else str(metadata("lamella-checkpoint").get_payload())  # type: ignore[attr-defined]


def test_the_example_saves_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", readme(), flags=re.DOTALL):
        assert len(example.strip().splitlines()) <= 14
        exec(example, names)
    assert names["step"] == 100
