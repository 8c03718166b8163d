"""A checkpoint of another model is refused by name, on every rank, before anything is written."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lamella_checkpoint import CheckpointFailed, CheckpointMismatch, NameDifference, check, load, save
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_checkpoint.testing import MemorySource
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit


def net(hidden: int = 3, bias: bool = True, num_layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(hidden, hidden, bias=bias) for _ in range(num_layers)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "a", model=net())
    return tmp_path / "a"


def test_missing_and_unexpected_names_are_listed_in_order(path: Path) -> None:
    with pytest.raises(CheckpointMismatch) as info:
        load(path, model=net(num_layers=3))
    assert info.value.missing == ("model.2.weight", "model.2.bias")
    with pytest.raises(CheckpointMismatch) as info:
        load(path, model=net(bias=False))
    assert info.value.unexpected == ("model.0.bias", "model.1.bias")
    assert (info.value.missing, info.value.shapes) == ((), ())


def test_shapes_are_listed_with_both_sides(path: Path) -> None:
    with pytest.raises(CheckpointMismatch) as info:
        load(path, model=net(hidden=4))
    assert info.value.shapes[:2] == (
        NameDifference("model.0.weight", "(3, 3)", "(4, 4)"),
        NameDifference("model.0.bias", "(3,)", "(4,)"),
    )
    assert "model.0.weight: (3, 3) in the checkpoint, (4, 4) here" in str(info.value)


def test_the_first_differences_come_first_and_the_rest_is_counted(path: Path) -> None:
    with pytest.raises(CheckpointMismatch) as info:
        load(path, model=net(hidden=4, num_layers=9))
    lines = str(info.value).splitlines()
    assert lines[0].startswith(f"Expected the checkpoint {str(path)!r} to hold this model")
    assert lines[1].strip() == "model.0.weight: (3, 3) in the checkpoint, (4, 4) here"
    assert lines[5].strip() == "model.2.weight: absent from the checkpoint, (4, 4) here"
    assert lines[11].strip() == "and 8 more"
    assert "strict=False" in lines[12]


def test_a_mismatched_checkpoint_leaves_model_and_optimizer_unchanged(path: Path) -> None:
    model = net(num_layers=3)
    optimizer = torch.optim.Adam(model.parameters())
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(CheckpointMismatch):
        load(path, model=model, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


def test_a_model_made_in_inference_mode_is_loaded_there_and_refused_by_name_outside(tmp_path: Path) -> None:
    saved = nn.Linear(2, 2)
    save(tmp_path / "a", model=saved)
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"torch.inference_mode\(\) around the load .* inference tensor 'weight' outside"
    ):
        load(tmp_path / "a", model=model)
    with torch.inference_mode():
        load(tmp_path / "a", model=model)
    assert torch.equal(model.weight, saved.weight)


def test_a_buffer_that_is_an_expanded_view_is_refused_by_name_and_its_clone_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("row", torch.arange(4.0).expand(1, 4))  # one row: each element has memory of its own
    model.register_buffer("ones", torch.ones(1).expand(4))
    save(tmp_path / "b", model=model)
    model.get_parameter("weight").data.zero_()
    for read in (check, load):
        with pytest.raises(ValueError, match=r"'ones'.* strides \(0,\), as `expand` makes.*`clone\(\)`"):
            read(tmp_path / "b", model=model)
    assert not model.get_parameter("weight").any()

    model.ones = torch.zeros(4)
    model.get_buffer("row").zero_()
    load(tmp_path / "b", model=model)
    assert model.get_parameter("weight").all()
    assert model.get_buffer("ones").tolist() == [1] * 4 and model.get_buffer("row").tolist() == [[0, 1, 2, 3]]


def test_a_checkpoint_can_be_checked_against_a_model_that_has_no_memory_yet(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = kit.build(sharded=False)
    save(tmp_path / "b", model=model, optimizer=optimizer, extra={"step": 2})
    monkeypatch.setattr(StoredCheckpoint, "read", lambda *_: pytest.fail("a tensor was read"))
    assert check(tmp_path / "b", model=model.to("meta")) == {"step": 2}
    with pytest.raises(CheckpointMismatch) as info:
        check(tmp_path / "b", model=net().to("meta"))
    assert info.value.missing[:2] == ("model.0.weight", "model.0.bias")
    with pytest.raises(FileNotFoundError):
        check(tmp_path / "absent", model=model)


def test_every_rank_raises_the_same_mismatch(kit: Kit, path: Path) -> None:
    def load_into_another_model() -> str | None:
        model, _ = kit.build(sharded=True)
        try:
            load(path, model=model)
        except CheckpointMismatch as mismatch:
            return str(mismatch)
        return None

    messages = run_ranks(load_into_another_model, 3)
    assert messages[0] is not None and messages == [messages[0]] * 3


def test_load_without_strict_loads_fitting_tensors_and_returns_the_differences(path: Path) -> None:
    saved = net()
    load(path, model=saved)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5), nn.Linear(5, 1))
    before = model.get_parameter("1.weight").clone()
    result = load(path, model=model, strict=False)
    assert torch.equal(model.get_parameter("0.weight"), saved.get_parameter("0.weight"))
    assert torch.equal(model.get_parameter("1.weight"), before)
    assert [difference.name for difference in result.left.shapes] == ["model.1.weight", "model.1.bias"]
    assert result.left.missing == ("model.2.weight", "model.2.bias")
    assert result.extra == {}


def test_without_strictness_the_state_of_a_parameter_that_differs_is_left(tmp_path: Path) -> None:
    def stepped(*sizes: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(2, size, bias=False) for size in sizes))
        optimizer = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return model, optimizer

    model, optimizer = stepped(2, 3)
    optimizer.step()
    save(tmp_path / "a", model=model, optimizer=optimizer)
    live, live_optimizer = stepped(2, 4)
    load(tmp_path / "a", model=live, optimizer=live_optimizer, strict=False)
    steps = [live_optimizer.state[param]["step"].item() for param in live.parameters()]
    assert steps == [2, 1]
    assert live_optimizer.state[live.get_parameter("1.weight")]["exp_avg"].shape == (4, 2)


def test_a_fitting_checkpoint_leaves_nothing(path: Path) -> None:
    assert not load(path, model=net(), strict=False).left


def test_ranks_that_open_different_checkpoints_are_told_apart(kit: Kit, tmp_path: Path) -> None:
    def load_by_rank() -> str:
        model, _ = kit.build(sharded=True)
        for name in ("0", "1"):
            save(tmp_path / name, model=model)
        try:
            load(tmp_path / str(torch.distributed.get_rank()), model=model)
        except (RuntimeError, CheckpointFailed) as error:
            return str(error)
        pytest.fail("loaded")

    messages = run_ranks(load_by_rank, 2)
    assert all("the same checkpoint" in message and "on rank 1" in message for message in messages)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("scale", ["weight_scale", "scale_weight", "SCB"])
def test_values_with_a_scale_that_the_model_lacks_are_a_difference(stored: torch.dtype, scale: str) -> None:
    weight = torch.ones(3, 3).to(stored)
    source = MemorySource({"model.0.weight": weight, "model.0.bias": torch.ones(3), f"model.0.{scale}": torch.ones(())})
    model = net(num_layers=1)
    before = model.get_parameter("0.weight").detach().clone()
    with pytest.raises(CheckpointMismatch, match=rf"model.0.weight: {stored} \(3, 3\) to be multiplied by '{scale}'"):
        load(source, model=model)
    differences = load(source, model=model, strict=False).left
    assert [difference.name for difference in differences.names] == ["model.0.weight", f"model.0.{scale}"]
    assert torch.equal(model.get_parameter("0.weight"), before)
    assert torch.equal(model.get_parameter("0.bias"), torch.ones(3))


def test_float8_with_its_scale_loads_unchanged_and_float8_without_scale_is_cast() -> None:
    weight = torch.full((3, 3), 2.0).to(torch.float8_e4m3fn)
    tensors = {"model.0.weight": weight, "model.0.bias": torch.ones(3)}
    model = net(num_layers=1)
    load(MemorySource(tensors), model=model)
    assert torch.equal(model.get_parameter("0.weight"), torch.full((3, 3), 2.0))
    scaled = nn.Sequential(nn.Linear(3, 3))
    scaled[0].weight = nn.Parameter(torch.zeros_like(weight), requires_grad=False)
    scaled[0].register_buffer("weight_scale", torch.zeros(()))
    load(MemorySource({**tensors, "model.0.weight_scale": torch.tensor(0.5)}), model=scaled)
    assert torch.equal(scaled.get_parameter("0.weight").float(), torch.full((3, 3), 2.0))
    assert scaled.get_buffer("0.weight_scale").item() == 0.5


@pytest.mark.parametrize(
    ("stored", "live", "fits"),
    [
        (torch.int64, torch.int32, False),
        (torch.int8, torch.uint8, False),
        (torch.uint8, torch.int8, False),
        (torch.uint8, torch.int16, True),
        (torch.int32, torch.int64, True),
        (torch.bool, torch.int8, True),
        (torch.int64, torch.float32, True),
    ],
)
def test_integers_beyond_the_live_dtype_are_a_difference(stored: torch.dtype, live: torch.dtype, fits: bool) -> None:
    source = MemorySource({"model.counts": torch.ones(3).to(stored)})
    model = nn.Module()
    model.register_buffer("counts", torch.zeros(3, dtype=live))
    if fits:
        load(source, model=model)
        assert torch.equal(model.get_buffer("counts"), torch.ones(3).to(live))
    else:
        with pytest.raises(CheckpointMismatch, match=rf"counts: {stored} \(3,\) in the checkpoint, {live} \(3,\) here"):
            load(source, model=model)


def test_data_is_cast_to_the_live_dtype(path: Path) -> None:
    saved = net()
    load(path, model=saved)
    model = net().bfloat16()
    load(path, model=model)
    assert torch.equal(model.get_parameter("0.weight"), saved.get_parameter("0.weight").bfloat16())
