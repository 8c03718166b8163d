"""Names are the unsharded model's under any wrapper; a tied tensor is stored once and found under each name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lamella_checkpoint import CheckpointMismatch, check, load, save
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit


class Tied(nn.Module):
    """A language model's two ends."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 16)
        self.head = nn.Linear(16, 1000, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(tokens))
        return out


def names_in(path: Path) -> set[str]:
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


Built = tuple[nn.Module, torch.optim.Optimizer]


def wrapped_by_ddp(kit: Kit) -> Built:
    model, optimizer = kit.build(sharded=False)
    return DistributedDataParallel(model), optimizer


def compiled(kit: Kit) -> tuple[Callable[..., Any], torch.optim.Optimizer]:
    model, optimizer = kit.build(sharded=False)
    model.hidden = torch.compile(model.hidden, backend="eager")  # type: ignore[assignment]
    return torch.compile(model, backend="eager"), optimizer


def recomputed(kit: Kit) -> Built:
    model, optimizer = kit.build(sharded=False)
    model.hidden = checkpoint_wrapper(model.hidden)  # type: ignore[assignment]
    return model, optimizer


@pytest.mark.parametrize("wrap", [wrapped_by_ddp, compiled, recomputed])
def test_checkpoint_names_are_free_of_ddp_compile_and_recompute_wrappers(
    kit: Kit, tmp_path: Path, wrap: Callable[[Kit], Built]
) -> None:
    def save_wrapped_and_load_back() -> dict[str, torch.Tensor]:
        model, optimizer = wrap(kit)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        save(tmp_path / "wrapped", model=model, optimizer=optimizer)
        load(tmp_path / "wrapped", model=model, optimizer=optimizer)
        return kit.weights(getattr(model, "module", getattr(model, "_orig_mod", model)))

    weights = run_ranks(save_wrapped_and_load_back, 2)[0]
    plain, optimizer = kit.build(sharded=False, seed=1)
    load(tmp_path / "wrapped", model=plain, optimizer=optimizer)
    assert {name for name in names_in(tmp_path / "wrapped") if name.startswith("model.")} == {
        f"model.{name}" for name in plain.state_dict()
    }
    hidden = weights.get("hidden.weight", weights.get("hidden._orig_mod.weight"))
    assert hidden is not None and torch.equal(plain.hidden.weight, hidden)
    assert optimizer.state[plain.hidden.weight]["step"] == 1


def test_a_module_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    save(tmp_path / "a", model=model)
    assert names_in(tmp_path / "a") == {"model.module.weight", "model.module.bias"}


@pytest.mark.parametrize("part", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_two_tensors_of_one_name_without_a_wrappers_part_are_refused_by_both_keys(tmp_path: Path, part: str) -> None:
    model = nn.Module()
    model.add_module(part, nn.Linear(1, 1, bias=False))
    save(tmp_path / "a", model=model)
    model.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(
        ValueError, match=f"got the tensors 'weight' and '{part}.weight', both 'weight' in a checkpoint"
    ):
        save(tmp_path / "b", model=model)
    assert not (tmp_path / "b").exists()


def test_persistent_buffers_are_stored_and_nonpersistent_buffers_are_not(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.tensor([1, 2]))
    model.register_buffer("computed", torch.tensor([3]), persistent=False)
    save(tmp_path / "a", model=model)
    model.get_buffer("kept").zero_()
    load(tmp_path / "a", model=model)
    assert model.get_buffer("kept").tolist() == [1, 2]
    assert names_in(tmp_path / "a") == {"model.kept"}


def test_extra_state_that_is_a_tensor_reaches_the_module_again(tmp_path: Path) -> None:
    class Counting(nn.Module):
        count = 0

        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor(self.count)

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.count = int(state)

    model = Counting()
    model.count = 3
    save(tmp_path / "a", model=model)
    fresh = Counting()
    load(tmp_path / "a", model=fresh)
    assert fresh.count == 3
    model.get_extra_state = dict  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError, match="got {} for '_extra_state'"):
        save(tmp_path / "b", model=model)


def test_modules_learn_that_their_weights_have_changed_and_in_which_version(tmp_path: Path) -> None:
    class Watching(nn.Linear):
        _version = 7

        def _load_from_state_dict(
            self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
        ) -> None:
            self.seen = local_metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    watching = Watching(1, 1)
    model = nn.Sequential(watching)
    save(tmp_path / "a", model=model)
    load(tmp_path / "a", model=model)
    assert watching.seen == 7


