"""The places of a model's tensors in `torch_dist`, as megatron-core's modules tell them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lamella_convert import StoredPart, canonical_name, logical_name, logical_names
from lamella_layout import Chunk
from lamella_megatron._checkpoint.global_tensors import WholeModel
from lamella_megatron._checkpoint.stages import unwrapped
from lamella_megatron._model.sharded_model import innermost


@dataclass(frozen=True)
class Places:
    """Where this rank's tensors lie in `torch_dist`.

    Attributes:
        parts: By the model's own names.
        objects: Values of modules (`_extra_state`) that this rank writes, by stored name.
    """

    parts: Mapping[str, list[StoredPart]]
    objects: Mapping[str, object]

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], whole: WholeModel, groups: Any = None) -> Places:
        """Call `sharded_state_dict` of sharded models, which reads shapes of parameters and no values.

        Args:
            chunks: Sharded by `fully_shard_model`.
            whole: Of the chunks.
            groups: With `dp_cp`; None takes the groups of `parallel_state`.
        """
        mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
        if groups is None:
            config = importlib.import_module("megatron.core.process_groups_config")
            groups = config.ProcessGroupCollection.use_mpu_process_groups(["dp_cp"])
        # A wrapper would put `module.` before its keys. The class's: the model's own refuses.
        models: list[Any] = [innermost(chunk) for chunk in chunks]
        metadata = {"dp_cp_group": groups.dp_cp}
        told = [type(model).sharded_state_dict(model, metadata=metadata) for model in models]
        parts: dict[str, list[StoredPart]] = {}
        objects: dict[str, object] = {}
        for i, name, value in ((i, *item) for i, of_chunk in enumerate(told) for item in of_chunk.items()):
            if isinstance(value, mapping.ShardedObject):
                if mapping.is_main_replica(value.replica_id):
                    objects[value.unique_key] = value.data
                continue
            own = whole.names.get((i, unwrapped(name)))
            if own is None:
                continue
            held = whole.part_of(own)
            base = torch.empty(held.sizes, device="meta")
            parts[own] = [_part(held, base, each) for each in _tensors(value, base)]
        if whole.layer_groups is not None:
            keys = logical_names((part.key for each in parts.values() for part in each), whole.layer_groups)
            parts = {own: [replace(part, key=keys[part.key]) for part in each] for own, each in parts.items()}
        return cls(parts, objects)

    def spelling(self) -> dict[str, str]:
        """The model's canonical names by the readers' canonical names of `torch_dist`, where both differ.

        The keys of norms belong to layers that fuse norms, even where the model's layers are apart.
        """
        found = {}
        for name, parts in self.parts.items():
            if len(parts) == 1 and ".experts." not in name:
                [part] = parts
                is_stacked = len(part.shape) > len(part.box.sizes)
                number = f".layers.{part.chunk.offsets[0]}." if is_stacked else ".layers."
                found[canonical_name(part.key.replace(".layers.", number, 1))] = logical_name(canonical_name(name))
        return {key: name for key, name in found.items() if key != name}


def _tensors(value: Any, base: torch.Tensor) -> Iterator[Any]:
    """A `ShardedTensor`, or a factory's several, as views of `base`."""
    build = getattr(value, "build_fn", None)
    if build is None:
        yield value
        return
    made = build(value.key, base, value.replica_id, None)
    yield from made.values() if isinstance(made, dict) else made


def _part(held: Chunk, base: torch.Tensor, told: Any) -> StoredPart:
    """The place of a view of a tensor-parallel part, `held` in the whole tensor."""
    offsets, flat = [], told.data.storage_offset() if told.data.is_meta else 0
    for stride in base.stride():
        offsets.append(flat // stride)
        flat %= stride
    sizes = tuple(told.local_shape)
    return StoredPart(
        box=Chunk(tuple(start + offset for start, offset in zip(held.offsets, offsets, strict=True)), sizes),
        key=told.key,
        shape=tuple(told.global_shape),
        chunk=Chunk(tuple(told.global_offset), (*[1] * told.prepend_axis_num, *sizes)),
    )
