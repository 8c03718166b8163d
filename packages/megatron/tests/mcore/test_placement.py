"""Each parameter lies over its own ranks; groups in conflict with the model are refused before any change."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO3, FSDPModule, ShardingOptions, fully_shard
from lamella_megatron import build_sharded_model, fully_shard_model, sharding_units
from lamella_testing import run_ranks
from lamella_testing.megatron_parity import Layout, assert_trains_as_on_one_rank, make_model

# -- corners outside the matrix ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout", "placements"),
    [
        pytest.param("gpt", Layout(num_ranks=2, tp=2), None, id="each rank has its own part"),
        pytest.param("moe", Layout(ep=4), None, id="an expert a rank"),
        pytest.param("moe", Layout(ep=2), DDP, id="nothing sharded", marks=pytest.mark.slow),
        pytest.param("moe", Layout(ep=2, instances=2), (HSDP, ZERO1), id="experts, reduced over instances at last"),
        pytest.param("moe", Layout(expert_tp=2, instances=2), (HFSDP, ZERO3), id="main weights over instances"),
    ],
)
def test_a_model_trains_as_on_one_rank(kind: str, layout: Layout, placements: Any) -> None:
    options = ShardingOptions(placements=placements)
    assert_trains_as_on_one_rank(kind, layout, lambda model: fully_shard_model(model, options=options))


# -- meshes ----------------------------------------------------------------------------------------------------------


def _ranks_of(model: nn.Module) -> dict[str, tuple[Any, tuple[object, ...]]]:
    """For dense parameters and for experts: the mesh, and the placements on it."""
    ranks_by_name: dict[str, tuple[Any, tuple[object, ...]]] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        kind = "experts" if ".experts." in name else "dense"
        lies = parameter.device_mesh.mesh.tolist(), parameter.placements
        assert ranks_by_name.setdefault(kind, lies) == lies, name
    return ranks_by_name


def test_dense_and_expert_parameters_are_sharded_over_their_own_ranks() -> None:
    rows: list[tuple[Layout, Any, Any]] = [
        (Layout(ep=2), [0, 1, 2, 3], [0, 2]),
        (Layout(tp=2), [0, 2], [0, 2]),
        (Layout(tp=2, expert_tp=1), [0, 2], [0, 1, 2, 3]),
        (Layout(expert_tp=2), [0, 1, 2, 3], [0, 2]),
        (Layout(cp=2, ep=2), [0, 1, 2, 3], [0, 2]),
        (Layout(instances=2), [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        (Layout(ep=2, instances=2), [[0, 1], [2, 3]], [[0], [2]]),
        (Layout(tp=2, expert_tp=1, instances=2), [[0], [2]], [[0, 1], [2, 3]]),
    ]

    def on_each_rank() -> list[Any]:
        from megatron.core import parallel_state

        placements = []
        for layout, *_ in rows:
            placements.append(_ranks_of(fully_shard_model(make_model("ME", layout))))
            parallel_state.destroy_model_parallel()
        return placements

    for (layout, dense, experts), placements in zip(rows, run_ranks(on_each_rank, 4)[0], strict=True):
        lies = (Replicate(), Shard(0)) if layout.instances == 2 else (Shard(0),)
        assert placements == {"dense": (dense, lies), "experts": (experts, lies)}, layout


def test_every_parameter_has_the_values_of_the_first_rank_that_holds_it() -> None:
    """Ranks that initialise with seeds of their own would each keep their own rows."""
    layouts = [Layout(cp=2, ep=2), Layout(tp=2, expert_tp=1), Layout(ep=2, instances=2)]

    def build(layout: Layout) -> nn.Module:
        model = make_model("ME", layout)
        for parameter in model.parameters():
            nn.init.constant_(parameter, dist.get_rank())
        return model

    def on_each_rank() -> None:
        from megatron.core import parallel_state

        for layout in layouts:
            model = fully_shard_model(build(layout))
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                first = parameter.device_mesh.mesh.flatten()[0]
                assert (parameter.to_local() == first).all(), (layout, name, parameter)
            parallel_state.destroy_model_parallel()

    run_ranks(on_each_rank, 4)


def test_ignored_parameters_keep_each_ranks_values() -> None:
    def on_each_rank() -> None:
        model: Any = make_model("gpt", Layout(num_ranks=2))
        bias = model.decoder.layers[0].mlp.linear_fc1.bias
        nn.init.constant_(bias, dist.get_rank())
        fully_shard_model(model, ignored_params={bias})
        assert (bias == dist.get_rank()).all()

    run_ranks(on_each_rank, 2)


def test_a_collection_of_groups_places_as_parallel_state() -> None:
    def on_each_rank() -> Any:
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        model = make_model("ME", Layout(ep=2, instances=2))
        groups = ProcessGroupCollection.use_mpu_process_groups()
        parallel_state.destroy_model_parallel()
        return _ranks_of(fully_shard_model(model, groups=groups))

    lies = (Replicate(), Shard(0))
    placements = run_ranks(on_each_rank, 4)[1]
    assert placements == {"dense": ([[0, 1], [2, 3]], lies), "experts": ([[1], [3]], lies)}


def test_every_tensor_parallel_part_has_a_mark() -> None:
    """A part without a mark is taken for replicated: a checkpoint has one rank's, and so has the norm of gradients."""
    models: list[tuple[str, dict[str, Any]]] = [
        ("gpt", {"softmax_type": "learnable", "qk_layernorm": True, "attention_output_gate": True}),
        ("moe", {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}),
        ("moe-mla", {}),
        ("M*GE/*-", {"softmax_type": "learnable"}),
    ]

    def shapes(tp: int) -> list[dict[str, list[int]]]:
        """Shapes of all tensor-parallel parts together, by the marks."""
        from megatron.core import parallel_state, tensor_parallel

        shapes_by_model = []
        for kind, changes in models:
            model = make_model(kind, Layout(num_ranks=tp, tp=tp), **changes)
            for parameter in model.parameters():  # as Megatron-LM does
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            fully_shard_model(model)
            shapes_by_model.append({name: list(parameter.shape) for name, parameter in model.named_parameters()})
            for name, parameter in model.named_parameters():
                if getattr(parameter, "tensor_model_parallel", False):
                    shapes_by_model[-1][name][parameter.partition_dim] *= tp  # type: ignore[attr-defined]
            parallel_state.destroy_model_parallel()
        return shapes_by_model

    [expected] = run_ranks(lambda: shapes(1), 1)
    assert run_ranks(lambda: shapes(2), 2) == [expected, expected]


