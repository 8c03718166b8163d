"""Checkpoints of Megatron are read under one set of names from any writer, and written for any reader."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella_checkpoint import Source
from lamella_checkpoint.testing import MemorySource, read_all, read_in_chunks
from lamella_convert._translation.hybrid_stack import (
    layer_symbols,
    logical_name,
    logical_names,
    nested_groups,
    nested_names,
    regrouped,
)
from lamella_convert._translation.megatron import (
    BRIDGE,
    RELEASE_0_19,
    Dialect,
    MtpLayer,
    dialect_of,
    is_fsdp_dtensor,
    read_fsdp_dtensor,
    write_fsdp_dtensor,
)
from lamella_convert._translation.megatron_args import counters, sizes_of_args
from lamella_convert._translation.megatron_model import from_megatron_model, global_expert, to_megatron_model

QK, V, NVH, D_INNER, D_STATE, NHEADS = 4, 8, 4, 8, 4, 4
SIZES = {"qk": QK, "v": V, "nvh": NVH, "d_inner": D_INNER, "d_state": D_STATE, "nheads": NHEADS}
GDN_ROWS = {"query": QK, "key": QK, "value": V, "z": V, "beta": NVH, "alpha": NVH}
MAMBA_ROWS = {"z": D_INNER, "x": D_INNER, "B": D_STATE, "C": D_STATE, "dt": NHEADS}


Shapes = dict[str, tuple[int, ...]]


def counting(shapes: Shapes, start: int = 0) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + numel, dtype=torch.float64).reshape(shape)
        start += numel
    return tensors


def parameters(num_layers: int = 3, num_experts: int = 2) -> Shapes:
    """Canonical names and shapes: a layer of each kind, by turns."""
    shapes: Shapes = {"embedding.word_embeddings.weight": (8, 2)}
    for layer in range(num_layers):
        prefix = f"decoder.layers.{layer}."
        if layer % 3 == 0:
            shapes |= {f"{prefix}self_attention.in_proj.weight.{part}": (rows, 2) for part, rows in GDN_ROWS.items()}
            conv = {part: GDN_ROWS[part] for part in ("query", "key", "value")}
            shapes |= {f"{prefix}self_attention.conv1d.weight.{part}": (rows, 1, 4) for part, rows in conv.items()}
            shapes |= {f"{prefix}self_attention.A_log": (4,), f"{prefix}self_attention.in_proj.layer_norm_weight": (2,)}
        elif layer % 3 == 1:
            shapes |= {f"{prefix}mixer.in_proj.weight.{part}": (rows, 2) for part, rows in MAMBA_ROWS.items()}
            conv = {part: MAMBA_ROWS[part] for part in ("x", "B", "C")}
            shapes |= {f"{prefix}mixer.conv1d.weight.{part}": (rows, 1, 4) for part, rows in conv.items()}
            shapes |= {f"{prefix}mixer.conv1d.bias.{part}": (rows,) for part, rows in conv.items()}
        else:
            shapes |= {f"{prefix}self_attention.linear_qkv.weight": (6, 2)}
        shapes |= {f"{prefix}mlp.linear_fc1.weight": (8, 2), f"{prefix}mlp.linear_fc2.weight": (2, 4)}
        for expert in range(num_experts):
            shapes[f"{prefix}mlp.experts.linear_fc1.weight{expert}"] = (16, 2)
            shapes[f"{prefix}mlp.experts.linear_fc2.weight{expert}"] = (2, 8)
    shapes |= {"decoder.final_layernorm.weight": (2,), "mtp.layers.0.mtp_model_layer.mlp.linear_fc1.weight": (8, 2)}
    shapes |= {"mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight": (2, 4)}
    # Not gated: as many rows as the second layer has columns.
    shapes |= {"vision_model.decoder.layers.0.mlp.linear_fc1.weight": (4, 2)}
    return shapes | {"vision_model.decoder.layers.0.mlp.linear_fc2.weight": (2, 4)}


def checkpoint(
    shapes: Shapes, slots: Iterable[str] = ("exp_avg", "exp_avg_sq", "momentum_buffer")
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    tensors = counting({f"model.{name}": shape for name, shape in shapes.items()})
    start = 10_000
    for slot in slots:
        tensors |= counting({f"optimizer.state.{name}.{slot}": shape for name, shape in shapes.items()}, start)
        start += 10_000
    tensors |= {f"optimizer.state.{name}.step": torch.tensor(5.0) for name in shapes}
    objects: dict[str, object] = {f"optimizer.param_groups.{name}.lr": 0.5 for name in shapes}
    return tensors, objects | {"iteration": 7, "checkpoint_version": 3.0}


def through(source: Source, dialect: Dialect, sizes: Mapping[str, int], chunks: tuple[int, ...] = ()) -> MemorySource:
    """A source written in a dialect, stored, and read back."""
    written = write_fsdp_dtensor(source, dialect, sizes=sizes, chunks=chunks)
    return MemorySource(
        read_in_chunks(written) | scalars(written),
        {name: written.read_object(name) for name in written.objects if name != "args"},
    )


def scalars(source: Source) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in read_all(source).items() if tensor.ndim == 0}


def assert_holds(source: Source, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, object]) -> None:
    loaded = read_all(source)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
    assert {name: source.read_object(name) for name in source.objects} == objects


@pytest.mark.parametrize("dialect", [RELEASE_0_19, BRIDGE])
@pytest.mark.parametrize("num_tp", [1, 2, 4])
def test_megatron_dialects_round_trip_every_tensor_and_object(dialect: Dialect, num_tp: int) -> None:
    tensors, objects = checkpoint(parameters())
    stored = through(MemorySource(tensors, objects), dialect, {"tp": num_tp})
    assert is_fsdp_dtensor(stored)
    detected_dialect = dialect_of(stored)
    assert detected_dialect is not None and detected_dialect.name == dialect.name
    back = read_fsdp_dtensor(stored, sizes={"tp": num_tp, **SIZES})
    assert_holds(back, tensors, objects)
    assert back.inexact == {}


def test_fused_tensors_written_for_release_0_19_are_in_rank_order() -> None:
    tensors, objects = checkpoint(parameters(num_layers=2))
    stored = through(MemorySource(tensors, objects), RELEASE_0_19, {"tp": 2})
    prefix = "decoder.layers.0.self_attention.in_proj.weight"
    parts = [tensors[f"model.{prefix}.{part}"].chunk(2) for part in GDN_ROWS]
    assert torch.equal(
        stored.full_tensors[f"model.module.{prefix}"], torch.cat([part[rank] for rank in range(2) for part in parts])
    )
    prefix = "decoder.layers.1.mixer"
    parts = [tensors[f"optimizer.state.{prefix}.conv1d.bias.{part}.exp_avg"].chunk(2) for part in "xBC"]
    assert torch.equal(
        stored.full_tensors[f"optimizer.state.module.module.module.{prefix}.conv1d_bias.exp_avg"],
        torch.cat([part[rank] for rank in range(2) for part in parts]),
    )


def test_bridge_stores_components_and_halves() -> None:
    tensors, objects = checkpoint(parameters(num_layers=1))
    stored = through(MemorySource(tensors, objects), BRIDGE, {})
    names = {name for name in stored.full_tensors if "layers.0" in name and name.startswith("model.")}
    prefix = "model.module.decoder.layers.0."
    assert names == {
        *(f"{prefix}self_attention.in_proj.weight.{part}" for part in GDN_ROWS),
        *(f"{prefix}self_attention.conv1d.weight.{part}" for part in ("query", "key", "value")),
        *(f"{prefix}mlp.linear_fc1.weight_{half}" for half in "wv"),
        *(f"{prefix}mlp.experts.linear_fc1.weight{expert}_{half}" for half in "wv" for expert in range(2)),
        *(f"{prefix}mlp.experts.linear_fc2.weight{expert}" for expert in range(2)),
        *(f"{prefix}{name}" for name in ["self_attention.A_log", "self_attention.in_proj.layer_norm_weight"]),
        f"{prefix}mlp.linear_fc2.weight",
        *(f"model.module.mtp.layers.0.mtp_model_layer.mlp.linear_fc1.weight_{half}" for half in "wv"),
        "model.module.mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight",
        *(f"model.module.vision_model.decoder.layers.0.mlp.linear_fc{number}.weight" for number in [1, 2]),
    }
    gate = stored.full_tensors[
        "optimizer.state.module.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.momentum_buffer"
    ]
    fused = tensors["optimizer.state.decoder.layers.0.mlp.linear_fc1.weight.momentum_buffer"]
    assert torch.equal(gate, fused[:4])


def test_options_go_by_the_models_names_and_come_back_for_each_component() -> None:
    tensors, objects = checkpoint(parameters(num_layers=2))
    for dialect in [BRIDGE, RELEASE_0_19]:
        stored = through(MemorySource(tensors, objects), dialect, {"tp": 2})
        prefix = "optimizer.param_to_group_meta.module.module.module.decoder.layers."
        names = {name.removeprefix(prefix) for name in stored.values if name.startswith(f"{prefix}0.self_attention")}
        assert names == {
            f"0.self_attention.{name}.lr"
            for name in ["in_proj.weight", "conv1d.weight", "A_log", "in_proj.layer_norm_weight"]
        }
        assert f"{prefix}0.mlp.linear_fc1.weight.lr" in stored.values
        back = read_fsdp_dtensor(stored, sizes={"tp": 2, **SIZES})
        assert {name for name in back.objects if "param_groups" in name} == {
            name for name in objects if "param_groups" in name
        }


def test_options_of_components_must_agree() -> None:
    tensors, objects = checkpoint(parameters(num_layers=1))
    objects["optimizer.param_groups.decoder.layers.0.self_attention.in_proj.weight.key.lr"] = 0.25
    written = write_fsdp_dtensor(MemorySource(tensors, objects), BRIDGE)
    [name] = [name for name in written.objects if name.endswith("in_proj.weight.lr")]
    with pytest.raises(ValueError, match=r"got 0.5 of '.*query.lr' and 0.25 of '.*key.lr'"):
        written.read_object(name)


def test_a_step_that_is_an_option_is_a_slot_of_each_component() -> None:
    name = "decoder.layers.0.self_attention.in_proj.weight"
    tensors = {f"model.module.{name}.{part}": torch.ones(rows, 2) for part, rows in GDN_ROWS.items()}
    meta = f"optimizer.param_to_group_meta.module.module.module.{name}"
    read = read_fsdp_dtensor(MemorySource(tensors, {f"{meta}.step": 9, f"{meta}.lr": 0.5}))
    assert {name for name in read.objects if name.endswith("step")} == {
        f"optimizer.state.{name}.{part}.step" for part in GDN_ROWS
    }
    assert read.read_object(f"optimizer.state.{name}.beta.step") == 9


def test_a_written_fsdp_dtensor_has_checkpoint_version_iteration_and_args() -> None:
    written = write_fsdp_dtensor(MemorySource({"model.a": torch.ones(2)}), BRIDGE, args={"num_layers": 2})
    assert {name: written.read_object(name) for name in written.objects} == {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "args": Namespace(num_layers=2),
    }
    source = MemorySource({"model.a": torch.ones(2)}, {"args": {"hidden_size": 4}, "iteration": 3})
    written = write_fsdp_dtensor(source, BRIDGE)
    assert written.read_object("args") == Namespace(hidden_size=4)
    assert written.read_object("iteration") == 3


def test_random_and_rerun_states_of_the_writing_ranks_are_left_over_by_name() -> None:
    process_objects = {"rng_state.(0, 0).0.x": 1, "rerun_state_machine.y": 2}
    source = MemorySource({"model.module.a": torch.ones(2)}, {**process_objects, "iteration": 3})
    read = read_fsdp_dtensor(source)
    assert read.objects == ("iteration",)
    assert read.left_over == tuple(process_objects)


@pytest.mark.parametrize("dialect", [RELEASE_0_19, BRIDGE])
def test_experts_that_are_modules_of_their_own_are_read_and_written(dialect: Dialect) -> None:
    tensors, objects = checkpoint(parameters())
    sequential = replace(dialect, sequential_experts=True)
    stored = through(MemorySource(tensors, objects), sequential, {"tp": 2})
    experts = "decoder.layers.1.mlp.experts."
    assert not any(".experts.linear_fc" in name for name in [*stored.full_tensors, *stored.objects])
    gate = stored.full_tensors[f"model.module.{experts}local_experts.1.linear_fc1.weight_w"]
    assert torch.equal(gate, tensors[f"model.{experts}linear_fc1.weight1"][:8])
    assert (
        f"optimizer.state.module.module.module.{experts}local_experts.1.linear_fc2.weight.exp_avg"
        in stored.full_tensors
    )
    options = f"optimizer.param_to_group_meta.module.module.module.{experts}local_experts.0.linear_fc1.weight.lr"
    assert options in stored.objects
    detected_dialect = dialect_of(stored)
    assert detected_dialect is not None and detected_dialect.sequential_experts
    assert_holds(read_fsdp_dtensor(stored, sizes={"tp": 2, **SIZES}), tensors, objects)


def test_experts_without_gates_are_modules_of_their_own_too() -> None:
    experts = "decoder.layers.0.mlp.experts."
    shapes = {f"{experts}linear_fc1.weight0": (4, 2), f"{experts}linear_fc1.bias0": (4,)}
    shapes |= {f"{experts}linear_fc2.weight0": (2, 4), f"{experts}linear_fc2.bias0": (2,)}
    tensors, objects = checkpoint(shapes)
    stored = through(MemorySource(tensors, objects), replace(BRIDGE, sequential_experts=True), {})
    assert f"model.module.{experts}local_experts.0.linear_fc1.bias" in stored.full_tensors
    assert_holds(read_fsdp_dtensor(stored), tensors, objects)


def layer_of_experts(num_experts: int, *, sequential: bool) -> Shapes:
    """A model's names and shapes of a layer with the given experts, of all ranks together."""
    layer = "decoder.layers.0.mlp."
    shapes: Shapes = {f"{layer}router.weight": (3, 2)}
    for index in range(num_experts):
        names = [f"experts.local_experts.{index}.linear_fc{n}.weight" for n in (1, 2)]
        if not sequential:
            names = [f"experts.linear_fc{n}.weight{index}" for n in (1, 2)]
        shapes |= {f"{layer}{names[0]}": (8, 2), f"{layer}{names[1]}": (2, 4)}
    return shapes


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("num_etp", [1, 2])
def test_ranks_of_experts_take_their_own_from_a_checkpoint_that_has_all(sequential: bool, num_etp: int) -> None:
    """Three experts on two ranks, whose layers are cut for another number of ranks than the rest."""
    tensors, objects = checkpoint(layer_of_experts(3, sequential=False))
    for first, num_experts in [(0, 2), (2, 1)]:
        shapes = layer_of_experts(num_experts, sequential=sequential)
        sizes = {"tp": 4, "etp": num_etp}
        mine = from_megatron_model(shapes, sizes=sizes, first_expert=first)
        rank_source = to_megatron_model(MemorySource(tensors, objects), mine)
        values = read_all(rank_source)
        assert {name.removeprefix("model.") for name in values if name.startswith("model.")} == shapes.keys()
        name = "local_experts.0.linear_fc1.weight" if sequential else "linear_fc1.weight0"
        for section, slot in [("model.", ""), ("optimizer.state.", ".exp_avg")]:
            stored = tensors[f"{section}decoder.layers.0.mlp.experts.linear_fc1.weight{first}{slot}"]
            halves = [half.chunk(num_etp) for half in stored.chunk(2)]
            as_held = torch.cat([half[rank] for rank in range(num_etp) for half in halves])
            assert torch.equal(values[f"{section}decoder.layers.0.mlp.experts.{name}{slot}"], as_held)
        foreign_names = {
            name
            for name in [*tensors, *objects]
            for n in {0, 1, 2} - {first, first + num_experts - 1}
            if f".weight{n}" in name
        }
        assert set(rank_source.left_over) == foreign_names


