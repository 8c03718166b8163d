"""Checkpoints of other programs: found, with the model's names, and loaded with their optimizers."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.nn.parallel import DistributedDataParallel

from lamella_checkpoint import CheckpointDamaged, CheckpointMismatch, Source, check, load, save
from lamella_convert import Format, convert, open_checkpoint
from lamella_testing import run_ranks
from lamella_testing.plain_dcp import dcp_save
from lamella_testing.tiny import Kit, Tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


Trained = tuple[Tiny, torch.optim.Optimizer]
Write = Callable[[dict[str, Any], Path], Path]


def torch_save(entries: dict[str, Any], path: Path) -> Path:
    torch.save(entries, path)
    return path


@pytest.fixture
def trained(kit: Kit) -> Trained:
    model, optimizer = kit.build(sharded=False)
    kit.train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    return model, optimizer


def assert_loads(kit: Kit, path: Path, trained: Trained, *, with_optimizer: bool = True, **options: Any) -> Any:
    """Return the result of `load`, which depends on the options."""
    expected = kit.state(*trained) if with_optimizer else kit.weights(trained[0])
    model, optimizer = kit.build(sharded=False, seed=1)
    result = load(open_checkpoint(path), model=model, optimizer=optimizer if with_optimizer else None, **options)
    got = kit.state(model, optimizer) if with_optimizer else kit.weights(model)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    if with_optimizer:
        assert optimizer.param_groups[0]["lr"] == 0.125
    return result


@pytest.mark.parametrize("write", [dcp_save, torch_save])
@pytest.mark.parametrize(
    "keys",
    [
        ("model", "optimizer"),
        ("model_state_dict", "optimizer_state_dict"),
        ("state_dict", "optimizer"),
        ("model", "optim"),
    ],
)
def test_an_optimizer_that_counts_its_parameters_is_loaded_by_their_order(
    kit: Kit, tmp_path: Path, trained: Trained, write: Write, keys: tuple[str, ...]
) -> None:
    model, optimizer = trained
    path = write({keys[0]: model.state_dict(), keys[1]: optimizer.state_dict(), "epoch": 7}, tmp_path / "a.pt")
    assert assert_loads(kit, path, trained) == {"epoch": 7}


@pytest.mark.parametrize("write", [dcp_save, torch_save])
def test_the_dict_of_torchs_tutorials_is_loaded(kit: Kit, tmp_path: Path, trained: Trained, write: Write) -> None:
    model_state, optimizer_state = get_state_dict(*trained)
    path = write({"app": {"model": model_state, "optim": optimizer_state}}, tmp_path / "a.pt")
    assert assert_loads(kit, path, trained, strict=False).stripped == ("app",)


@pytest.mark.parametrize("write", [dcp_save, torch_save])
@pytest.mark.parametrize("outer", [(), ("state_dict",), ("a", "b")])
def test_outer_keys_shared_by_all_entries_are_stripped(
    kit: Kit, tmp_path: Path, trained: Trained, write: Write, outer: tuple[str, ...]
) -> None:
    entries: dict[str, Any] = {"model": trained[0].state_dict(), "optimizer": trained[1].state_dict()}
    for key in reversed(outer):
        entries = {key: entries}
    path = write(entries, tmp_path / "a.pt")
    assert assert_loads(kit, path, trained, strict=False).stripped == outer


@pytest.mark.parametrize("write", [dcp_save, torch_save])
@pytest.mark.parametrize("key", ["model", "net"])
def test_a_counter_may_lie_beside_the_key_that_holds_all_tensors(
    kit: Kit, tmp_path: Path, trained: Trained, write: Write, key: str
) -> None:
    state = trained[0].state_dict()
    app = {"model": state, "optimizer": trained[1].state_dict()} if key == "model" else state
    path = write({"step": 3, "app": app}, tmp_path / "a.pt")
    loaded = assert_loads(kit, path, trained, with_optimizer=key == "model", strict=False)
    assert loaded.extra == {"step": 3}


@pytest.mark.parametrize("write", [dcp_save, torch_save])
@pytest.mark.parametrize("key", [None, "net", "model"])
def test_a_state_dict_alone_is_a_model(
    kit: Kit, tmp_path: Path, trained: Trained, write: Write, key: str | None
) -> None:
    state = trained[0].state_dict()
    path = write(state if key is None else {key: state}, tmp_path / "a.pt")
    assert_loads(kit, path, trained, with_optimizer=False)


@pytest.mark.parametrize("prefix", ["module.", "_fsdp_wrapped_module.", "module._orig_mod.", "backbone.net."])
def test_a_prefix_that_all_names_share_is_left_out(kit: Kit, tmp_path: Path, trained: Trained, prefix: str) -> None:
    state = {f"{prefix}{name}": value for name, value in trained[0].state_dict().items()}
    path = dcp_save({"model": state}, tmp_path / "a")
    loaded = assert_loads(kit, path, trained, with_optimizer=False, strict=False)
    stripped_prefix = prefix.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "").removesuffix(".")
    assert loaded.stripped == ((stripped_prefix,) if stripped_prefix else ())
    nested = {name.replace("hidden.", "hidden._fsdp_wrapped_module."): value for name, value in state.items()}
    assert_loads(kit, dcp_save({"model": nested}, tmp_path / "b"), trained, with_optimizer=False)


def test_the_state_of_a_ddp_model_loads_into_the_model_without_ddp(kit: Kit, tmp_path: Path) -> None:
    def save_with_ddp() -> dict[str, torch.Tensor]:
        model, optimizer = kit.build(sharded=False)
        wrapped = DistributedDataParallel(model)
        kit.train(wrapped, optimizer)
        optimizer.param_groups[0]["lr"] = 0.125
        named = get_optimizer_state_dict(wrapped, optimizer)
        dcp.save({"model": wrapped.state_dict(), "optimizer": named}, checkpoint_id=tmp_path / "a")  # type: ignore[attr-defined]
        return kit.state(model, optimizer)

    expected = run_ranks(save_with_ddp, 2)[0]
    model, optimizer = kit.build(sharded=False, seed=1)
    load(open_checkpoint(tmp_path / "a"), model=model, optimizer=optimizer)
    got = kit.state(model, optimizer)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_sharded_models_of_plain_torch_are_loaded_sharded(kit: Kit, tmp_path: Path) -> None:
    def save_with_fsdp() -> dict[str, torch.Tensor]:
        model, optimizer = kit.build(sharded=True)
        kit.train(model, optimizer)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"app": {"model": model_state, "optim": optimizer_state}}, checkpoint_id=tmp_path / "a")  # type: ignore[attr-defined]
        return kit.state(model, optimizer)

    def load_sharded() -> dict[str, torch.Tensor]:
        model, optimizer = kit.build(sharded=True, seed=1)
        load(open_checkpoint(tmp_path / "a"), model=model, optimizer=optimizer)
        return kit.state(model, optimizer)

    expected = run_ranks(save_with_fsdp, 2)[0]
    for got in run_ranks(load_sharded, 3):
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_optimizer_state_is_matched_by_the_parameter_names_in_its_groups(tmp_path: Path) -> None:
    """torch keeps names in groups after `named_parameters`; then the order does not matter."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(reversed(list(model.named_parameters())))
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, float(number))
    optimizer.step()
    path = torch_save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    source = open_checkpoint(path).source
    assert "optimizer.state.1.bias.exp_avg" in source.tensors and "optimizer.param_groups.0.weight.lr" in source.objects
    live = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loaded = torch.optim.Adam(live.parameters())
    load(open_checkpoint(path), model=live, optimizer=loaded)
    for param, other in zip(model.parameters(), live.parameters(), strict=True):
        assert torch.equal(optimizer.state[param]["exp_avg"], loaded.state[other]["exp_avg"])


