"""Saves open in plain torch without lamella installed, and plain torch's checkpoints open in lamella."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lamella_checkpoint import load, save
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit

PLAIN_TORCH = """
    import sys, warnings

    class NoLamella:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0].startswith("lamella"):
                raise ImportError(f"{name} is not to be needed")

    sys.meta_path.insert(0, NoLamella())
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict,
    )

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    checkpoint, expected_file, converted = sys.argv[1:]
    expected = torch.load(expected_file)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3)
            self.hidden, self.head = nn.Linear(3, 7), nn.Linear(7, 1)
            self.frozen = nn.Linear(5, 1, bias=False).requires_grad_(False)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)

    # 1. Tensors by name.
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name

    # 2. The optimizer, through torch's own flattened state dict.
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.load({"optimizer": flat}, checkpoint_id=checkpoint)
    set_optimizer_state_dict(model, optimizer, flat, options=options)
    for name, param in model.named_parameters():
        for slot, value in optimizer.state.get(param, {}).items():
            assert torch.equal(value, expected[f"{name}/{slot}"]), (name, slot)
    assert optimizer.param_groups[0]["lr"] == 0.05 and optimizer.param_groups[0]["betas"] == (0.9, 0.999)

    # 3. As one file.
    dcp_to_torch_save(checkpoint, converted)
    whole = torch.load(converted)
    model.load_state_dict(whole["model"])
    assert whole["optimizer"]["param_groups.head.bias.lr"] == 0.05
    assert torch.equal(whole["optimizer"]["state.head.weight.exp_avg"], expected["head.weight/exp_avg"])
    assert not any(name.startswith("lamella") for name in sys.modules)
"""


def test_plain_torch_loads_the_model_and_the_optimizer_with_no_lamella_installed(kit: Kit, tmp_path: Path) -> None:
    def train_and_save() -> dict[str, torch.Tensor]:
        model, optimizer = kit.build(sharded=True)
        kit.train(model, optimizer)
        save(tmp_path / "checkpoint", model=model, optimizer=optimizer, extra={"step": 2})
        return kit.state(model, optimizer)

    torch.save(run_ranks(train_and_save, 3)[0], tmp_path / "expected.pt")
    arguments = [tmp_path / "checkpoint", tmp_path / "expected.pt", tmp_path / "converted.pt"]
    subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(PLAIN_TORCH), *map(str, arguments)], check=True, timeout=120
    )


def test_dcp_checkpoints_of_plain_torch_with_sharded_parameters_load(kit: Kit, tmp_path: Path) -> None:
    def train_and_save_with_torch() -> dict[str, torch.Tensor]:
        model, optimizer = kit.build(sharded=True)
        kit.train(model, optimizer)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.save({"model": model.state_dict(), "optimizer": flat}, checkpoint_id=tmp_path / "torch")  # type: ignore[attr-defined]
        return kit.state(model, optimizer)

    expected = run_ranks(train_and_save_with_torch, 2)[0]
    model, optimizer = kit.build(sharded=False, seed=1)
    optimizer.param_groups[0]["lr"] = 9.0
    assert load(tmp_path / "torch", model=model, optimizer=optimizer) == {}
    got = kit.state(model, optimizer)
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensor_options_and_other_top_level_names_of_plain_torch_do_not_disturb(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    entries = {
        "model": model.state_dict(),
        "model_ema": {"weight": torch.ones(2, 2)},
        "optimizer": {f"param_groups.{name}.lr": torch.tensor(0.25) for name in ("weight", "bias")},
        "args": {"seed": 1},
    }
    dcp.save(entries, checkpoint_id=tmp_path / "a")  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    load(tmp_path / "a", model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