def test_a_tied_parameter_is_stored_once_and_found_under_both_names(tmp_path: Path) -> None:
    model, untied = Tied(), Tied(tied=False)
    save(tmp_path / "tied", model=model)
    save(tmp_path / "untied", model=untied)
    size, untied_size = ((tmp_path / name / "__0_0.distcp").stat().st_size for name in ("tied", "untied"))
    assert size < 0.6 * untied_size
    load(tmp_path / "tied", model=untied)
    assert torch.equal(untied.embed.weight, model.embed.weight)
    assert torch.equal(untied.head.weight, model.embed.weight)


def test_a_tied_parameter_and_its_state_are_resharded(kit: Kit, tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.arange(12).reshape(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train_and_save() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Tied()
        kit.fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer)
        save(tmp_path / "tied", model=model, optimizer=optimizer)
        return kit.state(model, optimizer)

    expected = run_ranks(train_and_save, 3)[0]
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    load(tmp_path / "tied", model=model, optimizer=optimizer)
    got = kit.state(model, optimizer)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert model.head.weight is model.embed.weight


def test_a_tied_model_loads_a_checkpoint_that_has_only_one_of_the_names(tmp_path: Path) -> None:
    class OtherEnd(Tied):
        """The same model, whose first name for the tensor is the other one's second."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = self._modules.pop("embed")  # type: ignore[assignment]

    model = OtherEnd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    live = Tied()
    live_optimizer = torch.optim.SGD(live.parameters(), lr=0.1)
    load(tmp_path / "a", model=live, optimizer=live_optimizer)
    assert torch.equal(live.embed.weight, model.embed.weight)
    assert live_optimizer.param_groups[0]["lr"] == 0.5


def test_two_tied_names_are_not_taken_for_one_that_is_untied_here(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": Tied().embed})
    save(tmp_path / "a", model=model)
    with pytest.raises(CheckpointMismatch) as info:
        load(tmp_path / "a", model=Tied(tied=False))
    assert info.value.missing == ("model.head.weight",)


def test_an_unsharded_root_is_saved_in_its_sharded_state(kit: Kit, tmp_path: Path) -> None:
    def save_between_forward_and_backward() -> dict[str, torch.Tensor]:
        model, optimizer = kit.build(sharded=True)
        model(torch.ones(2, 5))
        assert isinstance(model.hidden, FSDPModule)
        model.hidden.unshard()
        save(tmp_path / "a", model=model, optimizer=optimizer)
        return kit.weights(model)

    expected = run_ranks(save_between_forward_and_backward, 2)[0]
    model, _ = kit.build(sharded=False, seed=1)
    load(tmp_path / "a", model=model)
    assert torch.equal(model.head.weight, expected["head.weight"])
    assert torch.equal(model.hidden.weight, expected["hidden.weight"])


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'weight' on the meta device"):
        save(tmp_path / "a", model=nn.Linear(1, 1, device="meta"))


def test_tied_names_with_different_values_are_refused_before_the_model_changes(tmp_path: Path) -> None:
    save(tmp_path / "a", model=Tied(tied=False))
    model = Tied()
    before = model.embed.weight.detach().clone()
    with pytest.raises(CheckpointMismatch, match="head.weight: other values than 'model.embed.weight' .* tied to it"):
        load(tmp_path / "a", model=model)
    assert torch.equal(model.embed.weight, before)
    untied = Tied(tied=False)
    load(tmp_path / "a", model=untied)
    differences = load(tmp_path / "a", model=model, strict=False).left
    assert torch.equal(model.embed.weight, untied.embed.weight)
    assert (
        differences.tied == ("model.head.weight",)
        and not differences.shapes
        and not differences.missing
        and not differences.unexpected
    )


def test_check_compares_the_values_of_tied_names_only_with_compare_tied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella_checkpoint._training.model_match._PIECE_NBYTES", 4096)  # 63 pieces of 64 KB
    stored = Tied(tied=False)
    save(tmp_path / "a", model=stored)
    stored.head.weight.data.copy_(stored.embed.weight.data)
    save(tmp_path / "alike", model=stored)
    stored.head.weight.data[-1, -1] += 1.0
    save(tmp_path / "last-differs", model=stored)
    with torch.device("meta"):
        model = Tied()
    check(tmp_path / "a", model=model)
    check(tmp_path / "alike", model=model, compare_tied=True)
    for name in ("a", "last-differs"):
        with pytest.raises(CheckpointMismatch, match="head.weight: other values"):
            check(tmp_path / name, model=model, compare_tied=True)


def test_tied_names_stored_twice_alike_are_loaded(tmp_path: Path) -> None:
    saved, model = Tied(tied=False), Tied()
    saved.head.weight.data.copy_(saved.embed.weight.data)
    saved.head.weight.data[0, 0] = saved.embed.weight.data[0, 0] = float("nan")
    save(tmp_path / "a", model=saved)
    load(tmp_path / "a", model=model)
    assert torch.equal(model.embed.weight[1:], saved.embed.weight[1:])
