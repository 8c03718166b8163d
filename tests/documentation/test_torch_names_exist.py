"""The private names in docs/reference/torch-private-names.md exist in the torch that runs."""

import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.varlen  # Defines the operator `_varlen_attn`.
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "torch-private-names.md"
ROWS = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
IN_EVERY_TORCH = [
    (name, holder)
    for names, _, versions, holder, *_ in ROWS
    for name in re.findall(r"`([^`]+)`", names)
    if versions.startswith("all")
]
WEIGHT = nn.Parameter(torch.zeros(1))


class Subclass(torch.Tensor):
    """A tensor that becomes a parameter by a mark, as a `DTensor` does."""


HOLDERS = {
    "`DTensor`": DTensor,
    "`DeviceMesh`": DeviceMesh,
    "`Module`": nn.Module(),
    "`Node`": torch.ones(1, requires_grad=True).exp().grad_fn,
    "`OpOverload`": torch.ops.aten.add.Tensor,
    "`Optimizer`": torch.optim.SGD([WEIGHT], lr=0.1),
    "`Parameter`": nn.Parameter(torch.zeros(1).as_subclass(Subclass)),
    "`ProcessGroup`": dist.ProcessGroup,
    "`function`": torch.compiler.assume_constant_result(lambda: None),  # type: ignore[no-untyped-call]
    "`Tensor`": WEIGHT,
    "`TypedStorage`": torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=WEIGHT.untyped_storage(), dtype=WEIGHT.dtype, _internal=True
    ),
    "`UntypedStorage`": torch.UntypedStorage,
}


def _resolve(name: str) -> object:
    """The object of a full name, whose first parts are modules."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return attrgetter(".".join(parts[end:]))(module) if parts[end:] else module
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize(("name", "holder"), IN_EVERY_TORCH, ids=lambda part: part if part[0] in ".t" else "")
def test_a_name_that_the_table_promises_exists(name: str, holder: str) -> None:
    if name.startswith("."):
        assert hasattr(HOLDERS[holder], name[1:])
    else:
        assert _resolve(name) is not None


def test_the_table_is_read() -> None:
    assert len(IN_EVERY_TORCH) > 50 and {holder for name, holder in IN_EVERY_TORCH if name[0] == "."} == {*HOLDERS}


def test_a_name_that_is_gone_is_noticed() -> None:
    with pytest.raises(AttributeError):
        _resolve("torch.utils._pytree.tree_of_a_later_torch")
