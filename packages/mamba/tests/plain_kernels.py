"""The fused kernels of mamba-ssm in plain torch: the same arguments and results, one time step after another."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int | None = None) -> torch.Tensor:
    """x / RMS(x) over the last dim, or over each group of the last dim, times a weight."""
    groups = x.reshape(*x.shape[:-1], -1, group_size or x.shape[-1])
    normed: torch.Tensor = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * weight


def causal_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A depthwise convolution of (batch, channels, length) by (channels, width), then SiLU."""
    padded = F.pad(x, (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))


def split_conv_scan(
    zxbcdt: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  # the kernel's names, here and below
    *,
    D: torch.Tensor,  # noqa: N803
    headdim: int,
    ngroups: int,
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """All of a Mamba-2 mixer behind `in_proj`, as `mamba_split_conv1d_scan_combined`."""
    num_heads = len(A)
    inner = num_heads * headdim
    z, xbc, dt = torch.split(zxbcdt, [inner, len(conv_weight), num_heads], dim=-1)
    xbc = causal_conv(xbc.transpose(1, 2), conv_weight, conv_bias).transpose(1, 2)
    x, b, c = torch.split(xbc, [inner, *2 * [(len(conv_weight) - inner) // 2]], dim=-1)
    x = x.reshape(*x.shape[:2], num_heads, headdim)
    b, c = (t.reshape(*t.shape[:2], ngroups, -1).repeat_interleave(num_heads // ngroups, dim=2) for t in (b, c))
    dt = F.softplus(dt + dt_bias)
    state = x.new_zeros(*x[:, 0].shape, b.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    y = torch.stack(outputs, dim=1).flatten(-2).to(zxbcdt.dtype) * F.silu(z)
    if rmsnorm_weight is not None:
        y = rms_norm(y, rmsnorm_weight, rmsnorm_eps)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)


def mamba_inner(
    xz: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    dt_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,  # noqa: N803
    B: None,  # noqa: N803
    C: None,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    *,
    delta_bias: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """All of a Mamba mixer behind `in_proj`, as `mamba_inner_fn`."""
    x, z = xz.chunk(2, dim=1)
    x = causal_conv(x, conv_weight.squeeze(1), conv_bias)
    num_states = A.shape[-1]
    projected = F.linear(x.transpose(1, 2), x_proj_weight)
    dt, b, c = torch.split(projected, [dt_proj_weight.shape[-1], num_states, num_states], dim=-1)
    dt = F.softplus(F.linear(dt, dt_proj_weight) + delta_bias)
    state = x.new_zeros(*x.shape[:2], num_states)
    outputs = []
    for t in range(x.shape[-1]):
        state = state * torch.exp(dt[:, t, :, None] * A) + (dt[:, t] * x[..., t])[..., None] * b[:, t, None]
        outputs.append((state * c[:, t, None]).sum(-1) + D * x[..., t])
    y = torch.stack(outputs, dim=1) * F.silu(z.transpose(1, 2))
    return F.linear(y.to(xz.dtype), out_proj_weight, out_proj_bias)
