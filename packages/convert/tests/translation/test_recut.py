"""A live model is saved by component, its optimizer too, and loaded back into fused tensors on any number of ranks."""

import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lamella_checkpoint import CheckpointDirectory, Correspondence, load, save
from lamella_checkpoint.extending import StoredCheckpoint
from lamella_checkpoint.testing import read_all
from lamella_convert import translate
from lamella_convert._translation.megatron_model import from_megatron_model
from lamella_convert._translation.megatron_rules import MAMBA_PARTS
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit

ROWS = {"z": 4, "x": 4, "B": 2, "C": 2, "dt": 1}
SIZES = {"tp": 1, "d_inner": 4, "d_state": 2, "nheads": 1}


class Mixer(nn.Module):
    """The parameters of a Mamba mixer in a group of a hybrid stack, and a linear layer to have gradients from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([nn.Module()])
        self.decoder.layers[0].layers = nn.ModuleList([nn.Module()])
        mixer = nn.Module()
        mixer.in_proj = nn.Linear(3, 13, bias=False)
        mixer.conv1d_weight = nn.Parameter(torch.randn(8, 1, 4))
        mixer.A_log = nn.Parameter(torch.randn(6))
        self.decoder.layers[0].layers[0].mixer = mixer

    def loss(self) -> torch.Tensor:
        total = sum(parameter.square().sum() for parameter in self.parameters())
        assert isinstance(total, torch.Tensor)
        return total


State = dict[str, torch.Tensor]


def prepared(*, steps: int) -> tuple[Mixer, torch.optim.Optimizer]:
    model = Mixer()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model, optimizer


def correspondences(model: nn.Module) -> list[Correspondence]:
    return from_megatron_model({name: tuple(param.shape) for name, param in model.named_parameters()}, sizes=SIZES)


def test_components_and_logical_names_are_stored_and_loaded_back(kit: Kit, tmp_path: Path) -> None:
    path = tmp_path / "saved"

    def save_mine() -> State:
        model, optimizer = prepared(steps=2)
        save(path, model=model, optimizer=optimizer, correspondences=correspondences(model))
        return kit.state(model, optimizer)

    def load_mine() -> State:
        model, optimizer = prepared(steps=0)
        rules = correspondences(model)
        load(path, model=model, optimizer=optimizer, translate=lambda source: translate(source, rules, to="right"))
        return kit.state(model, optimizer)

    saved = run_ranks(save_mine, 2)[0]
    mixer = "decoder.layers.0.mixer."
    assert {name for name in StoredCheckpoint(path).tensors if name.startswith("model.")} == {
        *(f"model.{mixer}in_proj.weight.{part}" for part in MAMBA_PARTS),
        *(f"model.{mixer}conv1d.weight.{part}" for part in "xBC"),
        f"model.{mixer}A_log",
    }
    parts = torch.split(saved["decoder.layers.0.layers.0.mixer.in_proj.weight/exp_avg"], list(ROWS.values()))
    plain = {f"optimizer.state.{mixer}in_proj.weight.{part}.exp_avg": torch.zeros(ROWS[part], 3) for part in ROWS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A warning: no group is initialized.
        dcp.load(plain, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    for values, part in zip(plain.values(), parts, strict=True):
        assert torch.equal(values, part)
    for num_ranks in [1, 3]:
        for loaded in run_ranks(load_mine, num_ranks):
            assert loaded.keys() == saved.keys()
            for name, value in saved.items():
                assert torch.equal(loaded[name], value), name


def test_a_save_in_the_background_cuts_as_one_that_waits(tmp_path: Path) -> None:
    def save_mine() -> None:
        model, optimizer = prepared(steps=1)
        rules = correspondences(model)
        checkpoints = CheckpointDirectory(tmp_path)
        checkpoints.save(1, model=model, optimizer=optimizer, correspondences=rules)
        checkpoints.save_async(2, model=model, optimizer=optimizer, correspondences=rules)
        checkpoints.close()

    run_ranks(save_mine, 2)
    waited, behind = (StoredCheckpoint(CheckpointDirectory(tmp_path).path(step)) for step in [1, 2])
    assert {name: info.shape for name, info in waited.tensors.items()} == {
        name: info.shape for name, info in behind.tensors.items()
    }
    tensors = read_all(waited), read_all(behind)
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_a_slot_that_cannot_be_cut_is_named(tmp_path: Path) -> None:
    model, optimizer = prepared(steps=1)
    [parameter] = [param for name, param in model.named_parameters() if "in_proj" in name]
    optimizer.state[parameter]["row"] = torch.zeros(13)
    with pytest.raises(NotImplementedError, match=r"in_proj.weight.row' of shape \(13, 3\), as its parameter is"):
        save(tmp_path / "saved", model=model, optimizer=optimizer, correspondences=correspondences(model))
