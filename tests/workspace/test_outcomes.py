"""A session that is cut off keeps its outcomes, and goes on with the tests that have none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import os, pytest
def test_a(): pass
def test_b(): assert "MENDED" in os.environ
def test_c(): pytest.skip("no")
def test_d(): pytest.xfail("known") if "MENDED" in os.environ else os._exit(1)
@pytest.fixture
def broken():
    yield
    assert "MENDED" in os.environ
def test_e(broken): pass
"""
RUN = {"session": "gpu(2)", "folder": "tests", "selection": "", "date": "2026-01-01", "commit": "0123456"}


def _run(folder: Path, *args: str, commit: str = "0123456") -> int:
    plugin = ["-p", "outcomes", "--outcomes", str(folder / "runs.jsonl")]
    plugin += ["--outcomes-of", json.dumps({**RUN, "commit": commit})]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *args, "test_all.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True).returncode


def _outcomes(folder: Path, commit: str = "0123456") -> dict[str, str]:
    lines = (folder / "runs.jsonl").read_text().splitlines()
    of_commit = [json.loads(line) for line in lines if f'"commit": "{commit}"' in line]
    return {line["test"].removeprefix("test_all.py::test_"): line["outcome"] for line in of_commit}


@pytest.mark.parametrize("processes", [[], ["-p", "xdist", "-n", "2"]], ids=["one process", "two processes"])
def test_a_second_command_runs_the_tests_without_a_good_outcome(
    processes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_all.py").write_text(TESTS)
    _run(tmp_path, *processes, "--deselect", "test_all.py::test_d")
    first = {"a": "passed", "b": "failed", "c": "skipped", "e": "failed"}
    assert _outcomes(tmp_path) == first
    _run(tmp_path, *processes)  # test_d ends its process, and pytest-xdist starts another
    assert _outcomes(tmp_path) == {**first, "d": "failed" if processes else "not run"}
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"session": "gpu(2)", "te')  # as of a process that was killed
    monkeypatch.setenv("MENDED", "1")
    assert _run(tmp_path, *processes) == 0
    mended = {"a": "passed", "b": "passed", "c": "skipped", "d": "skipped", "e": "passed"}
    assert _outcomes(tmp_path) == mended
    num_lines = len((tmp_path / "runs.jsonl").read_text().splitlines())
    assert _run(tmp_path, *processes) == 0
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == num_lines
    for commit in ("another", "another-dirty", "another-dirty"):
        num_lines = len((tmp_path / "runs.jsonl").read_text().splitlines())
        assert _run(tmp_path, *processes, commit=commit) == 0
        assert _outcomes(tmp_path, commit) == mended
        assert len((tmp_path / "runs.jsonl").read_text().splitlines()) > num_lines + len(mended)