def test_with_ddp_nothing_is_sharded() -> None:
    def on_each_rank() -> Any:
        options = ShardingOptions(placements=DDP)
        return _ranks_of(fully_shard_model(make_model("ME", Layout(ep=2)), options=options))

    placements = run_ranks(on_each_rank, 4)[0]
    assert placements == {"dense": ([0, 1, 2, 3], (Replicate(),)), "experts": ([0, 2], (Replicate(),))}


def test_experts_on_the_ranks_of_dense_parameters_share_their_collectives() -> None:
    def on_each_rank() -> set[int]:
        model = fully_shard_model(make_model("moe", Layout(num_ranks=2)))
        return {id(parameter.device_mesh) for parameter in model.parameters()}  # type: ignore[attr-defined]

    assert [len(meshes) for meshes in run_ranks(on_each_rank, 2)] == [1, 1]


# -- units -----------------------------------------------------------------------------------------------------------


def _units(kind: str) -> list[str]:
    def on_one_rank() -> list[str]:
        model = make_model(kind, Layout(num_ranks=1))
        order = [type(unit).__name__ for unit in sharding_units(model)]
        fully_shard_model(model)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        assert len(units) == len(order) + 1, "the layers, and the model"
        return order

    [unit_names] = run_ranks(on_one_rank, 1)
    return unit_names


def test_units_are_the_layers() -> None:
    assert _units("M*-E") == ["MambaLayer", "TransformerLayer", "MLPLayer", "MoETransformerLayer"]