def test_names_that_no_live_rank_has_are_kept_for_load_to_report() -> None:
    mine = from_megatron_model(layer_of_experts(1, sequential=False), sizes={"tp": 1})
    tensors, objects = checkpoint(
        layer_of_experts(1, sequential=False) | {"decoder.layers.7.mlp.router.weight": (3, 2)}
    )
    assert "model.decoder.layers.7.mlp.router.weight" in to_megatron_model(MemorySource(tensors, objects), mine).tensors


def test_a_models_own_spelling_of_multi_token_prediction_is_stored_canonically() -> None:
    [correspondence] = from_megatron_model(
        {"mtp.layers.0.transformer_layer.mlp.linear_fc2.weight": (2, 4)}, sizes={"tp": 1}
    )
    assert list(correspondence.left) == ["mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight"]


def test_fused_tensors_in_rank_order_need_the_tensor_parallel_size() -> None:
    tensors, objects = checkpoint(parameters())
    with pytest.raises(ValueError, match=r"the size 'tp'.*in_proj"):
        write_fsdp_dtensor(MemorySource(tensors, objects), RELEASE_0_19)
    stored = through(MemorySource(tensors, objects), RELEASE_0_19, {"tp": 2})
    with pytest.raises(ValueError, match=r"the size 'tp'.*in_proj"):
        read_fsdp_dtensor(stored, sizes=SIZES)


