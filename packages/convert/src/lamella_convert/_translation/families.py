"""Families of models that other packages know: found by the `model_type` of a config, whatever package it is.

A package declares each of its model types as an entry point, with the `Family` that has the rules:

    [project.entry-points."lamella.families"]
    qwen3_5 = "lamella_qwen:FAMILY"
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final, Protocol

from lamella_convert._translation.rules import Rules

PADDED_VOCABULARY: Final = "padded vocabulary"
"""The size that `Family.megatron`'s rules pad to, where a caller adds it to theirs."""

GROUP: Final = "lamella.families"
"""The entry points' group; their names are model types."""


class RulesOf(Protocol):
    """Makes rules for a model from its configuration."""

    def __call__(self, config: Mapping[str, object], /) -> Rules:
        """The rules for the model of a `config.json`. Raises ValueError if it is not a whole one of the family."""


class MegatronSizes(Protocol):
    """Makes the sizes that Megatron's dialects need where they store tensors rank-major."""

    def __call__(self, config: Mapping[str, object], /, *, tensor_parallel_size: int) -> Mapping[str, int]:
        """The sizes for the model of a `config.json`. Raises ValueError if ranks cannot share its heads."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The rules of a package for the checkpoints of its models.

    Attributes:
        megatron: Between the names of transformers' modules (left) and Megatron's canonical ones (right). Tensors
            with a row for each token are padded there to the size "padded vocabulary", if one is given.
        megatron_sizes: For tensor-parallel ranks of a given number.
        modules: Between the names in Hugging Face's files (left) and those of transformers' modules (right), where they
            differ: files of another spelling, or of a larger model that this one is a part of. Names that no rule takes
            are the same.
    """

    megatron: RulesOf
    megatron_sizes: MegatronSizes
    modules: RulesOf


def find_family(model_type: str) -> Family | None:
    """The family that an installed package has for a `model_type`; None if there is none.

    Raises:
        ImportError: The package cannot be imported.
        TypeError: What it declares is no `Family`.
        ValueError: Two packages claim the model type.

    Effects: imports the package that declares it, and no other.
    """
    declared = entry_points(group=GROUP, name=model_type)
    values = sorted({each.value for each in declared})
    if not values:
        return None
    if len(values) > 1:
        raise ValueError(f"Expected one package with rules for {model_type!r}, got {values}. Uninstall one of them.")
    family = next(iter(declared)).load()
    if not isinstance(family, Family):
        raise TypeError(f"Expected {values[0]!r} to be a Family, got {type(family).__name__}.")
    return family


def known_model_types() -> tuple[str, ...]:
    """The model types that installed packages have rules for, for messages. Effects: imports none of them."""
    return tuple(sorted(entry_points(group=GROUP).names))
