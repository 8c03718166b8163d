"""What a run leaves on disk, and where."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside a run's directory.

    `model` has the shape of a transformers model folder (config.json, tokenizer.json), so that other tools open it. Of
    a model that was published it has all but the weights that are trained: what `ckpt convert --config` puts back.
    """

    root: Path

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
    def tokens(self) -> Path:
        """A folder: the text's tokens, which ranks map into memory."""
        return self.root / "tokens"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: a step, or a validation."""
        return self.root / "metrics.jsonl"

    @property
    def plot(self) -> Path:
        return self.root / "loss.png"

    @property
    def profile(self) -> Path:
        """Of the first rank: the trace, and what was made of it."""
        return self.root / "profile"
