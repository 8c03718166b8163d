"""megatron-core on CPU ranks: GPU calls answered by the CPU, and models small enough for a test."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import queue
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB_SIZE, LENGTH, NUM_EXPERTS = 64, 16, 4

# Fields of `TransformerConfig` for models with experts, with Mamba layers, with gated delta nets, and with attention in
# a latent space (of `MLATransformerConfig`).
EXPERTS = {
    "num_moe_experts": NUM_EXPERTS,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
    "ffn_hidden_size": 24,
    "moe_grouped_gemm": False,
}
MAMBA = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": 8}
GATED_DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 1,  # of GPTModel; a pattern tells of its own
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "activation_func": F.silu,
    "deterministic_mode": True,  # torch's operators in place of flash-linear-attention's kernels
}
MULTI_LATENT_ATTENTION = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}


class _NoStream:
    """A stream, or an event, of a device that does everything in order."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self

    def query(self) -> bool:
        return True


class _NoFloat8:
    """In the place of Transformer Engine's state of float8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Import megatron-core, and run its models on CPU ranks while the context lasts: forks inherit it.

    Tensors asked for on CUDA are made on the CPU, and streams do nothing. Random states of megatron-core are the CPU's;
    one without a seed is an error, as on a GPU. Collectives take parts of different sizes, and sizes as tensors, as
    NCCL's do. Attention takes keys and values of different widths, as Transformer Engine's does. Norms are torch's,
    with sequence parallelism's mark. Mamba layers run as in `mamba_by_torch`, gated delta nets as in
    `gated_delta_nets_by_torch`. Saves start no process, and ask no psutil. Functions that megatron-core compiles
    run as they are written: each rank would compile them anew. Ranks connect to the ranks of a group when they first
    send to them: few of the 60 groups of `parallel_state` are ever used.
    """
    with warnings.catch_warnings():
        # Warnings about each fused library that is missing, and about deprecated names of torch.
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        files = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
        hybrid = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
        norms = importlib.import_module("megatron.core.transformer.torch_norm")
        attention = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
        random = importlib.import_module("megatron.core.tensor_parallel.random")
    # Makes the list of functions that `torch.device("meta")` diverts, of torch's own functions: `put` comes later.
    importlib.import_module("torch.utils._device")._device_constructors()
    with torch.compiler.set_stance("force_eager"), contextlib.ExitStack() as stack:

        def put(owner: object, **attributes: object) -> None:
            for name, value in attributes.items():
                stack.enter_context(patch.object(owner, name, value))

        put(torch.cuda, Stream=_NoStream, Event=_NoStream, synchronize=lambda *_: None)
        put(torch.cuda, current_stream=lambda *_: _NoStream(), stream=lambda _: contextlib.nullcontext())
        put(torch.cuda, current_device=lambda: torch.device("cpu"))
        put(torch.Tensor, cuda=lambda self, *_, **__: self, record_stream=lambda *_: None)
        put(nn.Module, cuda=lambda self, *_, **__: self)
        for name in ("zeros", "ones", "empty", "full", "tensor", "arange"):
            put(torch, **{name: _on_cpu(getattr(torch, name))})
        put(dist, all_to_all_single=_with_lists(dist.all_to_all_single))
        put(dist, all_gather=_gather_any_sizes, reduce_scatter=_reduce_scatter_any_sizes)
        put(random.CudaRNGStatesTracker, add=_add_state, fork=_forked)
        put(random, _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state())
        put(random, _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state))
        # Recomputed norms ask Transformer Engine for them, installed or not.
        unscaled = {
            name: lambda **_: contextlib.nullcontext() for name in ("activation_recompute_forward", "fp8_autocast")
        }
        for name, value in {"FP8GlobalStateManager": _NoFloat8, **unscaled}.items():
            stack.enter_context(patch.object(random, name, value, create=True))
        put(attention, __init__=_with_channels(attention.__init__))
        put(norms.WrappedTorchNorm, __new__=_torchs_norm)
        put(hybrid, TENorm=norms.WrappedTorchNorm)
        # megatron-core's own queue is in a server process, started by each rank that saves, and left behind by a rank
        # that ends without the interpreter's shutdown.
        put(files, get_write_results_queue=_results_of_threads, _process_memory=lambda: 0)
        stack.enter_context(mamba_by_torch())
        stack.enter_context(gated_delta_nets_by_torch())
        stack.enter_context(patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "1"}))
        yield


@contextlib.contextmanager
def mamba_by_torch() -> Iterator[None]:
    """Let megatron-core's Mamba layers scan by torch's operators, step by step, while the context lasts."""
    mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
    with patch.multiple(
        mixer,
        HAVE_MAMBA_SSM=True,
        ExtendedRMSNorm=_GroupedRMSNorm,
        mamba_split_conv1d_scan_combined=scan_in_steps,
    ):
        yield


@contextlib.contextmanager
def gated_delta_nets_by_torch() -> Iterator[None]:
    """Let gated delta nets of `deterministic_mode` do without flash-linear-attention while the context lasts.

    The mode takes torch's operators for all but the norm of queries and keys, whose torch form is here. Chunks of 64
    steps, the default, cost four times the host time of a whole tiny sequence.
    """
    nets = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    rule = functools.partial(nets.torch_chunk_gated_delta_rule, chunk_size=LENGTH)
    with (
        patch.multiple(nets, HAVE_FLA=True, l2norm=_l2norm),
        patch("megatron.core.ssm.gated_delta_net.gdn.torch_chunk_gated_delta_rule", rule),
    ):
        yield


def _l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """flash-linear-attention's norm over the last dim, as transformers has it without the kernel.

    `F.normalize` has no such eps: heads of small queries and keys would come out longer, by 41 % at a length of 1e-3.

    Source: `l2norm` of transformers, `modeling_qwen3_next.py`.
    """
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


@functools.cache
def _results_of_threads() -> queue.Queue[object]:
    """The queue of a rank's writers, which are threads."""
    return queue.Queue()


def _add_state(tracker: Any, name: str, seed: int) -> None:
    tracker.states_[name] = torch.Generator().manual_seed(seed).get_state()


