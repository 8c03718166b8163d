"""One adapter a backend: the same decoder, the same unit boundaries, the same optimizer.

Main weights are fp32, compute is bf16, the optimizer is `torch.optim.AdamW(fused=True)`. Initial weights are rounded to
bf16: backends with fp32 main weights derived from a bf16 model then start with the same numbers as backends in fp32
throughout. Keyword arguments are the options of a command line, read by `variants`.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Literal, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lamella_buffers as buffers
import lamella_engine as engine
import lamella_optim as optim
import lamella_precision as precision
from lamella_integration.llama import Block, Head, Llama, LlamaConfig, next_token_loss
from lamella_integration.reference import init_weights
from lamella_optim import CapturedStep, capture_step
from lamella_precision.te import replace_quantized_weights

REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training task, equal for every backend.

    Attributes:
        units: "blocks" makes a unit of each block, and a root unit of the remaining modules. "ends" makes the embedding
            and the head units too, if the backend can: the head stays unsharded from forward to backward, since
            backward begins with the head, and backward reads no embedding, so none is gathered.
        num_microbatches: Sequences whose gradients are accumulated in a step.
        recomputes: Whether blocks compute their activations again in backward.
        compiler: The backend that blocks are compiled with, before sharding. None compiles nothing.
    """

    config: LlamaConfig
    device: torch.device
    reduce_dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    learning_rate: float = 1e-4
    units: Literal["blocks", "ends"] = "blocks"
    num_microbatches: int = 1
    recomputes: bool = False
    compiler: str | None = None

    @property
    def num_units(self) -> int:
        return self.config.num_layers + (1 if self.units == "blocks" else 2)

    def batch(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A sequence of random tokens and labels for each microbatch, different on each rank."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + dist.get_rank())
        shape = (self.num_microbatches, num_tokens + 1)
        sequences = torch.randint(self.config.vocab_size, shape, generator=generator).to(self.device)
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def model_on_meta(self, dtype: torch.dtype = torch.float32) -> Llama:
        """The decoder without weights."""
        with torch.device("meta"):
            model = Llama(self.config).to(dtype)
        for block in model.blocks:
            cast(Block, block).recomputes = self.recomputes
            if self.compiler is not None:
                block.compile(backend=self.compiler)
        return model

    def model(self, dtype: torch.dtype) -> Llama:
        """The unsharded decoder, with initial weights."""
        return self.materialize(self.model_on_meta(dtype))

    def materialize(self, model: Llama) -> Llama:
        """Give a model on the meta device, sharded or not, the initial weights."""
        model.to_empty(device=self.device)
        init_weights(model, self.seed, round_to=torch.bfloat16)
        return model

    def units_of(self, model: Llama) -> list[nn.Module]:
        """The modules sharded before the root, in execution order."""
        return model.units() if self.units == "blocks" else [model.embedding, *model.units(), model.head]

    def unit_classes(self) -> list[type[nn.Module]]:
        """The classes of the units of `units_of`."""
        return [Block] if self.units == "blocks" else [nn.Embedding, Block, Head]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model that is ready to step.

    Attributes:
        microbatch: Returns the context for a microbatch's forward and backward; the argument marks the step's last.
        learns: Whether steps change the weights.
        is_captured: Whether steps are replayed, so that only the first steps allocate memory.
    """

    model: nn.Module
    optimizer_step: Callable[[], object]
    zero_grad: Callable[[], object]
    compute_context: Callable[[], AbstractContextManager[object]] = nullcontext
    microbatch: Callable[[bool], AbstractContextManager[object]] = lambda is_last: nullcontext()
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    learns: bool = True
    is_captured: bool = False

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Take a step. Returns the mean loss on the device, without a host sync."""
        loss = self.accumulate(tokens, labels)
        self.optimizer_step()
        self.zero_grad()
        return loss

    def accumulate(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forward and backward of each row, a microbatch each. Returns the mean loss on the device."""
        num_rows = len(tokens)
        losses = []
        for i in range(num_rows):
            with self.microbatch(i == num_rows - 1):
                with self.compute_context():
                    loss = next_token_loss(self.model(tokens[i : i + 1]), labels[i : i + 1]) / num_rows
                self.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()


@dataclass(frozen=True, kw_only=True)
class Captured(Training):
    """A training in a CUDA graph of a step, captured after some eager steps and replayed: the host does nothing.

    Attributes:
        optimizer: The optimizer of `optimizer_step`; `capturable`.
    """

    optimizer: torch.optim.Optimizer
    is_captured: bool = True

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._captured(tokens, labels)

    @cached_property
    def _captured(self) -> CapturedStep[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return capture_step(super().step, self.optimizer)


Backend = Callable[[Workload], Training]


def lamella(
    workload: Workload,
    *,
    keep: int = 0,
    prefetch: int | None = None,
    allocator: str | None = None,
    placements: Sequence[str] = (),
    mesh: Sequence[int] = (),
    reshard: bool | int | None = None,
    reductions: int = 1,
    separate: bool = False,
    overlap_optimizer: str = "false",
    graph: bool = False,
    float8: str | None = None,
) -> Training:
    """`lamella_engine.fully_shard`, built on the meta device."""
    allocators = {
        "caching": buffers.CachingAllocator,
        "mempool": buffers.MemPoolAllocator,
        "pool": buffers.PoolAllocator,
    }
    optim.install()
    model = workload.model_on_meta()
    shard = partial(
        engine.fully_shard,
        mesh=_mesh(workload, mesh),
        mp_policy=engine.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=workload.reduce_dtype, recipe=_in_float8(model, float8, workload)
        ),
        options=engine.ShardingOptions(
            placements=tuple(getattr(engine, name) for name in placements) or None,
            allocator=None if allocator is None else allocators[allocator](),
            keep_budget=keep,
            prefetch_budget=prefetch,
        ),
    )
    prepare: Callable[[torch.optim.Optimizer], object] | None = None
    if overlap_optimizer != "false":
        prepare = partial(optim.overlap_optimizer, late_gradients=overlap_optimizer == "late")
    training = _train_sharded(workload, model, shard, reshard, prepare, graph=graph, float8=float8)
    _set_reductions(cast(engine.FSDPModule, training.model), reductions, separate)
    return training


def fsdp2(
    workload: Workload,
    *,
    mesh: Sequence[int] = (),
    reshard: bool | int | None = None,
    reductions: int = 1,
    separate: bool = False,
    graph: bool = False,
    float8: str | None = None,
) -> Training:
    """`torch.distributed.fsdp.fully_shard`, built on the meta device; in float8 torchao's layers, or TE's in bf16."""
    if float8 in RECIPES:
        raise NotImplementedError(f"Expected {TORCHAO} or a recipe of {TE} as float8 of fsdp2, got {float8!r}.")
    model = workload.model_on_meta()
    _in_float8(model, float8, workload, has_quantized_weights=False)
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=workload.reduce_dtype)
    shard = partial(torch_fsdp.fully_shard, mesh=_mesh(workload, mesh), mp_policy=policy)
    training = _train_sharded(workload, model, shard, reshard, graph=graph, float8=float8)
    _set_reductions(cast(torch_fsdp.FSDPModule, training.model), reductions, separate)
    return training


def ddp(workload: Workload) -> Training:
    """`DistributedDataParallel` over fp32 weights under bf16 autocast."""
    model = workload.model(torch.float32)
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
        microbatch=lambda is_last: nullcontext() if is_last else replica.no_sync(),
    )


def ideal(workload: Workload, *, graph: bool = False, float8: str | None = None) -> Training:
    """The limit: bf16 weights on every rank, no communication, AdamW over one rank's share in fp32.

    The weights never move, because nothing carries gradients to the optimizer: only the first loss is comparable. In
    float8 the bf16 weights are quantised at each use; Transformer Engine's weights are quantised once.
    """
    model = workload.model(torch.bfloat16)
    _in_float8(model, float8, workload, gathers=False)
    numel = sum(parameter.numel() for parameter in model.parameters()) // dist.get_world_size()
    share = nn.Parameter(torch.zeros(numel, device=workload.device))
    share.grad = torch.zeros_like(share)
    optimizer = _adamw([share], workload, capturable=graph)
    kind = partial(Captured, optimizer=optimizer) if graph else Training
    return kind(
        model=model,
        optimizer_step=optimizer.step,
        zero_grad=model.zero_grad,
        compute_context=_quantising(float8),
        learns=False,
    )


def megatron_fsdp(workload: Workload, *, stage: int = 3, mesh: Sequence[int] = ()) -> Training:
    """Megatron-FSDP's production engine (v1), by default with optimizer, gradients and parameters sharded."""
    megatron = _import("megatron_fsdp", MEGATRON_FSDP)
    policy = megatron.MixedPrecisionPolicy(
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=workload.reduce_dtype,
    )
    model = megatron.fully_shard_model(
        workload.model(torch.bfloat16),
        fsdp_unit_modules=workload.unit_classes(),
        zero_dp_strategy=stage,
        mixed_precision_policy=policy,
        sync_model_each_microbatch=workload.num_microbatches == 1,
        **(_megatron_hybrid(workload, mesh) if mesh else {}),
    )
    optimizer = _adamw(model.parameters(), workload)
    _shard_optimizer_without_a_step(optimizer, megatron.fully_shard_optimizer)
    return Training(
        model=model,
        optimizer_step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        microbatch=lambda is_last: nullcontext() if is_last else model.no_sync(),
    )


def megatron_fsdp_experimental(workload: Workload, *, mesh: Sequence[int] = (), symmetric: bool = False) -> Training:
    """Megatron-FSDP's `experimental` engine. Gradients are reduced in their dtype, bf16.

    The engine reduces gradients after every microbatch, without an alternative.
    """
    megatron = _import("megatron_fsdp", MEGATRON_FSDP)
    experimental = _import("megatron_fsdp.experimental", MEGATRON_FSDP)
    if workload.reduce_dtype != torch.bfloat16:
        raise NotImplementedError(
            f"Expected a `reduce_dtype` of torch.bfloat16, the only one that megatron_fsdp.experimental has, "
            f"got {workload.reduce_dtype}. Run it with `--reduce bf16`."
        )
    device_mesh = _mesh(workload, mesh)
    outer = device_mesh.ndim - 1  # Placements along the outer axis, if any, come first.
    placements = experimental.Placements(
        dp_axes=list(range(device_mesh.ndim)),
        parameter=[experimental.Replicate()] * outer + [experimental.Flat()],
        gradient=[experimental.Partial(dist.ReduceOp.AVG)] * outer + [experimental.Flat()],
        optimizer=[experimental.Replicate()] * outer + [experimental.Flat()],
    )
    policy = megatron.MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    model = workload.model(torch.bfloat16)
    for unit in (*workload.units_of(model), model):
        experimental.fully_shard(unit, device_mesh, placements, policy, use_symm_mem=symmetric)
    optimizer = _adamw(model.parameters(), workload)
    experimental.fully_shard_optimizer(optimizer)
    return Training(
        model=model,
        optimizer_step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        microbatch=lambda is_last: experimental.microbatch(model, is_last=is_last),
    )


def deepspeed_zero3(workload: Workload) -> Training:
    """DeepSpeed's ZeRO-3. A block is fetched in one piece, and as much prefetched; other modules are fetched singly."""
    deepspeed = _import("deepspeed", DEEPSPEED)
    model = workload.model(torch.bfloat16)
    deepspeed.utils.set_z3_leaf_modules(model, [Block])
    block_numel = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    linear = F.linear
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_adamw(model.parameters(), workload),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "communication_data_type": "bf16" if workload.reduce_dtype == torch.bfloat16 else "fp32",
            "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": block_numel},
        },
    )
    its_linear, F.linear = F.linear, linear  # DeepSpeed replaces torch's `linear` for all models.

    @contextmanager
    def microbatch(is_last: bool) -> Iterator[None]:
        engine.set_gradient_accumulation_boundary(is_last)
        with patch.object(F, "linear", its_linear):
            yield

    return Training(
        model=engine,
        optimizer_step=engine.step,
        zero_grad=engine.zero_grad,
        microbatch=microbatch,
        backward=engine.backward,
    )


