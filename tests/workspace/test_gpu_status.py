"""Runs on GPUs record themselves, and the page shows their records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORT = '<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2"/></testsuites>'


def _run(workspace: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(workspace / "tools" / "gpu_status.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _record(
    workspace: Path, into: Path, *, session: str = "gpu(2)", selection: str = "", date: str = "", num_parts: int = 1
) -> None:
    """Write a session's record without torch, with constant answers to the questions about hardware."""
    (into.parent / "report.xml").write_text(REPORT)
    program = f"""
import sys; sys.path.insert(0, {str(workspace / "tools")!r})
from pathlib import Path
import gpu_status
gpu_status._ask = lambda question: "2 x NVIDIA H200" if "cuda" in question else "2.11.0"
gpu_status.record([Path({str(into.parent / "report.xml")!r})] * {num_parts}, Path({str(into)!r}), session={session!r},
    folder=gpu_status.ROOT / "integration" / "tests", selection={selection!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    if date:
        *lines, last = into.read_text().splitlines()
        into.write_text("\n".join([*lines, json.dumps({**json.loads(last), "date": date})]) + "\n")


def test_the_page_shows_the_records() -> None:
    run = _run(ROOT, "--check")
    assert run.returncode == 0, run.stdout


def test_a_record_is_taken_over_and_a_page_without_it_is_old(copy_of_the_workspace: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    _record(copy_of_the_workspace, runs)
    page = copy_of_the_workspace / "docs" / "reference" / "gpu-status.md"
    assert _run(copy_of_the_workspace, str(runs)).returncode == 0
    assert "| gpu(2) | integration/tests | 3 | 2 | 2 |" in page.read_text()
    assert _run(copy_of_the_workspace, "--check").returncode == 0
    page.write_text(page.read_text().replace("| 3 | 2 | 2 |", "| 5 | 0 | 2 |"))
    assert _run(copy_of_the_workspace, "--check").returncode == 1


def test_a_run_of_two_parts_is_one_record(copy_of_the_workspace: Path, tmp_path: Path) -> None:
    _record(copy_of_the_workspace, tmp_path / "runs.jsonl", num_parts=2)
    [line] = (tmp_path / "runs.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["passed"], record["failed"], record["skipped"]) == (6, 4, 4)


def test_the_latest_run_counts_and_a_later_selection_has_a_row_of_its_own(
    copy_of_the_workspace: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs.jsonl"
    _record(copy_of_the_workspace, runs, session="gpu(9)", date="2026-01-02")
    _record(copy_of_the_workspace, runs, session="gpu(9)", date="2026-01-01")
    _record(copy_of_the_workspace, runs, session="gpu(9)", selection="-k casts", date="2026-01-01")
    _record(copy_of_the_workspace, runs, session="gpu(9)", selection="-k norms", date="2026-01-03")
    assert _run(copy_of_the_workspace, str(runs)).returncode == 0
    page = (copy_of_the_workspace / "docs" / "reference" / "gpu-status.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| gpu(9)")]
    assert len(rows) == 2
    assert "2026-01-02" in rows[0] and "-k norms" in rows[1]


@pytest.mark.parametrize("argument", ["nowhere.jsonl"])
def test_a_file_that_is_not_there_is_refused_by_name(copy_of_the_workspace: Path, argument: str) -> None:
    run = _run(copy_of_the_workspace, argument)
    assert run.returncode == 1 and argument in run.stderr
