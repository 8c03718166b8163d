"""Slots that an optimizer keeps as plain tensors of a rank stay so through a conversion."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lamella_checkpoint import load, save
from lamella_convert import convert
from lamella_testing import run_ranks

ROWS = {"hidden": (7, 3), "short": (2, 2), "bias": (5,)}


class OnShards(torch.optim.Optimizer):
    """Momentum over the shards alone: knows of no other rank, and keeps one of its slots flat."""

    def __init__(self, params, lr=0.1, flat=False):
        super().__init__(params, {"lr": lr})
        self.flat = flat

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                held = local(param)
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(held)
                    state["square"] = torch.zeros(held.numel()) if self.flat else torch.zeros_like(held)
                state["step"] += 1
                grad = held.cos()
                state["momentum"].mul_(0.9).add_(grad)
                state["square"].view(held.shape).add_(grad.square())
                held.sub_(state["momentum"] / (state["square"].view(held.shape) + 1), alpha=group["lr"])


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def numbered(shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def make(make_sharded, **options):
    model = nn.ParameterDict({name: make_sharded(numbered(shape)) for name, shape in ROWS.items()})
    return model, OnShards(model.parameters(), **options)


def over_all(values):
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    return distribute_tensor(values, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def trained(make_sharded, num_steps, **options):
    model, optimizer = make(make_sharded, **options)
    for _ in range(num_steps):
        optimizer.step()
    return model, optimizer


def assert_holds_what_one_rank_has(path, num_steps):
    """Read by one process, which steps whole tensors."""
    model, optimizer = make(lambda values: values)
    load(path, model=model, optimizer=optimizer)
    expected, its_optimizer = trained(lambda values: values, num_steps)
    for name, param in model.items():
        assert torch.equal(param, expected[name])
        state, its_state = optimizer.state[param], its_optimizer.state[expected[name]]
        assert sorted(state) == sorted(its_state)
        for slot, value in its_state.items():
            assert torch.equal(state[slot], value), (name, slot)


def test_a_converted_checkpoint_still_says_which_slots_are_plain(tmp_path):
    def train_and_save():
        model, optimizer = trained(over_all, 2)
        save(tmp_path / "two", model=model, optimizer=optimizer)

    def resume():
        model, optimizer = make(over_all)
        load(tmp_path / "converted", model=model, optimizer=optimizer)
        optimizer.step()
        save(tmp_path / "three", model=model, optimizer=optimizer)

    run_ranks(train_and_save, 2)
    convert(tmp_path / "two", tmp_path / "converted", to="dcp")
    run_ranks(resume, 3)
    assert_holds_what_one_rank_has(tmp_path / "three", 3)
