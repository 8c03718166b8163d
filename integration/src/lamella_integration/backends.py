"""One adapter a backend: the same decoder, the same unit boundaries, the same optimizer.

Every block is a unit and the root is the last one. Main weights are fp32, compute is bf16, the optimizer is
`torch.optim.AdamW(fused=True)`. Initial weights are rounded to bf16, so that backends which are handed a bf16
model and derive their main weights from it start with the same numbers as those that keep fp32 throughout.
"""

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lamella_integration.llama import Block, Llama, LlamaConfig, next_token_loss
from lamella_integration.reference import init_weights

REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every backend is asked to train."""

    config: LlamaConfig
    device: torch.device
    reduce_dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    learning_rate: float = 1e-4

    def batch(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence of random tokens and its labels, each rank its own."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + dist.get_rank())
        sequence = torch.randint(self.config.vocab_size, (1, num_tokens + 1), generator=generator).to(self.device)
        return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model that is ready to step."""

    model: nn.Module
    optimizer_step: Callable[[], object]
    zero_grad: Callable[[], object]
    compute_context: Callable[[], AbstractContextManager[object]] = nullcontext

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One update. The loss comes back on the device: nothing here waits for it."""
        with self.compute_context():
            loss = next_token_loss(self.model(tokens), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer_step()
        self.zero_grad()
        return loss.detach()


Backend = Callable[[Workload], Training]


def lamella(workload: Workload) -> Training:
    """`lamella_engine.fully_shard`, built on the meta device."""
    from lamella_engine import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=workload.reduce_dtype)
    return _train_sharded(workload, lambda unit, mesh: fully_shard(unit, mesh=mesh, mp_policy=policy))


def lamella_step_in_backward(workload: Workload) -> Training:
    """The same, with an optimizer that steps each unit as soon as its gradients are reduced."""
    from lamella_engine import MixedPrecisionPolicy, fully_shard, step_in_backward

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=workload.reduce_dtype)
    return _train_sharded(workload, lambda unit, mesh: fully_shard(unit, mesh=mesh, mp_policy=policy), step_in_backward)


def fsdp2(workload: Workload) -> Training:
    """`torch.distributed.fsdp.fully_shard`, built on the meta device."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=workload.reduce_dtype)
    return _train_sharded(workload, lambda unit, mesh: fully_shard(unit, mesh=mesh, mp_policy=policy))


def ddp(workload: Workload) -> Training:
    """`DistributedDataParallel` over fp32 weights under bf16 autocast."""
    model = _build(workload, torch.float32)
    device_ids = [workload.device.index] if workload.device.type == "cuda" else None
    replica = nn.parallel.DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    if workload.reduce_dtype == torch.bfloat16:
        replica.register_comm_hook(None, _average_in_bf16)
    optimizer = _adamw(replica.parameters(), workload)
    return Training(
        model=replica,
        optimizer_step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        compute_context=lambda: torch.autocast(workload.device.type, torch.bfloat16),
    )


def ideal(workload: Workload) -> Training:
    """The limit: bf16 weights on every rank, no communication, AdamW over one rank's share in fp32.

    Its weights never move, because nothing carries gradients to the optimizer: only its first loss can be compared.
    """
    model = _build(workload, torch.bfloat16)
    numel = sum(parameter.numel() for parameter in model.parameters()) // dist.get_world_size()
    share = nn.Parameter(torch.zeros(numel, device=workload.device))
    share.grad = torch.zeros_like(share)
    optimizer = _adamw([share], workload)
    return Training(model=model, optimizer_step=optimizer.step, zero_grad=model.zero_grad)


def megatron_fsdp(workload: Workload) -> Training:
    """Megatron-FSDP's production engine (v1), optimizer, gradients and parameters sharded."""
    megatron = _import_megatron_fsdp("megatron_fsdp")
    policy = megatron.MixedPrecisionPolicy(
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=workload.reduce_dtype,
    )
    model = megatron.fully_shard_model(
        _build(workload, torch.bfloat16),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=3,
        mixed_precision_policy=policy,
    )
    optimizer = _adamw(model.parameters(), workload)
    _shard_optimizer_without_a_step(optimizer, megatron.fully_shard_optimizer)
    return Training(model=model, optimizer_step=optimizer.step, zero_grad=optimizer.zero_grad)


