"""How tensor-parallel ranks share a parameter: marks on it before its mixer's class, the class before a norm's name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import mamba_ssm_like
import pytest
import torch
from mamba_ssm_like import CONV, GROUPS, HEAD, HEADS, INNER, STATE, WIDTH, MambaLMHeadModel
from mamba_tiny import CONFIGS, make_model
from torch import nn

from lamella_mamba import Split, annotate, split

BC = GROUPS * STATE
REPLICATED = Split(dim=None)
FUSED = Split(dim=0, sizes=(INNER, INNER, BC, BC, HEADS), blocks=(HEAD, HEAD, STATE, STATE, 1))
CONVOLVED = Split(dim=0, sizes=(INNER, BC, BC), blocks=(HEAD, STATE, STATE))
OF_HEADS = Split(dim=0, sizes=(HEADS,))


def _mark(parameter: Any, dim: int = 0, **more: object) -> None:
    """The marks of megatron-core."""
    for name, value in {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1, **more}.items():
        setattr(parameter, name, value)


def test_marks_win_over_the_class() -> None:
    mixer = mamba_ssm_like.Mamba2(WIDTH)
    _mark(mixer.in_proj.weight, dim=1)
    assert annotate(mixer)["in_proj.weight"] == Split(dim=1, sizes=(WIDTH,))
    mixer.A_log.tensor_model_parallel = False  # type: ignore[attr-defined]
    assert annotate(mixer)["A_log"] == REPLICATED


def test_the_class_wins_over_a_norms_name() -> None:
    split_norm = annotate(mamba_ssm_like.Mamba2(WIDTH))["norm.weight"]
    assert split_norm == Split(dim=0, sizes=(INNER,), blocks=(HEAD,)) and split_norm.kind == "column"


def test_a_norm_that_is_marked_as_split_is_not_replicated() -> None:
    norm = mamba_ssm_like.RMSNorm(WIDTH)
    _mark(norm.weight)
    assert annotate(norm) == {"weight": Split(dim=0, sizes=(WIDTH,))}


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), mamba_ssm_like.RMSNorm(WIDTH)], ids=lambda n: type(n).__name__)
def test_a_norm_without_marks_is_replicated(norm: nn.Module) -> None:
    assert set(annotate(norm).values()) == {REPLICATED}


def test_weight_and_bias_of_the_convolution_have_sections_of_x_b_and_c() -> None:
    splits = annotate(mamba_ssm_like.Mamba2(WIDTH))
    assert splits["conv1d.weight"] == splits["conv1d.bias"] == CONVOLVED


def test_a_convolution_of_the_mixers_own_parameters_has_the_same_sections() -> None:
    class MambaMixer(nn.Module):
        """Named, and with the attributes, as megatron-core's."""

        def __init__(self) -> None:
            super().__init__()
            self.d_inner_local_tp, self.d_state, self.ngroups_local_tp = INNER, STATE, GROUPS
            self.nheads_local_tp, self.headdim = HEADS, HEAD
            self.conv1d_weight = nn.Parameter(torch.ones(INNER + 2 * BC, 1, CONV))
            self.conv1d_bias = nn.Parameter(torch.ones(INNER + 2 * BC))

    assert annotate(MambaMixer()) == {"conv1d_weight": CONVOLVED, "conv1d_bias": CONVOLVED}


@pytest.mark.parametrize("name", ["A_log", "D", "dt_bias"])
def test_parameters_of_heads_are_split_by_heads(name: str) -> None:
    assert annotate(mamba_ssm_like.Mamba2(WIDTH))[name] == OF_HEADS


def test_a_skip_parameter_for_each_channel_is_split_by_channels() -> None:
    mixer = mamba_ssm_like.Mamba2(WIDTH)
    mixer.D = nn.Parameter(torch.ones(INNER))
    assert annotate(mixer)["D"] == Split(dim=0, sizes=(INNER,), blocks=(HEAD,))


def test_the_projection_into_a_mixer_has_five_sections() -> None:
    how = annotate(mamba_ssm_like.Mamba2(WIDTH))["in_proj.weight"]
    assert how == FUSED and how.kind == "column"


def test_the_projection_out_of_a_mixer_is_split_by_its_input() -> None:
    mixer = mamba_ssm_like.Mamba2(WIDTH)
    mixer.out_proj = nn.Linear(INNER, WIDTH)
    splits = annotate(mixer)
    assert splits["out_proj.weight"] == Split(dim=1, sizes=(INNER,), blocks=(HEAD,))
    assert splits["out_proj.weight"].kind == "row"
    assert splits["out_proj.bias"] == REPLICATED


def test_marks_count_on_a_single_tensor_parallel_rank() -> None:
    """megatron-core marks parameters at a size of 1 too: the part is the whole."""
    linear = nn.Linear(WIDTH, 12)
    _mark(linear.weight, partition_sizes=[8, 4])
    how = annotate(linear)["weight"]
    assert how == Split(dim=0, sizes=(8, 4))
    assert split(linear.weight, how, 0, 1).equal(linear.weight)


def test_a_parameter_that_nothing_is_known_of_is_none() -> None:
    assert annotate(nn.Linear(2, 2)) == {"weight": None, "bias": None}


