"""The README's examples run as they stand."""

from pathlib import Path

import pytest

from lamella_testing.readme import run_examples


def test_the_example_saves_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_examples(Path(__file__).parents[1] / "README.md", "lamella-checkpoint")["step"] == 100
