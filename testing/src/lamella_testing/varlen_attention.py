"""References for torch's `varlen_attn`, which runs on GPUs alone."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the attention of each sequence to itself, in any dtype: a loop of `scaled_dot_product_attention`.

    Args:
        query: (num_tokens, num_heads, width).
        key: (num_tokens, num_key_heads, width).
        value: (num_tokens, num_key_heads, width).
        cu_seq_q: (num_sequences + 1,) int32 offsets of the sequences.
        cu_seq_k: Offsets equal to `cu_seq_q`.
        max_q: At least the length of the longest sequence.
        max_k: A length equal to `max_q`.
        scale: The factor of scores.
        window_size: Earlier and later tokens that a token sees beside itself; -1 for all.
        enable_gqa: Take fewer heads of keys than of queries.
    """
    if query.is_meta:
        return torch.empty_like(query)
    offsets = cu_seq_q.tolist()
    assert offsets == cu_seq_k.tolist() and offsets[0] == 0 and offsets[-1] == len(query)
    assert cu_seq_q.dtype == torch.int32 and max_q == max_k
    outputs = []
    for begin, end in pairwise(offsets):
        assert 0 <= end - begin <= max_q
        earlier, later = (end - begin if size < 0 else size for size in window_size)
        query_heads, key_heads, value_heads = (part[begin:end].transpose(0, 1) for part in (query, key, value))
        output = F.scaled_dot_product_attention(
            query_heads,
            key_heads,
            value_heads,
            attn_mask=torch.ones(end - begin, end - begin, dtype=torch.bool).triu(-earlier).tril(later),
            scale=scale,
            enable_gqa=enable_gqa,
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def varlen_attention_without_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *offsets_and_lengths: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Return the same with torch 2.11's options, which have no `enable_gqa`."""
    assert query.shape == key.shape
    return varlen_attention(query, key, value, *offsets_and_lengths, scale=scale, window_size=window_size)