@contextlib.contextmanager
def _forked(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    if name not in tracker.states_:
        raise Exception(f"cuda rng state {name} is not added")
    outside = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return make_on_cpu


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    def exchanged(
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        sizes = [
            split_sizes.tolist() if hasattr(split_sizes, "tolist") else split_sizes
            for split_sizes in (output_split_sizes, input_split_sizes)
        ]
        return exchange(output, tensor.contiguous(), *sizes, **kwargs)

    return exchanged


def _gather_any_sizes(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
    """`all_gather` of parts whose sizes may differ: a broadcast each."""
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(tensor)
        dist.broadcast(output, group=group, group_src=rank)


def _reduce_scatter_any_sizes(output: torch.Tensor, tensors: list[torch.Tensor], group: Any = None) -> None:
    """`reduce_scatter` of parts whose sizes may differ: an all-reduce each."""
    for rank, tensor in enumerate(tensors):
        dist.all_reduce(total := tensor.clone(), group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)


def _with_channels(construct: Callable[..., None]) -> Callable[..., None]:
    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        construct(self, *args, **kwargs)
        if v_channels is not None:  # the width of the output follows from the values'
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return init


def _torchs_norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: object) -> nn.Module:
    """As `WrappedTorchNorm`, with sequence parallelism's mark, as megatron-core's fused norms have the mark."""
    norm = (nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm)(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class _GroupedRMSNorm(nn.Module):
    """mamba-ssm's norm of groups of channels, without the gate."""

    def __init__(self, num_channels: int, *, eps: float, group_size: int, **_: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.view(*x.shape[:-1], -1, self.group_size)
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Split over tensor-parallel ranks, as `ExtendedRMSNorm` says."""
        make_sharded_tensors = importlib.import_module(
            "megatron.core.transformer.utils"
        ).make_sharded_tensors_for_checkpoint
        groups = {"tp_group": importlib.import_module("megatron.core.parallel_state").get_tensor_model_parallel_group()}
        groups["dp_cp_group"] = metadata["dp_cp_group"]
        return make_sharded_tensors(self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets, **groups)


def scan_in_steps(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  # the kernel's name
    *,
    D: torch.Tensor,  # noqa: N803
    headdim: int,
    ngroups: int,
    **_: object,
) -> torch.Tensor:
    """The result of mamba-ssm's fused kernel, step by step: a causal convolution, a state-space model and a gate.

    Args:
        zxbcdt: (batch, length, heads * headdim + len(weight) + heads).
        weight: (channels, width) of the convolution; channels are heads * headdim, and B and C of each group.
        bias: (channels,).
        dt_bias: (heads,).
        A: (heads,).
        D: (heads,).
        headdim: Channels of one head.
        ngroups: Number of groups of heads with B and C in common.

    Returns:
        (batch, length, heads * headdim), in the dtype of zxbcdt.
    """
    num_heads, inner = len(A), len(A) * headdim
    gate, channels, dt = zxbcdt.split([inner, len(weight), num_heads], dim=-1)  # type: ignore[no-untyped-call]
    padded = F.pad(channels.transpose(1, 2), (weight.shape[1] - 1, 0))
    mixed = F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2)
    lengths = mixed.shape[:2]
    x = mixed[..., :inner].reshape(*lengths, num_heads, headdim)
    b_and_c = mixed[..., inner:].reshape(*lengths, 2, ngroups, -1).repeat_interleave(num_heads // ngroups, dim=3)
    dt = F.softplus(dt + dt_bias)
    state, outputs = zxbcdt.new_zeros(()), []
    for x_t, bc_t, dt_t in zip(x.unbind(1), b_and_c.unbind(1), dt.unbind(1), strict=True):
        b_t, c_t = bc_t.unbind(1)
        added = (dt_t[..., None] * x_t)[..., None] * b_t[:, :, None]
        state = state * (dt_t * A).exp()[..., None, None] + added
        outputs.append((state * c_t[:, :, None]).sum(-1) + D[:, None] * x_t)
    return (torch.stack(outputs, dim=1).flatten(2) * F.silu(gate)).to(zxbcdt.dtype)


def seed_random_states(seed: int) -> None:
    """Seed torch's random state and megatron-core's tracker, whose states a model's layers draw from by name.

    The groups of megatron-core have been made. A second call starts all states anew.
    """
    torch.manual_seed(seed)
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(seed)


def tiny_config(**changes: Any) -> Any:
    """A `TransformerConfig` of two small layers without dropout; keywords change or add fields.

    With `multi_latent_attention` a `MLATransformerConfig`.
    """
    configs = importlib.import_module("megatron.core.transformer.transformer_config")
    is_latent = changes.get("multi_latent_attention", False)
    config = configs.MLATransformerConfig if is_latent else configs.TransformerConfig
    fields = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
    }
    return config(**{**fields, **changes})


def scale_auxiliary_losses(num_microbatches: int, device: str = "cpu") -> None:
    """Scale losses of routers and predictions as megatron-core's driver does in a step of microbatches.

    Args:
        num_microbatches: Number of microbatches in a step. The loss of a microbatch is a mean, divided by the number.
        device: Device of the losses.
    """
    for module, name in (("moe.moe_utils", "MoEAuxLossAutoScaler"), ("multi_token_prediction", "MTPLossAutoScaler")):
        scaler = getattr(importlib.import_module(f"megatron.core.transformer.{module}"), name)
        # One dim: the driver copies its scale, of one element, into this scale.
        scaler.set_loss_scale(torch.full((1,), 1 / num_microbatches, device=device))


def ddp_config(**changes: Any) -> Any:
    """A `DistributedDataParallelConfig` of ZeRO-3, a unit a layer, sums in fp32; keywords change or add fields."""
    config = importlib.import_module("megatron.core.distributed").DistributedDataParallelConfig
    fields = {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "grad_reduce_in_fp32": True,
        "bucket_size": 1,
    }
    return config(**{**fields, **changes})


def tiny_gpt(config: Any, **changes: Any) -> nn.Module:
    """A GPTModel of torch's own operators; keywords go to its constructor."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    model: Any = importlib.import_module("megatron.core.models.gpt").GPTModel
    spec = specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, multi_latent_attention=config.multi_latent_attention
    )
    fields = {"transformer_layer_spec": spec, "vocab_size": VOCAB_SIZE, "max_sequence_length": LENGTH}
    gpt: nn.Module = model(config=config, **{**fields, **changes})
    return gpt


def tiny_hybrid(config: Any, pattern: str, **changes: Any) -> nn.Module:
    """A HybridModel of torch's own operators, of layers `M`, `G`, `*`, `+`, `-`, `E`; keywords go to its constructor.

    Args:
        config: A configuration with as many layers and depths of multi-token prediction as the pattern.
        pattern: With `|` between pipeline stages, and `/` before each depth of multi-token prediction.
        changes: Arguments of the constructor.
    """
    model: Any = importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel
    fields = {"vocab_size": VOCAB_SIZE, "max_sequence_length": LENGTH, "hybrid_layer_pattern": pattern}
    hybrid: nn.Module = model(config=config, hybrid_stack_spec=_hybrid_spec(), **{**fields, **changes})
    return hybrid


def _hybrid_spec() -> Any:
    """The specs of `hybrid_layer_specs`, with torch's operators in place of Transformer Engine's."""

    def core(module: str) -> Any:
        return importlib.import_module(f"megatron.core.{module}")

    gpt, hybrid, mamba = core("models.gpt.gpt_layer_specs"), core("models.hybrid.hybrid_block"), core("ssm.mamba_layer")
    mixer, layers, parallel = core("ssm.mamba_mixer"), core("transformer.transformer_layer"), core("tensor_parallel")
    spec, norm = core("transformer.spec_utils").ModuleSpec, core("transformer.torch_norm").WrappedTorchNorm
    tokens, nets = core("transformer.multi_token_prediction"), core("ssm.gated_delta_net")
    add = core("fusions.fused_bias_dropout").get_bias_dropout_add
    dense = gpt.get_gpt_layer_local_submodules()
    experts = gpt.get_gpt_layer_local_submodules(num_experts=NUM_EXPERTS)
    latent = gpt.get_gpt_layer_local_submodules(multi_latent_attention=True)
    linears = {"in_proj": parallel.ColumnParallelLinear, "out_proj": parallel.RowParallelLinear}

    def layer(kind: Any, **submodules: Any) -> Any:
        return spec(module=kind, submodules=layers.TransformerLayerSubmodules(**submodules))

    def with_mlp(kind: Any, mlp: Any) -> Any:
        return layer(kind, pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add)

    def with_attention(attention: Any) -> Any:
        return layer(layers.TransformerLayer, input_layernorm=norm, self_attention=attention, self_attn_bda=add)

    prediction = tokens.MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=parallel.ColumnParallelLinear
    )
    depth = spec(module=tokens.MultiTokenPredictionLayer, submodules=prediction)
    scan = spec(module=mixer.MambaMixer, submodules=mixer.MambaMixerSubmodules(**linears))
    delta = spec(module=nets.GatedDeltaNet, submodules=nets.GatedDeltaNetSubmodules(out_norm=norm, **linears))
    return spec(
        module=hybrid.HybridStack,
        submodules=hybrid.HybridStackSubmodules(
            mamba_layer=spec(
                module=mamba.MambaLayer,
                submodules=mamba.MambaLayerSubmodules(norm=norm, mixer=scan, mamba_bda=add),
            ),
            gdn_layer=with_attention(delta),
            attention_layer=with_attention(dense.self_attention),
            mla_layer=with_attention(latent.self_attention),
            mlp_layer=with_mlp(core("ssm.mlp_layer").MLPLayer, dense.mlp),
            moe_layer=with_mlp(layers.MoETransformerLayer, experts.mlp),
            mtp_block_spec=spec(
                module=tokens.MultiTokenPredictionBlock,
                submodules=tokens.MultiTokenPredictionBlockSubmodules(layer_specs=[depth]),
            ),
        ),
    )


def token_losses(model: nn.Module, batch: torch.Tensor, *, cp_rank: int = 0, cp_size: int = 1) -> torch.Tensor:
    """The loss of each next token: (batch, LENGTH / cp_size) for a batch of (batch, LENGTH + 1) tokens.

    Args:
        model: A model of `tiny_gpt` or `tiny_hybrid`.
        batch: Tokens, equal on all context-parallel ranks.
        cp_rank: The context-parallel rank: it computes a part from the start of the tokens, and a part from the end.
        cp_size: Number of context-parallel ranks.
    """
    parts = torch.arange(LENGTH, device=batch.device).chunk(2 * cp_size)
    positions = torch.cat([parts[cp_rank], parts[-1 - cp_rank]])
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=batch.device).triu(1)
    tokens, labels = batch[:, :-1][:, positions], batch[:, 1:][:, positions]
    losses: torch.Tensor = model(tokens, positions.expand(len(batch), -1), mask, labels=labels)
    return losses
