"""Verification of a checkpoint of any format: every byte is compared with a stored checksum, if any."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Final

from lamella_checkpoint import verify as verify_dcp
from lamella_convert._formats.open import Format, find_files
from lamella_convert._formats.rank_parts import RankPart
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_convert._formats.torch_file import TorchFile, archive_records, whole_read
from lamella_files import (
    CheckpointDamaged,
    CheckpointUntrusted,
    Findings,
    FormatUnknown,
    OnProgress,
    Verification,
    check_tensors,
    verification,
)


def verify(
    path: str | os.PathLike[str], *, trust: bool = False, on_progress: OnProgress = lambda done, total: None
) -> Verification:
    """Read all of a checkpoint and list every problem; no stored code runs.

    Args:
        path: The path of any format known to `open_checkpoint`.
        trust: Allow other types than torch's own in DCP's metadata, and modules in a file of `torch.save`.
            **Unsafe: can execute code.**
        on_progress: Called with the bytes read so far, and all.

    Raises:
        CheckpointUntrusted: The checkpoint holds other types, without `trust`.
        FileNotFoundError: `path` does not exist, or was removed or replaced meanwhile.
        FormatUnknown: No format has these files.

    Effects: reads every stored chunk, several at a time, and holds 16 MiB of each; no collective, no accelerator.
    """
    path_of_files, kind = find_files(path)
    if kind is Format.DCP:
        return verify_dcp(path_of_files, trust=trust, on_progress=on_progress)
    return verification(path_of_files, on_progress, partial(_CHECKS[kind], trust=trust))


def _check_torch_file(findings: Findings, *, trust: bool) -> None:
    """Compare each record of the archive with its checksum; the report names the values that refer to the record."""
    path = findings.path
    files = archive_records(path)
    names, refused = _names_of_records(findings, trust)
    reads = [whole_read(path, record, _description(record.name, names.get(record.name))) for record in files.values()]
    findings.total = sum(record.length for record in files.values())
    findings.num_unverified_bytes = sum(record.length for record in files.values() if record.crc is None)
    lengths = {read.item: prod(read.sizes) for read in reads}
    damage = check_tensors(path.parent, reads, lambda _: None, lambda item: findings.count(lengths[item]))
    for error in damage or refused:
        findings.note(error)
    for record in names.keys() - files.keys() if files else ():
        findings.note(CheckpointDamaged(str(path), f"no record {record!r}, which {_first(names[record])!r} needs"))
    if not files and not refused:  # torch has read the whole file; the old format has no checksums.
        findings.total = findings.num_unverified_bytes = path.stat().st_size
        findings.count(findings.total)


def _names_of_records(findings: Findings, trust: bool) -> tuple[Mapping[str, Sequence[str]], list[CheckpointDamaged]]:
    """The values that refer to each record of a file of `torch.save`, or the reason of a failed opening."""
    try:
        return TorchFile(findings.path, trust=trust, verify=False).names_of_records(), []
    except CheckpointUntrusted:
        raise
    except RankPart as error:
        return {}, [error]
    except FormatUnknown as error:
        findings.notes.append(f"not a checkpoint of named tensors: it holds {error.problem}")
        return {}, []
    except CheckpointDamaged as error:
        return {}, [error]


def _check_safetensors(findings: Findings, *, trust: bool) -> None:
    """Compare headers with file sizes and the index, by opening; the format has no checksums."""
    source = SafetensorsSource(findings.path)
    findings.notes += source.notes
    findings.unneeded += source.unneeded
    findings.total = sum(prod(info.shape) * info.dtype.itemsize for info in source.tensors.values())
    findings.num_unverified_bytes = findings.total
    findings.count(findings.total)


_CHECKS: Final[Mapping[Format, Callable[..., None]]] = {
    Format.SAFETENSORS: _check_safetensors,
    Format.TORCH: _check_torch_file,
}


def _description(record: str, names: Sequence[str] | None) -> str:
    return f"{_first(names)} ({record})" if names else record


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
