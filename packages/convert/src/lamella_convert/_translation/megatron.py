"""Megatron's names: equal tensors in models, checkpoints and dialects.

Note [Megatron's names]
    Every checkpoint of Megatron is read into one set of names, the canonical names, and written from these. Canonical
    names are the model's module names without wrappers, at a tensor parallelism of 1, except for fused tensors:

    =====================================  =========================================================================
    canonical                              elsewhere
    =====================================  =========================================================================
    `mlp.linear_fc1.weight` (gate, up)     `..._w` and `..._v` in `fsdp_dtensor`; one tensor, rank-major, in a model
    `in_proj.weight.query` .key .value     `in_proj.weight`, rank-major, in a model and in `fsdp_dtensor`'s dialect
    .z .beta .alpha, `conv1d.weight.query` `release-0.19`; components in `bridge` and in `torch_dist`
    `mixer.in_proj.weight.z` .x .B .C .dt  the same: rank-major in a model and in both dialects of `fsdp_dtensor`
    `mixer.conv1d.weight.x` .B .C          `mixer.conv1d_weight` in newer models
    `experts.linear_fc1.weight<i>`         i numbers all experts; in a model, the experts of its rank.
                                           `experts.local_experts.<i>.linear_fc1.weight` where each is a module
    `linear_q_down_proj`, `linear_kv_...`  `linear_qkv_down_proj` in models that fuse them
    `mtp.layers.0.mtp_model_layer`         `transformer_layer` in `torch_dist` and in newer `fsdp_dtensor`
    `decoder.layers.0.mlp`                 `decoder.layers.0.layers.1.mlp` in grouped hybrid stacks:
                                           a group with two layers of a kind keeps the nested names
    =====================================  =========================================================================

    Rank-major means the tensor-parallel ranks' parts, one after another: each part has a share of every component.
    Reading such a tensor requires the number of ranks, which the file does not tell.

Note [Options go by the model's names]
    `fsdp_dtensor` stores a parameter's group options (`param_to_group_meta`) under the parameter's name in the model,
    also where tensors are stored as halves or components. Canonical names have options for each component.

Note [Dialects]
    `release-0.19` is read and written by megatron-core 0.19.2 itself; `bridge` by Megatron-Bridge. The choice concerns
    writing: while reading, each tensor is recognised by name.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from lamella_convert._translation.hybrid_stack import (
    logical_name,
    nested_as,
    nested_groups,
    nested_modules,
    nested_names,
    with_final_norm,
)
from lamella_convert._translation.megatron_args import OF_ARGS, args_of, check_heads
from lamella_convert._translation.megatron_rules import (
    FUSED,
    FUSED_MLA,
    GATED,
    GDN,
    MAMBA,
    MAMBA_IN,
    OLDER_MAMBA,
    SEQUENTIAL_EXPERTS,
    without_ungated,
)
from lamella_convert._translation.rules import Rules, parameter_shapes
from lamella_convert._translation.translate import Translated, translate
from lamella_files import (
    MODEL,
    OPTIONS,
    STATE,
    Correspondence,
    Renamed,
    Source,
    WithObjects,
    in_model,
    rename,
    split_section,
)

# megatron-core's sharded object has a key of its own.
_OF_PROCESSES: Final = frozenset({"rng_state", "rerun_state_machine", "rerun_state_machine_state"})
_MODEL: Final = re.compile(r"^model(\d*)\.((?:module\.)*)(.+)$")
_STATE: Final = re.compile(r"^optimizer\.state\.(?:module\.)*(.+)$")
_OPTIONS: Final = re.compile(r"^optimizer\.param_to_group_meta\.(?:module\.)*(.+)$")
_MTP: Final = re.compile(r"((?:^|\.)mtp\.layers\.\d+\.)(?:transformer_layer|mtp_model_layer)\.")
_LAYER: Final = re.compile(r"^((?:language_model\.)?decoder\.layers\.)(\d+)(\..+)$")

DialectName = Literal["release-0.19", "bridge"]
MtpLayer = Literal["mtp_model_layer", "transformer_layer"]
"""Names, in Megatron's releases, of the layer inside a multi-token prediction layer."""

