"""`--config`: files on top of their bases, and names in Python files."""

import sys
from pathlib import Path

import pytest

from lamella import ConfigError
from lamella._settings.config import resolve
from lamella._settings.files import read_config
from lamella.cli import config_of, parse

RUNS = """
from dataclasses import replace

import lamella
from sizes_beside import STEPS

small = {"model": {"name": "llama-small"}, "optim": {"steps": STEPS}, "data": {"paths": ["a", "b"]}}
typed = lamella.Config(model=lamella.ModelConfig(name="llama-small"), optim=lamella.OptimConfig(steps=8))
wrong = {"optim": {"learning_rate": 1}}
number = 3


def wide():
    return {**small, "run": {"seed": 4}}


def broken():
    raise RuntimeError("out of\\nluck")
"""


def test_a_table_in_the_place_of_a_list_has_a_text_a_name(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[data]\nvalidation_paths = {wiki = "w.jsonl", code = ["a", "b"]}\n[optim]\n'
        "optimizer_options = {momentum = 0.9, nesterov = true, betas = [0.5, 0.6]}\n"
    )
    groups = read_config(str(tmp_path / "run.toml"))
    assert groups["data"]["validation_paths"] == ("wiki=w.jsonl", "code=a", "code=b")
    assert groups["optim"]["optimizer_options"] == ("momentum=0.9", "nesterov=true", "betas=[0.5, 0.6]")


@pytest.mark.parametrize("field", ["paths", "validation_paths"])
@pytest.mark.parametrize("name", ["a+b", "", "wiki.de", "a=b", "\u00e9"])
def test_a_name_of_paths_with_another_character_is_refused(tmp_path: Path, field: str, name: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[data.{field}]\nwiki = "w.txt"\n"{name}" = "d/s.txt"\n', encoding="utf-8")
    expected = f"Expected names of ASCII letters, digits, '-' and '_' in [data.{field}] of {str(path)!r}, got {name!r}."
    assert refusal(path) == f"{expected} Rename it."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs.py").write_text(RUNS, encoding="utf-8")
    (tmp_path / "sizes_beside.py").write_text("STEPS = 7\n", encoding="utf-8")
    return tmp_path


def written(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.toml").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")


def refusal(source: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(str(source))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_config_file_overrides_its_chain_of_bases(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    written(
        tmp_path,
        **{
            "shared/all": "[model]\nname = 'llama-small'\n[optim]\nlr = 1e-3\nepochs = 2\n[run]\nseed = 1\n",
            "shared/large": "base = 'all.toml'\n[optim]\nlr = 2e-3\n",
            "mine": "base = 'shared/large.toml'\n[optim]\nsteps = 9\n",
        },
    )
    config = resolve(read_config(str(tmp_path / "mine.toml")))
    assert (config.optim.lr, config.run.seed, config.optim.steps, config.optim.epochs) == (2e-3, 1, 9, None)
    arguments = parse(["train", "--config", str(tmp_path / "mine.toml"), "--lr", "3e-3"])
    assert config_of(arguments).optim.lr == 3e-3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base = 'mine.toml'", "to be another file, got 'mine.toml', which leads back to it."),
        ("base = 'round.toml'", "to be another file, got 'mine.toml', which leads back to it."),
        ("base = 'absent.toml'", "absent.toml', got No such file or directory."),
        ("base = 3", "to be the path of a file, got 3."),
        ("base = 'wrong.toml'", "wrong.toml', got 'stepps'. Did you mean 'steps'?"),
        ("[optim]\nlearning_rate = 1", "mine.toml', got 'learning_rate'. Did you mean 'lr' in [optim]?"),
    ],
)
def test_a_base_that_cannot_be_read_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    written(tmp_path, mine=text, round="base = 'mine.toml'", wrong="[optim]\nstepps = 1")
    assert expected in refusal(tmp_path / "mine.toml")


def test_a_python_file_gives_settings_by_a_variable_or_a_function(folder: Path) -> None:
    path = list(sys.path)
    small, wide, typed = (resolve(read_config(f"{folder / 'runs.py'}:{name}")) for name in ("small", "wide", "typed"))
    assert small.optim.steps == 7 and small.data.paths == ("a", "b")
    assert (wide.run.seed, wide.optim.steps, typed.optim.steps) == (4, 7, 8)
    assert sys.path == path
    arguments = parse(["train", "--config", f"{folder / 'runs.py'}:wide", "--steps", "3"])
    assert config_of(arguments).optim.steps == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("runs.py", "Expected a name in the Python file, as --config {folder}/runs.py:NAME, got"),
        ("runs.py:absent", "got 'absent', which it lacks."),
        ("runs.py:number", "Expected a lamella.Config or groups of settings from '{folder}/runs.py:number', got 3."),
        ("runs.py:broken", "got RuntimeError: out of luck."),
        ("runs.py:wrong", "runs.py:wrong', got 'learning_rate'. Did you mean 'lr' in [optim]?"),
        ("absent.py:x", "Expected a Python file in '{folder}/absent.py', got none."),
        ("odd.py:x", "got SyntaxError: "),
    ],
)
def test_a_name_that_gives_no_settings_is_one_line(folder: Path, name: str, expected: str) -> None:
    (folder / "odd.py").write_text("x = (", encoding="utf-8")
    assert expected.format(folder=folder) in refusal(folder / name)
