"""A finished run, as the fixture `train` gives it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella import Config
from lamella._record.run_directory import RunDirectory


@dataclass(frozen=True)
class Run:
    """A finished run and what it recorded."""

    directory: RunDirectory
    losses: dict[int, float]
    validations: dict[int, float | None]

    def nats_per_byte(self, step: int) -> float:
        """A validation's result, where the bytes of tokens are known."""
        nats = self.validations[step]
        assert nats is not None
        return nats

    def copy_at_3(self, root: Path) -> None:
        """Copy the folder of a run of six steps as a kill would leave it, with the checkpoint of the third step alone.

        The records of later steps have other losses than the run: a resume that kept them would be noticed.
        """
        shutil.copytree(self.directory.root, root)
        shutil.rmtree(root / "checkpoints" / "step_00000006")
        metrics = root / "metrics.jsonl"
        records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        metrics.write_text(
            "".join(f"{json.dumps(_with_other_losses(record))}\n" for record in records), encoding="utf-8"
        )


def _with_other_losses(record: dict[str, Any]) -> dict[str, Any]:
    measured = {"loss", "grad_norm", "nats_per_byte"} & record.keys() if record["step"] > 3 else ()
    return {**record, **dict.fromkeys(measured, 0.0)}


TrainOn = Callable[[Config, int], Run]