MTP_LAYERS: Final[tuple[MtpLayer, ...]] = get_args(MtpLayer)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A spelling of `fsdp_dtensor` for writing: Note [Dialects].

    Attributes:
        name: The name of the dialect.
        splits_gdn: Whether gated delta networks are stored by component. If not, "tp" must be known.
        mtp_layer: Name of the layer inside a multi-token prediction layer.
        model_prefix: The model prefix of the model's names: the wrappers inside the sharding wrapper.
        optimizer_prefix: The optimizer prefix of the same names in the optimizer's state.
        older_mamba: Whether a Mamba convolution's parameters are `conv1d.weight`, and not `conv1d_weight`.
        fused_mla: Whether the down projections of latent attention are one tensor.
        sequential_experts: Whether experts are modules of their own (`local_experts.0.linear_fc1.weight`), and not of
            one layer with joint computation (`linear_fc1.weight0`).
        final_norm: Whether the decoder's last norm is `final_norm`, as in hybrid stacks, and not `final_layernorm`.
        hybrid_pattern: The hybrid pattern of a grouped hybrid stack ("[M*-][M*-]"), whose layers are stored
            nested. None stores layers without nesting.
        nested_modules: The nested paths of a grouped stack's modules where the pattern is unknown.
    """

    name: DialectName
    splits_gdn: bool
    mtp_layer: MtpLayer = "mtp_model_layer"
    model_prefix: str = "module."
    optimizer_prefix: str = "module.module.module."
    older_mamba: bool = False
    fused_mla: bool = False
    sequential_experts: bool = False
    final_norm: bool = False
    hybrid_pattern: str | None = None
    nested_modules: Mapping[str, str] = field(default_factory=dict, hash=False)


RELEASE_0_19: Final = Dialect(name="release-0.19", splits_gdn=False)
BRIDGE: Final = Dialect(name="bridge", splits_gdn=True)


def is_fsdp_dtensor(source: Source) -> bool:
    """Whether a source has the names of an `fsdp_dtensor` checkpoint."""
    wrapped = re.compile(r"(model\d*|optimizer\.(state|param_to_group_meta))\.module\.")
    return any(wrapped.match(name) for name in source.tensors)


def dialect_of(source: Source) -> Dialect | None:
    """The dialect shown by a checkpoint's names; None if either dialect could have written them."""
    names = tuple(source.tensors)
    dialect: Dialect | None = None
    if any(".self_attention.in_proj.weight.query" in name for name in names):
        dialect = BRIDGE
    elif any(name.endswith((".self_attention.in_proj.weight", ".mixer.in_proj.weight")) for name in names):
        dialect = RELEASE_0_19
    return dialect and spelled_as(source, dialect)


def spelled_as(source: Source, dialect: Dialect) -> Dialect:
    """A dialect with the names that models of one release choose by their options, as a checkpoint has them."""
    names = tuple(source.tensors)
    renamed = any(".transformer_layer." in name for name in names)
    return replace(
        dialect,
        mtp_layer="transformer_layer" if renamed else "mtp_model_layer",
        older_mamba=any(".mixer.conv1d.weight" in name for name in names),
        fused_mla=any(".self_attention.linear_qkv_down_proj." in name for name in names),
        sequential_experts=any(".experts.local_experts." in name for name in names),
        final_norm=any("decoder.final_norm." in name for name in names),
        nested_modules=nested_modules(match[3] for match in map(_MODEL.match, names) if match and not match[1]),
    )


def read_fsdp_dtensor(source: Source, *, sizes: Mapping[str, int] | None = None) -> Translated:
    """An `fsdp_dtensor` checkpoint of any dialect, under canonical names.

    Args:
        source: With the stored names.
        sizes: The components of rank-major tensors: "tp", and "qk", "v", "nvh" of gated delta networks, "d_inner",
            "d_state" (of all groups), "nheads" of Mamba, "q_down", "kv_down" of latent attention. Needed where the
            checkpoint has such a tensor. `sizes_of_args` derives the sizes from a checkpoint's `args`.

    Returns:
        The checkpoint as `model.<name>`, `optimizer.state.<name>.<slot>`, `optimizer.param_groups.<name>.<option>`;
        other entries under their own names. A step stored as an option (by fused optimizers) becomes a slot.
        `_extra_state` is dropped. State of the writing processes (`rng_state`, `rerun_state_machine`:
        objects that a reader would have to run, for the same number of ranks) is in `left_over`.

    Raises:
        ValueError: A needed size is unknown, or names are not the format's.

    Effects: reads nothing.
    """
    names = rename(source, _reads([*source.tensors, *source.objects]))
    shapes = parameter_shapes(names)
    # Tensors stored by component, or whole, match none of these rules.
    rules = Rules((*FUSED, *OLDER_MAMBA, *FUSED_MLA, *GATED), sizes or {})
    tensors = translate(names, rules.match(shapes, "right"), to="left")
    tensors = translate(tensors, Rules(SEQUENTIAL_EXPERTS).match(parameter_shapes(tensors), "right"), to="left")
    # Only options can still have a fused name, Note [Options go by the model's names].
    result = translate(tensors, _option_names(parameter_shapes(tensors)), to="left")
    return result.leaving(name for name in names.left_over if is_of_processes(name))


