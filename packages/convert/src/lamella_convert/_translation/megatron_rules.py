"""Tensors that Megatron fuses, cuts or numbers, as rules: Note [Megatron's names]."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from lamella_convert._translation.rules import Rule
from lamella_convert._translation.terms import Grouped, Join

GDN_PARTS: Final = ("query", "key", "value", "z", "beta", "alpha")
GDN_SIZES: Final = ("qk", "qk", "v", "v", "nvh", "nvh")
MAMBA_PARTS: Final = ("z", "x", "B", "C", "dt")
MAMBA_SIZES: Final = ("d_inner", "d_inner", "d_state", "d_state", "nheads")


def _rank_major(fused: str, name: str, parts: Sequence[str], sizes: tuple[str, ...]) -> Rule:
    """Components of `name`, stored by tensor-parallel ranks as one tensor `fused`."""
    return Rule(Join(tuple(f"{name}.{part}" for part in parts), sizes), Grouped(fused, "tp", sizes))


_ATTENTION: Final = "**.self_attention."
_MIXER: Final = "**.mixer."

GDN: Final = (
    _rank_major(f"{_ATTENTION}in_proj.weight", f"{_ATTENTION}in_proj.weight", GDN_PARTS, GDN_SIZES),
    _rank_major(f"{_ATTENTION}conv1d.weight", f"{_ATTENTION}conv1d.weight", GDN_PARTS[:3], GDN_SIZES[:3]),
    _rank_major(f"{_ATTENTION}conv1d.bias", f"{_ATTENTION}conv1d.bias", GDN_PARTS[:3], GDN_SIZES[:3]),
)
"""Gated delta networks: components on the left, a model's tensors on the right."""


def _mamba_conv(separator: str) -> tuple[Rule, ...]:
    return tuple(
        _rank_major(f"{_MIXER}conv1d{separator}{kind}", f"{_MIXER}conv1d.{kind}", MAMBA_PARTS[1:4], MAMBA_SIZES[1:4])
        for kind in ("weight", "bias")
    )


MAMBA_IN: Final = (_rank_major(f"{_MIXER}in_proj.weight", f"{_MIXER}in_proj.weight", MAMBA_PARTS, MAMBA_SIZES),)
"""The projection into a Mamba mixer."""

MAMBA: Final = _mamba_conv("_")
"""Convolutions of Mamba mixers of megatron-core 0.19, whose parameters are the mixer's own."""

OLDER_MAMBA: Final = _mamba_conv(".")
"""Convolutions of Mamba mixers as separate modules."""

FUSED: Final = (*GDN, *MAMBA_IN, *MAMBA)
"""Tensors stored rank-major by megatron-core 0.19, except gated layers."""

FUSED_MLA: Final = (
    Rule(
        Join(
            (f"{_ATTENTION}linear_q_down_proj.weight", f"{_ATTENTION}linear_kv_down_proj.weight"), ("q_down", "kv_down")
        ),
        f"{_ATTENTION}linear_qkv_down_proj.weight",
    ),
    *(
        Rule(
            f"**.input_layernorm.{kind}",
            f"{_ATTENTION}linear_qkv_down_proj.layer_norm_{kind}",
            left_beside=f"{_ATTENTION}linear_q_down_proj.weight",
        )
        for kind in ("weight", "bias")
    ),
)
"""Latent attention with one tensor for two down projections, and the norm before them."""

FC1: Final = tuple(
    f"**.mlp.{name}"
    for kind in ("weight", "bias")
    for name in (
        f"linear_fc1.{kind}",
        f"shared_experts.linear_fc1.{kind}",
        f"experts.linear_fc1.{kind}{{expert}}",
        f"experts.local_experts.{{expert}}.linear_fc1.{kind}",
    )
)
"""First layers of MLPs."""

GATED: Final = tuple(Rule(name, Join((f"{name}_w", f"{name}_v"), (1, 1))) for name in FC1)
"""The two halves of a gated MLP's first layer: one tensor on the left, `_w` and `_v` on the right."""

SEQUENTIAL_EXPERTS: Final = tuple(
    Rule(f"**.mlp.experts.{layer}.{kind}{{expert}}", f"**.mlp.experts.local_experts.{{expert}}.{layer}.{kind}")
    for layer in ("linear_fc1", "linear_fc2")
    for kind in ("weight", "bias")
)
"""Experts of a layer with joint computation, on the left, and as modules of their own."""

_FC1_NAME: Final = re.compile(r"((?:^|\.)mlp\.(?:.+\.)?)linear_fc1\.(?:weight|bias)(\d*)$")


def without_ungated(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """All tensors except first layers of ungated MLPs.

    A gated MLP's first layer has twice as many rows as the second layer has columns.

    Raises:
        ValueError: The second layer is absent, or has neither as many columns nor half as many.
    """
    return {
        name: shape for name, shape in shapes.items() if not _FC1_NAME.search(name) or _is_gated(name, shape, shapes)
    }


def _is_gated(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    second = _FC1_NAME.sub(lambda match: f"{match[1]}linear_fc2.weight{match[2]}", name)
    columns = shapes.get(second, (0, 0))[-1]
    if columns not in (shape[0], shape[0] // 2) or not columns:
        raise ValueError(
            f"Expected {second!r} with as many columns as {name!r} has rows ({shape[0]}), or half as many, got "
            f"{shapes.get(second)!r}: whether its halves are to be split cannot be told."
        )
    return columns * 2 == shape[0]
