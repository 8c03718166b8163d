"""A report is made as JSON only for those who ask for JSON."""

import json
import subprocess
import sys
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


def test_a_log_on_a_full_disk_loses_its_lines_and_the_program_goes_on() -> None:
    program = (
        "import sys; from lamella._record.output import log; from lamella._record.progress import ProgressBar\n"
        "bar = ProgressBar(0, 1, enabled=True); bar.say('a line'); bar.say('a line'); log(['a line'])\n"
        "sys.stderr.write('went on')"
    )
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, check=True)
    notice = b"lamella: the output cannot be written (No space left on device): its lines are left out.\n"
    assert ended.stderr == notice + b"went on"


def test_a_result_on_a_full_disk_is_an_error() -> None:
    command = [sys.executable, "-m", "lamella", "train", "--print-config"]
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    error = b"lamella: error: Expected to write to standard output, got No space left on device.\n"
    assert (ended.returncode, ended.stderr) == (2, error)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_held_back_for_a_full_disk_leaves_the_exit_code(stream: str) -> None:
    program = (
        "import sys; import lamella.__main__ as program\n"
        f"sys.{stream}.reconfigure(line_buffering=False, write_through=False)\n"
        f"program._main = lambda: sys.{stream}.write('part of a line') and 3\n"
        "sys.exit(program.main())"
    )
    with open("/dev/full", "w", encoding="utf-8") as full:
        stdout, stderr = (full if name == stream else subprocess.PIPE for name in ("stdout", "stderr"))
        ended = subprocess.run([sys.executable, "-c", program], stdout=stdout, stderr=stderr, check=False)
    assert ended.returncode == 3


def test_closed_outputs_are_opened_for_a_program_and_its_workers() -> None:
    program = (
        "import subprocess, sys; from lamella._record.output import open_closed_outputs\n"
        "open_closed_outputs(); print('a line', flush=True); print('an error', file=sys.stderr, flush=True)\n"
        "sys.exit(subprocess.run(['echo', 'a line']).returncode)"
    )
    command = f'exec "{sys.executable}" -c "$0" >&- 2>&-'
    assert subprocess.run(["sh", "-c", command, program], check=False).returncode == 0
