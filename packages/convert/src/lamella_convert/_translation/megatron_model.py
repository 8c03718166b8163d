"""Live models of Megatron: a rank's tensors under a checkpoint's names, and a checkpoint as a rank's tensors.

Note [Experts of a rank]
    A model numbers the experts of its rank from 0 on, and a checkpoint numbers all experts. So ranks have different
    tensors under one name, and each rank must give the global number of its first expert. Experts of
    other ranks are left out when a rank loads.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from lamella_convert._translation.hybrid_stack import logical_name, nested_groups
from lamella_convert._translation.megatron import Dialect, canonical_name
from lamella_convert._translation.megatron_rules import (
    FC1,
    FUSED_MLA,
    GDN,
    MAMBA,
    MAMBA_IN,
    OLDER_MAMBA,
    SEQUENTIAL_EXPERTS,
    without_ungated,
)
from lamella_convert._translation.rules import Rule, Rules, parameter_shapes
from lamella_convert._translation.terms import Grouped, Join
from lamella_convert._translation.translate import Translated, translate
from lamella_files import Correspondence, Source, rename, split_section


def _sharing(name: str) -> str:
    """The size for the number of ranks sharing a layer: experts may have another than the rest."""
    return "etp" if ".mlp.experts." in name else "tp"


RANK_MAJOR_GATED: Final = tuple(Rule(name, Grouped(name, _sharing(name), (1, 1))) for name in FC1)
"""Gated first layers: whole on the left; on the right as ranks hold them, with each rank's halves together."""

RANK_MAJOR_HALVES: Final = tuple(
    Rule(Join((f"{name}_w", f"{name}_v"), (1, 1)), Grouped(name, _sharing(name), (1, 1))) for name in FC1
)
"""The same with the halves of all ranks on the left."""

_EXPERT: Final = re.compile(r"^((?:.*\.)?mlp\.experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias)))(\d+)(.*)$")


def from_megatron_model(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    sizes: Mapping[str, int],
    dialect: Dialect | None = None,
    first_expert: int = 0,
) -> list[Correspondence]:
    """Correspondences of a checkpoint's tensors (left) with a live model's (right).

    Args:
        shapes: Global, by the model's own names, wrappers removed. Global means all tensor-parallel ranks' parts.
        sizes: "tp", and the sizes of `read_fsdp_dtensor` for the model's fused tensors; "etp", the number of ranks
            sharing an expert, if different.
        dialect: The dialect of `fsdp_dtensor`, whose prefixes `write_fsdp_dtensor` adds. None for canonical names.
        first_expert: The global number of this rank's first expert: Note [Experts of a rank].
    """
    rules: list[Rule] = [*(RANK_MAJOR_GATED if dialect is None else RANK_MAJOR_HALVES)]
    if dialect is None or dialect.splits_gdn:
        rules += GDN
    if dialect is None:
        rules += [*MAMBA_IN, *MAMBA, *OLDER_MAMBA]
    if dialect is None or not dialect.fused_mla:
        rules += FUSED_MLA
    sizes = {"etp": sizes["tp"], **sizes} if "tp" in sizes else sizes
    matches = Rules(tuple(rules), sizes).match(without_ungated(shapes), "right")
    matched_names = {name for match in matches for name in match.right}
    matches += [Correspondence.rename(name, name, shape) for name, shape in shapes.items() if name not in matched_names]
    if dialect is not None:  # A dialect has the model's names.
        return [match.renamed(left=lambda name: global_expert(name, first_expert)) for match in matches]
    spelled = {name: other for match in _sequential(matches) for name in match.right for other in match.left}

    nested = nested_groups(shapes)

    def canonical(name: str) -> str:
        return logical_name(canonical_name(global_expert(spelled.get(name, name), first_expert)), nested)

    return [match.renamed(left=canonical) for match in matches]


def to_megatron_model(source: Source, correspondences: Sequence[Correspondence]) -> Translated:
    """A checkpoint under the names and in the cuts of a live model, for `load(translate=...)`.

    Experts without a correspondence belong to other ranks, and are left out (`Translated.left_over`): Note [Experts of
    a rank]. All other names without a correspondence stay, for `load` to report; and so do tensors of other shapes than
    the correspondences have.

    Args:
        source: Under the names of the correspondences' left side.
        correspondences: The result of `from_megatron_model`.

    Effects: reads nothing.
    """
    local_experts = {
        match.group(1, 2)
        for correspondence in correspondences
        for match in map(_EXPERT.match, correspondence.left)
        if match
    }

    def keep(name: str) -> str | None:
        section, entry = split_section(name)
        match = _EXPERT.match(entry) if section else None
        return None if match and match.group(1, 2) not in local_experts else name

    renamed = rename(source, keep)
    stored = parameter_shapes(renamed)
    fitting = [
        correspondence
        for correspondence in correspondences
        if all(stored.get(name, shape) == shape for name, shape in correspondence.left.items())
    ]
    return translate(renamed, fitting, to="right").leaving(renamed.left_over)


def global_expert(name: str, first: int) -> str:
    """The canonical name of a rank's expert, with the global number.

    Args:
        name: Any; a name outside experts stays unchanged.
        first: The number of the rank's first expert.
    """
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first}{match[3]}", name)


def _sequential(correspondences: Sequence[Correspondence]) -> list[Correspondence]:
    """Correspondences of experts as modules of their own (right) with layers of all experts, among the left sides."""
    shapes = {name: shape for match in correspondences for name, shape in match.left.items()}
    return Rules(SEQUENTIAL_EXPERTS).match(shapes, "right")
