"""A DTensor with rows cut at any bounds: the resting form of a parameter in the flat layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from lamella_engine._ragged.ops import compute, reduce_ragged, rows_of
from lamella_layout import RaggedShard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class RaggedDTensor(DTensor):
    """A DTensor with `RaggedShard` placements: each rank has some rows of dim 0, however many, maybe none.

    A plain DTensor with such a local tensor would give a wrong `full_tensor()` without an error. A `RaggedDTensor`
    computes on local rows (elementwise operations on tensors that lie alike, optimizers' multi-tensor and fused
    operations, norms, sums and extremes), and refuses everything else: `full_tensor()` is the way out, and
    `redistribute` makes a plain DTensor. `torch.distributed.checkpoint` writes and reads the local rows.

    `ShardingOptions(keep_together=...)` makes parameters of this class.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return compute(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"RaggedDTensor(local_tensor={self._local_tensor}, shape={tuple(self.shape)}, "
            f"device_mesh={self.device_mesh}, placements={self.placements})"
        )

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> RaggedDTensor:
        plain: Any = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)  # type: ignore[no-untyped-call]
        return _over(plain._local_tensor, plain._spec, requires_grad=plain.requires_grad)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's rows.

        Args:
            grad_placements: None: the local gradient belongs to the same rows.

        Raises:
            NotImplementedError: `grad_placements` is not None.
        """
        _check_gradient_lies_alike(grad_placements)
        if torch.is_grad_enabled() and self.requires_grad:
            local: torch.Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
            return local
        with torch.no_grad():
            return super().to_local()

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, bit by bit, on every rank.

        Args:
            grad_placements: None: each rank's gradient is the whole tensor's, equal on all.

        Raises:
            NotImplementedError: `grad_placements` is not None.

        Effects: collective, an all-reduce of the whole tensor on each ragged axis; allocates the whole tensor.
        """
        _check_gradient_lies_alike(grad_placements)
        tensor: torch.Tensor = _ToFull.apply(self)  # type: ignore[no-untyped-call]
        return tensor

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """The tensor in torch's own placements, as a plain DTensor, by way of the whole.

        Args:
            device_mesh: The tensor's mesh, or None.
            placements: One an axis: `Replicate` or `Shard`. The tensor's own placements return the tensor itself.
            options: Further arguments of `DTensor.redistribute`.

        Raises:
            NotImplementedError: Another mesh, or other ragged placements.

        Effects: as `full_tensor`.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(f"Expected `device_mesh` to be {self.device_mesh}, got {device_mesh}.")
        if placements is not None and tuple(placements) == self.placements:
            return self
        if any(isinstance(placement, RaggedShard) for placement in placements or ()):
            raise NotImplementedError(f"Expected `placements` of torch's own, or {self.placements}, got {placements}.")
        # Equal on all ranks by construction: a check would be one collective more.
        replicated = DTensor.from_local(
            self.full_tensor(), self.device_mesh, [Replicate()] * self.device_mesh.ndim, run_check=False
        )
        return replicated.redistribute(placements=placements, **options)

    # -- torch.distributed.checkpoint -------------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        # Imported here and below: at module level, the import would cost every training process without checkpoints.
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        rows = rows_of(self)
        if not rows.numel and self.numel():  # Of an empty tensor a chunk is written, or its name would be missing.
            return []
        row_shape = self.shape[1:]
        return [
            ChunkStorageMetadata(
                torch.Size((rows.start, *(0 for _ in row_shape))), torch.Size((rows.numel, *row_shape))
            )
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._local_tensor


def dtensor_over(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over a local tensor, ragged if a placement is."""
    if any(isinstance(placement, RaggedShard) for placement in spec.placements):
        return _over(local, spec)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def lie_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape are cut at the same bounds; True if neither is ragged."""
    if isinstance(tensor, RaggedDTensor) is not isinstance(other, RaggedDTensor):
        return False
    if not isinstance(tensor, RaggedDTensor) or not isinstance(other, RaggedDTensor):
        return True
    return (tensor.device_mesh, tensor.placements) == (other.device_mesh, other.placements)


def _over(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> RaggedDTensor:
    return RaggedDTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]


def _zero_padded(tensor: RaggedDTensor) -> torch.Tensor:
    tensor_of_zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
    tensor_of_zeros[slice(*rows_of(tensor))] = tensor._local_tensor
    as_bytes = tensor_of_zeros.view(-1).view(torch.uint8)  # each byte is zero on all ranks but the owner: exact
    return reduce_ragged(as_bytes, tensor, dist.ReduceOp.SUM).view(tensor_of_zeros.dtype).view(tensor_of_zeros.shape)


def _check_gradient_lies_alike(grad_placements: object) -> None:
    if grad_placements is not None:
        raise NotImplementedError(
            f"Expected `grad_placements` to be None, got {grad_placements!r}. Redistribute the tensor first: a plain "
            "DTensor takes them."
        )


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        # A fresh view: autograd writes metadata into the result, and would turn the shard itself into a graph's tensor.
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> RaggedDTensor:
        return _over(gradient.contiguous(), ctx.spec)


class _ToFull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> torch.Tensor:
        ctx.spec, ctx.rows = tensor._spec, rows_of(tensor)
        return _zero_padded(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> RaggedDTensor:
        return _over(gradient[slice(*ctx.rows)].contiguous(), ctx.spec)


def _answer_every_operator() -> torch.library.Library | None:
    """Make torch dispatch to `RaggedDTensor`, in versions of torch that take subclasses of DTensor for DTensors.

    torch 2.11 does (pytorch PR 177878), except for operators with a rule of the subclass's own. DTensor's code would
    overlook ragged rows, so each of torch's operators gets the rule, refused operators too. Operators registered later
    have no sharding strategy, and DTensor refuses such operators.

    Returns:
        The owner of the rules, which must live as long as the rules; None if torch dispatches by itself.
    """
    if not _takes_subclasses_for_dtensors():
        return None

    def rule(cls: type[RaggedDTensor], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.__torch_dispatch__(func, types, args, kwargs)

    owner = torch.library.Library("aten", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            torch.library.register_torch_dispatch(name, RaggedDTensor, rule, lib=owner)
    return owner


def _takes_subclasses_for_dtensors() -> bool:
    """Whether torch never dispatches DTensor's operators by class; DTensor's own `__torch_dispatch__` then raises."""
    try:
        DTensor.__torch_dispatch__(lambda: None, ())  # type: ignore[no-untyped-call]
    except NotImplementedError:
        return True
    return False


# Bound for the life of the process: torch drops the rules with their owner.
_RULES = _answer_every_operator()

# As for DTensor: otherwise `torch.load(weights_only=True)` refuses a state dict of ragged tensors.
torch.serialization.add_safe_globals([RaggedDTensor, RaggedShard])