def test_a_wrong_tensor_parallel_size_reads_wrong_values() -> None:
    """The reason for the argument: a wrong value fits, and the file has no sign of the right one."""
    tensors, objects = checkpoint(parameters(num_layers=1))
    stored = through(MemorySource(tensors, objects), RELEASE_0_19, {"tp": 2})
    name = "model.decoder.layers.0.self_attention.in_proj.weight.key"
    assert not torch.equal(read_all(read_fsdp_dtensor(stored, sizes={"tp": 1, **SIZES}))[name], tensors[name])


@pytest.mark.parametrize("spelling", ["mtp_model_layer", "transformer_layer"])
def test_both_spellings_of_multi_token_prediction_are_read(spelling: MtpLayer) -> None:
    tensors, objects = checkpoint(parameters(num_layers=0))
    dialect = Dialect(name="bridge", splits_gdn=True, mtp_layer=spelling)
    stored = through(MemorySource(tensors, objects), dialect, {})
    assert f"model.module.mtp.layers.0.{spelling}.mlp.linear_fc2.weight" in stored.full_tensors
    assert (
        f"optimizer.state.module.module.module.mtp.layers.0.{spelling}.mlp.linear_fc2.weight.step"
        in stored.full_tensors
    )
    assert_holds(read_fsdp_dtensor(stored), tensors, objects)


