"""Commands import what they run and nothing more: help comes without torch, checkpoints without transformers."""

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch

import lamella
from lamella._command import ckpt_options
from lamella_convert import MtpLayer, Target

HEAVY = ("torch", "transformers", "matplotlib", "tokenizers", "numpy")
OF_TRAINING = (
    "transformers",
    "matplotlib",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor",
    "lamella_engine",
    "lamella_optim",
)


def test_the_datasets_package_is_installed_where_its_tests_would_skip() -> None:
    assert importlib.util.find_spec("datasets") is not None  # in the sessions that run unmarked tests


def imported(*commands: Sequence[str], code: int = 0) -> set[str]:
    """The modules that a process has imported when it has run some commands."""
    program = (
        "import json, sys\nfrom lamella.cli import main\ncodes = []\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    try:\n        codes.append(main(argv))\n    except SystemExit as left:\n        codes.append(left.code)\n"
        "print(json.dumps([codes, *sys.modules]), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    codes, *modules = json.loads(done.stderr.splitlines()[-1])
    assert codes == [code] * len(commands), done.stderr
    return set(modules)


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["ckpt", "--help"],
        ["ckpt", "convert", "--help"],
        ["overlap-report", "--help"],
        ["export", "--help"],
        ["generate", "--help"],
        ["eval", "--help"],
        ["run", "--help"],
    ],
    ids=" ".join,
)
def test_help_and_version_import_nothing_heavy(argv: list[str]) -> None:
    assert imported(argv).isdisjoint(HEAVY)


@pytest.mark.parametrize("argv", [[], ["trian"], ["train", "--stesp", "3"], ["ckpt", "inpsect"]], ids=" ".join)
def test_a_refused_command_imports_no_heavy_package(argv: list[str]) -> None:
    assert imported(argv, code=2).isdisjoint(HEAVY)


def test_commands_on_checkpoints_import_nothing_that_trains(tmp_path: Path) -> None:
    file, other = str(tmp_path / "a.pt"), str(tmp_path / "b")
    torch.save({"weight": torch.ones(3)}, file)
    inspect, verify = ["ckpt", "inspect", file], ["ckpt", "verify", file]
    convert, diff = ["ckpt", "convert", file, other, "--to", "dcp"], ["ckpt", "diff", file, other]
    assert imported(inspect, verify, convert, diff).isdisjoint(OF_TRAINING)


def test_lamella_imports_its_names_lazily_and_changes_no_optimizer_on_import() -> None:
    program = (
        "import sys, lamella\nassert 'torch' not in sys.modules\nfrom lamella import Config\n"
        "assert 'torch' not in sys.modules\nfrom lamella import *\nfully_shard, train, save\n"
        "import lamella._training.trainer, lamella_engine, lamella_optim\n"
        "from lamella_engine._optimizer_hooks import BEFORE_STEP\n"
        "assert lamella.fully_shard is lamella_engine.fully_shard\n"
        "print(BEFORE_STEP['view'].__module__)\nlamella_optim.install()\nprint(BEFORE_STEP['view'].__module__)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert process.stdout.split() == ["lamella_engine._optimizer_hooks", "lamella_optim._plain"]


def test_the_package_has_its_names() -> None:
    for name in lamella.__all__:
        assert getattr(lamella, name) is not None and name in dir(lamella)
    with pytest.raises(AttributeError, match=r"module 'lamella' has no attribute 'fully_sahrd'"):
        _ = lamella.fully_sahrd  # type: ignore[attr-defined]


def test_type_checkers_see_the_lazy_names_of_lamella() -> None:
    tree = ast.parse(Path(lamella.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (alias.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {(name, module) for module, names in lamella._NAMES.items() for name in names}


def test_ckpt_options_offer_the_targets_and_mtp_layers_of_convert() -> None:
    assert get_args(Target) == ckpt_options.TARGETS
    assert get_args(MtpLayer) == ckpt_options.MTP_LAYERS
