"""The records of a run: one a step, a validation or a sample, as a line to print and as a line of metrics.jsonl."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

_NUM_BITS: Final = 63


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. Speed and memory are measured over the step's reporting interval.

    Attributes:
        step: Number of completed steps; the first is 1.
        loss: Mean nats per token over the whole batch.
        grad_norm: Norm of the whole gradient before clipping.
        lr: Learning rate of the step.
        tokens_per_s: Tokens per second over all ranks, excluding validations and checkpoints.
        memory_nbytes: Largest peak memory of any rank: reserved by the allocator on GPUs, resident on CPU.
        mfu: Share of the device's peak FLOP/s; None when the peak is unknown.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    memory_nbytes: int
    mfu: float | None

    def line(self) -> str:
        """Return the step line."""
        mfu = "-" if self.mfu is None else f"{self.mfu:.1%}"
        return (
            f"step: {self.step}  loss: {self.loss:.4f}  grad_norm: {self.grad_norm:.2f}  "
            f"tokens/s: {self.tokens_per_s:,.0f}  memory: {self.memory_nbytes / 2**30:.1f}GiB  mfu: {mfu}"
        )


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """Loss on the held-out text.

    Attributes:
        step: Number of completed steps.
        nats_per_byte: Nats per byte of text, independent of the vocabulary; None when the bytes of tokens are unknown.
        nats_per_token: Nats per token when the bytes of tokens are unknown; else None.
        name: The name of the validation set; None for the only one.
    """

    step: int
    nats_per_byte: float | None = None
    nats_per_token: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.nats_per_byte is None) == (self.nats_per_token is None):
            raise ValueError(f"Expected nats a byte or nats a token, got {self!r}. Pass one of them.")

    @classmethod
    def of(cls, step: int, nats: float, unit: Literal["byte", "token"], name: str | None = None) -> "ValidationRecord":
        """Make a record of a loss in nats per `unit`."""
        if unit == "byte":
            return cls(step=step, nats_per_byte=nats, name=name)
        return cls(step=step, nats_per_token=nats, name=name)

    @property
    def title(self) -> str:
        """The word "validation", with the name of the set if there is one."""
        return "validation" if self.name is None else f"validation on {self.name}"

    @property
    def unit(self) -> str:
        """The denominator of the loss: "byte" or "token"."""
        return "token" if self.nats_per_byte is None else "byte"

    @property
    def nats(self) -> float:
        """The loss in nats per `unit`."""
        nats = self.nats_per_token if self.nats_per_byte is None else self.nats_per_byte
        assert nats is not None
        return nats

    def line(self) -> str:
        """Return the validation line."""
        return f"step: {self.step}  {self.title}: {self.nats:.4f} nats/{self.unit}"


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """A prompt as the model continued it during training.

    Attributes:
        step: Number of completed steps.
        number: The place of the prompt among the run's, from 1 on.
        prompt: The prompt.
        text: The continuation, without the prompt.
    """

    step: int
    number: int
    prompt: str
    text: str

    def line(self) -> str:
        """Return the sample line, both texts as Python spells them."""
        return f"step: {self.step}  sample: {self.prompt!r} -> {self.text!r}"


Record = StepRecord | ValidationRecord | SampleRecord


def append(path: Path, records: Iterable[Record]) -> None:
    """Append records to a metrics file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(_fields(record)) + "\n" for record in records)


def _fields(record: Record) -> dict[str, object]:
    """Return a record's fields, without those that a validation leaves out."""
    fields = asdict(record)
    is_step = isinstance(record, StepRecord)
    return {name: value for name, value in fields.items() if is_step or value is not None}


def read(path: Path) -> list[Record]:
    """Return the records of a metrics file, without damaged lines; an empty list without a file."""
    return [record for record in _read(path) if record is not None]


def _read(path: Path) -> Iterator[Record | None]:
    """Yield the record of each line; None for a damaged line, left by a run killed while writing."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            if line:
                yield _record(line)


def parsed_line(line: str) -> Any:
    """Parse a line of a metrics file.

    Raises:
        ValueError: The line is damaged: it is not JSON, is nested too deeply, or has an integer that no run counts to.
    """
    try:
        return json.loads(line, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("values that are nested too deeply") from error


def _integer(digits: str) -> int:
    number = int(digits)
    if number.bit_length() > _NUM_BITS:  # A larger one may be none of the floats that pages and plots compute with.
        raise ValueError(f"an integer of {number.bit_length()} bits")
    return number


def _record(line: str) -> Record | None:
    with suppress(TypeError, ValueError):
        fields = parsed_line(line)
        if "prompt" in fields:
            return SampleRecord(**fields)
        return StepRecord(**fields) if "loss" in fields else ValidationRecord(**fields)
    return None


def last_validations(records: Iterable[Record]) -> list[ValidationRecord]:
    """Return the last record of each validation set, in the order of the sets' first records."""
    return list({record.name: record for record in records if isinstance(record, ValidationRecord)}.values())


def rewind(path: Path, step: int) -> int:
    """Drop damaged lines and the records after `step`, the step of the checkpoint to resume from.

    Returns:
        The number of damaged lines.

    Effects: writes a second file and renames it over `path`: a run killed meanwhile loses no record.
    """
    records = list(_read(path))
    undamaged = [record for record in records if record is not None]
    partial_file = path.with_name(f"{path.name}.partial")
    partial_file.unlink(missing_ok=True)
    append(partial_file, (record for record in undamaged if record.step <= step))
    partial_file.replace(path)
    return len(records) - len(undamaged)
