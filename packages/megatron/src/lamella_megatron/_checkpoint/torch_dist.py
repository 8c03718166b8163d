"""The places of a model's tensors in `torch_dist`, by megatron-core's modules."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lamella_convert import StoredPart, canonical_name, logical_name, logical_names
from lamella_layout import Chunk
from lamella_megatron._checkpoint.global_tensors import GlobalModel
from lamella_megatron._checkpoint.stages import unwrapped
from lamella_megatron._model.sharded_model import innermost


@dataclass(frozen=True)
class StoredPlaces:
    """The places of this rank's tensors in `torch_dist`.

    Attributes:
        parts: Stored parts by the model's own names.
        objects: Values of modules (`_extra_state`) to write from this rank, by stored name.
    """

    parts: Mapping[str, list[StoredPart]]
    objects: Mapping[str, object]

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], global_model: GlobalModel, groups: Any = None) -> StoredPlaces:
        """Call `sharded_state_dict` of sharded models, which reads shapes of parameters and no values.

        Args:
            chunks: Sharded by `fully_shard_model`.
            global_model: The global tensors of the chunks.
            groups: With `dp_cp`; None takes the groups of `parallel_state`.
        """
        mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
        if groups is None:
            config = importlib.import_module("megatron.core.process_groups_config")
            groups = config.ProcessGroupCollection.use_mpu_process_groups(["dp_cp"])
        # A wrapper would put `module.` before the keys. The class's: the model's own refuses.
        models: list[Any] = [innermost(chunk) for chunk in chunks]
        metadata = {"dp_cp_group": groups.dp_cp}
        state_dicts = [type(model).sharded_state_dict(model, metadata=metadata) for model in models]
        parts: dict[str, list[StoredPart]] = {}
        objects: dict[str, object] = {}
        for i, name, sharded in (
            (i, *name_and_sharded)
            for i, chunk_state in enumerate(state_dicts)
            for name_and_sharded in chunk_state.items()
        ):
            if isinstance(sharded, mapping.ShardedObject):
                if mapping.is_main_replica(sharded.replica_id):
                    objects[sharded.unique_key] = sharded.data
                continue
            global_name = global_model.names.get((i, unwrapped(name)))
            if global_name is None:
                continue
            rank_box = global_model.part_of(global_name)
            base = torch.empty(rank_box.sizes, device="meta")
            parts[global_name] = [_part(rank_box, base, tensor) for tensor in _tensors(sharded, base)]
        if global_model.layer_groups is not None:
            keys = logical_names(
                (part.key for stored_parts in parts.values() for part in stored_parts), global_model.layer_groups
            )
            parts = {
                global_name: [replace(part, key=keys[part.key]) for part in stored_parts]
                for global_name, stored_parts in parts.items()
            }
        return cls(parts, objects)

    def spelling(self) -> dict[str, str]:
        """The model's canonical names by the readers' canonical names of `torch_dist`, if both differ.

        The keys of norms belong to layers with fused norms, even if the model's layers are apart.
        """
        spelling = {}
        for name, parts in self.parts.items():
            if len(parts) == 1 and ".experts." not in name:
                [part] = parts
                is_stacked = len(part.shape) > len(part.box.sizes)
                number = f".layers.{part.chunk.offsets[0]}." if is_stacked else ".layers."
                spelling[canonical_name(part.key.replace(".layers.", number, 1))] = logical_name(canonical_name(name))
        return {key: name for key, name in spelling.items() if key != name}


def _tensors(sharded: Any, base: torch.Tensor) -> Iterator[Any]:
    """A `ShardedTensor`, or a factory's several, as views of `base`."""
    build = getattr(sharded, "build_fn", None)
    if build is None:
        yield sharded
        return
    tensors = build(sharded.key, base, sharded.replica_id, None)
    yield from tensors.values() if isinstance(tensors, dict) else tensors


def _part(rank_box: Chunk, base: torch.Tensor, sharded: Any) -> StoredPart:
    """The place of a view of a tensor-parallel part, `rank_box` in the whole tensor."""
    offsets, flat = [], sharded.data.storage_offset() if sharded.data.is_meta else 0
    for stride in base.stride():
        offsets.append(flat // stride)
        flat %= stride
    sizes = tuple(sharded.local_shape)
    return StoredPart(
        box=Chunk(tuple(start + offset for start, offset in zip(rank_box.offsets, offsets, strict=True)), sizes),
        key=sharded.key,
        shape=tuple(sharded.global_shape),
        chunk=Chunk(tuple(sharded.global_offset), (*[1] * sharded.prepend_axis_num, *sizes)),
    )
