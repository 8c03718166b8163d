"""A Qwen3.5 goes from Hugging Face's names to Megatron's and back unchanged, however it is spelled."""

from collections.abc import Mapping
from math import prod

import pytest
import torch
from qwen_tiny import (
    MemorySource,
    config_of,
    in_memory,
    mtp_of,
    one_by_one,
    read_all,
    to_hugging_face,
    to_megatron,
    translated,
    weights_of,
)
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from lamella_convert import Dialect
from lamella_convert._translation.megatron import BRIDGE, RELEASE_0_19, read_fsdp_dtensor, write_fsdp_dtensor
from lamella_qwen import megatron_rules, megatron_sizes
from lamella_testing.qwen import KINDS, Kind, make_model

MODELS = {kind: weights_of(make_model(kind)) for kind in KINDS}


def assert_same(some: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert sorted(some) == sorted(expected)
    for name, tensor in some.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_of_a_model_comes_back_bit_equal(kind: Kind) -> None:
    rules = megatron_rules(config_of(kind))
    tensors = to_megatron(MODELS[kind], rules)
    assert not set(tensors) & set(MODELS[kind])
    assert_same(to_hugging_face(tensors, rules), MODELS[kind])


@pytest.mark.parametrize("dialect", [BRIDGE, RELEASE_0_19], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_with_its_optimizer_comes_back_bit_equal_from_every_dialect(
    kind: Kind, tensor_parallel_size: int, dialect: Dialect
) -> None:
    rules = megatron_rules(config_of(kind))
    sizes = megatron_sizes(config_of(kind), tensor_parallel_size=tensor_parallel_size)
    source = with_optimizer(MODELS[kind])
    ours = translated(source, rules, "right")
    theirs = in_memory(write_fsdp_dtensor(ours, dialect, sizes=sizes))
    assert all(name.partition(".")[2].startswith("module.") for name in theirs.tensors if name.startswith("model."))
    back = translated(read_fsdp_dtensor(theirs, sizes=sizes), rules, "left")
    assert not ours.left_over
    assert not any(name.startswith(("model.", "optimizer.")) for name in back.left_over)  # Counters are Megatron's.
    assert_same(read_all(back), source.stored)
    assert {name: back.read_object(name) for name in source.objects} == source.values


def with_optimizer(weights: Mapping[str, torch.Tensor]) -> MemorySource:
    """A checkpoint of a model and its AdamW, each slot with values of its own."""
    torch.manual_seed(2)
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    for name, tensor in weights.items():
        tensors |= {f"optimizer.state.{name}.{slot}": torch.rand_like(tensor) for slot in ("exp_avg", "exp_avg_sq")}
        tensors[f"optimizer.state.{name}.step"] = torch.tensor(7.0)
    return MemorySource(tensors, {f"optimizer.param_groups.{name}.lr": 1e-3 for name in weights})


@pytest.mark.parametrize(("packed", "packed_mtp"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", ["moe", "vision-moe"])
def test_packed_and_unpacked_experts_give_equal_megatron_tensors(kind: Kind, packed: bool, packed_mtp: bool) -> None:
    as_published = megatron_rules(config_of(kind))
    rules = megatron_rules(config_of(kind), packed_experts=packed, packed_mtp_experts=packed_mtp)
    weights = MODELS[kind] if packed else one_by_one(MODELS[kind])
    weights = weights | mtp_of(kind, packed=packed_mtp)
    tensors = to_megatron(weights, as_published)
    assert_same(tensors, to_megatron(MODELS[kind] | mtp_of(kind, packed=False), rules))
    assert_same(to_hugging_face(tensors, rules), weights)


@pytest.mark.parametrize(("kind", "outer"), [("dense", ""), ("vision", "language_model.")])
def test_the_layer_that_predicts_further_tokens_is_megatrons(kind: Kind, outer: str) -> None:
    rules = megatron_rules(config_of(kind))
    weights = mtp_of(kind, packed=True)
    tensors = to_megatron(weights, rules)
    assert_same(to_hugging_face(tensors, rules), weights)
    for theirs, ours in {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "final_layernorm": "norm",
        "mtp_model_layer.mlp.linear_fc2": "layers.0.mlp.down_proj",
        "mtp_model_layer.self_attention.linear_proj": "layers.0.self_attn.o_proj",
    }.items():
        assert torch.equal(tensors[f"{outer}mtp.layers.0.{theirs}.weight"], weights[f"mtp.{ours}.weight"])


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
def test_a_component_that_a_checkpoint_stores_is_hugging_faces(tensor_parallel_size: int) -> None:
    weights = MODELS["dense"]
    tensors = stored(weights, BRIDGE, tensor_parallel_size)
    layer, ours = "model.module.decoder.layers.0.", "model.layers.0."
    for right, component in {"in_proj": "in_proj_qkv", "conv1d": "conv1d"}.items():
        parts = weights[f"{ours}linear_attn.{component}.weight"].split([16, 16, 48])  # type: ignore[no-untyped-call]
        for part, rows in zip(("query", "key", "value"), parts, strict=True):
            assert torch.equal(tensors[f"{layer}self_attention.{right}.weight.{part}"], rows)
    for right, component in {
        "self_attention.in_proj.weight.z": "linear_attn.in_proj_z",
        "self_attention.in_proj.weight.beta": "linear_attn.in_proj_b",
        "self_attention.in_proj.weight.alpha": "linear_attn.in_proj_a",
        "mlp.linear_fc1.weight_w": "mlp.gate_proj",
        "mlp.linear_fc1.weight_v": "mlp.up_proj",
    }.items():
        assert torch.equal(tensors[f"{layer}{right}"], weights[f"{ours}{component}.weight"])


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
def test_a_fused_projection_has_each_ranks_components_one_after_another(tensor_parallel_size: int) -> None:
    bridge = stored(MODELS["dense"], BRIDGE, tensor_parallel_size)
    release = stored(MODELS["dense"], RELEASE_0_19, tensor_parallel_size)
    layer = "model.module.decoder.layers.1.self_attention."
    for name, kinds in {
        "in_proj.weight": ["query", "key", "value", "z", "beta", "alpha"],
        "conv1d.weight": ["query", "key", "value"],
    }.items():
        parts = [bridge[f"{layer}{name}.{kind}"].chunk(tensor_parallel_size) for kind in kinds]
        expected = torch.cat([part[rank] for rank in range(tensor_parallel_size) for part in parts])
        assert torch.equal(release[f"{layer}{name}"], expected)


def stored(weights: Mapping[str, torch.Tensor], dialect: Dialect, tensor_parallel_size: int) -> dict[str, torch.Tensor]:
    """A dense model's tensors by their names in an `fsdp_dtensor` checkpoint."""
    sizes = megatron_sizes(config_of("dense"), tensor_parallel_size=tensor_parallel_size)
    source = MemorySource({f"model.{name}": tensor for name, tensor in weights.items()})
    ours = translated(source, megatron_rules(config_of("dense")), "right")
    return read_all(write_fsdp_dtensor(ours, dialect, sizes=sizes))


def test_the_vector_of_the_fused_projection_is_in_the_order_of_its_ranks() -> None:
    """Components of 4, 4, 8, 8, 4 and 4 rows on two ranks, values counted off in the fused order."""
    config = config_of("dense") | {"linear_key_head_dim": 1, "linear_num_value_heads": 4, "linear_value_head_dim": 2}
    name = "decoder.layers.0.self_attention.in_proj.weight"
    fused = MemorySource({f"model.module.{name}": torch.arange(32.0)[:, None]})
    sizes = megatron_sizes(config, tensor_parallel_size=2)
    source = translated(read_fsdp_dtensor(fused, sizes=sizes), megatron_rules(config), "left")
    rows = {name.rpartition(".in_proj_")[2]: tensor.flatten().tolist() for name, tensor in read_all(source).items()}
    assert rows == {
        "qkv.weight": [0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23],
        "z.weight": [8, 9, 10, 11, 24, 25, 26, 27],
        "b.weight": [12, 13, 28, 29],
        "a.weight": [14, 15, 30, 31],
    }


def test_the_published_sizes_give_megatrons_shapes() -> None:
    """Qwen3.5-0.8B: its text sizes, with a vision tower of about its size."""
    text = {"vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16}
    vision = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "out_hidden_size": 1024}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    source = MemorySource({f"model.{name}": tensor for name, tensor in model.named_parameters()})
    ours = translated(source, megatron_rules(config.to_dict()), "right")
    assert not ours.left_over
    theirs = write_fsdp_dtensor(ours, RELEASE_0_19, sizes=megatron_sizes(config.to_dict(), tensor_parallel_size=2))
    shapes = {name.removeprefix("model.module."): info.shape for name, info in theirs.tensors.items()}
    assert sum(prod(shape) for shape in shapes.values()) == 852_985_920
    layers = "language_model.decoder.layers."
    assert shapes[f"{layers}0.self_attention.in_proj.weight"] == (8224, 1024)
    assert shapes[f"{layers}0.self_attention.conv1d.weight"] == (6144, 1, 4)
    assert shapes[f"{layers}3.self_attention.linear_qkv.weight"] == (4096 + 2 * 512, 1024)
    assert shapes[f"{layers}23.mlp.linear_fc1.weight_w"] == (3584, 1024)
    assert shapes["vision_model.decoder.layers.11.self_attention.linear_qkv.weight"] == (3 * 768, 768)
    assert shapes["vision_model.merger.linear_fc1.weight"] == (3072, 3072)
    assert "language_model.output_layer.weight" not in shapes


def test_weights_are_shifted_and_their_moments_are_not() -> None:
    source = with_optimizer(MODELS["dense"])
    tensors = read_all(translated(source, megatron_rules(config_of("dense")), "right"))
    ours, theirs = "model.layers.0.linear_attn.norm.weight", "decoder.layers.0.self_attention.out_norm.weight"
    assert torch.equal(tensors[f"model.{theirs}"], source.stored[f"model.{ours}"] - 1)
    for slot in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(tensors[f"optimizer.state.{theirs}.{slot}"], source.stored[f"optimizer.state.{ours}.{slot}"])


def test_a_norm_that_loses_bits_around_zero_is_reported() -> None:
    name = "model.layers.0.linear_attn.norm.weight"
    exact, lost = torch.tensor([0.5, 1.0, 1.5, 2**-16, 0.75, 1.25]), torch.tensor([0.5, 1e-9, 1.5, 1.0, 0.75, 1.25])
    for weights, expected in ((exact, set()), (lost, {"model.decoder.layers.0.self_attention.out_norm.weight"})):
        source = translated(MemorySource({f"model.{name}": weights}), megatron_rules(config_of("dense")), "right")
        read_all(source)
        assert set(source.inexact) == expected


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size that divides the 4 key heads of .*, got 3"):
        megatron_sizes(config_of("dense"), tensor_parallel_size=3)
    with pytest.raises(ValueError, match="divides the 6 value heads of a gated delta net, got 4"):
        megatron_sizes(config_of("dense") | {"linear_num_value_heads": 6}, tensor_parallel_size=4)


def test_a_tensor_that_does_not_fit_the_config_is_refused_by_name() -> None:
    name = "model.layers.3.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=r"Expected .*key \(16\).*self_attn"):
        to_megatron(MODELS["dense"] | {name: torch.zeros(8, 32)}, megatron_rules(config_of("dense")))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("dense", {"model_type": "llama"}, "one of .* as model_type, got 'llama'"),
        ("dense", {"head_dim": None}, "a number as head_dim of a Qwen3.5 config, got None"),
        ("dense", {"attention_bias": True}, "Expected attention_bias false"),
        ("vision", {"vision_config": None}, "a mapping as vision_config of a Qwen3.5 config, got None"),
        ("vision", {"text_config": {}}, "a number as text_config.vocab_size of a Qwen3.5 config, got None"),
    ],
)
def test_a_config_that_says_too_little_is_refused_by_the_key(
    kind: Kind, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        megatron_rules(config_of(kind) | change)
