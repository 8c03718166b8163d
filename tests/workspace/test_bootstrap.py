"""`./dev` from a bare machine to a session: the interpreter that PYTHON names, or one line with the reason for none."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands in for a Python of any version, so that a single Python is enough: the fake nox prints its Python's version.
FAKE = """#!/bin/sh
echo "$*" | head -n 1 >>"$0.log"
case "$1 $2" in
    "-m venv")
        mkdir -p "$4/bin"
        printf '#!/bin/sh\\nexit 0\\n' >"$4/bin/python"
        printf '#!/bin/sh\\necho "nox of {version} in $PYTHON, staleness $NOX_ENABLE_STALENESS_CHECK"\\n' >"$4/bin/nox"
        chmod +x "$4/bin/python" "$4/bin/nox" ;;
    "-c "*) printf '%s\\n' "$(readlink -f "$0")" /usr/{version} {version} ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("dev", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def interpreter(folder: Path, version: str, text: str = FAKE) -> Path:
    stand_in = folder / f"python{version}"
    stand_in.write_text(text.replace("{version}", version))
    stand_in.chmod(0o755)
    return stand_in


def dev(folder: Path, python: Path | str, *argv: str, code: int = 0) -> str:
    """The output of `./dev`, or the error output if `./dev` fails."""
    environment = {**os.environ, "PYTHON": str(python)}
    run = subprocess.run(
        [folder / "dev", *argv], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == code, run.stderr
    return run.stderr if code else run.stdout


def test_dev_makes_separate_tools_for_each_interpreter(folder: Path) -> None:
    one, other = interpreter(folder, "3.11.9"), interpreter(folder, "3.12.1")
    assert f"nox of 3.11.9 in {one}" in dev(folder, one, "lint")
    assert f"nox of 3.12.1 in {other}" in dev(folder, other, "lint")
    assert f"nox of 3.11.9 in {one}" in dev(folder, one, "lint")


def test_the_same_interpreter_keeps_its_tools_until_a_pin_moves(folder: Path) -> None:
    python = interpreter(folder, "3.12.1")
    num_environments = []
    for _ in range(2):
        dev(folder, python, "lint")
        num_environments.append(Path(f"{python}.log").read_text().count("-m venv"))
    with (folder / "constraints.txt").open("a") as pins:
        pins.write("another==1\n")
    dev(folder, python, "lint")
    assert [*num_environments, Path(f"{python}.log").read_text().count("-m venv")] == [1, 1, 2]


def test_sessions_get_an_absolute_path_and_environments_of_other_interpreters_are_remade(folder: Path) -> None:
    python = interpreter(folder, "3.12.1")
    assert dev(folder, "./python3.12.1", "train") == f"nox of 3.12.1 in {python}, staleness 1\n"


LISTING = """All sessions.

* tests -> Run the checks.
- unit(layout) -> Test one package (from its wheel).
- unit(engine) -> Test one package (from its wheel).
- gpu(1) -> Run tests on GPUs.
- docs -> Build the pages.

sessions marked with * are selected
"""


def test_without_a_session_each_is_listed_once_with_its_choices(folder: Path) -> None:
    (folder / "listing").write_text(LISTING)
    names = '"nox of {version} in $PYTHON, staleness $NOX_ENABLE_STALENESS_CHECK"'
    assert names in FAKE
    python = interpreter(folder, "3.12.1", FAKE.replace(f"echo {names}", f"cat {folder}/listing"))
    assert dev(folder, python).splitlines() == [
        *LISTING.splitlines()[:3],
        "- unit(layout | engine) -> Test one package (from its wheel).",
        *LISTING.splitlines()[5:],
    ]


def refusal(folder: Path, python: Path | str) -> str:
    [line] = dev(folder, python, "lint", code=1).splitlines()
    return line


def test_no_interpreter_at_all_is_one_line(folder: Path) -> None:
    line = refusal(folder, "python9.99")
    assert line.startswith("Expected PYTHON to be Python 3.11 or newer, got 'python9.99', which is no command here.")


def test_an_interpreter_without_venv_is_one_line(folder: Path) -> None:
    lacks = FAKE.replace('mkdir -p "$4/bin"', "echo long; echo 'ensurepip is not available' >&2; exit 1")
    line = refusal(folder, interpreter(folder, "3.12.1", lacks))
    assert "got 'ensurepip is not available'" in line and "python3-venv" in line


def test_an_index_that_cannot_be_reached_is_one_line(folder: Path) -> None:
    offline = FAKE.replace("exit 0", "echo many; echo lines; echo No matching distribution found for nox; exit 1")
    line = refusal(folder, interpreter(folder, "3.12.1", offline))
    assert "got 'No matching distribution found for nox'" in line and "tools/here.py" in line


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 || exit 1\n')
    old.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(old)}
    run = subprocess.run([ROOT / "dev"], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "Expected PYTHON to be Python 3.11 or newer" in run.stderr
    assert "Python 3.9.2" in run.stderr
