"""The safetensors files of a model in a directory, and the names that each has to hold.

Note [One arrangement]
    Loaders disagree on a directory with several arrangements of weights (a single file beside an index, shards of
    another save beside both): some take the single file, others the index. Here, one arrangement counts, or none: an
    index and its files, else the single file, else the files of torch's `HuggingFaceStorageWriter` by rank. A
    single file beside an index without it is refused, as are parts beside a single file without an index. Files that no
    index names are never mixed in, and `verify` lists them.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from lamella_convert._formats.rank_parts import RankPart
from lamella_convert._formats.safetensors_header import Header, without_duplicates
from lamella_files import CheckpointDamaged, read_json

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_PART: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
_OF_RANK: Final = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors")


class WeightsFiles(NamedTuple):
    """The headers of a model's files, in order; whether each holds one rank's parts; and remarks about all."""

    headers: Mapping[Path, Header]
    are_of_ranks: bool = False
    notes: tuple[str, ...] = ()


def has_weights(directory: Path) -> bool:
    """Whether a directory has weights in an arrangement of Note [One arrangement].

    Effects: lists the directory, if it has neither a single file nor an index.
    """
    names = (directory / WEIGHTS_FILE, directory / INDEX_FILE)
    return any(file.exists() for file in names) or bool(_files_of_ranks(directory))


def parts_without_index(directory: Path) -> list[str]:
    """Names of files that are some of a model's, for a directory without an index."""
    return sorted(name for name in _names(directory) if _PART.fullmatch(name))


def weights_files(path: Path) -> WeightsFiles:
    """Read the headers of a model's files, and compare them with each other and the index.

    Raises:
        CheckpointDamaged: A file is absent or damaged, a file and the index disagree, or the directory has several
            arrangements. The error names the file and the tensor.
        FileNotFoundError: The path is neither a file nor a directory with weights.
        RankPart: A lone file of one rank.
    """
    single, index = path / WEIGHTS_FILE, path / INDEX_FILE
    if path.is_file():
        return WeightsFiles(_lone_file(path))
    if index.exists():
        return _index_files(index)
    if single.is_file():
        if parts := parts_without_index(path):
            raise CheckpointDamaged(
                str(single), f"{parts[0]!r} lies beside it, a part of another save, and no index tells which counts"
            )
        return WeightsFiles(_lone_file(single))
    if rank_files := _files_of_ranks(path):
        return _rank_weights(path, rank_files)
    raise FileNotFoundError(
        f"Expected a safetensors file, or a directory with {WEIGHTS_FILE!r} or {INDEX_FILE!r}, got {str(path)!r}."
    )


def unneeded_files(path: Path, files: Iterable[Path]) -> list[str]:
    """Names of safetensors files in the model's directory that are none of the model's."""
    needed = {file.name for file in files}
    return sorted(name for name in _names(path) if name.lower().endswith(".safetensors") and name not in needed)


def _names(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


def _lone_file(file: Path) -> dict[Path, Header]:
    header = Header.read(file)
    if header.has_parts or (header.offsets and _OF_RANK.fullmatch(file.name)):
        raise RankPart(str(file), [*header.tensors], "Open the directory that has the files of all ranks.")
    return {file: header}


# -- an index ---------------------------------------------------------------------------------------------------------


def _index_files(index: Path) -> WeightsFiles:
    expected, total = _read_index(index)
    single = index.parent / WEIGHTS_FILE
    if single.exists() and single not in expected:
        raise CheckpointDamaged(
            str(single),
            f"it is not in the index beside it, {index.name!r}, and loaders disagree on which counts. Remove one of "
            f"the two, or open the file by its path",
        )
    headers = {}
    for file, names in expected.items():
        headers[file] = _lone_file(file)[file]
        _check_against_index(index, file, headers[file].tensors, names)
    nbytes = sum(stored.nbytes for header in headers.values() for stored in header.tensors.values())
    is_told = total is None or total == nbytes
    notes = () if is_told else (f"{index.name}: total_size is {total}, and the tensors have {nbytes} bytes",)
    return WeightsFiles(headers, notes=notes)


def _read_index(index: Path) -> tuple[dict[Path, frozenset[str]], object]:
    """The index's files with their tensors' names, in order, and the index's `total_size`.

    File names may not lead elsewhere. Links may: the hub's cache consists of links, and a foreign checkpoint brings
    names, not links on this machine.
    """
    content = read_json(index, pairs=without_duplicates)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointDamaged(str(index), "expected an object with weight_map, the names of files by tensor")
    metadata = content.get("metadata")
    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, []).append(name)
    for file, tensor_names in names.items():
        if Path(file).name != file or file in ("", ".."):
            raise CheckpointDamaged(str(index), f"it leads outside, to {file!r} for {tensor_names[0]!r}")
        if not os.path.isfile(index.parent / file):
            raise CheckpointDamaged(str(index.parent / file), f"absent, and the index has {tensor_names[0]!r} in it")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return {index.parent / file: frozenset(tensor_names) for file, tensor_names in names.items()}, total


def _check_against_index(index: Path, file: Path, tensor_names: Iterable[str], expected: frozenset[str]) -> None:
    for name in sorted(expected.symmetric_difference(tensor_names)):
        where = "in its index and not" if name in expected else "not in its index and"
        raise CheckpointDamaged(str(file), f"{name!r} is {where} in the file: {str(index)!r}")


# -- files by rank ----------------------------------------------------------------------------------------------------


def _files_of_ranks(directory: Path) -> list[re.Match[str]]:
    """The files of torch's writer by rank, as matches of (rank, part of the model, number of parts)."""
    return [match for name in sorted(_names(directory)) if (match := _OF_RANK.fullmatch(name))]


def _rank_weights(directory: Path, matches: list[re.Match[str]]) -> WeightsFiles:
    """The headers of all ranks' files. Parts of tensors are compared by the caller: no file has the whole shapes."""
    counts = {int(match[3]) for match in matches}
    if len(counts) > 1:
        raise CheckpointDamaged(str(directory), f"files of several saves: of {sorted(counts)} parts of the model")
    [num_parts] = counts
    if absent := set(range(1, num_parts + 1)) - {int(match[2]) for match in matches}:
        raise CheckpointDamaged(str(directory), f"no file of part {min(absent)} of {num_parts} of the model")
    headers = {directory / match[0]: Header.read(directory / match[0]) for match in matches}
    for file, header in headers.items():
        if header.tensors and not header.offsets:
            raise CheckpointDamaged(
                str(file), "no offsets of a rank's parts, which torch's writer adds to its metadata"
            )
    num_ranks = len({int(match[1]) for match in matches})
    note = f"one file a rank, of {num_ranks} ranks; no file has the number of ranks that wrote, or the whole shapes"
    return WeightsFiles(headers, are_of_ranks=True, notes=(note,))