BACKENDS: dict[str, Backend] = {
    backend.__name__: backend
    for backend in (ideal, lamella, fsdp2, ddp, megatron_fsdp, megatron_fsdp_experimental, deepspeed_zero3)
}

MEGATRON_FSDP = "megatron-fsdp 0.6.1"
DEEPSPEED = "deepspeed 0.19.8"
TORCHAO = "torchao"
RECIPES = {
    "tensor": precision.Float8Recipe(),
    "delayed": precision.Float8Recipe(num_past_amaxes=16),
    "row": precision.Float8Recipe((1, None)),
    "block": precision.Float8Recipe((128, 128)),
}
TE = "Transformer Engine"
_TE_RECIPES = {"te": "Float8CurrentScaling", "te_delayed": "DelayedScaling", "te_squares": "Float8BlockScaling"}
FLOAT8 = (*RECIPES, TORCHAO, *_TE_RECIPES)


def _train_sharded(
    workload: Workload,
    model: Llama,
    shard: Callable[..., object],
    reshard: bool | int | None,
    prepare: Callable[[torch.optim.Optimizer], object] | None = None,
    *,
    graph: bool = False,
    float8: str | None = None,
) -> Training:
    for unit in workload.units_of(model):
        shard(unit, reshard_after_forward=False if unit is model.head else reshard)
    shard(model)
    if workload.units == "ends":
        cast(torch_fsdp.FSDPModule, model.embedding).set_unshard_in_backward(False)
    workload.materialize(model)
    root = cast(torch_fsdp.FSDPModule, model)
    optimizer = _adamw(model.parameters(), workload, capturable=graph)
    if prepare is not None:
        prepare(optimizer)

    def microbatch(is_last: bool) -> AbstractContextManager[None]:
        root.set_requires_gradient_sync(is_last)
        root.set_is_last_backward(is_last)
        return nullcontext()

    step: Callable[[], object] = optimizer.step
    if float8 == TORCHAO:

        def step() -> None:  # all scales in one reduction, as torchao's users call it
            optimizer.step()
            _import("torchao.float8", TORCHAO).precompute_float8_dynamic_scale_for_fsdp(model)

    kind = partial(Captured, optimizer=optimizer) if graph else Training
    return kind(
        model=model,
        optimizer_step=step,
        zero_grad=optimizer.zero_grad,
        compute_context=_quantising(float8),
        microbatch=microbatch,
    )


