"""Families of models in other packages: found by the `model_type` of a config.

A package declares each of its model types as an entry point, with the `Family` for the rules:
    [project.entry-points."lamella.families"]
    qwen3_5 = "lamella_qwen:FAMILY"
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final, Protocol

from lamella_convert._translation.rules import Rules

PADDED_VOCABULARY: Final = "padded vocabulary"
"""The padded size in `Family.megatron`'s rules, for a caller to add to the rules' sizes."""

GROUP: Final = "lamella.families"
"""The entry points' group; their names are model types."""


class RulesOf(Protocol):
    """Makes rules for a model from its configuration."""

    def __call__(self, config: Mapping[str, object], /) -> Rules:
        """The rules for the model of a `config.json`. Raises ValueError for an incomplete or foreign configuration."""


class MegatronSizes(Protocol):
    """Makes the sizes for Megatron's dialects with rank-major tensors."""

    def __call__(self, config: Mapping[str, object], /, *, tensor_parallel_size: int) -> Mapping[str, int]:
        """The sizes for the model of a `config.json`. Raises ValueError if ranks cannot share its heads."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The rules of a package for the checkpoints of its models.

    Attributes:
        megatron: Between the names of transformers' modules (left) and Megatron's canonical names (right). Tensors
            with a row for each token are padded to the size "padded vocabulary", if given.
        megatron_sizes: The megatron sizes for a given number of tensor-parallel ranks.
        modules: Between the names in Hugging Face's files (left) and the names of transformers' modules (right), if
            different: files with another spelling, or of a larger model with this model as a part. Names without a rule
            are the same.
    """

    megatron: RulesOf
    megatron_sizes: MegatronSizes
    modules: RulesOf


def find_family(model_type: str) -> Family | None:
    """The family in an installed package for a `model_type`; None without one.

    Raises:
        ImportError: The package cannot be imported.
        TypeError: The declared object is no `Family`.
        ValueError: Two packages claim the model type.

    Effects: imports the declaring package, and no other.
    """
    declared = entry_points(group=GROUP, name=model_type)
    values = sorted({entry_point.value for entry_point in declared})
    if not values:
        return None
    if len(values) > 1:
        raise ValueError(f"Expected one package with rules for {model_type!r}, got {values}. Uninstall one of them.")
    family = next(iter(declared)).load()
    if not isinstance(family, Family):
        raise TypeError(f"Expected {values[0]!r} to be a Family, got {type(family).__name__}.")
    return family


def known_model_types() -> tuple[str, ...]:
    """The model types with rules in installed packages, for messages. Effects: imports none of them."""
    return tuple(sorted(entry_points(group=GROUP).names))
