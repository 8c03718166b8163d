"""Stand-ins for mamba-ssm's modules in plain torch. They are not mamba-ssm.

mamba-ssm needs a GPU to be imported. The stand-ins have its class names, the names of children and parameters, the
order of rows in `in_proj`, the Parameters' marks, and the reads without a call of mamba-ssm 2.3.2. A test with them
shows that the rows of the adapter's table are right for modules of such a structure, not that mamba-ssm's kernels run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plain_kernels
import torch
import torch.nn.functional as F
from torch import nn

VOCAB_SIZE = 64
WIDTH, INNER, STATE, HEAD, GROUPS, CONV = 16, 32, 4, 4, 2, 4
HEADS = INNER // HEAD
BATCH = torch.randint(VOCAB_SIZE, (4, 13), generator=torch.Generator().manual_seed(1))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, group_size: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = None
        self.eps = 1e-5
        self.group_size = group_size

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        gated = x if gate is None else x * F.silu(gate)
        return plain_kernels.rms_norm(gated, self.weight, self.eps, self.group_size)


def _add_norm(x: torch.Tensor, norm: Any, residual: torch.Tensor | None, in_fp32: bool) -> tuple[torch.Tensor, ...]:
    """The fused residual addition and norm: takes a norm's parameters, and never calls the norm."""
    residual = x if residual is None else x + residual
    if isinstance(norm, RMSNorm):
        normed = plain_kernels.rms_norm(residual, norm.weight, norm.eps)
    else:
        normed = F.layer_norm(residual, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normed.to(norm.weight.dtype), residual.float() if in_fp32 else residual


def _marked(values: torch.Tensor, mark: str) -> nn.Parameter:
    parameter = nn.Parameter(values)
    setattr(parameter, mark, True)
    return parameter


class Mamba(nn.Module):
    """Both paths read all projections; `in_proj` is a product with the weight itself."""

    def __init__(self, d_model: int, use_fast_path: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.d_model, self.d_state, self.d_inner, self.dt_rank = d_model, STATE, INNER, 2
        self.use_fast_path = use_fast_path
        self.in_proj = nn.Linear(d_model, 2 * INNER, bias=bias)
        self.conv1d = nn.Conv1d(INNER, INNER, CONV, groups=INNER, padding=CONV - 1)
        self.x_proj = nn.Linear(INNER, self.dt_rank + 2 * STATE, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, INNER)
        self.dt_proj.bias = _marked(torch.linspace(-3, 1, INNER), "_no_reinit")
        self.A_log = _marked(torch.arange(1.0, STATE + 1).repeat(INNER, 1).log(), "_no_weight_decay")
        self.D = _marked(torch.ones(INNER), "_no_weight_decay")
        self.out_proj = nn.Linear(INNER, d_model, bias=bias)

    def forward(self, hidden_states: torch.Tensor, inference_params: None = None) -> torch.Tensor:
        xz = self.in_proj.weight @ hidden_states.transpose(1, 2)
        if self.in_proj.bias is not None:
            xz = xz + self.in_proj.bias[:, None]
        conv, project, dt = self.conv1d, self.x_proj.weight, self.dt_proj
        fast = self.use_fast_path
        y = plain_kernels.mamba_inner(
            xz,
            conv.weight,
            conv.bias,
            project,
            dt.weight,
            self.out_proj.weight if fast else torch.eye(self.d_inner),
            self.out_proj.bias if fast else None,
            -self.A_log.float().exp(),
            None,
            None,
            self.D.float(),
            delta_bias=dt.bias.float(),
        )
        return y if fast else self.out_proj(y)


class _SecondMamba(nn.Module):
    """The fused path hands the convolution, the norm and `out_proj` to a kernel; the other one the convolution."""

    def __init__(self, d_model: int, use_mem_eff_path: bool = True, rmsnorm: bool = True) -> None:
        super().__init__()
        self.d_model, self.d_state, self.d_inner, self.d_ssm = d_model, STATE, INNER, INNER
        self.headdim, self.ngroups, self.nheads = HEAD, GROUPS, HEADS
        self.use_mem_eff_path = use_mem_eff_path
        channels = INNER + 2 * GROUPS * STATE
        self.in_proj = nn.Linear(d_model, INNER + channels + HEADS, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, CONV, groups=channels, padding=CONV - 1)
        self.dt_bias = _marked(torch.linspace(-3, 1, HEADS), "_no_weight_decay")
        self.A_log = _marked(torch.arange(1.0, HEADS + 1).log(), "_no_weight_decay")
        self.D = _marked(torch.ones(HEADS), "_no_weight_decay")
        if rmsnorm:
            self.norm = RMSNorm(INNER)
        self.out_proj = nn.Linear(INNER, d_model, bias=False)

    def forward(self, u: torch.Tensor, inference_params: None = None) -> torch.Tensor:
        norm = getattr(self, "norm", None)
        fused = self.use_mem_eff_path
        y = plain_kernels.split_conv_scan(
            self.in_proj(u),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias,
            -self.A_log.float().exp(),
            D=self.D,
            headdim=self.headdim,
            ngroups=self.ngroups,
            rmsnorm_weight=norm.weight if norm is not None and fused else None,
            outproj_weight=self.out_proj.weight if fused else None,
            outproj_bias=self.out_proj.bias if fused else None,
        )
        if fused:
            return y
        return self.out_proj(y if norm is None else norm(y))  # type: ignore[no-any-return]


class Mamba2(_SecondMamba):
    pass


class Mamba2Simple(_SecondMamba):
    pass


class Mamba3(nn.Module):
    """Calls all of its children; biases of B and C are its own parameters."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(d_model, 2 * INNER + 2 * STATE + HEADS, bias=False)
        self.dt_bias = _marked(torch.linspace(-3, 1, HEADS), "_no_weight_decay")
        self.B_bias = nn.Parameter(torch.ones(HEADS, STATE))
        self.C_bias = nn.Parameter(torch.ones(HEADS, STATE))
        self.B_norm, self.C_norm = RMSNorm(STATE), RMSNorm(STATE)
        self.D = _marked(torch.ones(HEADS), "_no_weight_decay")
        self.out_proj = nn.Linear(INNER, d_model, bias=False)

    def forward(self, u: torch.Tensor, inference_params: None = None) -> torch.Tensor:
        z, x, b, c, dt = self.in_proj(u).split([INNER, INNER, STATE, STATE, HEADS], dim=-1)
        b, c = self.B_norm(b)[:, :, None] + self.B_bias, self.C_norm(c)[:, :, None] + self.C_bias
        x = x.unflatten(-1, (HEADS, HEAD)) * F.softplus(dt + self.dt_bias)[..., None]
        seen = (x[..., None] * b[:, :, :, None]).cumsum(1)
        y = (seen * c[:, :, :, None]).sum(-1) + self.D[:, None] * x
        return self.out_proj(y.flatten(-2).to(z.dtype) * F.silu(z))  # type: ignore[no-any-return]


class MHA(nn.Module):
    """Attention behind a convolution whose weight is read."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_conv = CONV
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.conv1d = nn.Conv1d(3 * d_model, 3 * d_model, CONV, groups=3 * d_model, padding=CONV - 1)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, inference_params: None = None) -> torch.Tensor:
        qkv = self.in_proj(x).transpose(1, 2)
        qkv = plain_kernels.causal_conv(qkv, self.conv1d.weight.squeeze(1), self.conv1d.bias).transpose(1, 2)
        q, k, v = qkv.reshape(*qkv.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(attended.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(y * F.silu(gate))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Returns the mixer's output, and the residual (in fp32 if asked for) for the next block to add."""

    def __init__(self, mixer: Callable[[int], nn.Module], norm: Callable[[int], nn.Module], fused: bool) -> None:
        super().__init__()
        self.residual_in_fp32 = True
        self.fused_add_norm = fused
        self.norm, self.mixer = norm(WIDTH), mixer(WIDTH)
        self.norm2, self.mlp = norm(WIDTH), GatedMLP(WIDTH)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        for norm, inner in ((self.norm, self.mixer), (self.norm2, self.mlp)):
            if self.fused_add_norm:
                hidden_states, residual = _add_norm(hidden_states, norm, residual, self.residual_in_fp32)
            else:
                residual = hidden_states if residual is None else hidden_states + residual
                hidden_states = norm(residual.to(dtype=norm.weight.dtype))  # type: ignore[arg-type]
                residual = residual.float()
            hidden_states = inner(hidden_states)
        assert residual is not None
        return hidden_states, residual


class MixerModel(nn.Module):
    def __init__(self, mixers: list[Callable[[int], nn.Module]], norm: Callable[[int], nn.Module], fused: bool) -> None:
        super().__init__()
        self.fused_add_norm = fused
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Block(mixer, norm, fused) for mixer in mixers)
        self.norm_f = norm(WIDTH)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden_states, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        if self.fused_add_norm:
            return _add_norm(hidden_states, self.norm_f, residual, True)[0]
        return self.norm_f((hidden_states + residual).to(self.norm_f.weight.dtype))  # type: ignore[no-any-return]


class MambaLMHeadModel(nn.Module):
    """A language model of blocks with these mixers, its head tied to the embedding; equal weights on every call."""

    def __init__(
        self,
        *mixers: Callable[[int], nn.Module],
        norm: Callable[[int], nn.Module] = RMSNorm,
        fused_add_norm: bool = True,
    ) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.backbone = MixerModel(list(mixers), norm, fused_add_norm)
        self.lm_head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.lm_head.weight = self.backbone.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.backbone(input_ids))  # type: ignore[no-any-return]


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next tokens, 0-D, in fp32."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
