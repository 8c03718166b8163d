"""Two checkpoints of any formats, opened under comparable names."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella_convert._formats.float8 import Dequantised, block_of, is_quantised
from lamella_convert._formats.hf_files import read_config
from lamella_convert._formats.open import OpenCheckpoint
from lamella_convert._tools.between import Between, Convention, MegatronOptions, convention_of, layers_along, route
from lamella_convert._tools.plan import section_name
from lamella_convert._tools.published import Published, beside_of
from lamella_files import Source, find, rename


def open_both(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    tensor_parallel_size: int | None = None,
    trust: bool = False,
    verify: bool = True,
) -> tuple[Source, Source]:
    """Two checkpoints of any formats under comparable names.

    Names in Hugging Face's files are read as names of modules, by an installed package's rules for the
    configuration's `model_type`. The same holds for Megatron's names on one side only; then values beside the model and
    the optimizer are left out. Float8 weights are dequantised unless both sides have float8 weights.

    Args:
        a: The first checkpoint: a file or directory of any format.
        b: The other checkpoint.
        like: A Hugging Face directory with the configuration for a checkpoint without one. The other
            checkpoint's configuration is the next choice.
        tensor_parallel_size: The number of ranks that wrote a checkpoint of Megatron, where files do not tell.
        trust: Allow arbitrary unpickling. **Unsafe: can execute code.**
        verify: Verify checksums while reading, if there are any.

    Raises:
        CheckpointDamaged: The conditions of `convert`.
        FileNotFoundError: A path does not exist.
        FormatUnknown: The conditions of `convert`.
        ModelUnknown: The conditions of `convert`.
        SizeUnknown: The conditions of `convert`.
        ValueError: The conditions of `convert`.

    Effects: reads metadata and small files.
    """
    paths = [find(Path(os.path.realpath(path))) for path in (a, b)]
    published_folders = [beside_of(path) for path in paths]
    like_folder = None if like is None else Path(like)
    megatron = MegatronOptions(tensor_parallel_size=tensor_parallel_size)
    sides = [
        _ComparedCheckpoint.open(
            path, (published_folder, like_folder, *published_folders), megatron, trust=trust, verify=verify
        )
        for path, published_folder in zip(paths, published_folders, strict=True)
    ]
    are_megatrons = all(convention_of(side.opened) is Convention.MEGATRON for side in sides)
    are_quantised = all(is_quantised(side.opened.raw) for side in sides)
    first, second = (side.read(are_megatrons=are_megatrons, are_quantised=are_quantised) for side in sides)
    return first, second


@dataclass(frozen=True, kw_only=True)
class _ComparedCheckpoint:
    """One of the two checkpoints, with the rules and the published names."""

    opened: OpenCheckpoint
    between: Between
    published: Published

    @classmethod
    def open(
        cls, path: Path, folders: Sequence[Path | None], megatron: MegatronOptions, *, trust: bool, verify: bool
    ) -> "_ComparedCheckpoint":
        """Open a checkpoint; the first folder is the checkpoint's own, and the first with a configuration counts."""
        between = Between(config=_first_config(folders), megatron=megatron, strict=False)
        opened = between.open(path, trust=trust, verify=verify)
        published_folder = next((folder for folder in folders if folder is not None), None)
        return cls(opened=opened, between=between, published=Published.of(opened, folders[0], published_folder))

    def read(self, *, are_megatrons: bool, are_quantised: bool) -> Source:
        """The checkpoint under the names of modules; under Megatron's names if both sides have them."""
        source = self.opened.source
        if is_quantised(source) and not are_quantised:
            source = Dequantised(source, block=block_of(self.between.config or {}))
        if are_megatrons:
            return source
        for layer in layers_along(source, self._route(source), self.between, self.published):
            source = layer
        return rename(source, section_name) if convention_of(self.opened) is Convention.MEGATRON else source

    def _route(self, source: Source) -> list[tuple[Convention, Convention]]:
        """The route; a text model joins the rest of a published model under the published names."""
        start, published = convention_of(self.opened), self.published
        is_part = published.untrained is not None or self.between.is_part(source, published.shapes)
        return route(start, Convention.MODULES, by_published=start is Convention.MODULES and is_part)


def _first_config(folders: Iterable[Path | None]) -> dict[str, Any] | None:
    """The first configuration found in the folders."""
    configs = (read_config(folder) for folder in folders if folder is not None)
    return next((config for config in configs if config is not None), None)
