"""`load_safetensors`: a Hugging Face directory's weights read into a live model, sharded or not."""

import json
import os
from pathlib import Path
from typing import Final

from torch import nn

from lamella_checkpoint._errors import CheckpointMismatch, Differences
from lamella_checkpoint._float8 import Dequantised, block_of, is_quantised
from lamella_checkpoint._load import _match_model, _Plan
from lamella_checkpoint._model import LiveModel
from lamella_checkpoint._ranks import everywhere, on_device_of
from lamella_checkpoint._rules import Rules
from lamella_checkpoint._safetensors import SafetensorsSource
from lamella_checkpoint._source import Source
from lamella_checkpoint._translate import parameter_shapes, rename, translate

_NO_RULES: Final = Rules(())


def load_safetensors(
    path: str | os.PathLike[str], *, model: nn.Module, rules: Rules = _NO_RULES, strict: bool = True
) -> Differences:
    """Read a model's weights from safetensors: one file, or several with an index.

    Each rank reads what its shards need, straight into them; none holds more. All names and shapes are checked first:
    when they differ, nothing has been touched. Weights that are float8 with a scale a block are read as numbers. Data
    is cast to the live tensors' dtypes.

    Args:
        path: The file, or the directory of a model. Every rank must see the same one.
        model: Sharded by `fully_shard`, wrapped by DDP, compiled or plain; on its device.
        rules: Where the files (left) and the model's modules (right) differ; a family's `modules`, say.
        strict: False loads what fits, and returns the rest.

    Returns:
        What was left; nothing with `strict`.

    Raises:
        CheckpointDamaged: A file is absent, truncated or no safetensors file.
        CheckpointFailed: Another rank failed. A rank that failed raises its own error.
        CheckpointMismatch: Names or shapes differ.
        FileNotFoundError: There are no weights.

    Effects: collective on the default group, if there is one (two small object exchanges); each rank reads what its
        shards need.
    """
    with on_device_of(model.parameters()):
        plan = everywhere("find its weights", lambda: _plan(path, model, rules, allow_meta=False))
        if strict and plan.differences:
            raise CheckpointMismatch(str(path), plan.differences)
        everywhere("read its weights", plan.run)
    return plan.differences


def check_safetensors(path: str | os.PathLike[str], *, model: nn.Module, rules: Rules = _NO_RULES) -> Differences:
    """What `load_safetensors` would leave. The model may be on the meta device. No rank talks to another.

    Raises:
        CheckpointDamaged: A file is absent, truncated or no safetensors file.
        FileNotFoundError: There are no weights.

    Effects: reads the files' headers; no tensor.
    """
    return _plan(path, model, rules, allow_meta=True).differences


def _plan(path: str | os.PathLike[str], model: nn.Module, rules: Rules, *, allow_meta: bool) -> _Plan:
    source = _open(Path(path), rules)
    live = LiveModel.of(model, allow_meta=allow_meta)
    targets, names = _match_model(source, live)
    differences = Differences(names=tuple(names))
    return _Plan(
        source=source, live=live, targets=targets, optimizer=None, differences=differences, extra={}, stripped=()
    )


def _open(path: Path, rules: Rules) -> Source:
    """The files' tensors as numbers, under the names of the modules."""
    stored: Source = SafetensorsSource(path)
    if is_quantised(stored):
        stored = Dequantised(stored, block=block_of(json.loads((path / "config.json").read_text(encoding="utf-8"))))
    named = rename(stored, lambda name: f"model.{name}")
    return translate(named, rules.match(parameter_shapes(named)), to="right")
