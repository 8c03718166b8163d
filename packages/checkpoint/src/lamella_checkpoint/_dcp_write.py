"""torch DCP's file format, written through its planners, with names that share data.

Note [Names that share data]
    DCP's metadata maps a name to its chunks, and each chunk to a place in a file. Nothing says that two names cannot
    map to one place. A tied tensor is written once and found under each of its names, and an option that all
    parameters of a group share is written once and found under each parameter's name, by plain DCP too.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lamella_checkpoint._ranks import exchange, rank

WRITTEN_BY: Final = "lamella_checkpoint"
"""What a checkpoint's metadata carries if it should hold `lamella.json` as well."""

Section = Mapping[str, object]
"""A part of a checkpoint: values by name. A value is a tensor, or plain data that is written as an object."""


def write(directory: Path, sections: Mapping[str, Section], aliases: Mapping[str, Mapping[str, str]]) -> None:
    """Write each section's values under `<section>.<name>`, and let aliases share their places.

    Args:
        directory: The same, existing directory on every rank.
        sections: This rank's values. Names that only some ranks hold are written too.
        aliases: By section, further names of values; rank 0's count.

    Effects: collective on the default group (two exchanges); copies what is on an accelerator to the host piece by
        piece; waits until the files are on the disk.
    """
    planner = DefaultSavePlanner()
    tensors = [value for values in sections.values() for value in values.values() if isinstance(value, torch.Tensor)]
    writer = _Writer(directory, aliases, from_host=all(tensor.device.type == "cpu" for tensor in tensors))
    metadata: list[Metadata] = []  # rank 0's

    def plan_mine() -> SavePlan:
        planner.set_up_planner(dict(sections), writer.storage_meta(), is_coordinator=rank() == 0)
        writer.set_up_storage_writer(rank() == 0, rank=rank())
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        plans, all_metadata = planner.create_global_plan(plans)
        metadata.append(all_metadata)
        return writer.prepare_global_plan(plans)

    plan = exchange("plan the checkpoint's files", plan_mine, plan_all)

    def write_mine() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(plan), planner).wait()

    def finish(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(metadata[0], results)
        return [None] * len(results)

    exchange("write the checkpoint's files", write_mine, finish)


class _Writer(FileSystemWriter):
    """DCP's writer, with Note [Names that share data]."""

    def __init__(self, directory: Path, aliases: Mapping[str, Mapping[str, str]], *, from_host: bool) -> None:
        # Copying ahead takes a stream: on a machine with a GPU that would wake it for a model that is not on it, and
        # then no process forked from here could use it.
        super().__init__(directory, sync_files=True, per_thread_copy_ahead=0 if from_host else 10_000_000)
        self._aliases = [(section, alias, name) for section, names in aliases.items() for alias, name in names.items()]

    def storage_meta(self) -> StorageMeta:
        # No checkpoint_id: it would be the staging directory's path, which no longer exists when somebody reads it.
        return StorageMeta(save_id=self.save_id, modules=[WRITTEN_BY])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        by_name: dict[str, list[WriteResult]] = {}
        for result in (result for of_rank in results for result in of_rank):
            by_name.setdefault(result.index.fqn, []).append(result)
        shared: list[WriteResult] = []
        for section, alias, name in self._aliases:
            full_alias, full_name = f"{section}.{alias}", f"{section}.{name}"
            metadata.state_dict_metadata[full_alias] = metadata.state_dict_metadata[full_name]
            metadata.planner_data[full_alias] = (section, alias)
            shared += [replace(result, index=replace(result.index, fqn=full_alias)) for result in by_name[full_name]]
        super().finish(metadata, [*results, shared])
