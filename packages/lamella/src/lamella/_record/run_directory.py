"""The files of a run."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside a run's directory.

    `model` has the shape of a transformers model folder (config.json, tokenizer.json), for other tools to open.
    For a pretrained model, `model` holds everything but the trained weights, which `ckpt convert --config` adds.

    Attributes:
        root: The folder.
        checkpoint_folder: The folder of the checkpoints, if they lie elsewhere (`--checkpoints`).
    """

    root: Path
    checkpoint_folder: str | None = None

    @property
    def config(self) -> Path:
        """The resolved configuration; `--config` reads it."""
        return self.root / "config.json"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def model_config(self) -> Path:
        return self.model / "config.json"

    @property
    def weights(self) -> Path:
        """The fingerprint of the run's first weights, if read from a model; else no file."""
        return self.root / "weights.sha256"

    @property
    def weights_dtype(self) -> Path:
        """The dtype of the run's first weights, for `lamella export`; absent for weights drawn at random."""
        return self.root / "weights.dtype"

    @property
    def tokens(self) -> Path:
        """The folder of the text's tokens, memory-mapped by the ranks."""
        return self.root / "tokens"

    @property
    def streamed(self) -> Path:
        """The list of the files that are read as the run goes (`--streaming`)."""
        return self.root / "streamed.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints" if self.checkpoint_folder is None else Path(self.checkpoint_folder)

    @property
    def metrics(self) -> Path:
        """One JSON object per line: a step, or a validation."""
        return self.root / "metrics.jsonl"

    @property
    def plot(self) -> Path:
        return self.root / "loss.png"

    @property
    def report(self) -> Path:
        """The page on the run, for a browser."""
        return self.root / "report.html"

    @property
    def history(self) -> Path:
        """One JSON object per line: a start of the run, or an end."""
        return self.root / "history.jsonl"

    @property
    def profile(self) -> Path:
        """The folder of rank 0's profile: the trace and the overlap reports."""
        return self.root / "profile"
