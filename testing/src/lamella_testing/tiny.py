"""A tiny model for tests of saving and loading, and the model's state as whole tensors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Tiny(nn.Module):
    """Odd sizes, fewer rows than ranks, a buffer that counts, a frozen parameter."""

    def __init__(self) -> None:
        """Parameters by torch's random state."""
        super().__init__()
        self.embed = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.hidden = nn.Linear(3, 7)
        self.head = nn.Linear(7, 1)
        self.frozen = nn.Linear(5, 1, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 5) to (n, 1)."""
        out: torch.Tensor = self.head(torch.tanh(self.hidden(self.norm(self.embed(x))))) + self.frozen(x)
        return out


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a large learning rate."""
    return torch.optim.AdamW(params, lr=0.05)


def two_groups(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two linear layers, each a parameter group of its own, after one step of AdamW."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@dataclass(frozen=True)
class Kit:
    """Actions of tests on the model."""

    def build(
        self, *, sharded: bool, seed: int = 0, optimizer: MakeOptimizer = adamw
    ) -> tuple[Tiny, torch.optim.Optimizer]:
        """The model and an optimizer; sharded over the default group if asked."""
        torch.manual_seed(seed)
        model = Tiny()
        if sharded:
            self.shard(model)
        return model, optimizer(model.parameters())

    def fully_shard(self, module: nn.Module) -> nn.Module:
        """Shard a module by torch FSDP2, over the default group."""
        # Without a mesh, `fully_shard` takes the machine's GPUs, even for a module on the CPU.
        device = next(module.parameters()).device.type
        fully_shard(module, mesh=init_device_mesh(device, (dist.get_world_size(),)))
        return module

    def shard(self, model: Tiny) -> nn.Module:
        """Shard the model, one layer as a unit of its own."""
        self.fully_shard(model.hidden)
        return self.fully_shard(model)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> list[float]:
        """Train on fixed inputs. Returns the losses."""
        inputs = torch.linspace(-1, 1, 20).reshape(4, 5)
        losses = []
        for _ in range(num_steps):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def full_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the whole tensor."""
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by name."""
        return {name: self.full_copy(tensor) for name, tensor in model.state_dict().items()}

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """All weights, buffers and optimizer slots, whole and by name."""
        return self.weights(model) | {
            f"{name}/{slot}": self.full_copy(torch.as_tensor(value))
            for name, param in model.named_parameters()
            for slot, value in optimizer.state.get(param, {}).items()
        }
