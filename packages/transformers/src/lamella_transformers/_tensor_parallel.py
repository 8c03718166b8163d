"""Tensor parallelism by transformers' own plans: a layer's matrices cut over ranks that work on the same tokens.

Note [Tensors cut first, then sharded]
    A plan of transformers names modules, and for each a style: `colwise` cuts the outputs of a linear layer, `rowwise`
    its inputs. torch's styles of the same names make the matrices DTensors on the axis of the ranks with the same
    tokens, and `fully_shard` cuts each rank's part further among the ranks with the same part:

        unsharded       [8, n]
        after a plan    [8, n] Shard(0) over tensor                             rank t: rows 4t .. 4t + 3
        sharded         [8, n] _StridedShard(0), Shard(0) over (data, tensor)   2 rows a rank, on 2 x 2 ranks

    Parameters outside the plan (norms, embeddings, the head) compute on each rank of the tensor axis alike, and their
    gradients are equal there, so they are sharded over all ranks: no element is stored twice, and the mean of a
    gradient over all ranks is its mean over the data ranks.

Note [Norms between cut matrices]
    A norm of queries and keys (`replicated_with_grad_allreduce`) sees the heads of its rank alone, and its gradient is
    a part of a sum over the tensor axis. A mean over all ranks divides the sum by the size of the axis. The gradient
    that enters the norm is therefore multiplied by this size, and the gradient that leaves it is divided again.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lamella_engine.extending import ParameterPlacement, placement_on
from lamella_transformers._errors import ModelError

TENSOR_AXES: Final = ("data", "tensor")
"""The names of a mesh's axes: ranks with the same part of each matrix, and ranks with the same tokens."""

_COLUMNS: Final = frozenset({"colwise"})
_GATHERED_COLUMNS: Final = frozenset({"colwise_gather_output", "colwise_rep"})
_ROWS: Final = frozenset({"rowwise"})
_ROWS_OF_UNCUT: Final = frozenset({"rowwise_split_input", "rowwise_rep"})
_NORMS: Final = frozenset({"replicated_with_grad_allreduce"})
_UNCUT: Final = frozenset({"replicate"})
_STYLES: Final = _COLUMNS | _GATHERED_COLUMNS | _ROWS | _ROWS_OF_UNCUT | _NORMS | _UNCUT
_HEADS: Final = ("num_attention_heads", "num_key_value_heads")


def check_tensor_parallel(model: nn.Module, num_ranks: int) -> None:
    """Refuse models that `cut_tensors` cannot cut for a number of ranks.

    Args:
        model: A model of transformers, also on the meta device; not changed.
        num_ranks: The ranks with the same tokens.

    Raises:
        ModelError: The model has no plan, a plan with styles of experts or latent attention, or one without a parameter
            beside cut layers; or heads, inputs or outputs of a layer do not divide among the ranks.
    """
    styles = _styles(model)
    _check_styles(model, styles)
    _check_heads(model, styles, num_ranks)
    _check_neighbours(model, styles)
    for name, style in styles.items():
        if style not in _NORMS | _UNCUT:
            _check_size(name, model.get_submodule(name), style, num_ranks)


def cut_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of the layers as transformers' plan for the model says, in place.

    See Note [Tensors cut first, then sharded]. Call the function before `fully_shard`, on a model with all weights
    equal on all ranks, or on the meta device. The head and the embedding are not cut.

    Args:
        model: Passed `check_tensor_parallel`.
        mesh: Two axes, `TENSOR_AXES`.

    Raises:
        ModelError: The conditions of `check_tensor_parallel`.

    Effects: frees the other ranks' parts. In each forward an all-reduce over the tensor axis a `rowwise` layer, in
        each backward one for the inputs of each `colwise` layer.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    axis = mesh[TENSOR_AXES[1]]
    check_tensor_parallel(model, axis.size())
    styles = _styles(model)
    plan = {name: _torchs_style(style) for name, style in styles.items() if style not in _NORMS | _UNCUT}
    # No source rank: every rank cuts its own copy, and nothing is sent.
    parallelize_module(model, axis, plan, src_data_rank=None)
    for name, style in styles.items():
        if style in _NORMS:
            _add_up_gradients(model.get_submodule(name), axis.size())


