"""One rank's live model and optimizer: all values for a checkpoint."""

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._base.ranks import num_ranks
from lamella_checkpoint._state.model import LiveModel
from lamella_checkpoint._state.optimizer import LiveOptimizer, kind_of
from lamella_files import encode_extra, in_model


@final
class Ranks(tuple[int, ...]):
    """Ranks of the default group, in order: the holders of equal values, often all ranks.

    Hashed once, since thousands of values are looked up by their holders. Other ranks get the `key`, of constant size:
    sent in full by each rank, the sets would grow with the square of the number of ranks.
    """

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def key(self) -> str:
        """The number of ranks, and a digest of the ranks."""
        return f"{len(self)}-{hashlib.sha256(array('q', self).tobytes()).hexdigest()[:32]}"

    @staticmethod
    def num_in(key: str) -> int:
        """The number of ranks in the set of a key."""
        return int(key.partition("-")[0])


@dataclass(frozen=True, kw_only=True)
class StateContents:
    """The values of a checkpoint by full name: the live tensors themselves, and plain data.

    Attributes:
        values: Each value under the first name.
        aliases: Further names of some values.
        params: The parameter of each optimizer slot.
        everyone: The ranks that train this model, as far as the model shows.
        manifest: The checkpoint's description, without checksums.
    """

    values: Mapping[str, object]
    aliases: Mapping[str, str]
    params: Mapping[str, torch.Tensor]
    everyone: Ranks
    manifest: Manifest

    @classmethod
    def of(
        cls, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, object] | None
    ) -> "StateContents":
        """Name the values of a model and its optimizer.

        Raises:
            NotImplementedError: The optimizer keeps state that is neither a tensor nor plain data.
            TypeError: `extra` holds a value that would not come back, an option is no plain data, or an entry of the
                model's state dict is no tensor.
            ValueError: A parameter of the optimizer is not the model's, or a tensor has no storage.

        Effects: runs the model's state-dict hooks; no collective.
        """
        encoded = encode_extra(extra or {})
        live = LiveModel.of(model)
        values: dict[str, object] = {in_model(name): value for name, value in live.tensors.items()}
        aliases = {in_model(alias): in_model(name) for alias, name in live.aliases.items()}
        params: dict[str, torch.Tensor] = {}
        if optimizer is not None:
            live_optimizer = LiveOptimizer.of(optimizer, live)
            entries, further_names = live_optimizer.entries()
            values |= {f"optimizer.{name}": value for name, value in entries.items()}
            aliases |= {f"optimizer.{alias}": f"optimizer.{name}" for alias, name in further_names.items()}
            for name, param, _ in live_optimizer.params():
                params |= {f"optimizer.state.{name}.{slot}": param for slot in live_optimizer.slots(param)}
        kind = None if optimizer is None else kind_of(optimizer)
        return cls(
            values=values,
            aliases=aliases,
            params=params,
            everyone=_everyone(live),
            manifest=Manifest(extra=encoded, num_ranks=num_ranks(), optimizer=kind),
        )

    @property
    def steady(self) -> dict[str, torch.Tensor]:
        """Tensors changed by an optimizer's step alone: parameters, optimizer state. Buffers change in the forward."""
        return {
            name: value
            for name, value in self.values.items()
            if isinstance(value, torch.Tensor) and (name in self.params or isinstance(value, nn.Parameter))
        }


def _everyone(live: LiveModel) -> Ranks:
    """The ranks on the model's meshes and in the model's groups; all ranks for a model without either.

    A pipeline stage has a mesh of its own, and its buffers differ from other stages'.
    """
    ranks: set[int] = set()
    for mesh in {tensor.device_mesh for tensor in live.tensors.values() if isinstance(tensor, DTensor)}:
        ranks.update(mesh.mesh.flatten().tolist())
    for module in live.model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks.update(dist.get_process_group_ranks(module.process_group))
    return Ranks(sorted(ranks) or range(num_ranks()))
