"""megatron-core's data-parallel wrapper: the contract of `_BaseDataParallel`, over a model in units.

Note [Who waits for gradients]
    The drivers of megatron-core (`forward_backward_func`) leave `no_sync` before the last microbatch's backward, and
    call `finalize_model_grads`, hence `finish_grad_sync`, after the backward. So `no_sync` says which backward is the
    step's last, and the stage says when gradients are reduced: ZeRO-2 and ZeRO-3 after each microbatch, into shards;
    ZeRO-1 and DDP after the last.

Note [Marks on sharded parameters]
    `finalize_model_grads` and the norms of megatron-core take the local shard of a gradient if the *sharded* Parameter
    has `__fsdp_param__`. The unsharded Parameter must not have the mark: megatron-core's own linear would write over
    its `main_grad` instead of adding.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lamella_engine import ZERO3, FSDPModule, parameter_norms
from lamella_engine.extending import local_of
from lamella_megatron._model.configuration import (
    check_model_config,
    check_options,
    min_unit_size_of,
    options_of,
    placements_of,
    policy_of,
    strategy_of,
)
from lamella_megatron._model.float8_weights import with_float8_weights
from lamella_megatron._model.placement import check_group, num_instances, split_parameters
from lamella_megatron._model.sharded_model import fully_shard_model, innermost
from lamella_megatron._overlap.schedule_plan import schedule_by_plans

_CHOICES_OF_UNITS = frozenset({"layer_groups", "min_unit_size", "unit_classes"})


class ShardedModel(_BaseDataParallel):  # type: ignore[misc]  # megatron-core has no types
    """A megatron-core model, sharded, in the place of megatron-core's `DistributedDataParallel`.

        ddp_config = DistributedDataParallelConfig(
            use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", grad_reduce_in_fp32=True
        )
        model = ShardedModel(config=config, ddp_config=ddp_config, module=Float16Module(config, GPTModel(...)))
        forward_backward_func(model=[model], ...)

    Parameters compute in the dtypes that they have in `module`; the main weights, which the optimizer holds, are in
    `ddp_config.megatron_fsdp_main_params_dtype` (fp32). The driver of megatron-core finds `no_sync` in
    `config.no_sync_func`, which is set here if it was None, for all chunks with the same configuration.

    Args:
        config: The model's TransformerConfig.
        ddp_config: megatron-core's `DistributedDataParallelConfig`. `data_parallel_sharding_strategy` is the stage
            (`no_shard`, `optim`, `optim_grads`, `optim_grads_params`); options without an equal are refused, as
            `docs/reference/megatron_fsdp.md` lists them.
        module: The model, or a `Float16Module` around one; the innermost module is sharded, in place. A model of
            `build_sharded_model` stays as it is: its stage must be the strategy's.
        disable_bucketing: Changes nothing: megatron-core sets it where buckets would not overlap.
        pg_collection: megatron-core's `ProcessGroupCollection`; None takes the groups of `parallel_state`.
        fully_shard_kwargs: Arguments of `lamella_megatron.fully_shard_model`, over what `ddp_config` says.

    Raises:
        ValueError: An option of either configuration is refused, or does not fit the groups; `module` has parameters
            on the meta device, or units of another stage; or as `fully_shard_model`.
        TypeError: `mesh` or `shard_placement_fn` was given.

    Effects: shards the model, with a broadcast of each parameter over its ranks; none for a model of
        `build_sharded_model`.

    Source: `_BaseDataParallel` and `DistributedDataParallel` of megatron-core 0.19.2.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        **fully_shard_kwargs: Any,
    ) -> None:
        check_options(ddp_config)
        check_model_config(config)
        self.pg_collection = pg_collection
        _check_groups(ddp_config, pg_collection)
        super().__init__(config=config, module=module)
        # finalize_model_grads reads shards if the option is set, and gathers whole gradients otherwise.
        strategy = strategy_of(ddp_config)
        self.ddp_config = dataclasses.replace(
            ddp_config, use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy
        )
        self._groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["dp_cp", "mp"])
        if isinstance(self._root, FSDPModule):
            self._check_sharded(fully_shard_kwargs)
        else:
            _check_values(self._root)
            policy = fully_shard_kwargs.pop("mp_policy", None) or policy_of(ddp_config, module)
            policy = with_float8_weights(policy, ddp_config, self._root)
            options = options_of(ddp_config, policy.param_dtype)
            arguments = {"mp_policy": policy, "options": options, **fully_shard_kwargs}
            if not (_runs_layers_apart(config) or fully_shard_kwargs.keys() & _CHOICES_OF_UNITS):
                arguments["min_unit_size"] = min_unit_size_of(ddp_config)
            fully_shard_model(self._root, groups=pg_collection, **arguments)
        self._check_stage()
        if config.overlap_moe_expert_parallel_comm:
            schedule_by_plans(self._root)
        # A rank whose experts saw no token has no gradients, and would not come to the all-reduces of
        # finalize_model_grads and of the norm with as many elements as its peers.
        self._root.set_reduce_scatter_unused_params(True)
        if config.calculate_per_token_loss:
            # finalize_model_grads divides by the number of tokens on all ranks instead.
            for unit in self._units():
                unit.set_gradient_divide_factor(1.0)
        for parameter in self._root.parameters():
            parameter.__fsdp_param__ = True  # Note [Marks on sharded parameters]
        self._shared_embeddings = [p for p in self._root.parameters() if getattr(p, "shared_embedding", False)]
        self.param_and_grad_buffer = _NoBuffer()
        if config.no_sync_func is None:
            config.no_sync_func = _NoSync()
        if isinstance(config.no_sync_func, _NoSync):
            config.no_sync_func.chunks.add(self)

    @property
    def _root(self) -> Any:
        """The model, outermost unit: as an attribute it would be a child module of two names."""
        return innermost(self.module)

    def _check_sharded(self, kwargs: Mapping[str, object]) -> None:
        """Refuse arguments, and main weights of another dtype, for a model whose units are made already.

        Raises:
            ValueError: `kwargs` are for units to be made; or main weights are in another dtype than the options say,
                also because a `Float16Module` around the sharded model has cast them.
        """
        if kwargs:
            raise ValueError(
                f"Expected no arguments for units of a model that is sharded already, got {sorted(kwargs)}. Pass them "
                "to build_sharded_model."
            )
        main = self.ddp_config.megatron_fsdp_main_params_dtype
        odd = next((name for name, p in self._root.named_parameters() if main is not None and p.dtype != main), None)
        if odd is not None:
            raise ValueError(
                f"Expected main weights in {main}, `ddp_config.megatron_fsdp_main_params_dtype`, got {odd!r} in "
                f"another dtype. Build the model with mp_policy=MixedPrecisionPolicy(..., main_dtype={main}), and put "
                "no Float16Module around the result."
            )

    def _check_stage(self) -> None:
        """Hold the units' stage against the strategy, from which megatron-core derives the ranks of a norm.

        Raises:
            ValueError: The two differ.
        """
        expected, sharded_by = placements_of(self.ddp_config), self._root.sharding_options.placements or ZERO3
        if sharded_by != expected:
            raise ValueError(
                f"Expected units of the stage that `ddp_config` names, {expected}, got {sharded_by}. Give "
                "options=ShardingOptions(placements=...) of the strategy, or change data_parallel_sharding_strategy."
            )

    @property
    def _device(self) -> torch.device:
        device: torch.device = local_of(next(self._root.parameters())).device
        return device

    def _units(self) -> Iterator[FSDPModule]:
        return (module for module in self._root.modules() if isinstance(module, FSDPModule))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Every backward inside is followed by another in the same step: none ends the step."""
        self._root.set_is_last_backward(False)
        try:
            yield
        finally:
            self._root.set_is_last_backward(True)

    def start_grad_sync(self, *_: object) -> None:
        """Nothing: backward starts the reduction of each unit's gradients."""

    def finish_grad_sync(self, force_all_reduce: bool | None = None) -> None:
        """Wait for all reductions of the step, on the compute stream; check the gradients if the options say so.

        Args:
            force_all_reduce: True asks for whole gradients on every rank, which only `no_shard` has.

        Raises:
            ValueError: `force_all_reduce` with another strategy.
            RuntimeError: With `check_for_nan_in_grad`, a gradient of this rank or of a peer is not finite. The
                parameters of this rank are in the message. Every rank of the model raises.

        Effects: with `check_for_nan_in_grad` two all-reduces of one number, over `dp_cp` and `mp`, and a host sync.
        """
        if force_all_reduce and self.ddp_config.data_parallel_sharding_strategy != "no_shard":
            raise ValueError(
                "Expected `force_all_reduce` with data_parallel_sharding_strategy='no_shard', got "
                f"{self.ddp_config.data_parallel_sharding_strategy!r}: ranks hold shards of gradients. Read "
                "`parameter.grad.full_tensor()` instead."
            )
        FSDPModule.wait_for_gradients(self._root)
        for weight in self._shared_embeddings:
            if weight.grad is not None:
                # finalize_model_grads sums the shard over pipeline stages in place, then assigns it: `.grad` refuses a
                # plain shard, and megatron-core takes an attribute `main_grad` before `.grad`.
                weight.main_grad = weight.grad
        if self.ddp_config.megatron_fsdp_use_decoupled_grad:
            for parameter in self._root.parameters():
                parameter.decoupled_grad = parameter.grad
        if self.ddp_config.check_for_nan_in_grad:
            self._check_finite()

    def _check_finite(self) -> None:
        gradients = {name: p.grad for name, p in self._root.named_parameters() if p.grad is not None}
        shards = [local_of(gradient) for gradient in gradients.values()]
        # In fp32: the norm of finite fp16 elements may be infinite in fp16.
        norms = torch._foreach_norm(shards, 2, torch.float32) if shards else []
        finite = torch.stack(list(norms)).isfinite() if norms else torch.ones(1, dtype=torch.bool, device=self._device)
        # Ranks that went on alone would wait for their peers in the next collective.
        worst = finite.all().logical_not().to(torch.int32)
        for group in (self._groups.dp_cp, self._groups.mp):
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        if worst.item():
            names = [name for name, ok in zip(gradients, finite.tolist(), strict=bool(gradients)) if not ok]
            raise RuntimeError(
                f"Expected finite gradients, got NaN or infinity in {names or 'parameters of other ranks'}. "
                "lamella_engine.find_nonfinite tells ranks and counts."
            )

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all gradients by a number, or by a tensor of one element without a host sync."""
        if isinstance(scaling_factor, torch.Tensor):
            scaling_factor = scaling_factor.reshape(())
        gradients = [local_of(p.grad) for p in self._root.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scaling_factor)

    def parameter_norms(self, *, of: Literal["gradient", "weight"] = "gradient") -> dict[str, float]:
        """The 2-norm of each parameter, or of its gradient, of all tensor-parallel parts together.

        For `lamella_engine.SpikeWatch`, which then decides alike on all tensor-parallel ranks. Experts have the names
        and the norms of this rank's.

        Args:
            of: "gradient" for `.grad`, "weight" for the parameters.

        Raises:
            ValueError: `lamella_engine.parameter_norms` refuses `of`.

        Effects: the all-reduce of `lamella_engine.parameter_norms`, and one of 8 bytes a split parameter over `tp`,
            and over `expt_tp` for experts; a host sync each.
        """
        norms = parameter_norms(self._root, of=of)
        for group, names in split_parameters(self._root).items():
            split = [name for name in names if name in norms]
            squares = torch.tensor([norms[name] for name in split], dtype=torch.float64, device=self._device).square()
            dist.all_reduce(squares, group=group)
            norms.update(zip(split, squares.sqrt().tolist(), strict=True))
        return norms

    def zero_grad_buffer(self) -> None:
        """Clear all gradients, with gradients kept for a later microbatch."""
        self._root.zero_grad()
        for weight in self._shared_embeddings:
            vars(weight).pop("main_grad", None)
        if self.ddp_config.megatron_fsdp_use_decoupled_grad:
            for parameter in self._root.parameters():
                vars(parameter).pop("decoupled_grad", None)

    def broadcast_params(self) -> None:
        """Give every replica the weights of its first rank; shards stay, cut from the first rank's weights.

        Effects: a broadcast a parameter and replicated mesh axis.
        """
        with torch.no_grad():
            for parameter in self._root.parameters():
                for group in replica_groups(parameter):
                    dist.broadcast(local_of(parameter), group=group, group_src=0)
        FSDPModule.mark_updated(self._root)

    def start_param_sync(self, *_: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Nothing, or with `force_sync` copies of weights are made anew: forward gathers each unit ahead of its use."""
        if force_sync:
            FSDPModule.mark_updated(self._root)

    def synchronize_param_gather(self) -> None:
        """Nothing: a unit's forward waits for the unit's own gather."""

    def stop_communication(self) -> None:
        """Wait for all reductions of gradients, on the compute stream."""
        FSDPModule.wait_for_gradients(self._root)

    def enable_forward_pre_hook(self) -> None:
        """Nothing: units gather in every forward."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Nothing: weights that are read outside of forward are read as shards, or in `unshard()`."""

    def free_overlap_buffers(self) -> None:
        """Nothing: memory of gathers goes back after each use."""

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """`state_dict`, with shards as DTensors."""
        state_dict: dict[str, Any] = self.state_dict(prefix=prefix, keep_vars=keep_vars)
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load DTensors placed as the parameters, or whole tensors, of which each rank keeps its part.

        Raises:
            RuntimeError: Names or shapes differ, as `nn.Module.load_state_dict` says.
        """
        parameters = dict(self._root.named_parameters())
        loaded = self.module.load_state_dict(
            {name: _as_placed(tensor, parameters.get(name)) for name, tensor in state_dict.items()}, strict=strict
        )
        FSDPModule.mark_updated(self._root)
        return loaded


class _NoSync:
    """`no_sync` of all living chunks of one configuration, for `config.no_sync_func`.

    megatron-core copies configurations, deeply, where layers change a field: a bound method would bring the sharded
    model into the copy.
    """

    def __init__(self) -> None:
        self.chunks: weakref.WeakSet[ShardedModel] = weakref.WeakSet()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in list(self.chunks):
                stack.enter_context(chunk.no_sync())
            yield

    def __deepcopy__(self, memo: object) -> _NoSync:
        return self


class _NoBuffer:
    """In the place of megatron-core's buffer of parameters and gradients, needless for units."""

    parameter_groups: Sequence[object] = ()

    def copy_main_weights_to_model_weights(self) -> None:
        """Nothing: the next gather casts main weights to the compute dtype."""


