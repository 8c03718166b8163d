"""How tensor-parallel ranks share the parameters of a model, found for each parameter.

In order, the first answer counts:

    1. marks on the parameter     `tensor_model_parallel`, `partition_dim`, `partition_sizes`, `partition_stride`
    2. class of the mixer         a table of mixers and gated layers; linear layers of megatron-core
    3. class with Norm in it      replicated

Marks come first since a mixer's norm is split over the ranks, though a norm. Attributes of modules are not asked: a
layer that is tensor-parallel as a whole can hold replicated parameters. Marks without `partition_sizes` tell the dim
alone, and the class tells the sections: gated delta nets and grouped experts of megatron-core have such marks, and a
fused tensor taken for one section would change its rows' order at another number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lamella_mamba._splits import Split


def annotate(model: nn.Module) -> dict[str, Split | None]:
    """Return how tensor-parallel ranks share each parameter of a model or module.

    Sizes are those of the parameters as they are: of this rank's parts in a model that was built for several ranks. A
    mark `tensor_model_parallel` counts at a tensor-parallel size of 1 too, where the part is the whole.

    Args:
        model: A model of any library; parameters may be on the meta device. Not changed.

    Returns:
        By name from `model` on, for every name of a tied parameter. None for a parameter without marks, of no known
        class and in no norm: replicated and split parameters look alike, and a guess would mix ranks' parts up.

    Raises:
        ValueError: Marks or the table's sections do not fit a parameter's shape.

    Effects: none.
    """
    by_class = dict(_by_class(model))
    splits: dict[str, Split | None] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = _join(prefix, own_name)
            class_split = by_class.get(name) or _linear_split(module, own_name)
            parameter_split = (
                _by_marks(name, parameter, class_split) or class_split or (_REPLICATED if _is_norm(module) else None)
            )
            _check(name, parameter, parameter_split)
            splits[name] = parameter_split
    return splits


_REPLICATED = Split(dim=None)


# -- marks on parameters --------------------------------------------------------------------------------------------


def _by_marks(name: str, parameter: nn.Parameter, class_split: Split | None) -> Split | None:
    """The split that megatron-core's marks say; sections and blocks on which marks are silent come from the table."""
    is_split = getattr(parameter, "tensor_model_parallel", None)
    if not is_split:
        return None if is_split is None else _REPLICATED
    dim: Any = getattr(parameter, "partition_dim", None)
    if dim not in range(parameter.ndim):
        raise ValueError(
            f"Expected a `partition_dim` of {name!r}, marked `tensor_model_parallel`, from 0 to {parameter.ndim - 1}, "
            f"got {dim!r}. Set the dim along which tensor-parallel ranks hold different parts."
        )
    size = parameter.shape[dim]
    stride = getattr(parameter, "partition_stride", 1)
    marked_sizes = getattr(parameter, "partition_sizes", None)
    sizes = tuple(marked_sizes or stride * (size // stride,))
    if (
        class_split is not None
        and class_split.dim == dim
        and (class_split.sizes == sizes or (marked_sizes is None and stride == 1))
    ):
        return class_split
    return Split(dim=dim, sizes=sizes)


# -- classes of mixers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Names of a mixer's attributes with its sizes.

    Attributes:
        inner: Channels of the state-space model.
        state: Size of B and C, for each group.
        groups: Number of groups of B and C; none in a Mamba-1 mixer, whose B and C every rank computes as a whole.
        heads: Number of heads.
        head: Channels of a head.
        projected: Channels of `out_proj`'s input; more than `inner` with a gated MLP beside the state-space model.
    """

    inner: str
    state: str | None = None
    groups: str | None = None
    heads: str | None = None
    head: str | None = None
    projected: str | None = None

    def read(self, mixer: Any) -> dict[str, tuple[int, int]]:
        """A section's size and block, by its letter in the layouts."""
        inner = getattr(mixer, self.inner)
        if self.state is None or self.groups is None or self.heads is None or self.head is None:
            return {"x": (inner, 1)}
        state, groups = getattr(mixer, self.state), getattr(mixer, self.groups)
        projected = inner if self.projected is None else getattr(mixer, self.projected)
        return {
            "x": (inner, getattr(mixer, self.head)),
            "b": (groups * state, state),
            "h": (getattr(mixer, self.heads), 1),
            "m": (projected - inner, 1),
        }


@dataclass(frozen=True)
class _DeltaSizes:
    """A gated delta net's own sizes; key heads and value heads are whole on a rank."""

    inner: str = "qk_dim_local_tp"

    def read(self, net: Any) -> dict[str, tuple[int, int]]:
        """A section's size and block, by its letter in the layouts."""
        return {
            "q": (net.qk_dim_local_tp, net.key_head_dim),
            "v": (net.v_dim_local_tp, net.value_head_dim),
            "h": (net.num_v_heads_local_tp, 1),
        }


@dataclass(frozen=True)
class _GroupedSizes:
    """Rows of grouped experts' first layer: two halves if gated, blocks of both halves' rows if interleaved."""

    inner: str = "linear_fc1"

    def read(self, experts: Any) -> dict[str, tuple[int, int]]:
        """A section's size and block, by its letter in the layouts."""
        first: nn.Parameter | None = getattr(experts.linear_fc1, "weight0", None)
        rows = 0 if first is None else first.shape[0]
        interleaved = getattr(experts.config, "moe_mlp_glu_interleave_size", None)
        if interleaved:
            return {"g": (rows, 2 * interleaved), "u": (0, 1)}
        if not experts.config.gated_linear_unit:
            return {"g": (rows, 1), "u": (0, 1)}
        return {"g": (rows // 2, 1), "u": (rows // 2, 1)}


_MEGATRON = _Sizes(
    inner="d_inner_local_tp", state="d_state", groups="ngroups_local_tp", heads="nheads_local_tp", head="headdim"
)
_MAMBA_SSM = _Sizes(
    inner="d_ssm", state="d_state", groups="ngroups", heads="nheads", head="headdim", projected="d_inner"
)
_MAMBA_SSM_SIMPLE = _Sizes(inner="d_inner", state="d_state", groups="ngroups", heads="nheads", head="headdim")
_TRANSFORMERS = _Sizes(
    inner="intermediate_size", state="ssm_state_size", groups="n_groups", heads="num_heads", head="head_dim"
)

# Parameter -> dim and sections. x: inner channels (z too), b: B or C, h: heads, m: gated MLP. "" is replicated.
# In gated delta nets q: queries or keys, v: values or the gate. In gated layers g and u: the halves. # is any number.
_Layout = Mapping[str, tuple[int, str]]
_SECOND: _Layout = {
    "in_proj.weight": (0, "mmxxbbh"),
    "in_proj.bias": (0, "mmxxbbh"),
    "conv1d.weight": (0, "xbb"),
    "conv1d.bias": (0, "xbb"),
    "conv1d_weight": (0, "xbb"),
    "conv1d_bias": (0, "xbb"),
    "A_log": (0, "h"),
    "D": (0, "h"),
    "dt_bias": (0, "h"),
    "norm.weight": (0, "x"),
    "out_proj.weight": (1, "mx"),
    "out_proj.bias": (0, ""),
}
_FIRST: _Layout = {
    "in_proj.weight": (0, "xx"),
    "in_proj.bias": (0, "xx"),
    "conv1d.weight": (0, "x"),
    "conv1d.bias": (0, "x"),
    "x_proj.weight": (1, "x"),
    "dt_proj.weight": (0, "x"),
    "dt_proj.bias": (0, "x"),
    "A_log": (0, "x"),
    "D": (0, "x"),
    "out_proj.weight": (1, "x"),
    "out_proj.bias": (0, ""),
}
_DELTA: _Layout = {
    "in_proj.weight": (0, "qqvvhh"),
    "in_proj.bias": (0, "qqvvhh"),
    "conv1d.weight": (0, "qqv"),
    "conv1d.bias": (0, "qqv"),
    "A_log": (0, "h"),
    "dt_bias": (0, "h"),
    "out_proj.weight": (1, "v"),
    "out_proj.bias": (0, ""),
}
_GROUPED: _Layout = {"linear_fc1.weight#": (0, "gu"), "linear_fc1.bias#": (0, "gu")}

_MIXERS: tuple[tuple[str, _Sizes | _DeltaSizes | _GroupedSizes, _Layout], ...] = (
    ("MambaMixer", _MEGATRON, _SECOND),
    ("Mamba2", _MAMBA_SSM, _SECOND),
    ("Mamba2Simple", _MAMBA_SSM_SIMPLE, _SECOND),
    ("Mamba2Mixer", _TRANSFORMERS, _SECOND),
    ("NemotronHMamba2Mixer", _TRANSFORMERS, _SECOND),
    ("BambaMixer", _TRANSFORMERS, _SECOND),
    ("Zamba2MambaMixer", _TRANSFORMERS, _SECOND),
    ("FalconH1Mixer", _TRANSFORMERS, _SECOND),
    ("GraniteMoeHybridMambaLayer", _TRANSFORMERS, _SECOND),
    ("Mamba", _Sizes(inner="d_inner"), _FIRST),
    ("MambaMixer", _Sizes(inner="intermediate_size"), _FIRST),
    ("FalconMambaMixer", _Sizes(inner="intermediate_size"), _FIRST),
    ("JambaMambaMixer", _Sizes(inner="intermediate_size"), _FIRST),
    ("GatedDeltaNet", _DeltaSizes(), _DELTA),
    ("TEGroupedMLP", _GroupedSizes(), _GROUPED),
)


def _by_class(model: nn.Module) -> Iterator[tuple[str, Split]]:
    """Splits of the parameters in and below mixers, by name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        names = {cls.__name__ for cls in type(module).__mro__}
        for class_name, sizes, layout in _MIXERS:
            if class_name in names and hasattr(module, sizes.inner):
                yield from _mixer_splits(prefix, module, sizes.read(module), layout)
                break


def _mixer_splits(
    prefix: str, mixer: nn.Module, sizes: Mapping[str, tuple[int, int]], layout: _Layout
) -> Iterator[tuple[str, Split]]:
    for name, parameter in mixer.named_parameters(remove_duplicate=False):
        if (dim_and_letters := layout.get(re.sub(r"\d+$", "#", name))) is None:
            continue
        dim, letters = dim_and_letters
        if name == "D" and letters == "h" and parameter.shape[0] != sizes["h"][0]:
            letters = "x"  # an option: one D for each channel
        sections = [sizes[letter] for letter in letters if sizes[letter][0]]
        if not sections:
            yield _join(prefix, name), _REPLICATED
            continue
        all_sizes, blocks = zip(*sections, strict=True)
        yield _join(prefix, name), Split(dim=dim, sizes=all_sizes, blocks=blocks)


# -- linear layers and norms ----------------------------------------------------------------------------------------


def _linear_split(module: nn.Module, name: str) -> Split | None:
    """Replicated parameters of megatron-core's linear layers, which have no marks."""
    names = {cls.__name__ for cls in type(module).__mro__}
    fused_norm = "TELayerNormColumnParallelLinear" in names and name.startswith("layer_norm_")
    row_bias = bool({"RowParallelLinear", "TERowParallelLinear"} & names) and name == "bias"
    return _REPLICATED if fused_norm or row_bias else None


def _is_norm(module: nn.Module) -> bool:
    return any("Norm" in cls.__name__ for cls in type(module).__mro__)


# -- checks ---------------------------------------------------------------------------------------------------------


def _check(name: str, parameter: nn.Parameter, parameter_split: Split | None) -> None:
    if parameter_split is None or parameter_split.dim is None:
        return
    if parameter.ndim <= parameter_split.dim or parameter.shape[parameter_split.dim] != sum(parameter_split.sizes):
        raise ValueError(
            f"Expected sections of {name!r} that add up to its size along dim {parameter_split.dim}, got "
            f"{parameter_split.sizes} for shape {tuple(parameter.shape)}. Correct `partition_sizes` on the parameter: "
            "they are a single rank's."
        )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
