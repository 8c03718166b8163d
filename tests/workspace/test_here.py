"""The runner for machines without an environment fails if the tests of any folder fail."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CRASHED, INTERRUPTED, NO_TESTS = -11, 2, 5


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("here")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, CRASHED, NO_TESTS], CRASHED),
        ([CRASHED, 0], CRASHED),
        ([0, 1, 0], 1),
        ([NO_TESTS, INTERRUPTED, 1], INTERRUPTED),
        ([0, NO_TESTS], 0),
        ([NO_TESTS, NO_TESTS], NO_TESTS),
        ([], NO_TESTS),
    ],
)
def test_the_first_folder_that_fails_is_the_result(
    runner: ModuleType,
    codes: list[int],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [tmp_path / f"folder{i}" for i in range(len(codes))]
    for folder in folders:
        folder.mkdir()
        (folder / "test_one.py").write_text("pytest.mark.gpu9\n")
    by_folder = dict(zip(folders, codes, strict=True))
    monkeypatch.setattr(runner, "_pytest_in", lambda marker, args: by_folder[Path(args[-1]).parent])
    assert runner._pytest("gpu9", [], session="gpu(9)", folders=folders) == expected
    messages = [f"pytest in {folder} was killed by signal 11." for folder, code in by_folder.items() if code == CRASHED]
    assert capsys.readouterr().err.splitlines() == messages


@pytest.mark.parametrize(
    ("args", "markers", "expected"),
    [
        (["-n", "4", "-q"], ["alone"], [("gpu2 and not alone", "-n 4 -q"), ("gpu2 and alone", "-n 0 -q")]),
        (["-n", "4", "-q"], [], [("gpu2", "-n 4 -q")]),
        (["-q"], ["alone"], [("gpu2", "-q")]),
        (["-q"], ["hybrid"], [("gpu2 and not hybrid", "-q")]),
    ],
)
def test_tests_that_need_the_gpu_alone_run_after_those_of_several_processes(
    runner: ModuleType, args: list[str], markers: list[str], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "test_one.py").write_text("".join(f"pytest.mark.{marker}\n" for marker in ["gpu2", *markers]))
    assert [(marker, " ".join(arguments)) for marker, arguments in runner._parts("gpu2", tmp_path, args)] == expected


def test_installed_versions_that_differ_from_pins_are_named(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        try:
            return {"torch": "2.11.0+cu130", "mamba-ssm": "2.4.0"}[name]
        except KeyError:
            raise runner.metadata.PackageNotFoundError from None

    monkeypatch.setattr(runner.metadata, "version", version)
    pins = ["torch==2.11.0", "mamba-ssm==2.3.2.post1", "deepspeed==0.19.8"]
    assert list(runner._differences(pins)) == ["mamba-ssm 2.4.0, not 2.3.2.post1"]


@pytest.mark.parametrize("arguments", [[], ["-q"], ["nowhere/runs.jsonl"]])
def test_status_without_a_file_is_refused(arguments: list[str]) -> None:
    command = [sys.executable, str(ROOT / "tools" / "here.py"), "soak", "--status", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2 and re.match("Expected a file .*after --status", run.stderr)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["-k", "docs"], {"a": ["{root}/a", "-k", "docs"], "b": ["{root}/b", "-k", "docs"]}),
        (["b/test_one.py::test", "-q"], {"b": ["b/test_one.py::test", "-q"]}),
        (["-k", "a/missing"], {"a": ["{root}/a", "-k", "a/missing"], "b": ["{root}/b", "-k", "a/missing"]}),
    ],
)
def test_a_path_runs_in_its_own_folder_alone(
    runner: ModuleType, args: list[str], expected: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "b", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_one.py").touch()
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    selected = runner._selected([tmp_path / "a", tmp_path / "b"], args)
    assert selected == {tmp_path / name: [arg.format(root=tmp_path) for arg in its] for name, its in expected.items()}


def test_packages_from_the_sources_announce_their_entry_points() -> None:
    program = "from importlib.metadata import entry_points; print(*entry_points(group='lamella.adapters').names)"
    command = [sys.executable, "-S", str(ROOT / "tools" / "here.py"), "python", "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {"mamba2", "qwen3_5_text"} <= set(done.stdout.split())


def test_the_tests_of_clients_run_in_their_session_alone(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, list[str]]] = []

    def run(marker: str, args: list[str]) -> int:
        runs.append((marker, args))
        return 0

    monkeypatch.setattr(runner, "_require_gpus", lambda num_gpus: 0)
    monkeypatch.setattr(runner, "_pytest_in", run)
    # Its own asks torch, which the environment of these tests does not have.
    monkeypatch.setattr(runner.gpu_status, "description", lambda **_: {})
    assert runner.main(["clients", "--status", str(tmp_path / "runs.jsonl"), "-q"]) == 0
    assert runner.main(["gpu", "2", "integration/tests"]) == 0
    (marker, clients), (_, others) = runs
    test, ignore = str(runner.CLIENTS / "test_accelerate.py"), f"--ignore={runner.CLIENTS}"
    assert marker == "gpu2" and test in clients and ignore not in clients
    assert test not in others and ignore in others
    assert clients.index("-W") < clients.index(test)
    assert runner._selection(["-q", "-W", "error", "--durations=8", "--maxfail=9"]) == ""


def test_files_without_tests_of_the_session_are_not_imported(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {"test_gpu.py": "pytest.mark.te", "test_cpu.py": "", "clients/test_gpu.py": "pytest.mark.te"}
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(runner, "CLIENTS", tmp_path / "clients")
    runs: list[list[str]] = []

    def run(_marker: str, args: list[str]) -> int:
        runs.append(args)
        return 0

    monkeypatch.setattr(runner, "_pytest_in", run)
    assert runner._pytest("te", ["-q"], session="te", folders=[tmp_path, tmp_path / "clients"]) == 0
    assert [[arg for arg in args if arg.endswith(".py")] for args in runs] == [[str(tmp_path / "test_gpu.py")]]
