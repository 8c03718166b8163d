"""The tool that runs PyTorch's own test files on both implementations."""

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

THEIRS = """
import os, time, pytest

def test_passes(): ...
def test_differs(): assert os.environ["TORCH_TESTS_IMPLEMENTATION"] == "torch"
def test_takes_the_process_down(): os._exit(3)
def test_is_skipped(): pytest.skip("a reason")
def test_runs_all_the_same(): ...
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_tests", TOOLS / "torch_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch_tests", module)
    spec.loader.exec_module(module)
    return module


def _run(tool: ModuleType, folder: Path, implementation: str, text: str, timeout_s: float = 60.0) -> dict[str, str]:
    file = folder / "test_theirs.py"
    file.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(TOOLS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = tool.FileRun(file, implementation, timeout_s, time.monotonic() + 60.0).finish(environment, [])
    return {test: f"{outcome.word} {outcome.reason}".strip() for test, outcome in run.outcomes.items()}


def test_every_test_has_an_outcome_though_a_test_takes_the_process_down(tool: ModuleType, tmp_path: Path) -> None:
    assert _run(tool, tmp_path, "lamella", THEIRS) == {
        "test_passes": "passed",
        "test_differs": "failed AssertionError: assert 'lamella' == 'torch'",
        "test_takes_the_process_down": "stopped ran past the time limit or ended the process",
        "test_is_skipped": "skipped a reason",
        "test_runs_all_the_same": "passed",
    }


def test_a_test_that_never_ends_is_stopped(tool: ModuleType, tmp_path: Path) -> None:
    endless = "import time\ndef test_endless(): time.sleep(600)\ndef test_passes(): ..."
    outcomes = _run(tool, tmp_path, "torch", endless, timeout_s=5.0)
    assert outcomes["test_endless"].startswith("stopped")
    assert outcomes["test_passes"] == "passed"


def test_a_file_that_cannot_be_imported_says_why(tool: ModuleType, tmp_path: Path) -> None:
    outcomes = _run(tool, tmp_path, "torch", "import a_module_that_is_not_there")
    assert outcomes == {"(the file)": "failed ModuleNotFoundError: No module named 'a_module_that_is_not_there'"}


def test_only_a_test_that_torch_passes_counts(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    passed, failed = tool.Outcome("passed"), tool.Outcome("failed", "KeyError")

    def is_same(ends: dict[str, tuple[object, object]]) -> bool:
        runs = [tool.FileRun(Path(), name, 0.0, 0.0) for name in ("torch", "lamella")]
        for test, pair in ends.items():
            for run, end in zip(runs, pair, strict=True):
                run.outcomes[test] = end
        passes: bool = tool._print_table("test_theirs", runs)
        return passes

    assert is_same({"test_a": (passed, passed), "test_b": (failed, failed)})
    assert not is_same({"test_a": (passed, failed)})
    assert "test_a: passed | failed KeyError" in capsys.readouterr().out