def test_extra_states_are_dropped_and_counters_kept() -> None:
    tensors = {"model.module.decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(2)}
    extra = "model.module.decoder.layers.0.self_attention.linear_qkv._extra_state"
    source = MemorySource(tensors, {extra: b"", "iteration": 3, "checkpoint_version": 3.0})
    read = read_fsdp_dtensor(source)
    assert list(read.tensors) == ["model.decoder.layers.0.self_attention.linear_qkv.weight"]
    assert read.objects == ("iteration", "checkpoint_version")
    translated_counters = counters(read, {"step": 9, "consumed_train_samples": 512})
    assert translated_counters.found == {"checkpoint_version": 3.0, "iteration": 9, "consumed_train_samples": 512}
    assert translated_counters.lacking == (
        "args",
        "optimizer",
        "opt_param_scheduler",
        "rng_state",
        "num_floating_point_operations_so_far",
    )


def test_models_without_a_wrapper_for_precision_are_read() -> None:
    tensors, objects = checkpoint(parameters())
    dialect = Dialect(name="bridge", splits_gdn=True, model_prefix="", optimizer_prefix="module.module.")
    stored = through(MemorySource(tensors, objects), dialect, {"tp": 2})
    assert "model.embedding.word_embeddings.weight" in stored.full_tensors
    assert_holds(read_fsdp_dtensor(stored, sizes={"tp": 2, **SIZES}), tensors, objects)


def test_chunks_of_virtual_pipelines_count_their_own_layers() -> None:
    tensors, objects = checkpoint(parameters(num_layers=5))
    stored = through(MemorySource(tensors, objects), BRIDGE, {"tp": 2}, chunks=(2, 3))
    assert "model0.module.decoder.layers.1.mixer.in_proj.weight" in stored.full_tensors
    assert "model1.module.decoder.layers.1.self_attention.in_proj.weight.query" in stored.full_tensors
    assert "model1.module.decoder.final_layernorm.weight" in stored.full_tensors
    assert_holds(read_fsdp_dtensor(stored, sizes={"tp": 2, **SIZES}), tensors, objects)
    with pytest.raises(ValueError, match=r"4 decoder layers in chunks of \(2, 2\)"):
        write_fsdp_dtensor(MemorySource(tensors, objects), BRIDGE, sizes={"tp": 2}, chunks=(2, 2))


def test_fused_latent_attention_comes_apart_with_the_norm_before_it() -> None:
    prefix = "decoder.layers.0."
    shapes = {
        f"{prefix}input_layernorm.weight": (3,),
        f"{prefix}self_attention.linear_q_down_proj.weight": (4, 3),
        f"{prefix}self_attention.linear_kv_down_proj.weight": (2, 3),
    }
    tensors, objects = checkpoint(shapes)
    fused = Dialect(name="release-0.19", splits_gdn=False, fused_mla=True)
    stored = through(MemorySource(tensors, objects), fused, {})
    assert {name for name in stored.full_tensors if name.startswith("model.")} == {
        f"model.module.{prefix}self_attention.linear_qkv_down_proj.{name}" for name in ["weight", "layer_norm_weight"]
    }
    assert_holds(read_fsdp_dtensor(stored, sizes={"q_down": 4, "kv_down": 2}), tensors, objects)


def test_a_layer_whose_halves_cannot_be_told_is_refused() -> None:
    source = MemorySource({"model.decoder.layers.0.mlp.linear_fc1.weight": torch.ones(6, 2)})
    with pytest.raises(ValueError, match=r"'decoder.layers.0.mlp.linear_fc2.weight' with as many columns.*got None"):
        write_fsdp_dtensor(source, BRIDGE)


@pytest.mark.parametrize(
    ("name", "renumbered"),
    [
        ("decoder.layers.3.mlp.experts.linear_fc1.weight1", "decoder.layers.3.mlp.experts.linear_fc1.weight5"),
        ("mlp.experts.local_experts.0.linear_fc2.weight", "mlp.experts.local_experts.4.linear_fc2.weight"),
        ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight1_w", "decoder.layers.3.mlp.experts.linear_fc1.weight5_w"),
    ],
)
def test_experts_of_a_rank_are_counted_through(name: str, renumbered: str) -> None:
    assert global_expert(name, 4) == renumbered
    assert global_expert(name, 0) == name


def test_sizes_are_taken_from_args() -> None:
    args = {
        "tensor_model_parallel_size": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "mamba_num_heads": None,
        "kv_lora_rank": 6,
        "qk_pos_emb_head_dim": 2,
    }
    assert sizes_of_args(args) == {"tp": 2, "qk": 16, "v": 32, "nvh": 4, "kv_down": 8}


@pytest.mark.parametrize(("configured_heads", "num_heads"), [(None, 8), (4, 4)])
def test_mamba_mixers_without_a_number_of_heads_are_twice_as_wide_as_the_model(
    configured_heads: int | None, num_heads: int
) -> None:
    args = {"hidden_size": 16, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 8}
    sizes = sizes_of_args({**args, "mamba_num_heads": configured_heads})
    assert sizes == {"d_inner": 4 * num_heads, "d_state": 16, "nheads": num_heads}


class TestGroupedHybridStacks:
    pattern = "M[M*]-[*-]"
    names = (
        "decoder.layers.0.mixer.A_log",
        "decoder.layers.1.mixer.A_log",
        "decoder.layers.1.norm.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.3.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
    )
    nested = (
        "decoder.layers.0.mixer.A_log",
        "decoder.layers.1.layers.0.mixer.A_log",
        "decoder.layers.1.layers.0.norm.weight",
        "decoder.layers.1.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.3.layers.1.mlp.linear_fc2.weight",
        "decoder.final_norm.weight",
    )

    def test_layers_have_logical_names(self) -> None:
        assert tuple(map(logical_name, self.nested)) == self.names
        nested_names_by_logical = nested_names(self.names, self.pattern)
        assert tuple(nested_names_by_logical.get(name, name) for name in self.names) == self.nested

    flat = (
        "decoder.layers.0.mixer.A_log",
        "decoder.layers.1.mixer.A_log",
        "decoder.layers.1.norm.weight",
        "decoder.layers.2.self_attention.linear_qkv.weight",
        "decoder.layers.3.mlp.linear_fc2.weight",
        "decoder.layers.5.mlp.linear_fc2.weight",
        "decoder.final_norm.weight",
    )

    def test_names_are_nested_and_flat_again(self) -> None:
        flat = "MM*-*-"
        assert regrouped(self.flat, flat, self.pattern) == dict(zip(self.flat, self.nested, strict=True))
        assert regrouped(self.nested, self.pattern, flat) == dict(zip(self.nested, self.flat, strict=True))
        outside = ("embedding.weight", "mtp.layers.0.mtp_model_layer.layers.1.mixer.A_log")
        assert regrouped(outside, flat, self.pattern) == dict(zip(outside, outside, strict=True))

    @given(st.lists(st.text("M*-", min_size=1, max_size=3), min_size=1, max_size=4), st.data())
    def test_layer_names_are_renamed_between_any_groupings_and_back(
        self, layers: list[str], data: st.DataObject
    ) -> None:
        symbols = "".join(layers)
        first = "".join(f"[{layer}]" if data.draw(st.booleans()) else layer for layer in layers)
        cut = data.draw(st.integers(0, len(symbols)))
        second = "".join(f"[{group}]" for group in (symbols[:cut], symbols[cut:]) if group)
        names = regrouped((f"decoder.layers.{number}.weight" for number in range(len(symbols))), symbols, first)
        second_names = regrouped(names.values(), first, second)
        assert len(set(second_names.values())) == len(symbols)
        assert second_names == {name: regrouped([flat], symbols, second)[flat] for flat, name in names.items()}
        assert regrouped(second_names.values(), second, first) == {name: other for other, name in second_names.items()}

    def test_names_of_other_layers_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"same layers, got '\*E' and '\[\*-\]'"):
            regrouped([], "*E", "[*-]")
        for name in ("decoder.layers.2.mlp.weight", "decoder.layers.0.layers.0.mlp.weight"):
            with pytest.raises(ValueError, match=f"the 2 layers of '\\*E', got '{name}'"):
                regrouped([name], "*E", "[*E]")

    def test_layers_of_a_flat_stack_have_logical_names(self) -> None:
        assert tuple(logical_names(self.flat, self.pattern).values()) == self.names
        assert logical_names(self.flat, "MM*-*-") == {name: name for name in self.flat}
        with pytest.raises(ValueError, match=r"one layer of a kind, got '\[MM\*\]' in '-\[MM\*\]'"):
            logical_names(["decoder.final_norm.weight"], "-[MM*]")

    def test_checkpoints_are_written_nested_and_read_back(self) -> None:
        tensors, objects = checkpoint(dict.fromkeys(self.names, (2, 2)))
        dialect = Dialect(name="release-0.19", splits_gdn=False, hybrid_pattern=self.pattern)
        stored = through(MemorySource(tensors, objects), dialect, {"tp": 1})
        assert {name for name in stored.full_tensors if name.startswith("model.")} == {
            f"model.module.{name}" for name in self.nested
        }
        assert (
            "optimizer.state.module.module.module.decoder.layers.3.layers.1.mlp.linear_fc2.weight.step"
            in stored.full_tensors
        )
        assert_holds(read_fsdp_dtensor(stored), tensors, objects)

    def test_a_group_with_two_layers_of_a_kind_stays_nested(self) -> None:
        pattern = "[M*][MM*]-"
        modules = ("mixer", "self_attention", "mixer", "mixer", "self_attention", "mlp")
        flat = tuple(f"decoder.layers.{number}.{module}.weight" for number, module in enumerate(modules))
        nested = regrouped(flat, "M*MM*-", pattern)
        names = tuple(logical_name(name, nested_groups(nested.values())) for name in nested.values())
        assert names == (
            "decoder.layers.0.mixer.weight",
            "decoder.layers.0.self_attention.weight",
            "decoder.layers.1.layers.0.mixer.weight",
            "decoder.layers.1.layers.1.mixer.weight",
            "decoder.layers.1.layers.2.self_attention.weight",
            "decoder.layers.2.mlp.weight",
        )
        tensors, objects = checkpoint(dict.fromkeys(names, (2, 2)))
        dialect = Dialect(name="release-0.19", splits_gdn=False, hybrid_pattern=pattern)
        stored = through(MemorySource(tensors, objects), dialect, {"tp": 1})
        in_model = {name for name in stored.full_tensors if name.startswith("model.")}
        assert in_model == {f"model.module.{name}" for name in nested.values()}
        assert_holds(read_fsdp_dtensor(stored), tensors, objects)
        with pytest.raises(ValueError, match=r"one layer of '\[MM\*\]' to have 'mixer', got 2"):
            nested_names(["decoder.layers.0.mixer.A_log"], "[MM*]")

    @pytest.mark.parametrize("pattern", ["[[*-]]", "[]", "[*-", "*-]", "*Q"])
    def test_malformed_patterns_are_refused(self, pattern: str) -> None:
        with pytest.raises(ValueError, match="Expected a pattern"):
            layer_symbols(pattern)

    def test_patterns_are_read_as_layers(self) -> None:
        assert layer_symbols("M[M*]-|[*-]/*E/*E") == ["M", "[M*]", "-", "[*-]"]

    def test_a_model_with_more_layers_than_the_pattern_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"the 1 layers of '\[\*-\]', got 'decoder.layers.1.mlp"):
            nested_names(["decoder.layers.1.mlp.linear_fc2.weight"], "[*-]")


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_model_goes_through_any_dialect_at_any_rank_count(data: st.DataObject) -> None:
    shapes = parameters(data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3)))
    tensors, objects = checkpoint(shapes, slots=data.draw(st.sets(st.sampled_from(["exp_avg", "master_param", "z"]))))
    source = MemorySource(tensors, objects)
    for _ in range(data.draw(st.integers(1, 3))):
        num_tp = data.draw(st.sampled_from([1, 2, 4]))
        dialect = data.draw(st.sampled_from([RELEASE_0_19, BRIDGE]))
        stored = through(source, dialect, {"tp": num_tp})
        back = read_fsdp_dtensor(stored, sizes={"tp": num_tp, **SIZES})
        source = MemorySource(read_all(back), {name: back.read_object(name) for name in back.objects})
    assert_holds(source, tensors, objects)