def write_fsdp_dtensor(
    source: Source,
    dialect: Dialect,
    *,
    sizes: Mapping[str, int] | None = None,
    chunks: Sequence[int] = (),
    args: Mapping[str, object] | None = None,
) -> Renamed:
    """A checkpoint with canonical names, under the names of `fsdp_dtensor`.

    Args:
        source: Canonical names.
        dialect: The dialect of the reader.
        sizes: "tp", the reader's number of tensor-parallel ranks, for a dialect with rank-major tensors.
        chunks: The number of decoder layers in each model chunk, for virtual pipelines: `model0`, `model1`, ... The
            optimizer's names number all layers. Empty for `model`.
        args: The values of Megatron's `args`, which a training run compares with its own (unless fine-tuning). None for
            the source's. Readers take rank-major tensors apart by `tensor_model_parallel_size`, so the value is "tp".

    Returns:
        The checkpoint, with the objects required by megatron-core's training: `checkpoint_version`,
        `iteration` (0 if absent from the source), and `args` (a namespace; empty if unknown).

    Raises:
        ValueError: "tp" is needed and unknown, does not divide a component, or the heads and groups that `args` tell;
            the pattern is not the model's.

    Effects: reads `args`.
    """
    args = args_of(source) if args is None else args
    source = rename(source, lambda name: None if name.startswith(OF_ARGS) else name)
    if dialect.sequential_experts:
        source = translate(source, Rules(SEQUENTIAL_EXPERTS).match(parameter_shapes(source), "left"), to="right")
    shapes = parameter_shapes(source)
    rules = [*GATED, *MAMBA_IN, *(OLDER_MAMBA if dialect.older_mamba else MAMBA)]
    rules += () if dialect.splits_gdn else GDN
    rules += FUSED_MLA if dialect.fused_mla else ()
    cut = translate(
        source,
        Rules(tuple(rules), sizes or {}).match(without_ungated(shapes), "left"),
        to="right",
        options=_option_names(shapes, older_mamba=dialect.older_mamba, fused_mla=dialect.fused_mla),
    )
    present = {*cut.objects, *cut.tensors}
    arguments = dict(args)
    if (num_ranks := (sizes or {}).get("tp")) is not None:
        check_heads(shapes, arguments, num_ranks)
        arguments["tensor_model_parallel_size"] = num_ranks
    defaults = {"checkpoint_version": 3.0, "iteration": 0}
    missing_defaults = {name: value for name, value in defaults.items() if name not in present}
    complete = WithObjects(cut, {**missing_defaults, "args": Namespace(**arguments)})
    return rename(complete, stored_names(dialect, tuple(parameter_shapes(cut)), chunks))


def _option_names(
    shapes: Mapping[str, tuple[int, ...]], *, older_mamba: bool = False, fused_mla: bool = True
) -> list[Correspondence]:
    """Canonical names (left) and the model's names (right), where parameters differ.

    For options, which have no shape: any number of tensor-parallel ranks will do.
    """
    rules = (*GDN, *MAMBA_IN, *(OLDER_MAMBA if older_mamba else MAMBA), *(FUSED_MLA if fused_mla else ()))
    return Rules(rules, {"tp": 1}).match(shapes, "left")


def is_of_processes(name: str) -> bool:
    """Whether a stored name is of the writing processes' own state, of no use to other processes."""
    return re.split(r"[./]", name, maxsplit=1)[0] in _OF_PROCESSES


def keys_of(name: str) -> tuple[str, ...]:
    """The keys of Megatron's nested dicts, by stored name; a parameter's whole name is one key."""
    section, *keys = name.split(".")
    if section == "optimizer" and len(keys) > 2:
        return section, keys[0], ".".join(keys[1:-1]), keys[-1]
    return (section, ".".join(keys)) if keys else (section,)