def test_a_prediction_layer_is_a_unit_around_its_inner_layer() -> None:
    assert _units("mtp") == ["TransformerLayer", "TransformerLayer", "TransformerLayer", "MultiTokenPredictionLayer"]


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("gpt", Layout(tp=2)), ("moe", Layout(ep=2)), ("moe", Layout(expert_tp=2))],
    ids=["tensor parallel", "expert parallel", "expert tensor parallel"],
)
def test_units_of_models_whose_ranks_differ_are_refused_by_name(kind: str, layout: Layout) -> None:
    def on_each_rank() -> None:
        with pytest.raises(ValueError, match=r"lamella_megatron\.fully_shard_model\(model\)"):
            sharding_units(make_model(kind, layout))

    run_ranks(on_each_rank, layout.num_ranks)


def _group_of(lists: list[list[int]]) -> dist.ProcessGroup:
    """This rank's group of some that divide the ranks. Effects: collective over the world."""
    groups: list[tuple[list[int], dist.ProcessGroup]] = [(ranks, dist.new_group(ranks)) for ranks in lists]
    return next(group for ranks, group in groups if dist.get_rank() in ranks)


def _assert_refused(kind: str, layout: Layout, message: str, **groups: list[list[int]] | None) -> None:
    """Some groups are replaced by others, or taken away."""

    def on_each_rank() -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        model = make_model(kind, layout)
        collection = ProcessGroupCollection.use_mpu_process_groups()
        for name, lists in groups.items():
            setattr(collection, name, None if lists is None else _group_of(lists))
        with pytest.raises(ValueError, match=message):
            fully_shard_model(model, groups=collection)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing has changed"

    run_ranks(on_each_rank, layout.num_ranks)


EVERYONE = [[0, 1, 2, 3]]
HALVES, COMBS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def test_groups_that_are_missing_are_named() -> None:
    instances = Layout(instances=2)
    _assert_refused("moe", Layout(ep=2), "process group `dp_cp`, got none", dp_cp=None)
    _assert_refused("moe", Layout(ep=2), r"`expt_dp`, over which '.*experts.*' is sharded, got none", expt_dp=None)
    _assert_refused("moe", instances, "`inter_dist_opt`, as `intra_dp_cp` has 2 of the 4 ranks", inter_dist_opt=None)
    _assert_refused("moe", instances, "got only one of the two: `dp_cp` makes a mesh of 2 axes", intra_expt_dp=None)


def test_instances_that_do_not_divide_their_group_are_refused() -> None:
    message = r"to divide `dp_cp`, of ranks \[0, 1, 2, 3\], into instances .* got ranks \[.*\] and \[.*\]"
    _assert_refused("gpt", Layout(), message, intra_dp_cp=COMBS, inter_dist_opt=HALVES)
    _assert_refused("gpt", Layout(), message, intra_dp_cp=HALVES, inter_dist_opt=EVERYONE)
    three = Layout(num_ranks=3)
    _assert_refused("gpt", three, "to divide `dp_cp`", intra_dp_cp=[[0, 1], [2]], inter_dist_opt=[[0, 1], [2]])


def test_groups_of_another_model_are_refused() -> None:
    message = r"`expt_dp` to have the ranks that hold the same parameters, got ranks \[.*\] with .* group `{}`"
    for layout, name in ((Layout(ep=2), "ep"), (Layout(expert_tp=2), "expt_tp")):
        _assert_refused("moe", layout, message.format(name), expt_dp=EVERYONE, intra_expt_dp=None)
    message = r"`dp_cp` to have .* the model's group `tp`\."
    _assert_refused("gpt", Layout(tp=2), message, dp_cp=EVERYONE, intra_dp_cp=None)
    alone = [[0], [1], [2], [3]]
    _assert_refused("moe", Layout(ep=2), r"got 4 \* 1 and 1 \* 2 \* 1", expt_dp=alone, intra_expt_dp=None)
    _assert_refused("moe", Layout(ep=2), r"got 2 \* 1 and 2 \* 2 \* 1", dp_cp=HALVES, intra_dp_cp=None)


def test_missing_megatron_groups_are_refused_with_initialize_model_parallel() -> None:
    def on_one_rank() -> None:
        from megatron.core import parallel_state

        model = make_model("gpt", Layout(num_ranks=1))
        parallel_state.destroy_model_parallel()
        with pytest.raises(ValueError, match=r"got none. Call parallel_state.initialize_model_parallel\(\) first"):
            fully_shard_model(model)

    run_ranks(on_one_rank, 1)


