"""The export of a run's adapters: a folder for peft, or a checkpoint with adapters merged into the layers."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from lamella._export.trained_run import TrainedRun
from lamella._model.lora import check_peft, lora_settings, merged
from lamella._model.spec import load_spec, outline, refused_models
from lamella._settings.options import ConfigError
from lamella_convert import convert
from lamella_files import check_vacant, recover, stage
from lamella_transformers import as_peft, lora_config

if TYPE_CHECKING:
    from lamella_convert import Conversion

_WEIGHTS: Final = "adapter_model.safetensors"
_ONE_FILE_NBYTES: Final = 1 << 62


def is_for_peft(run: TrainedRun, *, merge: bool) -> bool:
    """True for a run whose export is a folder of adapters alone.

    Raises:
        ConfigError: The run has no adapters to merge, adapters are of fresh weights, or peft is not installed.
    """
    has_adapters = run.config.model.lora_rank is not None
    if merge and not has_adapters:
        raise ConfigError(
            f"Expected a run with --lora-rank for --merge, got none in {str(run.directory.root)!r}. Leave --merge out."
        )
    if merge or not has_adapters:
        return False
    if not run.directory.weights.is_file():
        raise ConfigError(
            f"Expected --merge with adapters on fresh weights, which no other folder holds, got none. Run: lamella "
            f"export {run.directory.root} --merge"
        )
    check_peft(run.config.model)
    return True


def export_adapters(
    run: TrainedRun, to: Path, dtype: torch.dtype, card: str, on_progress: Callable[[int, int], None]
) -> "Conversion":
    """Write the folder of a run's adapters: adapter_model.safetensors, adapter_config.json and the card.

    Raises:
        CheckpointDamaged: A file of the checkpoint is absent or damaged.
        ConfigError: The adapters are DoRA's in layers where peft opens LoRA alone.
        FileExistsError: `to` is occupied.

    Effects: no collective; imports peft.
    """
    settings = lora_settings(run.config.model)
    assert settings is not None
    with refused_models():
        config = lora_config(outline(load_spec(str(run.directory.model))), settings, run.config.model.name)
    config.inference_mode = True

    def complete(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / _WEIGHTS)
        config.save_pretrained(str(folder))
        # After peft's card, which lacks the figures.
        (folder / "README.md").write_text(card, encoding="utf-8")

    return convert(
        run.checkpoint,
        to,
        to="hf",
        translate=as_peft,
        dtype=dtype,
        max_shard_nbytes=_ONE_FILE_NBYTES,
        complete=complete,
        on_progress=on_progress,
    )


@contextmanager
def merged_checkpoint(run: TrainedRun, export_folder: Path) -> Iterator[Path]:
    """Give a checkpoint of the run's model without adapters; for a run with adapters, a merged one in the block.

    Args:
        run: The run.
        export_folder: The folder of the export; a merged checkpoint is written beside the folder, fp32.

    Raises:
        CheckpointDamaged: A file of the checkpoint is absent or damaged.
        FileExistsError: `export_folder` is occupied; checked before the merge.

    Effects: removes a killed export's merged checkpoint beside the folder.
    """
    if run.config.model.lora_rank is None:
        yield run.checkpoint
        return
    target = Path(os.path.realpath(export_folder))
    # Not the conversion's staging name: the conversion would remove the checkpoint as a leftover.
    merged_target = target.with_name(f"{target.name}.merged")
    recover(merged_target)  # A killed export may have left the folder although `target` is whole.
    check_vacant(target)
    folder = stage(merged_target, check=check_vacant)
    try:
        convert(run.checkpoint, folder / "checkpoint", to="dcp", translate=partial(merged, model=run.config.model))
        yield folder / "checkpoint"
    finally:
        shutil.rmtree(folder)