def megatron_fsdp_experimental(workload: Workload, *, use_symm_mem: bool = False) -> Training:
    """Megatron-FSDP's `experimental` engine. It reduces in the dtype of the gradients, which is bf16 here."""
    megatron = _import_megatron_fsdp("megatron_fsdp")
    experimental = _import_megatron_fsdp("megatron_fsdp.experimental")
    if workload.reduce_dtype != torch.bfloat16:
        raise NotImplementedError(
            f"Expected a `reduce_dtype` of torch.bfloat16, the only one that megatron_fsdp.experimental has, "
            f"got {workload.reduce_dtype}. Run it with `--reduce bf16`."
        )
    mesh = _mesh(workload)
    flat = [experimental.Flat()]
    placements = experimental.Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat)
    policy = megatron.MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    model = _build(workload, torch.bfloat16)
    for unit in (*model.units(), model):
        experimental.fully_shard(unit, mesh, placements, policy, use_symm_mem=use_symm_mem)
    optimizer = _adamw(model.parameters(), workload)
    experimental.fully_shard_optimizer(optimizer)
    return Training(model=model, optimizer_step=optimizer.step, zero_grad=optimizer.zero_grad)


def megatron_fsdp_experimental_symm(workload: Workload) -> Training:
    """The same over NCCL's symmetric memory."""
    return megatron_fsdp_experimental(workload, use_symm_mem=True)


BACKENDS: dict[str, Backend] = {
    backend.__name__: backend
    for backend in (
        ideal,
        lamella,
        lamella_step_in_backward,
        fsdp2,
        ddp,
        megatron_fsdp,
        megatron_fsdp_experimental,
        megatron_fsdp_experimental_symm,
    )
}


def _train_sharded(
    workload: Workload,
    shard: Callable[[nn.Module, DeviceMesh], object],
    prepare: Callable[[torch.optim.Optimizer], object] = lambda optimizer: None,
) -> Training:
    mesh = _mesh(workload)
    with torch.device("meta"):
        model = Llama(workload.config)
    for unit in (*model.units(), model):
        shard(unit, mesh)
    model.to_empty(device=workload.device)
    init_weights(model, workload.seed, round_to=torch.bfloat16)
    optimizer = _adamw(model.parameters(), workload)
    prepare(optimizer)
    return Training(model=model, optimizer_step=optimizer.step, zero_grad=optimizer.zero_grad)


def _build(workload: Workload, dtype: torch.dtype) -> Llama:
    with torch.device("meta"):
        model = Llama(workload.config).to(dtype)
    model.to_empty(device=workload.device)
    init_weights(model, workload.seed, round_to=torch.bfloat16)
    return model


def _mesh(workload: Workload) -> DeviceMesh:
    return init_device_mesh(workload.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def _average_in_bf16(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    # torch's own `bf16_compress_hook` refuses gloo.
    wire = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(wire, async_op=True).get_future()
    copied: torch.futures.Future[torch.Tensor] = reduced.then(lambda future: bucket.buffer().copy_(future.value()[0]))
    return copied


def _adamw(parameters: Iterable[nn.Parameter], workload: Workload) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=workload.learning_rate, fused=True)


def _shard_optimizer_without_a_step(
    optimizer: torch.optim.Optimizer, fully_shard_optimizer: Callable[[torch.optim.Optimizer], object]
) -> None:
    # It makes the optimizer's state by a step with zero gradients. Left alone, that decays the weights once and
    # shifts every bias correction by one step, and losses could not be compared.
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    fully_shard_optimizer(optimizer)
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate
    for state in optimizer.state.values():
        state["step"].zero_()


def _import_megatron_fsdp(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"Expected the package megatron-fsdp 0.6.1 for this backend, got no module {error.name!r}. "
            "Install it, or leave the backend out of `--backends`."
        ) from error