def _in_float8(
    model: Llama,
    float8: str | None,
    workload: Workload,
    *,
    gathers: bool = True,
    has_quantized_weights: bool = True,
) -> Callable[[nn.Parameter], precision.Recipe | None] | None:
    """Let the blocks' linear layers multiply in float8, and return the recipes of lamella's gathers.

    Args:
        model: Before sharding. Transformer Engine's layers come with memory, also on the meta device.
        float8: A name of `FLOAT8`; None changes nothing.
        workload: The workload of the model.
        gathers: Whether weights will be gathered: torchao's weights then travel in float8.
        has_quantized_weights: Whether Transformer Engine's weights are quantised themselves.
    """
    if float8 is None:
        return None
    if float8 == TORCHAO:
        torchao = _import("torchao.float8", TORCHAO)
        config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=gathers)
        torchao.convert_to_float8_training(model.blocks, config=config)
        return None
    if float8 in RECIPES:
        if names := precision.float8_matmul_layers(model.blocks, RECIPES[float8]):  # other layers only gather in float8
            precision.use_float8_matmul(model.blocks, RECIPES[float8], names=names)
        return precision.matrices_of(model.blocks, RECIPES[float8])
    te = _import("transformer_engine.pytorch", TE)
    with te.quantized_model_init(enabled=has_quantized_weights, recipe=_te_recipe(float8)):
        for block in model.blocks:
            for parent in [*block.modules()]:
                for name, layer in parent.named_children():
                    if type(layer) is nn.Linear:
                        options = {"params_dtype": layer.weight.dtype, "device": workload.device}
                        quantised = te.Linear(layer.in_features, layer.out_features, bias=False, **options)
                        if not layer.weight.is_meta:
                            quantised.weight.data.copy_(layer.weight)
                        setattr(parent, name, quantised)
    return replace_quantized_weights(model) if gathers and has_quantized_weights else None


