"""A report is made as JSON only for those who ask for JSON."""

import json
from pathlib import Path

import pytest

from lamella._record.output import file_error, show


def unwanted() -> str:
    raise AssertionError("The report was made as JSON, and nothing reads it.")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(13, "Permission denied", "a\tb"), "Expected usable files, got Permission denied: 'a\\tb'."),
        (OSError("lost\nthe disk."), "Expected usable files, got lost the disk."),
        (OSError("Expected a whole archive, got half of one."), "Expected a whole archive, got half of one."),
    ],
)
def test_errors_of_the_file_system_are_one_sentence(error: OSError, expected: str) -> None:
    assert file_error(error) == expected


def test_text_alone_makes_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    show(["a line"], unwanted, None)
    assert capsys.readouterr().out == "a line\n"


def test_json_goes_to_the_terminal_or_to_a_file_beside_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(["a line"], lambda: json.dumps({"a": 1}), "-")
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    show(["a line"], lambda: json.dumps({"a": 1}), str(tmp_path / "report.json"))
    assert capsys.readouterr().out == "a line\n"
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": 1}
