"""The reference decoder in pipeline stages, whose layers leave weight gradients to later.

Tensor names end in the tensor's dims: B batch, T tokens, D model.
"""

# ruff: noqa: N803  Dims are spelled in capitals.

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import nn

from lamella_integration.llama import Block, Head, LlamaConfig, next_token_loss, rotations
from lamella_integration.moe import DelayedLinear
from lamella_integration.reference import init_weights
from lamella_schedule import LayerSlots, ModelChunk, Pipeline, Slot


class DecoderStage(nn.Module):
    """Blocks of a Llama, with the embedding or the head at the ends, and the weights of the Llama with the same seed.

    Args:
        config: Sizes of the Llama.
        blocks: The stage's blocks.
        length: Number of tokens in a sequence.
        device: Device of the weights.
        dtype: Dtype of weights and values.
    """

    def __init__(
        self, config: LlamaConfig, blocks: range, *, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.dim) if blocks.start == 0 else None
            self.blocks = nn.ModuleDict({str(i): _delayed(Block(config)) for i in blocks})
            self.head = Head(config) if blocks.stop == config.num_layers else None
        self.to(dtype).to_empty(device=device)
        init_weights(self, seed=0)
        self._rotations = rotations(config, torch.empty(1, length, 1, device=device, dtype=dtype))

    def chunk(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor, scale: float) -> ModelChunk:
        """Return the stage applied to a microbatch; the last stage returns the mean loss times `scale`."""
        return ModelChunk(
            (lambda x_BTD: x_BTD) if self.embedding is None else partial(self.embedding, tokens_BT),
            [self._slots(cast(Block, block)) for block in self.blocks.values()],
            (lambda x_BTD: x_BTD)
            if self.head is None
            else lambda x_BTD: next_token_loss(cast(Head, self.head)(x_BTD), labels_BT) * scale,
        )

    def _slots(self, block: Block) -> LayerSlots:
        return LayerSlots(
            pre=lambda x_BTD: x_BTD + block.attention(block.attention_norm(x_BTD), *self._rotations),
            experts=lambda x_BTD: x_BTD + block.ffn(block.ffn_norm(x_BTD)),
            delayed={Slot.PRE: _weight_gradients(block.attention), Slot.EXPERTS: _weight_gradients(block.ffn)},
        )


def stages_of_rank(
    pipeline: Pipeline,
    rank: int,
    config: LlamaConfig,
    *,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[int, DecoderStage]:
    """Build the stages of a rank, with as many blocks each.

    Raises:
        ValueError: The blocks do not divide among the stages.
    """
    num_blocks, excess = divmod(config.num_layers, pipeline.num_stages)
    if excess:
        raise ValueError(
            f"Expected blocks that divide among {pipeline.num_stages} stages, got num_layers={config.num_layers}. Give "
            f"a multiple of {pipeline.num_stages}."
        )
    return {
        stage: DecoderStage(
            config,
            range(stage * num_blocks, (stage + 1) * num_blocks),
            length=length,
            device=device,
            dtype=dtype,
        )
        for stage in pipeline.stages_of(rank)
    }


def _delayed(block: Block) -> Block:
    """Put delayed linear layers in place of a block's, with weights yet to be drawn."""
    for part in (block.attention, block.ffn):
        for name, linear in list(part.named_children()):
            assert isinstance(linear, nn.Linear)
            part.register_module(name, DelayedLinear(linear.out_features, linear.in_features, is_delayed=True))
    return block


def _weight_gradients(part: nn.Module) -> Callable[[], None]:
    def compute() -> None:
        for linear in part.children():
            cast(DelayedLinear, linear).backward_dw()

    return compute
