"""`tools/same_tree.py` tells commits that change names from commits that change more."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "same_tree.py"
BEFORE = '''"""A module."""

from os import path
from typing import Any, NamedTuple


def total(given: list[int], *, start: int = 0) -> int:
    """The sum of what is given."""
    made = start  # what is returned
    for each in given:
        made += each
    return made


def use(patched: Any) -> tuple[int, bool]:
    patched("module.total", path.exists)
    return total(given=[1, 2], start=3), isinstance(patched, NamedTuple)
'''
RENAMED = (
    BEFORE.replace("given", "numbers").replace("each", "number").replace("total", "sum_of").replace("made", "sums")
)


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def _compared(folder: Path, before: dict[str, str], after: dict[str, str], *arguments: str) -> tuple[int, str]:
    """The tool's exit status and output for a repository of two commits."""
    _git(folder, "init", "-q")
    for files in (before, after):
        for old in folder.glob("*.py"):
            old.unlink()
        for name, text in files.items():
            (folder / name).write_text(text)
        _git(folder, "add", "-A")
        _git(folder, "commit", "-qm", "a commit")
    command = [sys.executable, str(TOOL), "HEAD~1", *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return run.returncode, run.stdout


def test_renamed_variables_arguments_functions_and_strings_that_spell_them_pass(tmp_path: Path) -> None:
    assert _compared(tmp_path, {"module.py": BEFORE}, {"module.py": RENAMED}) == (
        0,
        "1 files differ, 0 in more than names.\n",
    )


def test_a_string_that_stays_passes_where_a_name_of_its_letters_goes(tmp_path: Path) -> None:
    before = BEFORE + "made = 'made'\n"
    after = before.replace("made", "sums").replace("'sums'", "'made'")
    status, output = _compared(tmp_path, {"module.py": before}, {"module.py": after})
    assert status == 0, output


def test_a_file_that_moves_is_compared_with_the_old_one(tmp_path: Path) -> None:
    moved = BEFORE.replace("made", "partial_sum").replace('"module.', '"sums.')
    status, output = _compared(tmp_path, {"module.py": BEFORE}, {"sums.py": moved}, "HEAD")
    assert status == 0, output


def test_imports_that_a_rename_sorts_anew_pass(tmp_path: Path) -> None:
    sorted_anew = BEFORE.replace(
        "from os import path\nfrom typing import Any, NamedTuple",
        "from typing import NamedTuple, TypeAlias\nfrom zlib import path",
    )
    status, output = _compared(tmp_path, {"module.py": BEFORE}, {"module.py": sorted_anew})
    assert status == 0, output


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("sums += number", "sums -= number", 11),
        ("start: int = 0", "start: int = 1", 7),
        ("[1, 2], start=3", "[2, 1], start=3", 17),
        ("start=3), ", "start=3, more=4), ", 17),
        ('"module.sum_of"', '"other.sum_of"', 16),
        ("    return sums\n", "", 7),
        ("NamedTuple\n", "NamedTuple, Self\n", 4),
    ],
)
def test_any_other_change_fails_and_is_shown(tmp_path: Path, old: str, new: str, line: int) -> None:
    changed = RENAMED.replace(old, new)
    assert changed != RENAMED
    status, output = _compared(tmp_path, {"module.py": BEFORE}, {"module.py": changed})
    assert status == 1 and f"module.py:{line}: " in output, output


def test_a_file_without_a_counterpart_fails_unless_left_out_of_the_paths(tmp_path: Path) -> None:
    after = {"module.py": RENAMED, "other.py": "number = 1\n"}
    status, output = _compared(tmp_path, {"module.py": BEFORE}, after)
    assert status == 1 and "other.py: in one commit only" in output
    command = [sys.executable, str(TOOL), "HEAD~1", "HEAD", "module.py"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_a_base_that_is_no_commit_is_refused(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    run = subprocess.run([sys.executable, str(TOOL), "none"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "Expected a commit as BASE, got 'none'" in run.stderr


def test_two_variables_that_become_one_are_told(tmp_path: Path) -> None:
    after = BEFORE.replace("made", "each")
    status, output = _compared(tmp_path, {"module.py": BEFORE}, {"module.py": after})
    assert (status, output) == (
        1,
        "module.py:7: each stands for each and made\n1 files differ, 1 in more than names.\n",
    )


def test_a_name_may_stand_for_two_in_two_scopes(tmp_path: Path) -> None:
    before = BEFORE + "def squares(given: list[int]) -> list[int]:\n    return [each**2 for each in given]\n"
    status, output = _compared(
        tmp_path, {"module.py": before}, {"module.py": before.replace("each**2 for each", "made**2 for made")}
    )
    assert status == 0, output