def test_marks_of_a_module_do_not_count() -> None:
    linear: Any = nn.Linear(2, 2)
    _mark(linear)
    assert annotate(linear)["weight"] is None
    norm: Any = nn.LayerNorm(2)
    _mark(norm)
    assert annotate(norm)["weight"] == REPLICATED


def test_annotate_gives_every_parameter_name_of_the_model_its_split() -> None:
    model = MambaLMHeadModel(mamba_ssm_like.Mamba2, mamba_ssm_like.Mamba)
    splits = annotate(model)
    assert set(splits) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert splits["backbone.layers.0.mixer.in_proj.weight"] == FUSED
    assert splits["backbone.layers.1.mixer.in_proj.weight"] == Split(dim=0, sizes=(INNER, INNER))
    assert splits["backbone.layers.1.norm.weight"] == splits["backbone.norm_f.weight"] == REPLICATED
    assert splits["lm_head.weight"] is None


def test_marks_without_sections_keep_the_blocks_that_the_class_knows() -> None:
    mixer = mamba_ssm_like.Mamba2(WIDTH)
    _mark(mixer.in_proj.weight, partition_sizes=list(FUSED.sizes))
    assert annotate(mixer)["in_proj.weight"] == FUSED


def test_a_stride_makes_as_many_sections() -> None:
    linear = nn.Linear(2, 12, bias=False)
    _mark(linear.weight, partition_stride=2)
    assert annotate(linear)["weight"] == Split(dim=0, sizes=(6, 6))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gated_linear_unit": True}, Split(dim=0, sizes=(8, 8))),
        ({"gated_linear_unit": False}, Split(dim=0, sizes=(16,))),
        ({"gated_linear_unit": True, "moe_mlp_glu_interleave_size": 4}, Split(dim=0, sizes=(16,), blocks=(8,))),
    ],
)
def test_grouped_experts_have_halves_that_marks_leave_out(options: dict[str, object], expected: Split) -> None:
    """megatron-core marks weights of Transformer Engine's grouped layers with a stride of 1, gated or not."""
    experts: Any = type("TEGroupedMLP", (nn.Module,), {})()
    experts.config = SimpleNamespace(**options)
    experts.linear_fc1, experts.linear_fc2 = nn.Module(), nn.Module()
    for i in range(2):
        experts.linear_fc1.register_parameter(f"weight{i}", nn.Parameter(torch.ones(16, 2)))
        experts.linear_fc2.register_parameter(f"weight{i}", nn.Parameter(torch.ones(2, 8)))
        _mark(experts.linear_fc1.get_parameter(f"weight{i}"))
        _mark(experts.linear_fc2.get_parameter(f"weight{i}"), dim=1)
    splits = annotate(experts)
    assert [splits[f"linear_fc1.weight{i}"] for i in range(2)] == [expected, expected]
    assert splits["linear_fc2.weight1"] == Split(dim=1, sizes=(8,))


@pytest.mark.parametrize(
    ("class_name", "parameter"), [("RowParallelLinear", "bias"), ("TELayerNormColumnParallelLinear", "layer_norm_bias")]
)
def test_unmarked_parameters_of_parallel_linear_layers_are_replicated(class_name: str, parameter: str) -> None:
    linear: nn.Module = type(class_name, (nn.Module,), {})()
    linear.register_parameter(parameter, nn.Parameter(torch.ones(2)))
    assert annotate(linear) == {parameter: REPLICATED}


def test_first_mixers_share_their_channels() -> None:
    splits = annotate(mamba_ssm_like.Mamba(WIDTH))
    channels = Split(dim=0, sizes=(INNER,))
    assert all(
        splits[f"{name}"] == channels for name in ("A_log", "D", "dt_proj.bias", "dt_proj.weight", "conv1d.bias")
    )
    assert splits["x_proj.weight"] == splits["out_proj.weight"] == Split(dim=1, sizes=(INNER,))
    assert splits["out_proj.bias"] == REPLICATED


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {"qwen3_next", "zamba"}))
def test_every_parameter_of_a_familys_mixer_is_known(family: str) -> None:
    with torch.device("meta"):
        model = make_model(family)
    splits = annotate(model)
    mixers = [name for name, module in model.named_modules() if hasattr(module, "conv1d")]
    assert mixers
    for name, how in splits.items():
        if any(name.startswith(f"{mixer}.") for mixer in mixers):
            assert how is not None, name
    num_sections = {len(how.sizes) for name, how in splits.items() if how and name.endswith("in_proj.weight")}
    assert num_sections == {2 if family in {"mamba", "falcon_mamba", "jamba"} else 5}


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"partition_sizes": [3, 4]}, "Expected sections of 'weight' that add up to its size along dim 0, got (3, 4)"),
        ({"partition_dim": -1}, "Expected a `partition_dim` of 'weight', marked `tensor_model_parallel`, from 0 to 1"),
    ],
)
def test_marks_that_do_not_fit_are_refused(marks: dict[str, object], message: str) -> None:
    linear = nn.Linear(2, 8)
    _mark(linear.weight, **marks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(message)):
        annotate(linear)
