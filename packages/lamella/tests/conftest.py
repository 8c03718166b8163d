"""A tiny model, a little real text, and training in forked ranks."""

import gc
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"

import calendar
import shlex
import textwrap

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from trained_runs import Run, TrainOn

from lamella._estimate.api import estimate_run
from lamella._processes.placement import Rank, place
from lamella._record.metrics import StepRecord, ValidationRecord, read
from lamella._settings.config import Config, resolve
from lamella._training.preparation import prepare
from lamella._training.trainer import Trainer
from lamella.cli import main
from lamella_convert import find_family
from lamella_testing import run_ranks, start_autograd, write_entry_points
from lamella_testing.forked_programs import forked_workers
from lamella_testing.forked_writers import forked_writers

# Property tests draw the same examples in every run: a red run is red again.
settings.register_profile("lamella", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("lamella")

# A rank's imports: once here, and not in each forked rank.
MODULES = (
    "torch._dynamo",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "transformers.models.llama.modeling_llama",
)
for module in MODULES:
    importlib.import_module(module)

# The first backward of an estimate would start threads since torch 2.15, and `run_ranks` could fork no more.
start_autograd()

# The bars of `datasets` and their monitor threads share a lock with forked ranks: a rank that ends while its monitor
# has the lock would leave the next bar of every process waiting.
bars: Any = importlib.import_module("tqdm.std")
bars.TqdmDefaultWriteLock.mp_lock = None
bars.tqdm.monitor_interval = 0

TINY_LLAMA: Mapping[str, object] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}

_VALIDATION_FRACTION = 0.4
"""With this fraction one of the three source files is held out, and none is cut."""


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Three source files of the standard library, 60 kB together: a preparation takes a third of the time of 240 kB."""
    return write_text(tmp_path)


def write_text(parent: Path, modules: Sequence[ModuleType] = (calendar, shlex, textwrap)) -> Path:
    """Write the sources of some modules to a folder."""
    folder = parent / "text"
    folder.mkdir()
    for module in modules:
        (folder / f"{module.__name__}.py").write_text(inspect.getsource(module), encoding="utf-8")
    return folder


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """The config of a Llama with 11 thousand parameters."""
    return _write_model(tmp_path)


def _write_model(parent: Path) -> Path:
    path = parent / "tiny.json"
    path.write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
    return path


@pytest.fixture
def options(tmp_path: Path, text_folder: Path, model_file: Path) -> list[str]:
    """A command line for a few steps of the tiny model, with a save at the end, in this process alone."""
    options = {
        "--model": model_file,
        "--data": text_folder,
        "--validation-fraction": _VALIDATION_FRACTION,
        "--run-dir": tmp_path / "run",
        "--device": "cpu",
        "--steps": 6,
        "--batch-size": 8,
        "--sequence-length": 32,
        "--validation-interval": 3,
        "--validation-sequences": 7,
        "--checkpoint-interval": 6,
        "--log-interval": 2,
        "--warmup-steps": 2,
    }
    return ["train", *(str(part) for option in options.items() for part in option)]


@pytest.fixture
def config(tmp_path: Path, text_folder: Path, model_file: Path) -> Config:
    """The same as a configuration."""
    return _configure(tmp_path, text_folder, model_file)


@pytest.fixture(scope="module")
def shared_config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The same for a run shared by several tests; each takes a copy of the directory."""
    folder = tmp_path_factory.mktemp("shared")
    return _configure(folder, write_text(folder), _write_model(folder))


def _configure(folder: Path, text_folder: Path, model_file: Path) -> Config:
    return resolve(
        {
            "model": {"name": str(model_file)},
            "data": {
                "paths": (str(text_folder),),
                "sequence_length": 32,
                "validation_fraction": _VALIDATION_FRACTION,
            },
            "optim": {"steps": 6, "batch_size": 8, "warmup_steps": 2},
            "parallel": {"device": "cpu"},
            "run": {
                "directory": str(folder / "run"),
                "validation_interval": 3,
                "validation_sequences": 7,
                "checkpoint_interval": 6,
                "log_interval": 2,
            },
        }
    )


@pytest.fixture(scope="module")
def trained(shared_config: Config, train: TrainOn) -> Run:
    """A finished run, shared by the tests of a file."""
    return train(shared_config, 2)


@pytest.fixture(scope="module")
def exported(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run's model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", str(trained.directory.root), str(folder)]) == 0
    return folder


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed Qwen adapter; no entry point would name it from a source tree."""
    if find_family("qwen3_5_text") is None:
        types = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
        write_entry_points(
            tmp_path / "site", "lamella-qwen", "lamella.families", dict.fromkeys(types, "lamella_qwen:FAMILY")
        )
        monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.fixture
def estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate settings once for all searches of a test."""
    monkeypatch.setattr("lamella._estimate.recorded_options.estimate_run", cache(estimate_run))


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt this process and its children; a background job of a shell is born deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _imports_outlive_collections() -> None:
    """Leave imported objects out of collections: an estimate has two, and pytest's end five, of 0.35 s each."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _forked_writers() -> Iterator[None]:
    """Fork the processes that write checkpoints."""
    with forked_writers():
        yield


@pytest.fixture(name="forked_workers")
def _forked_workers() -> Iterator[None]:
    """Fork the workers of commands that run in this process."""
    with forked_workers():
        yield


@pytest.fixture
def start_python(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start Python with arguments that name the test's folder. Its processes end with the test, in any case."""

    def start(*arguments: str, stdin: int | None = None) -> "subprocess.Popen[str]":
        command = [sys.executable, *arguments]
        pipe = subprocess.PIPE
        program = subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        return programs.enter_context(program)

    with ExitStack() as programs:
        yield start
        # Before the pipes are closed; workers are in sessions of their own, and may have outlived their parent.
        _kill_those_that_name(tmp_path)


def _kill_those_that_name(folder: Path) -> None:
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if f"{folder}/".encode() in command.read_bytes():
                os.kill(int(command.parent.name), signal.SIGKILL)


@pytest.fixture(scope="session")
def train() -> TrainOn:
    """Train in forked ranks, as the workers of `lamella train` do; no plot is drawn."""
    return _train


def _train(config: Config, num_ranks: int) -> Run:
    directory = prepare(place(config)).directory

    def on_rank() -> None:
        rank = Rank(rank=dist.get_rank(), num_ranks=num_ranks, device=torch.device("cpu"))
        with patch("lamella._record.stream.plot"):  # a tenth of a run's CPU
            Trainer(config, directory, rank).train()

    run_ranks(on_rank, num_ranks)
    records = read(directory.metrics)
    return Run(
        directory=directory,
        losses={record.step: record.loss for record in records if isinstance(record, StepRecord)},
        validations={record.step: record.nats_per_byte for record in records if isinstance(record, ValidationRecord)},
    )
