"""Published weights: the safetensors of a Hugging Face directory, checked, read into shards, and given back."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn

from lamella_checkpoint import (
    CheckpointDamaged,
    CheckpointMismatch,
    Correspondence,
    Differences,
    Source,
    TensorInfo,
    Translate,
    Wanted,
    check,
    load,
)
from lamella_convert import find_family, open_checkpoint, parameter_shapes, translate
from lamella_layout import Chunk
from lamella_transformers._construction import ModelSpec
from lamella_transformers._conversion import correspondences
from lamella_transformers._errors import ModelError
from lamella_transformers._outline import outline

_NUM_NAMED = 3
_NUM_COMPARED: Final = 256


def check_weights(directory: Path, outline: nn.Module, spec: ModelSpec) -> tuple[str, ...]:
    """Refuse weights unfit for the model, before anything starts.

    Args:
        outline: The model, on the meta device.

    Returns:
        The names of the files' tensors without a module of the model; training leaves the tensors alone.

    Raises:
        ModelError: A tensor is absent or of another shape, tied tensors differ, or a file is damaged; the message names
            the tensor or file.

    Effects: reads tensors tied by the config, if the files hold both.
    """
    try:
        check(
            partial(open_checkpoint, directory),
            model=outline,
            translate=partial(_as_modules, model=outline, spec=spec),
            compare_tied=True,
        )
    except CheckpointMismatch as error:
        if tied := error.differences.tied:
            raise ModelError(_untied_weights(directory, outline, spec, tied)) from error
        if unfit := _unfit(error.differences):
            raise ModelError(f"Expected the weights in {str(directory)!r} to be the model's, got {unfit}.") from error
        return _names_in_files(directory, outline, spec, error.unexpected)
    except (CheckpointDamaged, ValueError) as error:
        raise ModelError(f"{error}") from error
    return ()


def _untied_weights(directory: Path, model: nn.Module, spec: ModelSpec, names: Sequence[str]) -> str:
    stored = ", ".join(map(repr, _names_in_files(directory, model, spec, names)))
    return (
        f"Expected {stored} in {str(directory)!r} to have the values of the input embedding, which the config ties to "
        f'it, got other values. Set "tie_word_embeddings": false in {str(directory / "config.json")!r} to train both, '
        "or remove the tensor from the files to train one."
    )


def fingerprint_of_weights(directory: Path) -> str | None:
    """Return a hash of the weights' names, shapes, dtypes and first elements; None for unreadable weights.

    A file's header is the same for all weights of a config. A row's first elements differ between two trainings, and
    take a short read a tensor; whole files take minutes. The hash does not depend on the cut into files.
    """
    try:
        source = open_checkpoint(directory).raw
        first = [_first_elements(name, info) for name, info in sorted(source.tensors.items())]
        source.read(first)
    except CheckpointDamaged:
        return None
    digest = hashlib.sha256()
    for elements in first:
        info = source.tensors[elements.name]
        digest.update(f"{elements.name} {info.shape} {info.dtype} ".encode())
        digest.update(elements.into.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _first_elements(name: str, info: TensorInfo) -> Wanted:
    """Return the request for the first elements of a tensor's first row."""
    *outer, inner = info.shape or (1,)
    sizes = (*(min(1, size) for size in outer), min(_NUM_COMPARED, inner))[: len(info.shape)]
    return Wanted(name, Chunk((0,) * len(sizes), sizes), torch.empty(sizes, dtype=info.dtype))


def _names_in_files(directory: Path, model: nn.Module, spec: ModelSpec, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, in a directory's files, of modules' tensors (`model.<name>`)."""
    translations = _correspondences(open_checkpoint(directory).source, model, spec)
    origins = {f"model.{name}": tuple(translation.left) for translation in translations for name in translation.right}
    return tuple(
        dict.fromkeys(stored for name in names for stored in origins.get(name, (name.removeprefix("model."),)))
    )


def _unfit(differences: Differences) -> str:
    """Describe the model's first tensors missing in the files; empty if the files hold all tensors."""
    names = [difference for difference in differences.names if difference.live is not None]
    more = f"; and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return "; ".join(map(str, names[:_NUM_NAMED])) + more


def load_weights(
    directory: Path, model: nn.Module, spec: ModelSpec, *, over: Translate = lambda source: source
) -> None:
    """Read the weights into a model, after `check_weights`.

    Args:
        directory: The folder of the weights.
        model: The model, sharded.
        spec: The config of the model.
        over: Lays further tensors, or other names, over the weights, whose names are `model.<name>`: `FreshLora`.

    Raises:
        RuntimeError: A tensor has vanished from the files.

    Effects: collective.
    """
    # Of a model without memory: a sharded model has other classes, and transformers' table goes by class too.
    plain = outline(spec, is_checked=True)

    def as_modules(source: Source) -> Source:
        return over(_as_modules(source, plain, spec))

    differences = load(partial(open_checkpoint, directory), model=model, strict=False, translate=as_modules).left
    if unfit := _unfit(differences):
        raise RuntimeError(f"Expected the weights in {str(directory)!r} to stay as they were, got {unfit}.")


def _as_modules(source: Source, model: nn.Module, spec: ModelSpec) -> Source:
    """Return the files' tensors under the names of modules, by the rules of the family or by transformers' table."""
    return translate(source, _correspondences(source, model, spec), to="right")


def _correspondences(source: Source, model: nn.Module, spec: ModelSpec) -> list[Correspondence]:
    family, shapes = find_family(spec.model_type), parameter_shapes(source)
    return correspondences(model, shapes) if family is None else family.modules(spec.to_dict()).match(shapes)


def as_published(directory: Path, spec: ModelSpec) -> Callable[[Source], Source] | None:
    """Return the translation of a run's checkpoint to the names and cuts of the published weights.

    Args:
        directory: The published files without the trained weights, as left by `lamella_convert.keep_published`.
        spec: The config of the model.

    Returns:
        The argument `translate` of `lamella_convert.convert`. None if `convert` needs none: the model's family has
        rules, the weights were not published, or untrained tensors are kept beside.

    Raises:
        ModelError: The config is not a causal model's.
    """
    file = directory / "lamella_published.json"
    if not file.is_file() or (directory / "lamella_untrained.safetensors").is_file():
        return None
    shapes = {name: tuple(shape) for name, shape in json.loads(file.read_text(encoding="utf-8")).items()}
    if find_family(spec.model_type) is not None:
        return None
    translations = correspondences(outline(spec, is_checked=True), shapes)
    return partial(translate, correspondences=translations, to="left") if translations else None
