"""Operations on ragged tensors, each rank on its own rows; everything else is refused.

    elementwise      on local rows, if all operands are 0-D or lie alike; replicated operands are cut first
    multi-tensor     the same, index by index; operators that write in place get no empty local tensors
    norms, sums, ..  on local rows, then over the ragged axes: one collective an operation, however many tensors
    in-place random  drawn for the whole tensor; each rank keeps its rows
    complex          seen as pairs of real numbers, and pairs as complex numbers, on local rows
    matrices         products and transposes of tensors that lie whole on one rank

Note [Empty shards]. Multi-tensor kernels have been seen to go on with the memory behind a tensor without elements.
Operators that write are therefore called without the tensors of which this rank has no rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from lamella_layout import RaggedShard, Range, ragged_rows

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def compute(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator with a ragged operand.

    Args:
        func: An overload of aten.
        args: The operator's positional arguments.
        kwargs: The operator's keyword arguments.

    Returns:
        Ragged tensors that lie as the operands; replicated DTensors of norms and the like.

    Raises:
        NotImplementedError: The operator needs elements of several ranks, or the operands lie differently.

    Effects: norms and the like are a collective on the ragged axes, on the current stream.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "copy_":
        return _copy(func, *args, **kwargs)
    if name in _RANDOM:
        return _draw(func, args, kwargs)
    if name in _MATRIX:
        return _on_owner(func, args, kwargs)
    if name == "index_put_":
        _check_mask(func, *args[:2])
    if str(func) in _REDUCTIONS:
        return _REDUCTIONS[str(func)](func, args, kwargs)
    if name in _PAIRS:
        return _as_pairs(func, *args)
    if name in _NEW:
        return _new_tensor(func, args, kwargs)
    if name.startswith(("_foreach_", "_fused_")) and name not in _ONE_A_TENSOR:
        return _multi_tensor(func, args, kwargs)
    if name in _LIKE or _is_pointwise(func):
        return _elementwise(func, args, kwargs)
    raise _refusal(func, f"operands {_described((args, kwargs))}")


_LIKE = {
    "_to_copy", "alias", "clone", "detach", "empty_like", "fill_", "full_like", "index_put_", "masked_fill",
    "masked_fill_", "ones_like", "zero_", "zeros_like",
}  # fmt: skip
_NEW = {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"}
_RANDOM = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
_ONE_A_TENSOR = {"_foreach_max", "_foreach_norm", "_foreach_powsum"}
_PAIRS = {"view_as_complex", "view_as_real"}
_MATRIX = {"addmm", "mm", "permute", "t", "transpose"}


# -- how operands lie -----------------------------------------------------------------------------------------------


def is_ragged(tensor: object) -> bool:
    """Whether an operand is a DTensor with ragged placements."""
    return isinstance(tensor, DTensor) and any(isinstance(placement, RaggedShard) for placement in tensor.placements)


def rows_of(tensor: DTensor) -> Range:
    """This rank's rows of a ragged tensor, along dim 0."""
    _check_one_cut(tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    rows = ragged_rows(tensor.placements, coordinate)
    assert rows is not None
    return rows


def _check_one_cut(tensor: DTensor) -> None:
    """Refuse a tensor that another axis cuts too: the bounds are of a part, and other parts are not on ragged axes."""
    if unsupported := [
        placement
        for placement in tensor.placements
        if not (isinstance(placement, RaggedShard) or placement.is_replicate())
    ]:
        raise NotImplementedError(
            f"Expected a tensor cut by ragged axes alone, got one of shape {tuple(tensor.shape)} that "
            f"{unsupported[0]!r} cuts too. Use to_local(), or save the tensor by lamella_checkpoint, which places the "
            "parts."
        )


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _first_ragged(tree: object) -> DTensor:
    ragged: DTensor = next(leaf for leaf in pytree.tree_leaves(tree) if is_ragged(leaf) and type(leaf) is not DTensor)
    return ragged


def _local(func: Any, operand: Any, like: DTensor) -> Any:
    """An operand's part beside the local rows of `like`."""
    if not isinstance(operand, torch.Tensor):
        return operand
    if isinstance(operand, DTensor) and operand.ndim == 0:
        # Of a partial sum this is a collective: every rank gets here, with rows or without.
        return operand.full_tensor()
    if operand.ndim == 0:
        return operand
    if isinstance(operand, DTensor) and operand.shape == like.shape and operand.device_mesh == like.device_mesh:
        # The types must match too: code unaware of ragged rows made a plain DTensor with ragged placements.
        if operand.placements == like.placements and type(operand) is type(like):
            return operand._local_tensor
        if is_ragged(like) and all(placement.is_replicate() for placement in operand.placements):
            return operand._local_tensor[slice(*rows_of(like))]
    raise _refusal(func, f"{_described(like)} and {_described(operand)}")


def _over(func: Any, local: torch.Tensor, like: DTensor) -> DTensor:
    """A tensor that lies as `like`."""
    if local.shape != like._local_tensor.shape:
        raise _refusal(func, f"{_described(like)}, for a result that is not of the operands' shape")
    like_meta = like._spec.tensor_meta
    assert like_meta is not None
    meta = TensorMeta(like_meta.shape, like_meta.stride, local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    output: DTensor = type(like)(local, spec, requires_grad=False)
    return output


def _refusal(func: Any, got: str) -> NotImplementedError:
    return NotImplementedError(
        f"Expected {func} to work on the rows that each rank has of tensors in the flat layout (elementwise, where all "
        f"lie alike; norms and sums), got {got}. Call full_tensor() first, or redistribute() to a plain DTensor; "
        "products of matrices take tensors kept Whole()."
    )


def _described(tree: object) -> str:
    return ", ".join(
        f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
        + (f" {tensor.placements}" if isinstance(tensor, DTensor) else "")
        for tensor in _tensors(tree)
    )


# -- elementwise ----------------------------------------------------------------------------------------------------


def _is_pointwise(func: Any) -> bool:
    """Whether torch tags an operator pointwise; never for `equal` and random masks, though torch tags both."""
    makes_tensors = all(str(output.type) == "Tensor" for output in func._schema.returns)
    return makes_tensors and torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags


def _elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    like = _first_ragged((args, kwargs))
    written = _written(func, args, kwargs)
    for operand in written:
        if not is_ragged(operand):
            raise _refusal(func, f"{_described(operand)} to write into")
    local_args, local_kwargs = pytree.tree_map(lambda operand: _local(func, operand, like), (tuple(args), dict(kwargs)))
    outputs = func(*local_args, **local_kwargs)
    if written:
        return written[0]
    return pytree.tree_map(
        lambda local: _over(func, local, like) if isinstance(local, torch.Tensor) else local, outputs
    )


def _written(func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
    """The operands that an operator writes: tensors, or lists of tensors."""
    return [
        operand for argument, operand in _named(func, args, kwargs) if _is_written(argument) and operand is not None
    ]


def _named(func: Any, args: Args, kwargs: Kwargs) -> list[tuple[Any, Any]]:
    arguments = func._schema.arguments
    by_name = [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]
    return [*zip(arguments, args, strict=False), *by_name]


def _is_written(argument: Any) -> bool:
    if argument.name == "state_steps":  # counted beforehand, on every rank; kernels only read steps, against the schema
        return False
    return argument.alias_info is not None and argument.alias_info.is_write


def _copy(func: Any, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(into, DTensor):
        raise _refusal(func, f"{_described(source)} into {_described(into)}")
    if not is_ragged(into):
        assert isinstance(source, DTensor)
        into.copy_(source.redistribute(placements=into.placements), non_blocking)
        return into
    if isinstance(source, DTensor) and source.shape == into.shape and source.placements != into.placements:
        # A collective, which ranks without rows join too: the two layouts give a rank different rows.
        rows = source.full_tensor()[slice(*rows_of(into))]
    else:
        rows = _local(func, source, into)
    into._local_tensor.copy_(rows, non_blocking)
    return into


def _check_mask(func: Any, into: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
    """Refuse indices other than a mask of the same shape, which selects each element by itself."""
    if len(indices) != 1 or indices[0] is None or indices[0].dtype != torch.bool or indices[0].shape != into.shape:
        raise _refusal(func, f"{_described(into)} and indices {_described(indices)}")


def _new_tensor(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    """A tensor of the same shape lies alike."""
    like, shape, *arguments = args
    if tuple(shape) != tuple(like.shape):
        raise _refusal(func, f"shape {tuple(shape)} from {_described(like)}")
    if func._schema.name == "aten::new_empty_strided":
        return _over(func, torch.empty_like(like._local_tensor, **kwargs), like)
    return _over(func, func(like._local_tensor, like._local_tensor.shape, *arguments, **kwargs), like)


def _as_pairs(func: Any, like: DTensor) -> DTensor:
    """A view of complex numbers as pairs in a further dim, or of pairs as complex numbers: rows stay where they are."""
    meta = func(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta"))
    if meta.ndim == 0:
        raise _refusal(func, f"{_described(like)}, whose rows are parts of one number")
    spec = DTensorSpec(
        like.device_mesh, like.placements, tensor_meta=TensorMeta(meta.shape, tuple(meta.stride()), meta.dtype)
    )
    output: DTensor = type(like)(func(like._local_tensor), spec, requires_grad=False)
    return output


def _draw(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    """Draw random values for the whole tensor, and keep this rank's rows; replicas take the first replica's."""
    into, *arguments = args
    full = torch.empty(into.shape, dtype=into.dtype, device=into._local_tensor.device)
    if any(isinstance(operand, torch.Tensor) for operand in (*arguments, *kwargs.values())):
        raise _refusal(func, _described((args, kwargs)))
    func(full, *arguments, **kwargs)  # whole on each rank: all generators advance alike, whatever rows a rank has
    # To the mesh's device for the broadcast: its backend may take no CPU tensors, and shards may rest on the CPU.
    drawn = full[slice(*rows_of(into))].to(into.device_mesh.device_type)
    for axis, placement in enumerate(into.placements):
        # Replicas have the same rows: all of them skip a broadcast of nothing, or none does.
        if placement.is_replicate() and into.device_mesh.size(axis) > 1 and drawn.numel():
            dist.broadcast(drawn, group=into.device_mesh.get_group(axis), group_src=0)
    into._local_tensor.copy_(drawn)
    return into  # type: ignore[no-any-return]


# -- multi-tensor ---------------------------------------------------------------------------------------------------


def _multi_tensor(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Lists of tensors: the i-th tensors of all lists go together, and operands outside of lists with each index."""
    lists = [
        operand for operand in (*args, *kwargs.values()) if isinstance(operand, list | tuple) and _tensors(operand)
    ]
    likes = [_like_of([tensors[i] for tensors in lists if i < len(tensors)]) for i in range(max(map(len, lists)))]
    written = _written(func, args, kwargs)
    for operands in written:
        _check_written(func, operands, likes)

    # Every rank checks all operands, also beside empty rows: an error on one rank alone would hang the rest.
    def local(operand: Any) -> Any:
        if isinstance(operand, list | tuple) and len(operand) == len(likes):
            return [_local_beside(func, tensors, like) for tensors, like in zip(operand, likes, strict=True)]
        return _local_beside(func, operand, next(like for like in likes if like is not None))

    local_arguments: Args = [local(operand) for operand in args]
    named: Kwargs = {name: local(operand) for name, operand in kwargs.items()}
    if not written:
        outputs = func(*local_arguments, **named)
        return [
            tensors if like is None else _over(func, tensors, like)
            for tensors, like in zip(outputs, likes, strict=True)
        ]
    filled = [like is None or like._local_tensor.numel() > 0 for like in likes]
    if any(filled):
        func(
            *(_filled_only(operand, filled) for operand in local_arguments),
            **{name: _filled_only(operand, filled) for name, operand in named.items()},
        )
    return None


def _check_written(func: Any, operands: Sequence[Any], likes: Sequence[DTensor | None]) -> None:
    for operand, like in zip(operands, likes, strict=False):
        if like is not None and not (isinstance(operand, DTensor) and operand.placements == like.placements):
            raise _refusal(func, f"{_described(operand)} to write into")


def _filled_only(operand: Any, filled: Sequence[bool]) -> Any:
    """A list without the entries of empty tensors. Note [Empty shards]."""
    if not isinstance(operand, list) or len(operand) != len(filled):
        return operand
    return [tensor for tensor, is_filled in zip(operand, filled, strict=True) if is_filled]


def _like_of(row: Sequence[Any]) -> DTensor | None:
    """The operand by which all operands of a row must lie."""
    placed = [operand for operand in row if isinstance(operand, DTensor) and operand.ndim > 0]
    return next((operand for operand in placed if is_ragged(operand)), placed[0] if placed else None)


def _local_beside(func: Any, operand: Any, like: DTensor | None) -> Any:
    if like is None or not isinstance(operand, torch.Tensor):
        return operand
    if not is_ragged(like) and any(placement.is_partial() for placement in like.placements):
        raise _refusal(func, f"{_described(like)}, a sum that was not made yet")
    return _local(func, operand, like)


# -- over the ranks -------------------------------------------------------------------------------------------------


def reduce_ragged(tensor: torch.Tensor, like: DTensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce a tensor over the ragged axes of another.

    Effects: collective, one call an axis, on the current stream; for a tensor off the mesh's device (offloaded shards),
        a copy to the device and back, and the host waits for both copies.
    """
    _check_one_cut(like)
    # Maybe `tensor` itself, which is then reduced in place: callers give away a tensor that they have just made.
    sent = tensor.to(like.device_mesh.device_type).contiguous()
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, RaggedShard) and like.device_mesh.size(axis) > 1 and sent.numel():
            dist.all_reduce(sent, op, group=like.device_mesh.get_group(axis))
    return sent.to(tensor.device)


def _over_ranks(local_results: torch.Tensor, like: DTensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce the ranks' results on local rows.

    A maximum keeps NaN, which collectives may lose.
    """
    invalid = local_results.isnan() if op is not dist.ReduceOp.SUM and local_results.is_floating_point() else None
    sent = local_results if invalid is None else torch.stack([local_results, invalid.to(local_results.dtype)])
    if invalid is not None and op is dist.ReduceOp.MIN:
        sent[1].neg_()
    sent = reduce_ragged(sent, like, op)
    if invalid is None:
        return sent
    return torch.where(sent[1] != 0, math.nan, sent[0])


def _everywhere(reduced: torch.Tensor, like: DTensor) -> DTensor:
    # Equal on all ranks by the reductions before: a check would be one collective more.
    return DTensor.from_local(reduced, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _norms(func: Any, tensors: Sequence[DTensor], p: float, dtype: torch.dtype | None) -> list[DTensor]:
    """Norms of tensors on the same axes, with one collective.

    Source: the p-th root of the sum of the ranks' norms to the power of p.
    """
    like = tensors[0]
    if p < 0:
        raise _refusal(func, f"a norm of order {p}, which has no value for a rank without rows")
    dtypes = [dtype or tensor.dtype for tensor in tensors]
    # Not in the operands' dtype: a sum of squares over the ranks would overflow in half precision.
    wide = torch.float64 if any(kind.itemsize == 8 for kind in dtypes) else torch.float32
    zero = torch.zeros((), dtype=wide, device=like._local_tensor.device)
    locals_ = [tensor._local_tensor.detach() for tensor in tensors]
    local_norms = torch.stack([torch.linalg.vector_norm(x, p, dtype=wide) if x.numel() else zero for x in locals_])
    if math.isinf(p):
        norms = _over_ranks(local_norms, like, dist.ReduceOp.MAX)
    elif p == 0:
        norms = _over_ranks(local_norms, like, dist.ReduceOp.SUM)
    else:
        norms = _over_ranks(local_norms.pow(p), like, dist.ReduceOp.SUM).pow(1 / p)
    return [_everywhere(norm.to(kind), like) for norm, kind in zip(norms.unbind(), dtypes, strict=True)]


def _foreach_norm(func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
    tensors, p, dtype = _bound(func, args, kwargs, "self", "ord", "dtype")
    norms: dict[int, Any] = {}
    for axes, indices in _by_axes(tensors).items():
        tensors_on_axes = [tensors[i] for i in indices]
        shared_norms = (
            torch._foreach_norm(tensors_on_axes, p, dtype=dtype)
            if axes is None
            else _norms(func, tensors_on_axes, float(p), dtype)
        )
        norms.update(zip(indices, shared_norms, strict=True))
    return [norms[i] for i in range(len(tensors))]


def _unscale(func: Any, args: Args, kwargs: Kwargs) -> None:
    """`GradScaler`'s operator: every rank must hear of a gradient that is not finite."""
    tensors, found_inf, inverse = _bound(func, args, kwargs, "self", "found_inf", "inv_scale")
    for axes, indices in _by_axes(tensors).items():
        tensors_on_axes = [tensors[i] for i in indices]
        if axes is None:
            func(tensors_on_axes, found_inf, inverse)
            continue
        # Without tensors of no elements: Note [Empty shards].
        if filled := [tensor._local_tensor for tensor in tensors_on_axes if tensor._local_tensor.numel()]:
            func(filled, found_inf, inverse)
        found_inf.copy_(reduce_ragged(found_inf, tensors_on_axes[0], dist.ReduceOp.MAX))


def _by_axes(tensors: Sequence[torch.Tensor]) -> dict[object, list[int]]:
    """The indices of tensors that are reduced together; tensors that are not ragged under None."""
    together: dict[object, list[int]] = {}
    for i, tensor in enumerate(tensors):
        key = (tensor.device_mesh, _cuts(tensor)) if isinstance(tensor, DTensor) and is_ragged(tensor) else None
        together.setdefault(key, []).append(i)
    return together


def _cuts(tensor: DTensor) -> tuple[bool, ...]:
    """Whether a tensor is ragged, axis by axis. Tensors with equal answers are reduced together."""
    return tuple(isinstance(placement, RaggedShard) for placement in tensor.placements)


def _vector_norm(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    tensor, p, dim, keepdim, dtype = _bound(func, args, kwargs, "self", "ord", "dim", "keepdim", "dtype")
    _check_all_dims(func, tensor, dim, keepdim)
    return _norms(func, [tensor], float(p), dtype)[0]


def _norm(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    tensor, p, dim, keepdim, dtype = _bound(func, args, kwargs, "self", "p", "dim", "keepdim", "dtype")
    _check_all_dims(func, tensor, dim, keepdim)
    return _norms(func, [tensor], 2.0 if p is None else float(p), dtype)[0]


def _sum(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    tensor, dim, keepdim, dtype = _bound(func, args, kwargs, "self", "dim", "keepdim", "dtype")
    _check_all_dims(func, tensor, dim, keepdim)
    sum_dtype = dtype or (tensor.dtype if tensor.dtype.is_floating_point else torch.int64)
    # Ranks' sums rounded to a narrow dtype would make the total depend on the number of ranks.
    wide = torch.float32 if sum_dtype.is_floating_point and sum_dtype.itemsize < 4 else sum_dtype
    local_sum = tensor._local_tensor.detach().sum(dtype=wide)
    return _everywhere(_over_ranks(local_sum, tensor, dist.ReduceOp.SUM).to(sum_dtype), tensor)


def _mean(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    tensor, dim, keepdim, dtype = _bound(func, args, kwargs, "self", "dim", "keepdim", "dtype")
    _check_all_dims(func, tensor, dim, keepdim)
    return torch.div(torch.sum(tensor, dtype=dtype), tensor.numel())  # type: ignore[return-value]


def _extreme(op: dist.ReduceOp.RedOpType) -> Callable[[Any, Args, Kwargs], DTensor]:
    def find(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
        tensor, dim, keepdim = _bound(func, args, kwargs, "self", "dim", "keepdim")
        _check_all_dims(func, tensor, dim, keepdim)
        local, is_max = tensor._local_tensor.detach(), op is dist.ReduceOp.MAX
        if tensor.dtype == torch.bool:
            raise _refusal(func, _described(tensor))
        limits = torch.finfo(tensor.dtype) if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype)
        lowest, highest = (-math.inf, math.inf) if tensor.dtype.is_floating_point else (limits.min, limits.max)
        # A rank without rows joins the collective with the neutral element: torch has no maximum of nothing.
        nothing = local.new_full((), lowest if is_max else highest)
        local_extreme = nothing if not local.numel() else local.max() if is_max else local.min()
        return _everywhere(_over_ranks(local_extreme, tensor, op), tensor)

    return find


def _truth(op: dist.ReduceOp.RedOpType) -> Callable[[Any, Args, Kwargs], DTensor]:
    def find(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
        tensor, dim, keepdim = _bound(func, args, kwargs, "self", "dim", "keepdim")
        _check_all_dims(func, tensor, dim, keepdim)
        local = tensor._local_tensor.detach()
        # As 0 and 1: the maximum over the ranks is `any`, the minimum is `all`.
        local_extreme = (local.any() if op is dist.ReduceOp.MAX else local.all()).to(torch.uint8)
        return _everywhere(_over_ranks(local_extreme, tensor, op).to(torch.bool), tensor)

    return find


def _bound(func: Any, args: Args, kwargs: Kwargs, *names: str) -> list[Any]:
    """Arguments by name, or their defaults, or None for names that the overload lacks."""
    arguments_by_name = {
        argument.name: argument.default_value for argument in func._schema.arguments if argument.has_default_value()
    }
    arguments_by_name.update({argument.name: operand for argument, operand in _named(func, args, kwargs)})
    return [arguments_by_name.get(name) for name in names]


def _check_all_dims(func: Any, tensor: DTensor, dim: Any, keepdim: Any) -> None:
    dims = [dim] if isinstance(dim, int) else dim
    covers_all = not dims or sorted(i % tensor.ndim for i in dims) == list(range(tensor.ndim))
    if not covers_all or keepdim:
        raise _refusal(func, f"{_described(tensor)} along dims {dims}")


_REDUCTIONS: dict[str, Callable[[Any, Args, Kwargs], Any]] = {
    "aten._foreach_norm.Scalar": _foreach_norm,
    "aten._amp_foreach_non_finite_check_and_unscale_.default": _unscale,
    "aten.linalg_vector_norm.default": _vector_norm,
    **{f"aten.norm.Scalar{overload}": _norm for overload in ("", "Opt_dim", "Opt_dim_dtype", "Opt_dtype")},
    **{f"aten.sum.{overload}": _sum for overload in ("default", "dim_IntList")},
    **{f"aten.mean.{overload}": _mean for overload in ("default", "dim")},
    **{f"aten.{name}.default": _extreme(dist.ReduceOp.MAX) for name in ("max", "amax")},
    **{f"aten.{name}.default": _extreme(dist.ReduceOp.MIN) for name in ("min", "amin")},
    "aten.any.default": _truth(dist.ReduceOp.MAX),
    "aten.all.default": _truth(dist.ReduceOp.MIN),
}


# -- matrices that lie whole on a rank ------------------------------------------------------------------------------


def _on_owner(func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    """Run an operator on the operands' owner; all further ranks make an empty tensor of the result's kind."""
    operands = [tensor for tensor in _tensors((args, kwargs)) if tensor.ndim > 0]
    like = _first_ragged((args, kwargs))
    cuts = {_cut(tensor) for tensor in operands}
    if len(cuts) > 1 or None in cuts or any(tensor.ndim != 2 for tensor in operands):
        raise _refusal(func, _described(operands))

    def run(pick: Callable[[DTensor], torch.Tensor]) -> torch.Tensor:
        picked = pytree.tree_map(lambda v: pick(v) if isinstance(v, DTensor) else v, (tuple(args), dict(kwargs)))
        output: torch.Tensor = func(*picked[0], **picked[1])
        return output

    # On meta on every rank: ranks without rows cannot run the operator, and must know the shape and strides.
    meta = run(lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
    if rows_of(like).numel:
        local = run(lambda tensor: tensor.full_tensor() if tensor.ndim == 0 else tensor._local_tensor)
    else:
        local = torch.empty((0, *meta.shape[1:]), dtype=meta.dtype, device=like._local_tensor.device)
    placements = tuple(_with_rows(placement, meta.shape[0]) for placement in like.placements)
    spec = DTensorSpec(
        like.device_mesh, placements, tensor_meta=TensorMeta(meta.shape, tuple(meta.stride()), meta.dtype)
    )
    output: DTensor = type(like)(local, spec, requires_grad=False)
    return output


def _cut(tensor: torch.Tensor) -> object:
    """The place of a tensor that lies whole on one rank of its ragged axes; else None."""
    if not isinstance(tensor, DTensor) or not is_ragged(tensor):
        return None
    lies = tuple(
        (placement.owner, placement.num_shards, placement.stride) if isinstance(placement, RaggedShard) else placement
        for placement in tensor.placements
    )
    is_whole = all(placement.owner is not None for placement in tensor.placements if isinstance(placement, RaggedShard))
    return (tensor.device_mesh, lies) if is_whole else None


def _with_rows(placement: Any, num_rows: int) -> Any:
    """The same owner's placement of another number of rows."""
    if not isinstance(placement, RaggedShard):
        return placement
    assert placement.owner is not None
    bounds = [0 if rank <= placement.owner else num_rows for rank in range(placement.num_shards + 1)]
    return RaggedShard(bounds, placement.stride)
