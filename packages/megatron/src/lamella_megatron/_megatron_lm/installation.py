"""`install`: programs of `megatron.training` with `--use-megatron-fsdp` train on lamella."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, TracebackType
from typing import Final, Self

_OURS: Final = "lamella_megatron._megatron_lm"


class MegatronInstallation:
    """lamella in Megatron-FSDP's place, until `undo()` or the end of a `with` statement; made by `install`.

    Attributes:
        replaced: The replaced names, sorted, such as "megatron.training.training.megatron_FSDP"; none if lamella was in
            place before.
    """

    def __init__(self) -> None:
        self._pairs = _stand_ins().PAIRS
        self.replaced = tuple(sorted(_replace({id(theirs): ours for theirs, ours in self._pairs})))
        self._is_undone = not self.replaced

    def undo(self) -> None:
        """Give all names back to megatron's classes and functions, also in modules imported since.

        Sharded models stay sharded. Nothing happens if no name was replaced, or after an earlier `undo()`.
        """
        if not self._is_undone:
            self._is_undone = True
            list(_replace({id(ours): theirs for theirs, ours in self._pairs}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def install() -> MegatronInstallation:
    """Put lamella in Megatron-FSDP's place in this process: a program of Megatron-LM trains on lamella.

        lamella_megatron.install()
        pretrain(...)     # with --use-megatron-fsdp --ckpt-format fsdp_dtensor

    The wrapper (`FullyShardedDataParallel`), `get_megatron_optimizer`, the norm of `--log-params-norm`, and the parts
    of `megatron.training.checkpointing` that know Megatron-FSDP are replaced in the globals of all modules, under any
    name. A model in another wrapper is left to megatron: each function asks for the model first. Gradients are
    finalised by megatron's own function, which reads lamella's shards as they are, and nothing is copied between model
    and main weights, which are the same.

    Returns:
        The installation, which lists the names; `undo()`, or the end of a `with` statement, gives the names back to
        megatron. A second call replaces nothing, and undoing the second changes nothing.

    Raises:
        ImportError: megatron-core is not installed, or without `megatron.training`.

    Effects: imports `megatron.training`; none beyond this process. Call on every rank, before `pretrain`.

    Source: `megatron.training` of megatron-core 0.19.2.
    """
    return MegatronInstallation()


def _stand_ins() -> ModuleType:
    """The module that pairs megatron's names with lamella's; `lamella_megatron` itself imports no megatron."""
    try:
        return importlib.import_module(f"{_OURS}.stand_ins")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ImportError(
            f"Expected megatron-core 0.19.2 with its `megatron.training`, got no module {error.name!r}. Install "
            "lamella-megatron[mcore]."
        ) from error


def _replace(by_identity: Mapping[int, object]) -> Iterator[str]:
    """Replace classes and functions, given by identity, in the globals of all modules, and list the replaced names."""
    for title, module in list(sys.modules.items()):
        if title.startswith(_OURS):
            continue
        for name, member in list(getattr(module, "__dict__", {}).items()):  # some entries are no modules, or None
            if id(member) in by_identity:
                setattr(module, name, by_identity[id(member)])
                yield f"{title}.{name}"
