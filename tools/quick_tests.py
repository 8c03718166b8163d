"""Spare the tests habits of pytest and torch that take their time and change no outcome. A plugin of pytest.

Imports of torch and of the tests make hardly any garbage, and a search for garbage takes a fifth of the time of a
collection. Later collections leave the imported objects out too.

A `FakeTensorMode` keeps the lines of all callers for a message that no test reads. DTensor makes one for each operator
and shape, in each rank: a fifth of the CPU time of the engine's tests of stages and meshes, with reads of source files.

The process that hands tests out to others runs none: without the tests' conftest, which imports torch, the others start
two seconds sooner.
"""

import gc
import os
import sys
import traceback
from types import SimpleNamespace

import pytest

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    options = early_config.known_args_namespace
    options.noconftest = bool(getattr(options, "numprocesses", None)) and "PYTEST_XDIST_WORKER" not in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()
    if fake_tensor := sys.modules.get("torch._subclasses.fake_tensor"):
        substitute = SimpleNamespace(extract_stack=list, format_list=traceback.format_list)
        fake_tensor.traceback = substitute  # type: ignore[attr-defined]
