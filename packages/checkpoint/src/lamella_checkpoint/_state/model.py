"""A live model as named tensors, under the names of the unsharded, unwrapped, uncompiled model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Name parts that torch.compile and activation checkpointing insert.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """The persistent tensors of a model, each under one name.

    `state` is the model's own state dict, with its keys, its version marks and the tensors themselves. `tensors` holds
    each tensor once, under the unsharded name; `aliases` maps every further name of a tied tensor to the first; `names`
    maps each tensor's id to the first name.
    """

    model: nn.Module
    state: dict[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    names: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module, *, allow_meta: bool = False) -> "LiveModel":
        """Name the tensors of `model`, which must have storage unless `allow_meta`.

        Raises:
            TypeError: An entry of the state dict is no tensor.
            ValueError: A tensor has no storage yet; or two tensors' names are one without the wrappers' parts.

        Effects: runs the model's state-dict hooks, which reshard a sharded model.
        """
        # `keep_vars`: detached tensors would have new ids, which lose ties and the optimizer's parameters.
        state = model.state_dict(keep_vars=True)
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        names: dict[int, str] = {}
        keys: dict[str, str] = {}
        wrappers = {path for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)}
        for key, value in state.items():
            name = _unwrapped(key, wrappers)
            _check_storable(name, value, allow_meta=allow_meta)
            if value is not state[first_key := keys.setdefault(name, key)]:
                raise ValueError(
                    f"Expected names that differ by more than wrappers' parts ({', '.join(sorted(_WRAPPER_PARTS))}), "
                    f"got the tensors {first_key!r} and {key!r}, both {name!r} in a checkpoint. Rename a module."
                )
            first = names.setdefault(id(value), name)
            if first == name:
                tensors[name] = value
            else:
                aliases[name] = first
        return cls(model=model, state=state, tensors=tensors, aliases=aliases, names=names)

    def all_names(self) -> Mapping[str, list[str]]:
        """Every name of each tensor, by the first name."""
        names = {name: [name] for name in self.tensors}
        for alias, first in self.aliases.items():
            names[first].append(alias)
        return names


def _unwrapped(key: str, wrappers: set[str]) -> str:
    """The key without wrappers' parts."""
    parts = key.split(".")
    return ".".join(
        part
        for index, part in enumerate(parts)
        if part not in _WRAPPER_PARTS and not (part == "module" and ".".join(parts[:index]) in wrappers)
    )


def _check_storable(name: str, value: object, *, allow_meta: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"Expected every entry of the model's state dict to be a tensor, got {value!r} for {name!r}. "
            f"Return a tensor from `get_extra_state`, or keep the value in `extra`."
        )
    if value.is_meta and not allow_meta:
        raise ValueError(
            f"Expected materialised tensors, got {name!r} on the meta device. "
            f"Call `to_empty(device=...)` before loading or saving."
        )
