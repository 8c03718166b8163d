"""megatron-core's optimizer interface over a `torch.optim` optimizer of sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS, MegatronOptimizer
from torch.optim import SGD, Adam, AdamW, Optimizer

import lamella_optim
from lamella_engine.extending import local_of
from lamella_megatron._driver.muon import muon_maker
from lamella_megatron._driver.norms import ModelRanks
from lamella_megatron._driver.precision_aware import bytes_at_rest, check_gradient_dtypes, fused_adam
from lamella_megatron._driver.wrapper import ShardedModel
from lamella_megatron._model.sharded_model import refuse_sharded_state_dict

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]

_REFUSED = {
    "optimizer_cpu_offload": "Shard with offload_policy=CPUOffloadPolicy() instead.",
    "overlap_param_gather_with_optimizer_step": "Gathers overlap with forward; see lamella_optim.overlap_optimizer.",
    "reuse_grad_buf_for_mxfp8_param_ag": "Parameters are gathered in the compute dtype.",
}


def sharded_optimizer(
    config: Any,
    model_chunks: Sequence[ShardedModel],
    *,
    make: MakeOptimizer | None = None,
    config_overrides: Any = None,
    pg_collection: Any = None,
) -> ShardedOptimizer:
    """An optimizer over the shards of megatron-core models, for megatron-core's training loop.

        optimizer = sharded_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True), [model])
        success, norm, num_zeros = optimizer.step()

    Parameter groups are megatron-core's: by weight decay, learning rate and expert parallelism, the same groups in the
    same order on all ranks.

    Args:
        config: megatron-core's OptimizerConfig. `optimizer` is "adam" or "sgd": torch's; or "muon": torch's for the
            matrices of layers, evenly sharded or whole on a rank (`keep_matrices`), and AdamW for the rest. With
            `use_precision_aware_optimizer` Adam is Transformer Engine's, with gradients in `main_grads_dtype` and
            moments in `exp_avg_dtype` and `exp_avg_sq_dtype`. Over main weights in bf16
            (`ddp_config.megatron_fsdp_main_params_dtype`) the optimizer keeps main weights in `main_params_dtype`, or
            with `store_param_remainders` the missing 16 bits.
        model_chunks: The training loop's list of models.
        make: Builds another optimizer from the parameter groups: one whose kernels take DTensors, or that
            `lamella_optim.step_on_local_shards` gave plain shards, such as Transformer Engine's FusedAdam.
        config_overrides: megatron-core's overrides of options by parameter, as `get_megatron_optimizer` takes them.
        pg_collection: The groups of the model; None takes those that the chunks were wrapped with.

    Raises:
        TypeError: A chunk is no ShardedModel.
        ValueError: A group of the collection is missing; `config` asks for something that shards do not have, or for
            an optimizer that `make` must build; or gradients are in another dtype than the optimizer reads.
        ImportError: `use_precision_aware_optimizer` without Transformer Engine.

    Effects: collective on the default process group: parameter groups are agreed on, through the host. Calls
        `lamella_optim.install`.

    Source: `get_megatron_optimizer` of megatron-core 0.19.2.
    """
    for chunk in model_chunks:
        if not isinstance(chunk, ShardedModel):
            raise TypeError(f"Expected model chunks to be ShardedModels, got {type(chunk).__name__}.")
    for name, way_out in _REFUSED.items():
        if getattr(config, name, False):
            raise ValueError(f"Expected `config.{name}` to be False, got True. {way_out}")
    lamella_optim.install()
    groups = pg_collection or model_chunks[0].pg_collection
    named = [pair for chunk in model_chunks for pair in chunk.named_parameters()]
    if make is None:
        check_gradient_dtypes(config, named)
        if config.use_precision_aware_optimizer:
            make = fused_adam(config, (p for _, p in named))
        elif config.optimizer == "muon":
            tp = getattr(groups, "tp", None) or parallel_state.get_tensor_model_parallel_group()
            make = muon_maker(config, named, tp.size(), model_chunks[0].config)
        else:
            make = _maker(config)
    overrides = get_standard_config_overrides(config) if config_overrides is None else config_overrides
    param_groups = _get_param_groups(list(model_chunks), config, overrides)
    return ShardedOptimizer(make(param_groups), config, model_chunks, pg_collection=groups)


class ShardedOptimizer(MegatronOptimizer):  # type: ignore[misc]  # megatron-core has no types
    """`MegatronOptimizer` over sharded parameters; `sharded_optimizer` makes one.

    The optimizer holds the main weights, which are the model's own parameters: nothing is copied between model and main
    weights, in either direction.

    Args:
        optimizer: The optimizer of the chunks' parameters.
        config: megatron-core's OptimizerConfig.
        model_chunks: Whose gradients are cleared, by `zero_grad`.
        pg_collection: With `intra_dist_opt`, `tp` and `expt_tp`, and `inter_dist_opt` for several instances; None takes
            the groups of `parallel_state`.
    """

    def __init__(
        self, optimizer: Optimizer, config: Any, model_chunks: Sequence[ShardedModel], *, pg_collection: Any = None
    ) -> None:
        super().__init__(optimizer, config)
        self.is_stub_optimizer = False
        self.model_chunks = list(model_chunks)
        self.grad_scaler = _grad_scaler(config)
        self._ranks = ModelRanks.of(pg_collection)
        # Under these names megatron-core's base class asks for groups.
        self.tp_group, self.expert_tp_group = self._ranks.tp, self._ranks.expert_tp
        self.grad_stats_parallel_group = self._ranks.instance
        self._shares = {parameter: self._ranks.share(parameter) for parameter in self.get_parameters()}
        self._device = next((local_of(p).device for p in self._shares), torch.device("cpu"))

    # -- gradients -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Divide gradients by the loss scale.

        Returns:
            Whether an element on any rank is not finite, always False without a loss scale: the step is skipped then.

        Effects: with a loss scale an all-reduce of one number over the model's ranks, and a host sync.
        """
        if self.grad_scaler is None:
            return False
        non_finite = torch.zeros((), dtype=torch.float32, device=self._device)
        if gradients := [gradient for gradient in _gradients(self._shares) if gradient.numel() > 0]:
            # Not by `torch._amp_foreach_non_finite_check_and_unscale_`, which CUDA lacks for gradients in bf16.
            largest = torch.stack(torch._foreach_norm(gradients, math.inf, torch.float32))
            non_finite = (~largest.isfinite()).any().to(torch.float32)
            torch._foreach_mul_(gradients, self.grad_scaler.inv_scale.reshape(()).to(self._device))
        self._ranks.all_reduce(non_finite, dist.ReduceOp.MAX)
        has_inf = bool(non_finite.item())
        self.grad_scaler.update(has_inf)
        return has_inf

    @torch.no_grad()
    def get_grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients but those with a norm of their own, on the device.

        Effects: an all-reduce of one number a norm, over the model's ranks; no host sync.
        """
        return self._norms()[None]

    def clip_grad_norm(self, clip_grad: float) -> torch.Tensor:
        """Scale gradients down to a norm of at most `clip_grad`; parameters of `grad_norm_group` have their own norm.

        Returns:
            The norm before, on the device.

        Effects: an all-reduce of one number a norm, over the model's ranks; no host sync.
        """
        norms = self._norms()
        self.grad_norms_by_group = {name: norm for name, norm in norms.items() if name is not None}
        for name, norm in norms.items():
            gradients = _gradients(p for p in self._shares if _norm_group(p) == name)
            if gradients and clip_grad > 0:
                torch._foreach_mul_(gradients, (clip_grad / (norm + 1e-6)).clamp(max=1.0).to(torch.float32))
        return norms[None]

    def _norms(self) -> dict[str | None, torch.Tensor]:
        """The norm of each group of parameters with clipping of its own; None is all others' group."""
        names: list[str | None] = [None, *SEPARATE_GRAD_NORM_GROUPS]
        squares = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        for row, name in enumerate(names):
            parameters = [p for p in self._shares if p.grad is not None and _norm_group(p) == name]
            if parameters:
                # Gradients may be in bf16 (`main_grads_dtype`), in which the norm would be rounded too.
                norms = torch._foreach_norm(_gradients(parameters), 2, torch.float32)
                # Scalars travel as arguments of the kernel: a tensor of them would be a copy from pageable memory.
                torch._foreach_mul_(norms, [math.sqrt(self._shares[p]) for p in parameters])
                squares[row] = torch.stack(norms).to(torch.float64).square().sum()
        self._ranks.all_reduce(squares)
        return dict(zip(names, squares.sqrt(), strict=True))

    @torch.no_grad()
    def count_zeros(self) -> float:
        """The number of zeros in all gradients.

        Effects: an all-reduce of one number over the model's ranks, and a host sync.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter, share in self._shares.items():
            if parameter.grad is not None and share:
                gradient = local_of(parameter.grad)
                total += share * (gradient.numel() - torch.count_nonzero(gradient))
        self._ranks.all_reduce(total)
        return float(round(total.item()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model chunks."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    # -- steps ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step; the next forward gathers the new weights.

        Returns:
            True.
        """
        self.optimizer.step()
        return True

    @torch.no_grad()
    def step(self) -> tuple[bool, torch.Tensor | None, float | None]:
        """Clip and step.

        Returns:
            Whether the weights changed; the norm of the gradients before clipping, 0 without clipping; the number of
            zeros, if `config.log_num_zeros_in_grad`, else 0. (False, None, None) if a scaled gradient is not finite.

        Effects: all-reduces of one number: with a loss scale (and a host sync), for each norm, and with
            `log_num_zeros_in_grad` (and a host sync).
        """
        self.grad_norms_by_group = {}
        if self.prepare_grads():
            return False, None, None
        clip = self.config.clip_grad
        norm = self.clip_grad_norm(clip) if clip > 0 else torch.zeros((), device=self._device)
        num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else 0.0
        return self.step_with_ready_grads(), norm, num_zeros

    def get_loss_scale(self) -> torch.Tensor:
        """The factor of the loss, 1 without a scaler: a tensor of one element on the device."""
        if self.grad_scaler is None:
            return torch.ones(1, device=self._device)
        scale: torch.Tensor = self.grad_scaler.scale
        return scale

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Copies of weights are made anew: the optimizer's main weights are the model's own."""
        for chunk in self.model_chunks:
            chunk.start_param_sync(force_sync=True)

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Nothing: main weights are the model's own."""

    # -- state ---------------------------------------------------------------------------------------------------------

    def bytes_at_rest(self) -> dict[str, int]:
        """Bytes of this rank's weights, gradients and optimizer state before a step, as their dtypes say.

        Returns:
            Under "weights", "gradients" and "state": numbers of elements times sizes. Neither single numbers nor the
            alignment of shards are in it.

        Raises:
            NotImplementedError: The state of an optimizer of `make` is unknown.
        """
        return bytes_at_rest(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with shards as DTensors, and the scaler's."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, on as many ranks as saved it.

        Without "optimizer" in it the scaler's state alone is loaded: `load_checkpoint` fills the optimizer itself.
        """
        if "optimizer" in state_dict:
            self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    sharded_state_dict = staticmethod(refuse_sharded_state_dict)


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local_of(p.grad) for p in parameters if p.grad is not None]


def _norm_group(parameter: torch.Tensor) -> str | None:
    """The name under which a parameter is clipped apart, or None."""
    name = getattr(parameter, "grad_norm_group", None)
    return name if name in SEPARATE_GRAD_NORM_GROUPS else None


def _maker(config: Any) -> MakeOptimizer:
    """The optimizer named by `config.optimizer`.

    Raises:
        ValueError: Neither Adam nor SGD.
    """
    # torch steps DTensors one by one by default.
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":  # not fused, which refuses gradients of another dtype
        return lambda groups: SGD(groups, momentum=config.sgd_momentum, foreach=True, **options)
    if config.optimizer != "adam":
        raise ValueError(
            f"Expected `config.optimizer` to be 'adam', 'muon' or 'sgd', got {config.optimizer!r}. Pass `make`, a "
            "function of the parameter groups that returns an optimizer over shards."
        )
    options |= {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, "fused": True}
    return lambda groups: (AdamW if config.decoupled_weight_decay else Adam)(groups, **options)


def _grad_scaler(config: Any) -> Any:
    """megatron-core's choice: a constant scale if given, for fp16 a dynamic scale, else none."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
