"""The reference decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU; no dropout, no buffers, no tricks.

Tensor names end in the tensor's dims: B batch, T tokens, D model, H heads, K key/value heads, E head, V vocabulary.
"""

# ruff: noqa: N803, N806  Dims are spelled in capitals.

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamella_integration.reference import ReferenceModel


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a decoder."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    rope_theta: float = 500_000.0
    tied_embedding: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


SIZES = {
    "8b": LlamaConfig(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=128256),
    "1b": LlamaConfig(dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_dim=8192, vocab_size=128256),
    "tiny": LlamaConfig(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=256),
}


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        query_BHTE = _rotate(self._heads(self.query(x_BTD)), cos_TE, sin_TE)
        key_BKTE = _rotate(self._heads(self.key(x_BTD)), cos_TE, sin_TE)
        value_BKTE = self._heads(self.value(x_BTD))
        y_BHTE = F.scaled_dot_product_attention(query_BHTE, key_BKTE, value_BKTE, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.out(y_BHTE.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        down_BTD: torch.Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return down_BTD


class Block(nn.Module):
    """A decoder layer, one unit in every backend. With `recomputes` backward recomputes the layer's activations."""

    recomputes = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.ffn = FeedForward(config)

    def forward(self, x_BTD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        if not self.recomputes:
            return self._compute(x_BTD, cos_TE, sin_TE)
        # Recomputed inside the module: no backend's hooks run again. No random state to preserve: there is no dropout.
        args = (x_BTD, cos_TE, sin_TE)
        out_BTD: torch.Tensor = checkpoint(self._compute, *args, use_reentrant=False, preserve_rng_state=False)
        return out_BTD

    def _compute(self, x_BTD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE)
        out_BTD: torch.Tensor = x_BTD + self.ffn(self.ffn_norm(x_BTD))
        return out_BTD


class Head(nn.Linear):
    """Final norm and projection to the vocabulary, in one class to be named as a unit."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.dim, config.vocab_size, bias=False)
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x_BTD))


class Llama(ReferenceModel):
    """Tokens to logits. Embedding and head belong to the root unit, unless sharded as separate units."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        if config.tied_embedding:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        cos_TE, sin_TE = rotations(self.config, x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TE, sin_TE)
        logits_BTV: torch.Tensor = self.head(x_BTD)
        return logits_BTV

    def units(self) -> list[nn.Module]:
        return list(self.blocks)


def next_token_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in fp32."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())


def num_flops_per_token(config: LlamaConfig, num_tokens: int) -> float:
    """Return the floating-point operations of forward and backward per token of a sequence.

    6 for every parameter of a matrix product (the embedding is a look-up), and 6 * layers * tokens * dim for
    attention: half of the full square, because a causal kernel computes half of the square.
    """
    kv_dim = config.num_kv_heads * config.head_dim
    block = 2 * config.dim * config.dim + 2 * config.dim * kv_dim + 3 * config.dim * config.ffn_dim
    matmul_numel = config.num_layers * block + config.vocab_size * config.dim
    return 6 * matmul_numel + 6 * config.num_layers * num_tokens * config.dim


def rotations(config: LlamaConfig, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (T, E) of the positions of `x_BTD`, on its device and in its dtype."""
    # Computed in each forward, not kept as a buffer: a buffer would be garbage after `to_empty`.
    half = torch.arange(0, config.head_dim, 2, device=x_BTD.device, dtype=torch.float32) / config.head_dim
    positions = torch.arange(x_BTD.shape[1], device=x_BTD.device, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_theta**-half).repeat(1, 2)
    return angles.cos().to(x_BTD.dtype), angles.sin().to(x_BTD.dtype)


def _rotate(x_BHTE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE
