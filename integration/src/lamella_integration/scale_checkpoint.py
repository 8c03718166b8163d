"""A save's plan on one rank among thousands, and the metadata of the checkpoint that all ranks together write."""

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from lamella_checkpoint.extending import (
    ByteSpan,
    Manifest,
    Placed,
    SavePart,
    StateContents,
    complete,
    open_dcp,
)
from lamella_engine.extending import dtensor_over
from lamella_integration.scale_models import ShapedModule
from lamella_integration.scale_plan import RankPlan
from lamella_layout import Chunk, mesh_chunks

_MOST_CHUNKS = 1_500_000  # With more, writing the metadata takes minutes: they are counted instead.


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """A rank's part in a save.

    Attributes:
        seconds: CPU seconds for the plan, without writing.
        num_items: Items that this rank writes.
        digests_nbytes: Bytes of this rank's message in the first exchange.
        placed_nbytes: Bytes of this rank's message in the second.
        num_chunks: Boxes of tensors in the checkpoint's metadata, of all ranks.
    """

    seconds: float
    num_items: int
    digests_nbytes: int
    placed_nbytes: int
    num_chunks: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """The files beside the data, written by rank 0 and read by every rank.

    Attributes:
        write_seconds: CPU seconds of rank 0, from all ranks' messages to the complete checkpoint.
        metadata_nbytes: Bytes of `.metadata`.
        checksums_nbytes: Bytes of the file of checksums.
        manifest_nbytes: Bytes of `lamella.json`.
        open_seconds: CPU seconds until a rank has opened the checkpoint, comparing its share of the files.
        num_names: Names listed after that.
    """

    write_seconds: float
    metadata_nbytes: int
    checksums_nbytes: int
    manifest_nbytes: int
    open_seconds: float
    num_names: int


class SimulatedState:
    """A rank's model and AdamW as after a step, each shard one element of memory repeated.

    Attributes:
        model: The plan's parameters under their names.
        optimizer: AdamW with both moments.
        tables: Each tensor of the checkpoint by name, with its boxes on all ranks, each box once.
    """

    def __init__(self, plan: RankPlan) -> None:
        self.num_ranks = plan.case.num_ranks
        self.model = ShapedModule({})
        for name, parameter in plan.model.named_parameters():
            self.model.register_at(name, torch.nn.Parameter(_repeated(parameter)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        for parameter in self.model.parameters():
            moments = {name: _repeated(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
        self.tables = [*_tables(self.model, self.optimizer)]

    @property
    def num_chunks(self) -> int:
        """Boxes of tensors on all ranks."""
        return sum(len(chunks) for _, _, chunks in self.tables)


def _repeated(parameter: torch.Tensor) -> DTensor:
    tensor = cast(Any, parameter)
    # Real memory: a save refuses tensors on meta. Of one element: a shard of few ranks would fill a host.
    element = torch.zeros((), dtype=parameter.dtype)
    return dtensor_over(element.expand(tensor._local_tensor.shape), tensor._spec)


def save_plan(state: SimulatedState, rank: int) -> SavePlan:
    """Plan this rank's part of a save, and measure the messages."""
    began = time.process_time()
    part = SavePart.of(state.model, state.optimizer, {"step": 1}, ())
    items, digests = part.share.items(), part.share.digests
    seconds = time.process_time() - began
    placed = []
    offset = 0
    for item in items:
        dtype = item.value.dtype if isinstance(item.value, torch.Tensor) else None
        span = ByteSpan(offset, item.nbytes)
        offset += item.nbytes
        placed.append(
            Placed(
                names=item.names, shape=item.shape, chunk=item.chunk, dtype=dtype,
                file=f"__{rank}_0.distcp", span=span, checksum=rank,
            )
        )  # fmt: skip
    return SavePlan(
        seconds=seconds,
        num_items=len(items),
        digests_nbytes=len(pickle.dumps(digests)),
        placed_nbytes=len(pickle.dumps(placed)),
        num_chunks=state.num_chunks,
    )


def checkpoint_files(state: SimulatedState) -> CheckpointFiles | None:
    """Write the metadata of all ranks' items beside sparse files of their sizes, and open the checkpoint.

    Returns:
        None for a checkpoint of more than 1.5 million boxes.

    Effects: writes and removes a temporary directory.
    """
    if state.num_chunks > _MOST_CHUNKS:
        return None
    num_ranks = state.num_ranks
    parts: list[list[Placed]] = [[] for _ in range(num_ranks)]
    ends = [0] * num_ranks
    for number, (name, tensor, chunks) in enumerate(state.tables):
        for index, chunk in enumerate(chunks):
            writer = (number * len(chunks) + index) % num_ranks
            span = ByteSpan(ends[writer], chunk.numel * tensor.element_size() + 1024)
            ends[writer] += span.length
            parts[writer].append(
                Placed(
                    names=(name,), shape=tuple(tensor.shape), chunk=chunk, dtype=tensor.dtype,
                    file=f"__{writer}_0.distcp", span=span, checksum=writer,
                )
            )  # fmt: skip
    with _sparse_files(ends) as directory:
        manifest = Manifest(extra={"step": 1}, num_ranks=num_ranks, optimizer=None)
        began = time.process_time()
        complete(directory, parts, manifest, "simulated")
        write_seconds = time.process_time() - began
        began = time.process_time()
        source = cast(Any, open_dcp(directory, compared_files=slice(0, None, num_ranks))).source
        num_names = len([*source.tensors, *source.objects])
        sizes = {file: (directory / file).stat().st_size for file in os.listdir(directory) if "distcp" not in file}
        return CheckpointFiles(
            write_seconds=write_seconds,
            metadata_nbytes=sizes[".metadata"],
            checksums_nbytes=sizes["lamella_checksums.json"],
            manifest_nbytes=sizes["lamella.json"],
            open_seconds=time.process_time() - began,
            num_names=num_names,
        )


@contextmanager
def _sparse_files(sizes: list[int]) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        directory = Path(folder) / "checkpoint"
        directory.mkdir()
        for rank, nbytes in enumerate(sizes):
            with (directory / f"__{rank}_0.distcp").open("wb") as file:
                file.truncate(nbytes)
        yield directory


def _tables(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor, list[Chunk]]]:
    tables: dict[object, list[Chunk]] = {}
    for name, value in StateContents.of(model, optimizer, None).values.items():
        if not isinstance(value, DTensor):
            if isinstance(value, torch.Tensor):
                yield name, value, [Chunk((0,) * value.ndim, tuple(value.shape))]
            continue
        key = (value.device_mesh, value.shape, value.placements)
        if key not in tables:
            along = zip(value.device_mesh.shape, value.placements, strict=True)
            sizes = [1 if placement.is_replicate() else size for size, placement in along]
            ranks = mesh_chunks(tuple(value.shape), sizes, value.placements)
            tables[key] = [*dict.fromkeys(chunk for chunks in ranks for chunk in chunks)]
        yield name, value, tables[key]
