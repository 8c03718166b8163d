"""What a run says about itself: the step line, metrics.jsonl, the loss plot and the progress bar."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. Speed and memory are those of the interval it was reported in.

    Attributes:
        loss: Mean nats a token over the whole batch.
        tokens_per_s: Over all ranks; validations and checkpoints are not counted.
        memory_nbytes: Peak of the rank that has most: reserved by the allocator on GPUs, resident on CPU.
        mfu: Share of the device's peak, or None where the peak is not known.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    memory_nbytes: int
    mfu: float | None

    def line(self) -> str:
        """The line people paste."""
        mfu = "-" if self.mfu is None else f"{self.mfu:.1%}"
        return (
            f"step: {self.step}  loss: {self.loss:.4f}  grad_norm: {self.grad_norm:.2f}  "
            f"tokens/s: {self.tokens_per_s:,.0f}  memory: {self.memory_nbytes / 2**30:.1f}GiB  mfu: {mfu}"
        )


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """Loss on the held-out text.

    Attributes:
        nats_per_byte: Nats a byte of text, which does not depend on the vocabulary; None where a token's bytes are not
            known.
        nats_per_token: Nats a token, where a token's bytes are not known.
    """

    step: int
    nats_per_byte: float | None = None
    nats_per_token: float | None = None

    def __post_init__(self) -> None:
        if (self.nats_per_byte is None) == (self.nats_per_token is None):
            raise ValueError(f"Expected nats a byte or nats a token, got {self!r}. Pass one of them.")

    @classmethod
    def of(cls, step: int, nats: float, unit: Literal["byte", "token"]) -> "ValidationRecord":
        """A loss in nats a `unit`."""
        return cls(step=step, nats_per_byte=nats) if unit == "byte" else cls(step=step, nats_per_token=nats)

    @property
    def unit(self) -> str:
        """Of what the loss is told: a byte or a token."""
        return "token" if self.nats_per_byte is None else "byte"

    @property
    def nats(self) -> float:
        """Nats a `unit`."""
        nats = self.nats_per_token if self.nats_per_byte is None else self.nats_per_byte
        assert nats is not None
        return nats

    def line(self) -> str:
        """The same in words."""
        return f"step: {self.step}  validation: {self.nats:.4f} nats/{self.unit}"


Record = StepRecord | ValidationRecord


def append(path: Path, records: Iterable[Record]) -> None:
    """Add records to a metrics file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(_values(record)) + "\n" for record in records)


def _values(record: Record) -> dict[str, object]:
    """A record's fields; of a validation, those of its unit."""
    values = asdict(record)
    return {name: value for name, value in values.items() if not (name.startswith("nats_per_") and value is None)}


def read(path: Path) -> list[Record]:
    """The records of a metrics file, without lines that are damaged; none if there is no file."""
    return [record for record in _read(path) if record is not None]


def _read(path: Path) -> Iterator[Record | None]:
    """The record of each line; None for one that is damaged, as a run leaves that is killed while it writes."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            if line:
                yield _record(line)


def _record(line: str) -> Record | None:
    with suppress(TypeError, ValueError):
        values = json.loads(line)
        return StepRecord(**values) if "loss" in values else ValidationRecord(**values)
    return None


def rewind(path: Path, step: int) -> int:
    """Drop damaged lines, and the records after `step`: those of steps after the checkpoint that a run goes on from.

    Returns:
        How many lines were damaged.

    Effects: replaces the file at once, so that a run which is killed meanwhile has lost no record.
    """
    records = list(_read(path))
    whole = [record for record in records if record is not None]
    kept = path.with_name(f"{path.name}.partial")
    kept.unlink(missing_ok=True)
    append(kept, (record for record in whole if record.step <= step))
    kept.replace(path)
    return len(records) - len(whole)


def plot(records: Iterable[Record], path: Path) -> None:
    """Draw training loss (nats a token) and validation loss (nats a byte, or a token) over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    every = list(records)
    steps = [record for record in every if isinstance(record, StepRecord)]
    validations = [record for record in every if isinstance(record, ValidationRecord)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot(xlabel="step", ylabel="training loss (nats/token)")
    right = left.twinx()
    right.set_ylabel(f"validation loss (nats/{validations[0].unit if validations else 'byte'})")
    lines = left.plot([r.step for r in steps], [r.loss for r in steps], color="tab:blue", lw=1, label="training")
    lines += right.plot(
        [r.step for r in validations],
        [r.nats for r in validations],
        "o-",
        color="tab:orange",
        label="validation",
    )
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.legend(handles=lines)
    figure.savefig(path, dpi=120)


class Progress:
    """The progress bar of one rank: drawn on a terminal, absent elsewhere, and silent where `enabled` is false."""

    def __init__(self, first_step: int, num_steps: int, *, enabled: bool) -> None:
        self._enabled = enabled
        self._bar = tqdm(
            initial=first_step,
            total=num_steps,
            unit="step",
            disable=not (enabled and sys.stderr.isatty()),
            dynamic_ncols=True,
        )

    def advance(self) -> None:
        """One more step is under way."""
        self._bar.update()

    def say(self, line: str) -> None:
        """Print a line above the bar. Where nobody reads any more (Ctrl-C ends `| tee` too), the run goes on."""
        if not self._enabled:
            return
        try:
            self._bar.write(line)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Else every line to come raises.

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
