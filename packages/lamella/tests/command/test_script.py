"""`lamella run`: a program written for FSDP2 runs unchanged, sharded by lamella."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lamella.cli import main

PROGRAM = """
    import atexit, os, sys
    import torch
    import torch.distributed as dist
    from helper import width
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = torch.nn.Linear(width, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # before sharding, as some libraries do
    fully_shard(model)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    report = open(f"rank-{os.environ['RANK']}.txt", "w")  # two ranks' prints would mingle
    print(__name__, type(model).__mro__[1].__module__.split(".")[0], sys.argv[1:], file=report)
    atexit.register(print, "exit handler", file=report, flush=True)
    dist.destroy_process_group()
    sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    (tmp_path / "helper.py").write_text("width = 4\n", encoding="utf-8")
    return tmp_path


def run(folder: Path, *argv: str, ranks: int) -> "subprocess.CompletedProcess[str]":
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "lamella", "run", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("program", [["program.py"], ["-m", "program"]], ids=["script", "module"])
def test_a_program_for_fsdp2_is_sharded_by_lamella_and_gets_its_arguments(folder: Path, program: list[str]) -> None:
    ended = run(folder, *program, "-m", "--lr", "0", ranks=2)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        lines = (folder / f"rank-{rank}.txt").read_text(encoding="utf-8").splitlines()
        assert lines == ["__main__ lamella_engine ['-m', '--lr', '0']", "exit handler"]


def test_the_exit_code_is_the_programs(folder: Path) -> None:
    program = "import sys; sys.exit(7)"
    (folder / "failing.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "lamella", "run", "failing.py"]
    assert subprocess.run(command, cwd=folder, check=False, timeout=120).returncode == 7


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["absent.py"], "Expected the file of a Python script, got 'absent.py'. Pass -m before the name of a module."),
        (["-m", "absent.module"], "Expected a module that Python finds after -m, got 'absent.module'."),
    ],
    ids=["script", "module"],
)
def test_an_absent_program_is_refused_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *argv]) == 2
    assert capsys.readouterr().err == f"lamella: error: {message}\n"


TRAINER_PROGRAM = """
    from transformers.trainer import DEFAULT_CALLBACKS

    print([vars(callback) for callback in DEFAULT_CALLBACKS[1:]])
"""


def settings_of(folder: Path, *options: str) -> str:
    (folder / "trainer.py").write_text(textwrap.dedent(TRAINER_PROGRAM), encoding="utf-8")
    command = [sys.executable, "-m", "lamella", "run", *options, "trainer.py"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return ended.stdout if ended.returncode == 0 else ended.stderr


def test_options_before_the_script_give_trainers_a_callback(folder: Path) -> None:
    settings = settings_of(folder, "--late-gradients", "--keep-budget", "1KiB", "--profile", "2")
    for expected in ("'_overlap': True", "'_late_gradients': True", "'_keep_budget': 1024", "profiled_steps': 2"):
        assert expected in settings
    assert settings_of(folder) == "[]\n"


def test_a_keep_budget_that_is_no_size_is_refused_in_one_line(folder: Path) -> None:
    message = "Expected --keep-budget to be a size such as 2GiB or 500MiB, got 'much'."
    assert settings_of(folder, "--keep-budget", "much") == f"lamella: error: {message}\n"
