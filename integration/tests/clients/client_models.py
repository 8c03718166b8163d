"""Set-ups of the clients' tests: tiny language models, rows of tokens, and leave for Accelerate to shard on CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor._random
from transformers import LlamaConfig, LlamaForCausalLM

from lamella_integration.tool_models import CHAT_TEMPLATE as TEMPLATE
from lamella_integration.tool_models import let_accelerate_shard_on_cpus as let_accelerate_shard_on_cpus
from lamella_integration.tool_models import model_folder as model_folder

__all__ = ["TEMPLATE", "let_accelerate_shard_on_cpus", "model_folder", "tiny_llama", "tokens"]

VOCABULARY = 61


def tiny_llama() -> Any:
    """Two layers; the same weights on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))


def tokens(num_rows: int = 16, length: int = 8, *, seed: int = 0) -> torch.Tensor:
    """(num_rows, length), from the seed alone."""
    return torch.randint(VOCABULARY, (num_rows, length), generator=torch.Generator().manual_seed(seed))