def test_groups_keep_their_options(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.bias], "lr": 0.5}, {"params": [model.weight], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups)
    path = torch_save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    live_groups: list[dict[str, Any]] = [{"params": [model.bias]}, {"params": [model.weight]}]
    live = torch.optim.SGD(live_groups, lr=9.0)
    load(open_checkpoint(path), model=model, optimizer=live)
    assert [group["lr"] for group in live.param_groups] == [0.5, 0.25]


def test_an_optimizer_of_another_number_of_parameters_is_not_taken_by_its_order(
    kit: Kit, tmp_path: Path, trained: Trained
) -> None:
    model, optimizer = trained
    fewer = torch.optim.AdamW(list(model.parameters())[:3])
    fewer.step()
    path = torch_save({"model": model.state_dict(), "optimizer": fewer.state_dict()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointMismatch, match="optimizer.param_groups.embed.weight: absent"):
        load(open_checkpoint(path), model=model, optimizer=optimizer)


def in_groups(model: nn.Module, *sizes: int) -> torch.optim.Optimizer:
    """An optimizer over the model's parameters from the last to the first, in groups of some sizes."""
    params = iter(reversed([*model.parameters()]))
    return torch.optim.AdamW([{"params": list(islice(params, size))} for size in sizes])


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The entries of a checkpoint after a step, in which each parameter has another gradient."""
    for number, param in enumerate(model.parameters(), start=1):
        param.grad = torch.full_like(param, float(number))
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def converted(entries: dict[str, Any], path: Path) -> Path:
    torch.save(entries, path.with_name("source.pt"))
    convert(path.with_name("source.pt"), path, to="dcp")
    return path


def converted_to_torch(entries: dict[str, Any], path: Path) -> Path:
    convert(converted(entries, path.with_name("dcp")), path, to="torch")
    return path


@pytest.mark.parametrize("write", [dcp_save, torch_save, converted, converted_to_torch])
@pytest.mark.parametrize("sizes", [(3, 3), (6,), (2, 3)])
def test_numbers_of_groups_of_other_sizes_are_no_parameters(
    tmp_path: Path, write: Write, sizes: tuple[int, ...]
) -> None:
    """torch refuses them: "loaded state dict has a different number of parameter groups", or another size of one."""
    model = nn.ParameterList(torch.zeros(2) for _ in range(6))  # Whose names are numbers, too.
    entries = stepped(model, in_groups(model, 2, 4))
    path = write(entries, tmp_path / "a.pt")
    live = nn.ParameterList(torch.zeros(2) for _ in range(6))
    optimizer = in_groups(live, *sizes)
    message = rf"groups of \[2, 4\] numbered parameters in the checkpoint, groups of \[{sizes[0]}.* here"
    with pytest.raises(CheckpointMismatch, match=rf"(?s){message}.*an optimizer with the saved run's groups"):
        load(open_checkpoint(path), model=live, optimizer=optimizer)
    differences = load(open_checkpoint(path), model=live, optimizer=optimizer, strict=False).left
    assert not optimizer.state and "optimizer.param_groups" in [name for name, _, _ in differences.shapes]
    of_saved_sizes = in_groups(live, 2, 4)
    load(open_checkpoint(path), model=live, optimizer=of_saved_sizes)
    moments = [of_saved_sizes.state[param]["exp_avg"][0].item() for param in live]
    assert moments == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_groups_with_equal_options_stay_apart_in_a_torch_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = converted_to_torch(stepped(model, in_groups(model, 1, 2, 1)), tmp_path / "a.pt")
    in_groups(model, 1, 2, 1).load_state_dict(torch.load(path, weights_only=True)["optimizer"])


@pytest.mark.parametrize("write", [torch_save, converted])
def test_state_of_another_parameters_shape_is_a_difference(tmp_path: Path, write: Write) -> None:
    def optimizer_of(*params: torch.Tensor) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [param]} for param in params])

    model, live = nn.Linear(2, 3), nn.Linear(2, 3)
    path = write(stepped(model, optimizer_of(model.weight, model.bias)), tmp_path / "a.pt")
    optimizer = optimizer_of(live.bias, live.weight)
    with pytest.raises(CheckpointMismatch, match=r"bias.exp_avg: \(3, 2\) in the checkpoint, \(3,\) here"):
        load(open_checkpoint(path), model=live, optimizer=optimizer)
    differences = load(open_checkpoint(path), model=live, optimizer=optimizer, strict=False).left
    assert not optimizer.state and len(differences.shapes) == 4


def test_a_name_that_is_the_models_is_not_taken_for_a_prefix(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    path = dcp_save({"model": model.state_dict()}, tmp_path / "a")
    load(open_checkpoint(path), model=model)
    check(open_checkpoint(path), model=model)
    assert load(open_checkpoint(path), model=model, strict=False).stripped == ()


def test_a_checkpoint_of_another_model_is_told_by_its_own_names(tmp_path: Path) -> None:
    path = dcp_save({"model": {"encoder.a": torch.ones(1), "encoder.b": torch.ones(1)}}, tmp_path / "a")
    with pytest.raises(CheckpointMismatch) as info:
        load(open_checkpoint(path), model=nn.Linear(2, 2))
    assert info.value.unexpected == ("model.encoder.a", "model.encoder.b")
    assert info.value.missing == ("model.weight", "model.bias")


def test_sections_with_like_names_are_told_apart(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    entries = {"model_ema": nn.Linear(2, 2).state_dict(), "model": model.state_dict(), "models": {"x": torch.ones(1)}}
    for path in (dcp_save(entries, tmp_path / "a"), torch_save(entries, tmp_path / "b.pt")):
        live = nn.Linear(2, 2)
        load(open_checkpoint(path), model=live)
        assert torch.equal(live.weight, model.weight)
        assert "model_ema.weight" in open_checkpoint(path).source.tensors


@pytest.mark.parametrize("write", [dcp_save, torch_save])
def test_a_configuration_under_the_key_of_a_section_is_no_section(
    kit: Kit, tmp_path: Path, trained: Trained, write: Write
) -> None:
    model, optimizer = trained
    entries = {
        "model": {"name": "tiny", "depth": 2, "optimizer": {"lr": 1}},
        "optimizer": {"name": "adam", "lr": 0.5},
        "state_dict": model.state_dict(),
        "optim": optimizer.state_dict(),
    }
    path = write(entries, tmp_path / "a")
    assert_loads(kit, path, trained)
    convert(path, tmp_path / "b", to="dcp")
    assert_loads(kit, tmp_path / "b", trained)


def test_translation_gives_other_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = dcp_save({"model": {"w": model.weight.detach(), "b": model.bias.detach()}}, tmp_path / "a")
    live = nn.Linear(2, 2)

    def translate(source: Source) -> Source:
        from lamella_files import rename

        return rename(source, {"model.w": "model.weight", "model.b": "model.bias"}.__getitem__)

    load(open_checkpoint(path), model=live, translate=translate)
    assert torch.equal(live.weight, model.weight)


# -- formats ----------------------------------------------------------------------------------------------------------


def test_checkpoint_formats_are_detected_from_their_files(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "own", model=model, extra={"step": 3})
    dcp_save({"model": model.state_dict()}, tmp_path / "dcp")
    torch_save(model.state_dict(), tmp_path / "no_suffix")
    opened = {name: open_checkpoint(tmp_path / name) for name in ("own", "dcp", "no_suffix")}
    assert {name: checkpoint.format for name, checkpoint in opened.items()} == {
        "own": Format.LAMELLA,
        "dcp": Format.DCP,
        "no_suffix": Format.TORCH,
    }
    assert opened["own"].extra == {"step": 3}
    for checkpoint in opened.values():
        assert set(checkpoint.source.tensors) == {"model.weight", "model.bias"}


def test_weights_of_hugging_face_are_loaded_and_scaled_float8_is_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 2))
    save(tmp_path / "own", model=model)
    convert(tmp_path / "own", tmp_path / "hf", to="hf")
    convert(tmp_path / "own", tmp_path / "float8", to="hf", float8=True)
    live = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 2))
    load(open_checkpoint(tmp_path / "hf"), model=live)
    assert torch.equal(live.get_parameter("0.weight"), model.get_parameter("0.weight"))
    opened = open_checkpoint(tmp_path / "float8")
    assert opened.format is Format.SAFETENSORS and "0.weight_scale_inv" in opened.raw.tensors
    load(open_checkpoint(tmp_path / "float8"), model=live)
    assert not torch.equal(live.get_parameter("0.weight"), model.get_parameter("0.weight"))
    torch.testing.assert_close(live.get_parameter("0.weight"), model.get_parameter("0.weight"), rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("has_head", [True, False])
def test_names_that_begin_with_model_are_names(tmp_path: Path, has_head: bool) -> None:
    state = {"model.embed.weight": torch.ones(2, 2), **({"lm_head.weight": torch.ones(2, 2)} if has_head else {})}
    save_file(state, tmp_path / "model.safetensors")
    torch_save(state, tmp_path / "a.pt")
    dcp_save(state, tmp_path / "a")
    for path in (tmp_path / "model.safetensors", tmp_path / "a.pt", tmp_path / "a"):
        assert set(open_checkpoint(path).source.tensors) == {f"model.{name}" for name in state}


def megatron(path: Path, **more: Any) -> Path:
    """What Megatron-LM writes as `fsdp_dtensor`, on a tiny scale."""
    weights = {"module.decoder.layers.0.mlp.linear_fc2.weight": torch.arange(4.0).reshape(2, 2)}
    state = {f"module.module.{name}": {"exp_avg": value + 1} for name, value in weights.items()}
    return dcp_save({"model": weights, "optimizer": {"state": state}, "checkpoint_version": 3.0, **more}, path)


def test_an_iteration_of_megatron_is_found_through_its_tracker(tmp_path: Path) -> None:
    megatron(tmp_path / "iter_0000012", iteration=12)
    megatron(tmp_path / "iter_0000007", iteration=7)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    opened = open_checkpoint(tmp_path)
    assert opened.format is Format.FSDP_DTENSOR and opened.path == tmp_path / "iter_0000012"
    assert opened.extra == {"checkpoint_version": 3.0, "iteration": 12}
    assert "args" in opened.lacking and "optimizer" not in opened.lacking
    assert "model.decoder.layers.0.mlp.linear_fc2.weight" in opened.source.tensors
    assert "optimizer.state.decoder.layers.0.mlp.linear_fc2.weight.exp_avg" in opened.source.tensors


def test_open_checkpoint_lists_the_entries_that_a_bridge_directory_lacks(tmp_path: Path) -> None:
    dcp_save({"model": {"module.x": torch.ones(2)}}, tmp_path / "iter_0000003")
    state = {"step": torch.tensor(3), "consumed_train_samples": torch.tensor(96)}
    torch.save(state, tmp_path / "latest_train_state.pt")
    torch.save(state, tmp_path / "iter_0000003" / "train_state.pt")
    opened = open_checkpoint(tmp_path)
    assert opened.format is Format.FSDP_DTENSOR
    assert opened.extra == {"iteration": 3, "consumed_train_samples": 96}
    assert {"args", "optimizer", "checkpoint_version"} <= set(opened.lacking)


def test_torch_dist_is_told_by_its_common_file(tmp_path: Path) -> None:
    dcp_save({"embedding.weight": torch.ones(2)}, tmp_path / "a")
    torch.save({"iteration": 5}, tmp_path / "a" / "common.pt")
    (tmp_path / "a" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    opened = open_checkpoint(tmp_path / "a")
    assert opened.format is Format.TORCH_DIST and "model.embedding.weight" in opened.source.tensors


def test_ddps_names_alone_are_not_megatrons(tmp_path: Path) -> None:
    path = dcp_save({"model": {"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)}}, tmp_path / "a")
    opened = open_checkpoint(path)
    assert opened.format is Format.DCP and opened.stripped == ("module",)
    assert set(opened.source.tensors) == {"model.weight", "model.bias"}


@pytest.mark.parametrize("tracked", ["13", "../elsewhere", ""])
def test_a_tracker_that_leads_nowhere_is_named(tmp_path: Path, tracked: str) -> None:
    megatron(tmp_path / "iter_0000012")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracked)
    with pytest.raises(CheckpointDamaged):
        open_checkpoint(tmp_path)


def test_paths_without_a_checkpoint_are_refused_when_opened(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(CheckpointDamaged, match="of a format that is known"):
            open_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointDamaged, match="neither torch.save's nor safetensors"):
        open_checkpoint(tmp_path / "notes.txt")