def canonical_name(name: str) -> str:
    """A parameter's name (or a name with this prefix) with the canonical spelling of multi-token prediction."""
    return _MTP.sub(r"\1mtp_model_layer.", name)


def _reads(names: Sequence[str]) -> Callable[[str], str | None]:
    """Maps stored names to canonical names, except for fused tensors."""
    firsts = _first_layers(names)
    counts_in_groups = not any(_STATE.match(name) and name.endswith(".step") for name in names)
    in_chunks = (match.group(1, 3) for match in map(_MODEL.match, names) if match)
    nested = nested_groups(_renumbered(name, firsts.get(chunk, 0)) for chunk, name in in_chunks)

    def canonical(name: str) -> str:
        return logical_name(canonical_name(name), nested)

    def read(name: str) -> str | None:
        if "._extra_state" in name or is_of_processes(name):
            return None
        if match := _MODEL.match(name):
            return in_model(canonical(_renumbered(match[3], firsts.get(match[1], 0))))
        if match := _STATE.match(name):
            return f"optimizer.state.{canonical(match[1])}"
        if match := _OPTIONS.match(name):
            is_step = counts_in_groups and name.endswith(".step")
            return f"optimizer.{'state' if is_step else 'param_groups'}.{canonical(match[1])}"
        return name

    return read


def _first_layers(names: Sequence[str]) -> dict[str, int]:
    """By model chunk, the number of decoder layers in the chunks before."""
    num_layers: dict[str, int] = {}
    for chunk in (match for match in map(_MODEL.match, names) if match):
        num_layers.setdefault(chunk[1], 0)
        if layer := _LAYER.match(chunk[3]):
            num_layers[chunk[1]] = max(num_layers[chunk[1]], int(layer[2]) + 1)
    firsts, total = {}, 0
    for chunk_number in sorted(num_layers, key=lambda number: int(number or 0)):
        firsts[chunk_number] = total
        total += num_layers[chunk_number]
    return firsts


def _renumbered(name: str, first: int) -> str:
    return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + first}{match[3]}", name) if first else name


def stored_names(dialect: Dialect, parameters: Sequence[str] = (), chunks: Sequence[int] = ()) -> Callable[[str], str]:
    """Maps canonical names, cut by the dialect, to stored names.

    Args:
        dialect: The dialect of the reader.
        parameters: All of the model's, for a dialect with a pattern.
        chunks: The number of decoder layers in each model chunk, for virtual pipelines.
    """
    nested = nested_names(parameters, dialect.hybrid_pattern) if dialect.hybrid_pattern else {}

    def nest(name: str) -> str:
        return nested.get(name) or nested_as(name, dialect.nested_modules)

    def dialect_name(name: str) -> str:
        named = _MTP.sub(rf"\1{dialect.mtp_layer}.", name)
        return with_final_norm(named) if dialect.final_norm else named

    def entry_name(entry: str) -> str:
        """`<parameter>.<slot>`; split at the last dot, since a slot's name has no dot and a nested parameter's has."""
        parameter, dot, slot = entry.rpartition(".")
        return dialect_name(f"{nest(parameter)}{dot}{slot}")

    def write(name: str) -> str:
        section, suffix = split_section(name)
        if section == MODEL:
            number, suffix = _chunk_of(nest(suffix), chunks)
            return f"model{number}.{dialect.model_prefix}{dialect_name(suffix)}"
        if section == STATE:
            return f"optimizer.state.{dialect.optimizer_prefix}{entry_name(suffix)}"
        if section == OPTIONS:
            return f"optimizer.param_to_group_meta.{dialect.optimizer_prefix}{entry_name(suffix)}"
        return name

    return write


def _chunk_of(name: str, chunks: Sequence[int]) -> tuple[str, str]:
    """The model chunk of a parameter, and the parameter's name in the chunk."""
    if not chunks:
        return "", name
    layer = _LAYER.match(name)
    if layer is None:
        return ("0" if name.startswith("embedding.") or ".embedding." in name else str(len(chunks) - 1)), name
    number, first = int(layer[2]), 0
    for chunk, num_layers in enumerate(chunks):
        if number < first + num_layers:
            return str(chunk), _renumbered(name, -first)
        first += num_layers
    raise ValueError(f"Expected {sum(chunks)} decoder layers in chunks of {tuple(chunks)!r}, got {name!r}.")
