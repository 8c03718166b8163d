"""A finished run, as the fixture `train` gives it."""

from collections.abc import Callable
from dataclasses import dataclass

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


TrainOn = Callable[[Config, int], Run]
