"""Pretrain a GPTModel by `megatron.training` on Megatron's mock data, sharded by lamella.

    torchrun --nproc-per-node 2 examples/megatron/pretrain_gpt.py --use-megatron-fsdp --ckpt-format fsdp_dtensor \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --num-layers 2 --hidden-size 64 \
        --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 \
        --global-batch-size 8 --train-iters 10 --lr 1e-3 --bf16 --transformer-impl local --no-persist-layer-norm \
        --no-gradient-accumulation-fusion --eval-iters 1 --eval-interval 5 --log-interval 1

The call of `lamella_megatron.install` is the only line about lamella; without it the same program trains on
Megatron-FSDP.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as datasets_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

import lamella_megatron


def build_datasets(num_samples: Sequence[int]) -> Any:
    """Datasets for training, validation and test, of tokens that count up from a random one."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split="98,1,1",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.transformer_impl == "local",
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # each tensor-parallel rank reads for itself


def sum_losses(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of the tokens that count, their number, and both for the log.

    Args:
        mask: (batch, length), 1 for a token that counts.
        losses: (batch, length).
    """
    loss, num_tokens = (losses.float() * mask).sum(), mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss)])}


def forward_step(
    iterator: Iterator[dict[str, torch.Tensor]], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """The losses of a microbatch, and the function that sums them up."""
    batch = {name: tensor.to(torch.cuda.current_device(), non_blocking=True) for name, tensor in next(iterator).items()}
    batch = get_batch_on_this_cp_rank(
        {"cu_seqlens": None, "attention_mask": None, **batch},
        is_hybrid_cp=False,
        cp_group=parallel_state.get_context_parallel_group(),
    )
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(sum_losses, batch["loss_mask"])


def main(configure: Callable[[Namespace], Any]) -> None:
    """Train the model that the command line describes.

    Args:
        configure: Megatron's configuration of a model by the arguments.
    """
    if find_spec("megatron.core.datasets.helpers_cpp"):  # Compiled in the wheel, which has no Makefile to run.
        datasets_utils.compile_helpers = lambda: None
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, configure(args))
    pretrain(container, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    lamella_megatron.install()
    main(gpt_config_from_args)