def test_a_mesh_beside_the_groups_is_refused() -> None:
    def on_one_rank() -> None:
        model = make_model("gpt", Layout(num_ranks=1))
        with pytest.raises(TypeError, match="Expected no `mesh`, got one"):
            fully_shard_model(model, mesh=None)
        with pytest.raises(TypeError, match="Expected no `shard_placement_fn`, got one"):
            fully_shard_model(model, shard_placement_fn=None)
        for name in ("groups_by_name", "layer_groups"):
            with pytest.raises(TypeError, match=f"Expected no `{name}`, got one. .* Build the model whole"):
                build_sharded_model(lambda: make_model("gpt", Layout(num_ranks=1)), **{name: None})

    run_ranks(on_one_rank, 1)


def test_parameters_in_parts_already_are_refused_by_name() -> None:
    def on_one_rank() -> None:
        model = make_model("gpt", Layout(num_ranks=1))
        weight: Any = model.get_parameter("output_layer.weight")
        weight.is_gtp_weight_remat = True
        with pytest.raises(ValueError, match=r"'output_layer.weight' with the mark `is_gtp_weight_remat`"):
            fully_shard_model(model)
        del weight.is_gtp_weight_remat
        assert not any(isinstance(module, FSDPModule) for module in model.modules()), "nothing has changed"
        mesh = init_device_mesh("cpu", (1,))
        model.output_layer.weight = nn.Parameter(distribute_tensor(weight, mesh))  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"plain tensors, got 'output_layer.weight', a DTensor \(Replicate\(\),\)"):
            fully_shard_model(model)

    run_ranks(on_one_rank, 1)


def test_a_model_with_units_is_refused() -> None:
    def on_one_rank() -> None:
        model = make_model("gpt", Layout(num_ranks=1))
        fully_shard(sharding_units(model)[0])
        with pytest.raises(ValueError, match=r"without units, got 'decoder.layers.0', .* Call fully_shard_model once"):
            fully_shard_model(model)

    run_ranks(on_one_rank, 1)


def test_modules_of_the_given_unit_classes_are_units() -> None:
    def on_each_rank() -> set[str]:
        from megatron.core.transformer.mlp import MLP

        model = fully_shard_model(make_model("gpt", Layout(num_ranks=2)), unit_classes=[MLP])
        with pytest.raises(ValueError, match=r"with layers \['Conv1d'\]"):
            fully_shard_model(nn.Sequential(nn.Linear(2, 2)), unit_classes=[nn.Conv1d])
        return {type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)}

    assert run_ranks(on_each_rank, 2) == [{"FSDPMLP", "FSDPGPTModel"}] * 2


def test_a_convolution_that_is_read_without_a_call_is_gathered_with_its_reader() -> None:
    def shard(model: nn.Module) -> None:
        from megatron.core.transformer.transformer_layer import TransformerLayer

        fully_shard_model(model, unit_classes=[nn.Conv1d, TransformerLayer])

    assert_trains_as_on_one_rank("G*", Layout(num_ranks=2), shard)


def test_a_parameter_lies_on_the_group_that_is_named() -> None:
    def on_each_rank() -> None:
        model = make_model("gpt", Layout(num_ranks=4))
        pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
        pair = pairs[dist.get_rank() // 2]
        fully_shard_model(model, groups_by_name=lambda name: pair if name.endswith("linear_fc1.weight") else None)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.device_mesh.size() == (2 if name.endswith("linear_fc1.weight") else 4)

    run_ranks(on_each_rank, 4)


def test_a_group_by_name_among_several_instances_is_refused() -> None:
    def on_each_rank() -> None:
        model = make_model("gpt", Layout(num_ranks=4, instances=2))
        with pytest.raises(ValueError, match=r"got one of 4 ranks for '.*': replicas of its shards are unknown"):
            fully_shard_model(model, groups_by_name=lambda _: dist.group.WORLD)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing has changed"

    run_ranks(on_each_rank, 4)
