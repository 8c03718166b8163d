"""Float8 with a scale a block: reads are products, and writes lose only the rounding of float8."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lamella_checkpoint import CheckpointDamaged, TensorInfo, load
from lamella_checkpoint.testing import MemorySource, read_tensor
from lamella_convert import open_checkpoint
from lamella_convert._formats import float8 as _float8
from lamella_convert._formats.float8 import (
    Dequantised,
    Quantised,
    block_of,
    is_quantised,
    linear_weights,
    quantised_config,
)
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_files import box_of
from lamella_layout import Chunk

FLOAT8 = torch.float8_e4m3fn


def by_hand(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The product, block by block, in fp64."""
    result = torch.empty(weight.shape, dtype=torch.float64)
    for lead in product(*map(range, weight.shape[:-2])):
        for row in range(scales.shape[-2]):
            for column in range(scales.shape[-1]):
                at: tuple[int | slice, ...] = (
                    *lead,
                    slice(row * block[0], (row + 1) * block[0]),
                    slice(column * block[1], (column + 1) * block[1]),
                )
                result[at] = weight[at].double() * scales[(*lead, row, column)].double()
    return result


shapes = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
)
blocks = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk:
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return Chunk(tuple(starts), tuple(draw(st.integers(1, size - at)) for at, size in zip(starts, shape, strict=True)))


@settings(max_examples=80, deadline=None)
@given(st.data(), shapes, blocks, st.integers(0, 1000))
def test_any_box_is_the_product_with_its_blocks_scales(
    data: st.DataObject, shape: tuple[int, ...], block: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(shape).mul(50).to(FLOAT8)
    scales = torch.rand(_float8.num_blocks(shape, block)) + 0.01
    source = Dequantised(MemorySource({"w": weight, "w_scale_inv": scales}), block=block)
    assert list(source.tensors) == ["w"] and source.tensors["w"].dtype == torch.bfloat16
    chunk = data.draw(boxes(shape))
    expected = box_of(by_hand(weight, scales, block), chunk)
    assert torch.equal(read_tensor(source, "w", chunk, torch.float32), expected.float())
    assert torch.equal(read_tensor(source, "w", chunk), expected.float().bfloat16())


@settings(max_examples=80, deadline=None)
@given(st.data(), shapes, blocks, st.integers(0, 1000), st.integers(1, 20))
def test_quantised_weights_are_within_float8s_rounding(
    data: st.DataObject, shape: tuple[int, ...], block: tuple[int, int], seed: int, piece: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(shape) * torch.rand(shape).mul(8).exp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_float8, "PIECE_NUMEL", piece)
        quantised = Quantised(
            MemorySource({"w": weight, "other": weight}), is_chosen=lambda name, _: name == "w", block=block
        )
        assert set(quantised.tensors) == {"w", "w_scale_inv", "other"}
        scales = read_tensor(quantised, "w_scale_inv")
        values = read_tensor(quantised, "w")
        back = read_tensor(Dequantised(quantised, block=block), "w", dtype=torch.float32).double()
        chunk = data.draw(boxes(shape))
        assert torch.equal(
            read_tensor(quantised, "w", chunk).view(torch.uint8), box_of(values, chunk).view(torch.uint8)
        )
    assert values.dtype == FLOAT8 and not values.float().isnan().any()
    spread = by_hand(torch.ones(shape), scales, block)
    bound = torch.maximum(weight.double().abs() / 16, spread * 2**-10) * (1 + 1e-6)
    assert ((back - weight.double()).abs() <= bound).all()
    # The largest of a block is float8's largest: no bit of its range is wasted.
    assert (values.float().abs() == 448).sum() >= scales.numel()
    assert torch.equal(read_tensor(quantised, "other"), weight)


def test_numbers_representable_in_float8_survive_quantisation_unchanged() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    numbers = numbers[numbers.isfinite()]
    weight = torch.stack([numbers * 2.0**power for power in (-9, 0, 3, 20)]).repeat_interleave(2, 0)
    quantised = Quantised(MemorySource({"w": weight}), is_chosen=lambda *_: True, block=(2, len(numbers)))
    assert torch.equal(read_tensor(quantised, "w_scale_inv").flatten(), torch.tensor([2.0**-9, 1, 8, 2**20]))
    assert torch.equal(read_tensor(Dequantised(quantised, block=(2, len(numbers))), "w", dtype=torch.float32), weight)


def test_dequantised_weights_are_quantised_to_the_same_float8_bits_again() -> None:
    torch.manual_seed(0)
    once = Quantised(MemorySource({"w": torch.randn(300, 200)}), is_chosen=lambda *_: True)
    bits, scales = read_tensor(once, "w").view(torch.uint8), read_tensor(once, "w_scale_inv")
    assert scales.shape == (3, 2)
    numbers = read_tensor(Dequantised(once), "w", dtype=torch.bfloat16)
    again = Quantised(MemorySource({"w": numbers}), is_chosen=lambda *_: True)
    assert torch.equal(read_tensor(again, "w").view(torch.uint8), bits)
    torch.testing.assert_close(read_tensor(again, "w_scale_inv"), scales, rtol=2**-8, atol=0)


@pytest.mark.parametrize("number", [0.0, 1e-45, 1e-38])
def test_blocks_of_zeros_or_tiny_values_stay_finite_in_float8(number: float) -> None:
    quantised = Quantised(MemorySource({"w": torch.full((3, 3), number)}), is_chosen=lambda *_: True)
    assert (read_tensor(quantised, "w_scale_inv") > 0).all()
    assert read_tensor(Dequantised(quantised), "w", dtype=torch.float32).isfinite().all()


def test_infinities_are_refused_by_name() -> None:
    weight = torch.ones(3, 3)
    weight[1, 1] = torch.inf
    with pytest.raises(ValueError, match="finite.*'w'"):
        read_tensor(Quantised(MemorySource({"w": weight}), is_chosen=lambda *_: True), "w")


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"w_scale_inv": torch.ones(1, 1)}, ["'w_scale_inv'", "got nothing"]),
        ({"w": torch.ones(3, 3), "w_scale_inv": torch.ones(1, 1)}, ["'w_scale_inv'", "got torch.float32"]),
        ({"w": torch.ones(3, 200).to(FLOAT8), "w_scale_inv": torch.ones(1, 1)}, ["(1, 2)", "got (1, 1)"]),
    ],
)
def test_scales_that_do_not_fit_are_damage(tmp_path: Path, tensors: dict[str, torch.Tensor], words: list[str]) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointDamaged) as info:
        Dequantised(SafetensorsSource(tmp_path / "a.safetensors"))
    assert info.value.file == str(tmp_path / "a.safetensors")
    assert all(word in info.value.problem for word in words)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.0.mlp.experts.gate_up_proj", False),  # Two dims here: no stack.
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.mlp.shared_expert_gate.weight", False),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("model.layers.0.mlp.router.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
    ],
)
def test_linear_layers_are_quantised_and_routers_norms_embeddings_and_heads_are_not(name: str, chosen: bool) -> None:
    assert linear_weights(name, TensorInfo((256, 256), torch.bfloat16, ())) is chosen