def _quantising(float8: str | None) -> Callable[[], AbstractContextManager[object]]:
    """The context of a forward: Transformer Engine's autocast for Transformer Engine's layers."""
    if float8 not in _TE_RECIPES:
        return nullcontext
    recipe = _te_recipe(float8)
    return lambda: _import("transformer_engine.pytorch", TE).autocast(enabled=True, recipe=recipe)


def _te_recipe(float8: str) -> object:
    return getattr(_import("transformer_engine.common.recipe", TE), _TE_RECIPES[float8])()


def _set_reductions(root: torch_fsdp.FSDPModule, in_flight: int, separate: bool) -> None:
    if in_flight != 1:  # Not every torch has the method.
        root.set_reduce_scatter_max_input_buffers(in_flight)
    if separate:
        root.set_separate_reduce_scatter_group()


def _megatron_hybrid(workload: Workload, shape: Sequence[int]) -> dict[str, object]:
    names = ("outer", "shard", "tensor")  # Megatron-FSDP requires the tensor axis, even of size 1.
    return {
        "device_mesh": init_device_mesh(workload.device.type, (*shape, 1), mesh_dim_names=names),
        "dp_outer_dim": "outer",
        "dp_shard_dim": "shard",
        "tp_dim": "tensor",
        "hybrid_fsdp_group": dist.group.WORLD,
    }


