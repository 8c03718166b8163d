"""An export that is killed at any moment leaves no part of a folder, and is made again by the same command."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from drawn_kills import calls_in_process
from trained_runs import Run, TrainOn

from lamella import Config
from lamella.cli import main

# peft asks a model by a name that transformers renames.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Exports:
    """Exports of one run by one command.

    Attributes:
        run: The run's folder.
        options: Options of the command.
        folder: The parent of the exported folders.
    """

    run: Path
    options: Sequence[str]
    folder: Path

    def export(self, name: str, fatal: int | None = None, exit_code: int = 0) -> int | None:
        """Export in a forked process, or kill it at a call; return the number of calls, None of a killed process."""

        def run() -> None:
            assert main(["export", str(self.run), str(self.folder / name), *self.options]) == exit_code

        return calls_in_process(run, fatal)

    def check_kills(self, seeds: range) -> None:
        """Kill exports at drawn calls, at all distances from the end, where folders appear."""
        num_calls = self.export("unbroken")
        assert num_calls is not None
        expected = files(self.folder / "unbroken")
        assert "README.md" in expected
        for seed in seeds:
            folder = self.folder / f"{seed}"
            self.export(folder.name, fatal=num_calls + 1 - round(num_calls ** random.Random(seed).random()))
            exit_code = 0
            if folder.exists():
                assert files(folder) == expected, f"seed {seed}"
                exit_code = 2
            self.export(folder.name, exit_code=exit_code)
            assert files(folder) == expected, f"seed {seed}"
        assert {path.name for path in self.folder.iterdir()} == {"unbroken", *map(str, seeds)}


@pytest.fixture(scope="module")
def adapted(exported: Path, shared_config: Config, train: TrainOn, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of adapters on the exported model."""
    model = replace(shared_config.model, name=str(exported), lora_rank=4)
    directory = tmp_path_factory.mktemp("adapted") / "run"
    return train(replace(shared_config, model=model, run=replace(shared_config.run, directory=str(directory))), 1)


@pytest.fixture(params=["model", "adapters", "merged adapters"])
def exports(request: pytest.FixtureRequest, tmp_path: Path) -> Exports:
    run: Run = request.getfixturevalue("trained" if request.param == "model" else "adapted")
    return Exports(run.directory.root, ["--merge"] if request.param == "merged adapters" else [], tmp_path)


def test_exports_killed_at_drawn_moments_are_made_again(exports: Exports) -> None:
    exports.check_kills(range(2))


@pytest.mark.slow
def test_seventeen_exports_killed_at_drawn_moments_are_made_again(exports: Exports) -> None:
    exports.check_kills(range(2, 19))