def tensor_parallel_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], ParameterPlacement | None]:
    """Return the `shard_placement_fn` of a model after `cut_tensors`, for `fully_shard` over a mesh of all ranks.

    Args:
        mesh: Two axes, `TENSOR_AXES`.
    """
    placed = placement_on(mesh[TENSOR_AXES[0]])
    return lambda parameter: placed if isinstance(parameter, DTensor) else None


def _styles(model: nn.Module) -> dict[str, str]:
    """Return the style of each module in transformers' plan, by name; without the embedding's and the head's."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    ends = {id(module) for module in _ends(model)}
    names = [name for name, module in model.named_modules() if id(module) not in ends]
    names += [name for name, _ in model.named_parameters()]  # Plans of experts name stacks.
    matches = ((name, style) for pattern, style in patterns.items() for name in names if pattern.fullmatch(name))
    return dict(matches)


def _ends(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the embedding and the head: they may share a weight, and a loss may read the head's."""
    for method in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, method, lambda: None)()
        if module is not None:
            yield module


def _check_styles(model: nn.Module, styles: Mapping[str, str]) -> None:
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not any(style not in _NORMS | _UNCUT for style in styles.values()):
        raise ModelError(
            f"Expected a model with transformers' plan for tensor parallelism, got {model_type!r}, which has none."
        )
    if foreign := {name: style for name, style in styles.items() if style not in _STYLES}:
        name, style = next(iter(foreign.items()))
        raise ModelError(
            f"Expected a plan for tensor parallelism of linear layers and norms, got the style {style!r} for {name!r} "
            f"of {model_type!r}."
        )


def _check_heads(model: nn.Module, styles: Mapping[str, str], num_ranks: int) -> None:
    """Refuse heads that do not divide, where the outputs of a layer in an attention stay cut."""
    if not any("att" in name for name, style in styles.items() if style in _COLUMNS):
        return
    spec: Any = getattr(model, "config", None)
    spec = spec.get_text_config() if hasattr(spec, "get_text_config") else spec
    for field in _HEADS:
        count = getattr(spec, field, None)
        if isinstance(count, int) and count % num_ranks:
            raise ModelError(f"Expected heads that divide among the {num_ranks} ranks, got {field} {count}.")


def _check_neighbours(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Refuse parameters beside cut columns that the plan leaves out: a rank's gradient would be of its columns alone.

    Such are the exponents of Apertus' activation, and norms of heads in plans of transformers before their style.
    """
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style in _COLUMNS):
        for name, _ in model.get_submodule(parent).named_parameters(prefix=parent):
            if not any(f"{name}.".startswith(f"{planned}.") for planned in styles):
                raise ModelError(
                    f"Expected a plan for tensor parallelism with all tensors beside cut layers, got none for {name!r}."
                )


def _check_size(name: str, module: nn.Module, style: str, num_ranks: int) -> None:
    if type(module) is not nn.Linear:
        raise ModelError(
            f"Expected linear layers in transformers' plan for tensor parallelism, got {type(module).__name__} in "
            f"{name!r}."
        )
    kind = "outputs" if style in _COLUMNS | _GATHERED_COLUMNS else "inputs"
    count = module.out_features if kind == "outputs" else module.in_features
    if count % num_ranks:
        raise ModelError(f"Expected {kind} of {name!r} that divide among the {num_ranks} ranks, got {count}.")


def _torchs_style(style: str) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if style in _COLUMNS:
        return ColwiseParallel()
    if style in _GATHERED_COLUMNS:
        return ColwiseParallel(output_layouts=Replicate())
    return RowwiseParallel() if style in _ROWS else RowwiseParallel(input_layouts=Replicate())


def _add_up_gradients(norm: nn.Module, num_ranks: int) -> None:
    """See Note [Norms between cut matrices]."""

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (scale_gradient(inputs[0], 1 / num_ranks), *inputs[1:])

    def after(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return scale_gradient(output, num_ranks)

    norm.register_forward_pre_hook(before)
    norm.register_forward_hook(after)


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a view of a tensor whose gradient is multiplied by a factor on its way back."""
    return cast(torch.Tensor, _ScaledGradient.apply(tensor, factor))  # type: ignore[no-untyped-call]


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * context.factor, None