def test_stacks_of_experts_are_quantised_and_small_or_whole_numbers_are_not() -> None:
    assert linear_weights("mlp.experts.gate_up_proj", TensorInfo((4, 256, 256), torch.bfloat16, ()))
    assert not linear_weights("conv1d.weight", TensorInfo((256, 1, 4), torch.bfloat16, ()))
    assert not linear_weights("q_proj.weight", TensorInfo((256, 64), torch.bfloat16, ()))
    assert not linear_weights("q_proj.weight", TensorInfo((256, 300), torch.bfloat16, ()))
    assert not linear_weights("q_proj.weight", TensorInfo((256, 256), torch.int8, ()))
    assert not linear_weights("q_proj.weight", TensorInfo((256, 256), FLOAT8, ()))


def test_a_vector_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match=r"'b' of shape \(3,\)"):
        Quantised(MemorySource({"b": torch.ones(3)}), is_chosen=lambda *_: True)


def test_a_configuration_says_how_and_is_read_back() -> None:
    quantised = Quantised(MemorySource({"q.weight": torch.ones(256, 128), "head.weight": torch.ones(256, 128)}))
    assert quantised.left_alone == ("head",) and is_quantised(quantised)
    config = quantised_config({"model_type": "x"}, quantised.left_alone)
    assert config["quantization_config"]["quant_method"] == "fp8"
    assert config["quantization_config"]["modules_to_not_convert"] == ["head"]
    assert block_of(config) == (128, 128) and block_of({}) == (128, 128)
    assert _float8.plain_config(config) == {"model_type": "x"}
    with pytest.raises(NotImplementedError, match="gptq"):
        block_of({"quantization_config": {"quant_method": "gptq"}})


@pytest.mark.parametrize("block", [None, (4, 2)])
def test_a_model_loads_the_numbers(tmp_path: Path, block: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    edges = block or (128, 128)
    weight = torch.randn(6, 5).mul(50).to(FLOAT8)
    scales = torch.rand(_float8.num_blocks((6, 5), edges)) + 0.01
    bias = torch.randn(6)
    save_file({"weight": weight, "weight_scale_inv": scales, "bias": bias}, tmp_path / "model.safetensors")
    if block is not None:
        (tmp_path / "config.json").write_text(json.dumps(quantised_config({}, (), block)))
    model = torch.nn.Linear(5, 6)
    load(open_checkpoint(tmp_path), model=model)
    assert torch.equal(model.weight, by_hand(weight, scales, edges).float())
    assert torch.equal(model.bias, bias)
