"""The README's examples run as they stand."""

from pathlib import Path

import pytest

from lamella_testing.readme import run_examples


def test_the_examples_convert_load_and_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples(Path(__file__).parents[1] / "README.md", "lamella-convert")
    assert (tmp_path / "exports" / "second" / "model.safetensors").is_file()
