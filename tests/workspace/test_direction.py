"""Direction is enforced twice. An arrow broken on purpose is caught by the contracts and by the isolated wheels."""

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

PLANTED = [
    ("lamella_layout", "lamella_buffers", "Every arrow points down"),
    ("lamella_schedule", "lamella_layout", "Every arrow points down"),
    ("lamella_trace", "lamella_schedule", "Every arrow points down"),
    ("lamella_precision", "lamella_buffers", "Every arrow points down"),
    ("lamella_engine", "lamella_optim", "Every arrow points down"),
    ("lamella_qwen", "lamella_mamba", "Every arrow points down"),
    ("lamella_checkpoint", "lamella_convert", "Every arrow points down"),
    ("lamella_transformers", "lamella", "Every arrow points down"),
    ("lamella_qwen", "lamella_transformers", "Every arrow points down"),
    ("lamella_files", "lamella_checkpoint", "Every arrow points down"),
    ("lamella_files._base.boxes", "lamella_files._sources.source", "Files read from the bottom up"),
    ("lamella_engine", "lamella_checkpoint", "The engine is unaware of checkpoints"),
    ("lamella_checkpoint", "lamella_buffers", "Checkpoints know layouts, and neither the engine nor what it stands on"),
    ("lamella_buffers", "lamella_testing", "What ships is unaware of tests and benchmarks"),
    ("lamella_testing", "lamella_layout", "The forked ranks that tests share know none of the packages they test"),
    ("lamella_engine", "transformer_engine", "Only precision opens the door to Transformer Engine"),
    ("lamella_qwen", "causal_conv1d", "Only the Mamba adapter imports state-space kernels"),
    ("lamella_engine", "megatron", "Only the Megatron adapter imports megatron-core"),
    ("lamella_checkpoint", "transformers", "The layers know no model library"),
    ("lamella_trace", "torch", "Profiles are read by the standard library alone"),
    ("lamella_optim._plain", "lamella_optim._overlap", "Optimizers read from the bottom up"),
    (
        "lamella_precision._scales.tiles",
        "lamella_precision._recipes.float8",
        "Number formats read from the bottom up",
    ),
    (
        "lamella_engine._unit.weights",
        "lamella_engine._tree.tree",
        "The engine's rooms, as docs/design/0001-engine.md draws them",
    ),
    *(
        (f"lamella_engine.{room}.{low}", f"lamella_engine.{room}.{high}", f"Inside the engine: {room}")
        for room, low, high in (
            ("_parameters", "group", "payload_form"),
            ("_scaling", "scales", "scaling"),
            ("_unit", "weights", "unit"),
            ("_tree", "order", "tree"),
            ("_modules", "state", "hooks"),
            ("_api", "module", "fully_shard"),
            ("_streams", "streams", "context"),
            ("_ragged", "ops", "dtensor"),
            ("_options", "placements", "options"),
        )
    ),
    *(
        (low, high, "Inside lamella: from the verbs down to the settings")
        for low, high in (
            ("lamella._settings.options", "lamella._record.output"),
            ("lamella._record.metrics", "lamella._processes.watch"),
            ("lamella._model.sharding", "lamella._data.order"),
            ("lamella._processes.launch", "lamella._training.trainer"),
            ("lamella._training.checks", "lamella._command.parser"),
        )
    ),
    (
        "lamella_megatron._model.units",
        "lamella_megatron._checkpoint.stages",
        "The Megatron adapter reads from the bottom up",
    ),
    (
        "lamella_checkpoint._formats.dcp_read",
        "lamella_checkpoint._training.save",
        "Checkpoints read from the bottom up, as docs/design/0007-checkpoints.md has it",
    ),
    (
        "lamella_convert._formats.float8",
        "lamella_convert._tools.convert",
        "Conversions read from the bottom up, as docs/design/0007-checkpoints.md has it",
    ),
]


@contextmanager
def _planted(workspace: Path, importer: str, imported: str) -> Iterator[None]:
    path = importer.replace(".", "/")
    [file] = [*workspace.glob(f"**/src/{path}.py"), *workspace.glob(f"**/src/{path}/__init__.py")]
    intact = file.read_text()
    file.write_text(f"{intact}\nimport {imported} as planted  # noqa\n")
    try:
        yield
    finally:
        file.write_text(intact)


def _broken_contracts(workspace: Path) -> dict[str, str]:
    """The illegal imports by broken contract, as `lint-imports` reports them, in one line."""
    sources = os.pathsep.join(str(path) for path in workspace.glob("**/src"))
    command = ["lint-imports", "--no-cache", "--no-logo"]
    environment = {**os.environ, "PYTHONPATH": sources}
    run = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, check=False)
    broken = {line.removesuffix(" BROKEN") for line in run.stdout.splitlines() if line.endswith(" BROKEN")}
    assert (run.returncode != 0) == bool(broken), run.stdout + run.stderr
    reports = dict(re.findall(r"^(.+)\n-+\n((?:.*\n)*?)(?=.+\n-+\n|\Z)", f"{run.stdout}\n", flags=re.MULTILINE))
    return {sentence: " ".join(reports[sentence].split()) for sentence in broken}


def _unit_session(workspace: Path, package: str) -> subprocess.CompletedProcess[str]:
    command = ["nox", "-f", str(workspace / "noxfile.py"), "-s", f"unit({package})", "--", "--collect-only", "-q"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_workspace_itself_keeps_every_contract(shared_copy_of_the_workspace: Path) -> None:
    assert _broken_contracts(shared_copy_of_the_workspace) == {}


@pytest.fixture(scope="module")
def contracts_broken_by_all(shared_copy_of_the_workspace: Path) -> dict[str, str]:
    """The illegal imports by broken contract, with all imports planted together: a run takes a second."""
    with ExitStack() as plants:
        for importer, imported, _ in PLANTED:
            plants.enter_context(_planted(shared_copy_of_the_workspace, importer, imported))
        return _broken_contracts(shared_copy_of_the_workspace)


@pytest.mark.parametrize(("importer", "imported", "sentence"), PLANTED)
def test_a_planted_import_breaks_its_import_contract(
    contracts_broken_by_all: dict[str, str], importer: str, imported: str, sentence: str
) -> None:
    assert f"- {importer} -> {imported} (l." in contracts_broken_by_all[sentence]


def test_every_import_contract_has_a_planted_violation() -> None:
    assert {contract["name"] for contract in CONTRACTS} == {sentence for _, _, sentence in PLANTED}


def test_a_planted_arrow_fails_in_the_environment_of_the_isolated_wheel(copy_of_the_workspace: Path) -> None:
    """Of the package without dependencies: the environment is made twice here, and torch would take half a minute."""
    intact = _unit_session(copy_of_the_workspace, "trace")
    assert intact.returncode == 0, intact.stdout + intact.stderr

    with _planted(copy_of_the_workspace, "lamella_trace", "lamella_schedule"):
        broken = _unit_session(copy_of_the_workspace, "trace")
    assert broken.returncode != 0
    assert "No module named 'lamella_schedule'" in broken.stdout + broken.stderr
