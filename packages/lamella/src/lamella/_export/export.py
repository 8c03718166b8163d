"""The export of a run: a Hugging Face folder with weights, config, tokenizer, generation config and a model card."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from lamella._export.adapters import export_adapters, is_for_peft, merged_checkpoint
from lamella._export.model_card import adapter_card, model_card
from lamella._export.trained_run import TrainedRun, open_run
from lamella._model.published_dtype import recorded_dtype
from lamella._model.weights import as_published
from lamella._settings.options import ConfigError, in_short
from lamella._settings.parsing import parse_json, read_settings
from lamella_checkpoint import CheckpointDamaged
from lamella_convert import convert

if TYPE_CHECKING:
    from lamella_convert import Conversion

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Export:
    """An exported model.

    Attributes:
        run: The run, with the exported checkpoint.
        conversion: The conversion of its weights.
        dtype: The name of the exported weights' dtype, as torch spells it.
    """

    run: TrainedRun
    conversion: "Conversion"
    dtype: str


def export(
    path: Path,
    to: Path | None,
    *,
    dtype: str,
    merge: bool,
    step: int | None,
    version: str,
    on_progress: Callable[[int, int], None],
) -> Export:
    """Write the Hugging Face folder of a run's checkpoint, or peft's folder of its adapters: whole, or not at all.

    Args:
        path: The run's folder.
        to: The folder to write; None for `exports/<step>` in the run's folder, `<step>-adapters` for adapters.
        dtype: "fp32", "bf16", or "auto" for the dtype of the weights that the run started from.
        merge: Merge adapters into the layers; a run with adapters is a folder for peft otherwise.
        step: The number of steps of the checkpoint; None for the newest.
        version: The version of lamella, for the model card.
        on_progress: Called with the bytes written so far, and the total.

    Raises:
        CheckpointDamaged: A file of the checkpoint is absent or damaged.
        ConfigError: The folder is no run's, or has no such checkpoint.
        FileExistsError: `to` is occupied.
        OSError: A file cannot be written.

    Effects: no collective. A run in progress may remove the newest checkpoint meanwhile: then the next one is taken.
    """
    while True:
        run = open_run(path, step)
        for_peft = is_for_peft(run, merge=merge)
        try:
            name = f"{run.checkpoint.name}-adapters" if for_peft else run.checkpoint.name
            folder = to or run.directory.root / "exports" / name
            if for_peft:
                return _export_adapters(run, folder, dtype, version, on_progress)
            return _export(run, folder, dtype, version, on_progress)
        except (CheckpointDamaged, FileNotFoundError):
            if run.checkpoint.is_dir():
                raise


def _export(run: TrainedRun, to: Path, dtype: str, version: str, on_progress: Callable[[int, int], None]) -> Export:
    model = run.directory.model
    torch_dtype = recorded_dtype(run.directory.weights_dtype) if dtype == "auto" else _DTYPES[dtype]
    name = str(torch_dtype).removeprefix("torch.")
    card = model_card(run, model_type=_model_type(run), dtype=name, version=version)

    def write_card(folder: Path) -> None:  # over a copy of the published model's card
        (folder / "README.md").write_text(card, encoding="utf-8")

    with merged_checkpoint(run, to) as checkpoint:
        conversion = convert(
            checkpoint,
            to,
            to="hf",
            translate=as_published(model) if (model / "lamella_published.json").is_file() else None,
            dtype=torch_dtype,
            like=model,
            complete=write_card,
            on_progress=on_progress,
        )
    return Export(run=run, conversion=conversion, dtype=name)


def _export_adapters(
    run: TrainedRun, to: Path, dtype: str, version: str, on_progress: Callable[[int, int], None]
) -> Export:
    """Export adapters, in fp32 as they are trained where the dtype is "auto"."""
    torch_dtype = torch.float32 if dtype == "auto" else _DTYPES[dtype]
    name = str(torch_dtype).removeprefix("torch.")
    card = adapter_card(run, model_type=_model_type(run), dtype=name, version=version)
    conversion = export_adapters(run, to, torch_dtype, card, on_progress)
    return Export(run=run, conversion=conversion, dtype=name)


def _model_type(run: TrainedRun) -> str:
    path = run.directory.model_config
    try:
        config = parse_json(read_settings(path))
    except ValueError as error:
        raise ConfigError(f"Expected a transformers config in {str(path)!r}, got {in_short(error)}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"Expected a field 'model_type' in {str(path)!r}, got none.")
    return str(config["model_type"])