def replica_groups(parameter: torch.Tensor) -> list[dist.ProcessGroup]:
    """The process groups whose ranks hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    axes = [axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, Replicate)]
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


def _runs_layers_apart(config: Any) -> bool:
    """Whether neighbouring layers have backwards of their own, each of which would gather and reduce a joined unit.

    Overlapped, the forward of one layer runs beside the backward of its neighbour; recomputed in full, the layers of a
    chunk go forward and backward before those of the chunk below.
    """
    return bool(config.overlap_moe_expert_parallel_comm) or config.recompute_granularity == "full"


def _check_groups(ddp_config: Any, groups: Any) -> None:
    """Hold the options against the process groups; None are the groups of `parallel_state`.

    Raises:
        ValueError: They make another number of optimizer instances, or have none over which gradients are checked.
    """
    num_configured, num_grouped = ddp_config.num_distributed_optimizer_instances, num_instances(groups)
    if num_configured != num_grouped:
        raise ValueError(
            f"Expected process groups of {num_configured} instances of the distributed optimizer, "
            f"`ddp_config.num_distributed_optimizer_instances`, got groups of {num_grouped}. Call "
            f"parallel_state.initialize_model_parallel(num_distributed_optimizer_instances={num_configured}), or set "
            f"the option to {num_grouped}."
        )
    if ddp_config.check_for_nan_in_grad and groups is not None:
        check_group(groups, "mp", "whose ranks check gradients together (`ddp_config.check_for_nan_in_grad`)")


def _check_values(model: nn.Module) -> None:
    """Refuse a model without values: nothing after the wrapper would give it any."""
    if (name := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)) is not None:
        raise ValueError(
            f"Expected parameters with values, got {name!r} on the meta device. Build the model by "
            "lamella_megatron.build_sharded_model, which shards each layer as soon as it is built."
        )


def _as_placed(tensor: Any, parameter: torch.Tensor | None) -> Any:
    """A whole tensor as this rank's part; all other values as they are."""
    if not isinstance(parameter, DTensor) or isinstance(tensor, DTensor) or not isinstance(tensor, torch.Tensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
