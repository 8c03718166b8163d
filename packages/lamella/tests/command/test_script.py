"""`lamella run`: a program written for FSDP2 runs unchanged, sharded by lamella."""

import os
import py_compile
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from lamella._command import script
from lamella._settings.options import ConfigError
from lamella.cli import main, parse

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
    if os.environ["WORLD_SIZE"] != "1":
        # Last. As the interpreter ends, a thread of gloo's may want it, and abort (pytorch PR 179291).
        atexit.register(os._exit, 0)
    atexit.register(print, "exit handler", file=report, flush=True)
    dist.destroy_process_group()
    sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    (tmp_path / "helper.py").write_text("width = 4\n", encoding="utf-8")
    return tmp_path


def assert_sharded_by_lamella(folder: Path, num_ranks: int, arguments: list[str]) -> None:
    for rank in range(num_ranks):
        lines = (folder / f"rank-{rank}.txt").read_text(encoding="utf-8").splitlines()
        assert lines == [f"__main__ lamella_engine {arguments}", "exit handler"]


def test_a_script_for_fsdp2_is_sharded_by_lamella_and_gets_its_arguments(folder: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "-m", "lamella", "run", "program.py", "-m", "--lr", "0"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert_sharded_by_lamella(folder, 2, ["-m", "--lr", "0"])


def test_so_is_a_module_and_the_exit_code_is_the_programs(folder: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has
    store_variables = {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", "lamella", "run", "-m", "program", "-m", "--lr", "7"]
    environment = os.environ | store_variables | {"RANK": "0", "WORLD_SIZE": "1"}
    assert subprocess.run(command, cwd=folder, env=environment, check=False, timeout=120).returncode == 7
    assert_sharded_by_lamella(folder, 1, ["-m", "--lr", "7"])


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs in this process, without lamella in FSDP2's place and with its own `__main__` afterwards."""
    monkeypatch.setattr("lamella_engine.install", lambda: None)
    monkeypatch.setattr("lamella_optim.install", lambda: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])


@pytest.mark.usefixtures("uninstalled")
def test_the_path_of_a_script_is_absolute_and_its_argument_as_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("import sys; print(__file__, sys.argv[0], __package__, __spec__)", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["run", "program.py"])
    assert capsys.readouterr().out == f"{tmp_path / 'program.py'} program.py None None\n"


@pytest.mark.usefixtures("uninstalled")
def test_a_zipped_program_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(path := tmp_path / "program.pyz", "w") as file:
        file.writestr("__main__.py", "print(__name__)")
    with pytest.raises(SystemExit):
        main(["run", str(path)])
    assert capsys.readouterr().out == "__main__\n"


@pytest.mark.usefixtures("uninstalled")
def test_a_compiled_program_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text("print(__name__)", encoding="utf-8")
    compiled = py_compile.compile(str(tmp_path / "program.py"), str(tmp_path / "program.pyc"))
    with pytest.raises(SystemExit):
        main(["run", str(compiled)])
    assert capsys.readouterr().out == "__main__\n"


@pytest.mark.usefixtures("uninstalled")
def test_the_classes_of_a_script_come_back_from_spawned_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # By this name such a process sends them.
    program = "import sys; print(sys.modules['__mp_main__'] is sys.modules['__main__'])"
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "program.py")])
    assert capsys.readouterr().out == "True\n"


@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, ConfigError])
def test_an_error_of_the_program_keeps_its_traceback(
    tmp_path: Path, error: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        f"from lamella import ConfigError\ndef load():\n    raise {error.__name__}('9 TiB')\nload()\n", encoding="utf-8"
    )
    with pytest.raises(error, match="9 TiB") as caught:
        main(["run", str(path)])
    assert [entry.name for entry in caught.traceback][-2:] == ["<module>", "load"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "The following arguments are required: SCRIPT. See `lamella run --help`."),
        (["absent.py"], "Expected the file of a Python script, got 'absent.py'. Pass -m before the name of a module."),
        (["-m", "absent.module"], "Expected a module that Python finds after -m, got 'absent.module'."),
    ],
    ids=["none", "script", "module"],
)
def test_an_absent_program_is_refused_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *argv]) == 2
    assert capsys.readouterr().err == f"lamella: error: {message}\n"


def callbacks_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[dict[str, object]]:
    """Settings of the callbacks that Trainers have by the options."""
    callbacks: list[object] = []
    monkeypatch.setattr("transformers.trainer.DEFAULT_CALLBACKS", callbacks)
    script._set_trainers(parse(["run", *options, "program.py", "--profile", "9"]))
    return [vars(callback) for callback in callbacks]


def test_options_before_the_script_give_trainers_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callbacks_of(monkeypatch) == []
    [late] = callbacks_of(monkeypatch, "--late-gradients", "--profile", "2", "--local-clipping")
    expected = {"_overlap": True, "_late_gradients": True, "_keep_budget": None, "_num_profiled_steps": 2}
    assert late == late | expected | {"_clips_local_shards": True}
    [keeping] = callbacks_of(monkeypatch, "--keep-budget", "1KiB")
    assert keeping == keeping | {"_overlap": False, "_late_gradients": False, "_keep_budget": 1024}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep-budget", "much"], "Expected --keep-budget to be a size such as 2GiB or 500MiB, got 'much'."),
        (["--profile", "-1"], "Expected --profile to be at least 0, got -1."),
    ],
)
def test_a_value_that_is_no_size_or_number_is_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        callbacks_of(monkeypatch, *options)