def _mesh(workload: Workload, shape: Sequence[int]) -> DeviceMesh:
    """One axis over all ranks, or replicas by shards."""
    if not shape:
        return init_device_mesh(workload.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    return init_device_mesh(workload.device.type, tuple(shape), mesh_dim_names=("replicate", "shard"))


def _average_in_bf16(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    # torch's own `bf16_compress_hook` refuses gloo.
    wire = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(wire, async_op=True).get_future()
    copied: torch.futures.Future[torch.Tensor] = reduced.then(lambda future: bucket.buffer().copy_(future.value()[0]))
    return copied


def _adamw(parameters: Iterable[nn.Parameter], workload: Workload, *, capturable: bool = False) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=workload.learning_rate, fused=True, capturable=capturable)


def _shard_optimizer_without_a_step(
    optimizer: torch.optim.Optimizer, fully_shard_optimizer: Callable[[torch.optim.Optimizer], object]
) -> None:
    # Megatron-FSDP makes the optimizer's state by a step with zero gradients. Unchanged, the step would decay the
    # weights once and shift every bias correction by one step, and losses could not be compared.
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    fully_shard_optimizer(optimizer)
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate
    for state in optimizer.state.values():
        state["step"].zero_()


def _import(name: str, distribution: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"Expected the package {distribution} for this backend, got no module {error.name!r}. "
            "Install it, or leave the backend out of `--backends`."
        ) from error
