"""Two checkpoints of any formats, opened under names that they can be compared by."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lamella_checkpoint import Source
from lamella_checkpoint.files import find
from lamella_checkpoint.sources import rename
from lamella_convert._formats.float8 import Dequantised, block_of, is_quantised
from lamella_convert._formats.hf_files import read_config
from lamella_convert._formats.open import Format, OpenCheckpoint, open_checkpoint
from lamella_convert._tools.plan import (
    MEGATRONS,
    Between,
    Published,
    beside_of,
    completed,
    of_sections,
)
from lamella_convert._translation.megatron import RELEASE_0_19


def open_both(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    tensor_parallel_size: int | None = None,
    trust: bool = False,
    verify: bool = True,
) -> tuple[Source, Source]:
    """Two checkpoints of any formats under names that they can be compared by.

    Those of Hugging Face's files are read as those of the model's modules, by the rules that an installed package has
    for the configuration's `model_type`; so are Megatron's where only one side has them, and then what lies beside the
    model and the optimizer is left out. Weights in float8 are read as numbers unless both sides have them.

    Args:
        a: As `src` of `convert`.
        b: The other.
        like: A Hugging Face directory whose configuration counts for a checkpoint that has none. The other
            checkpoint's is the next that is asked.
        tensor_parallel_size: As for `convert`.
        trust: As for `convert`.
        verify: As for `convert`.

    Raises:
        CheckpointDamaged: As for `convert`.
        FileNotFoundError: There is nothing.
        FormatUnknown: As for `convert`.
        ModelUnknown: As for `convert`.
        SizeUnknown: As for `convert`.
        ValueError: As for `convert`.

    Effects: reads metadata and small files.
    """
    paths = [find(Path(os.path.realpath(each))) for each in (a, b)]
    given = None if like is None else Path(like)
    besides = [beside_of(path) for path in paths]
    folders = [(beside, given, *besides) for beside in besides]
    betweens = [
        Between(config=_first_config(each), dialect=RELEASE_0_19, tensor_parallel_size=tensor_parallel_size)
        for each in folders
    ]
    opened = [
        open_checkpoint(path, trust=trust, verify=verify, sizes=between.sizes())
        for path, between in zip(paths, betweens, strict=True)
    ]
    publisheds = [
        Published.of(each, of_each[0], next((folder for folder in of_each if folder is not None), None))
        for each, of_each in zip(opened, folders, strict=True)
    ]
    are_megatrons = all(each.format in MEGATRONS for each in opened)
    are_quantised = all(is_quantised(each.raw) for each in opened)

    def read(each: OpenCheckpoint, between: Between, published: Published) -> Source:
        source = each.source
        if is_quantised(source) and not are_quantised:
            source = Dequantised(source, block=block_of(between.config or {}))
        if each.format in MEGATRONS:
            if are_megatrons:
                return source
            return rename(between.translate(source, "left", published.originals), of_sections)
        if each.format is not Format.SAFETENSORS:
            if not between.is_part(source, published.shapes) and published.untrained is None:
                return source
            source = completed(between.as_published(source, published.shapes), published.untrained)
        return between.modules(source, published.shapes)

    return read(opened[0], betweens[0], publisheds[0]), read(opened[1], betweens[1], publisheds[1])


def _first_config(folders: Iterable[Path | None]) -> dict[str, Any] | None:
    """The configuration in the first folder that has one."""
    configs = (read_config(folder) for folder in folders if folder is not None)
    return next((config for config in configs if config is not None), None)
