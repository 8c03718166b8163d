"""`lamella run`: a program written for FSDP2, with lamella in FSDP2's place."""

import argparse
import os
import runpy
import sys
import zipfile
from importlib.util import MAGIC_NUMBER, find_spec
from io import open_code
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn

import lamella_engine
import lamella_optim
from lamella._settings.options import ConfigError
from lamella._settings.sizes import budget_nbytes

TRAINER_SETTINGS: Final = ("overlap", "late_gradients", "clips_local_shards", "keep_budget", "num_profiled_steps")


def prepare(arguments: argparse.Namespace) -> None:
    """Put lamella in FSDP2's place for a program.

    Raises:
        ConfigError: There is no such script or module, or an option of Trainers is refused.

    Effects: `lamella_engine.install` and `lamella_optim.install`, for the rest of the process; with an option of
        Trainers, a callback for all of them.
    """
    _check(arguments.program, is_module=arguments.is_module)
    lamella_engine.install()
    lamella_optim.install()
    _set_trainers(arguments)


def run(arguments: argparse.Namespace) -> NoReturn:
    """Run a script or a module as `python` would, after `prepare`, and end with its exit code.

    Raises:
        SystemExit: The program has ended: the interpreter's exit runs the program's exit handlers.
        BaseException: Any other end of the program.

    Effects: changes `sys.argv`, `sys.path` and `sys.modules` as `python` sets them for the program.
    """
    program = arguments.program
    sys.argv = [program, *arguments.arguments]
    if arguments.is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif zipfile.is_zipfile(program) or _is_compiled(program):
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        _run_file(program)
    raise SystemExit(0)


def _run_file(program: str) -> None:
    """Run a script as the module `__main__`."""
    # Not by runpy, which takes one path for both: `python` makes `__file__` absolute, for programs that change their
    # directory, and leaves `sys.argv[0]` as it was given.
    module = ModuleType("__main__")
    module.__file__ = os.path.abspath(program)
    # multiprocessing knows the program by the second name, in what spawned processes send.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    with open_code(module.__file__) as file:
        code = compile(file.read(), module.__file__, "exec", dont_inherit=True)
    exec(code, vars(module))


def _is_compiled(program: str) -> bool:
    with open(program, "rb") as file:
        return file.read(len(MAGIC_NUMBER)) == MAGIC_NUMBER


def _set_trainers(arguments: argparse.Namespace) -> None:
    """Give `transformers.Trainer` a callback by the options; without options transformers is not imported.

    Raises:
        ConfigError: An option's value is refused.
    """
    if arguments.num_profiled_steps < 0:
        raise ConfigError(f"Expected --profile to be at least 0, got {arguments.num_profiled_steps}.")
    settings = {name: vars(arguments)[name] for name in TRAINER_SETTINGS if vars(arguments)[name]}
    if not settings:
        return
    from lamella_transformers.trainer import ShardedTraining, add_to_trainers

    settings["keep_budget"] = budget_nbytes(arguments.keep_budget) or None
    add_to_trainers(ShardedTraining(**{"overlap": arguments.late_gradients, **settings}))


def _check(program: str, *, is_module: bool) -> None:
    if not is_module:
        if not Path(program).is_file():
            raise ConfigError(
                f"Expected the file of a Python script, got {program!r}. Pass -m before the name of a module."
            )
        return
    sys.path.insert(0, os.getcwd())
    try:
        is_absent = find_spec(program) is None
    except ModuleNotFoundError:  # of a package on the way
        is_absent = True
    if is_absent:
        raise ConfigError(f"Expected a module that Python finds after -m, got {program!r}.")
