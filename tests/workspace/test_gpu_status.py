"""Runs on GPUs record themselves, and the page shows their records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTCOMES = ["passed", "passed", "passed", "failed", "failed", "skipped", "skipped", "not run"]


def _run(workspace: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(workspace / "tools" / "gpu_status.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _record(into: Path, *, session: str = "gpu(2)", selection: str = "", date: str = "2026-01-01") -> None:
    """Write the outcomes of a session's tests."""
    run = {"session": session, "folder": "integration/tests", "selection": selection, "date": date}
    run |= {"commit": f"commit of {date}", "hardware": "2 x NVIDIA H200", "torch": "2.11.0"}
    lines = [json.dumps({**run, "test": f"test_{i}", "outcome": outcome}) for i, outcome in enumerate(OUTCOMES)]
    into.write_text((into.read_text() if into.is_file() else "") + "\n".join(lines) + "\n")


def test_the_page_shows_the_records() -> None:
    run = _run(ROOT, "--check")
    assert run.returncode == 0, run.stdout


def test_a_gpu_record_enters_the_status_page_and_an_altered_page_is_outdated(
    copy_of_the_workspace: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs.jsonl"
    _record(runs, date="9999-01-01")
    runs.write_text(runs.read_text() + '{"session": "gpu(2)", "fol')  # as of a process that was killed
    page = copy_of_the_workspace / "docs" / "reference" / "gpu-status.md"
    assert _run(copy_of_the_workspace, str(runs)).returncode == 0
    assert "| gpu(2) | integration/tests | 3 | 2 | 2 | 1 | 9999-01-01 |" in page.read_text()
    assert _run(copy_of_the_workspace, "--check").returncode == 0
    page.write_text(page.read_text().replace("| 3 | 2 | 2 | 1 |", "| 5 | 0 | 2 | 1 |"))
    assert _run(copy_of_the_workspace, "--check").returncode == 1


def test_the_latest_run_counts_and_a_later_selection_has_a_row_of_its_own(
    copy_of_the_workspace: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs.jsonl"
    _record(runs, session="gpu(9)", date="2026-01-02")
    _record(runs, session="gpu(9)", date="2026-01-01")
    _record(runs, session="gpu(9)", selection="-k casts", date="2026-01-01")
    _record(runs, session="gpu(9)", selection="-k norms", date="2026-01-03")
    assert _run(copy_of_the_workspace, str(runs)).returncode == 0
    page = (copy_of_the_workspace / "docs" / "reference" / "gpu-status.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| gpu(9)")]
    assert len(rows) == 2
    assert "2026-01-02" in rows[0] and "-k norms" in rows[1]


@pytest.mark.parametrize("argument", ["nowhere.jsonl"])
def test_a_missing_gpu_record_file_is_refused_by_name(copy_of_the_workspace: Path, argument: str) -> None:
    run = _run(copy_of_the_workspace, argument)
    assert run.returncode == 1 and argument in run.stderr
