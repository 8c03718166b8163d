"""Context parallelism: each sequence cut into pieces over ranks, by transformers' interface for attention.

Note [Sequences on several ranks]
    All layers but attention compute each token by itself. A rank therefore runs the model on its pieces of a sequence,
    at their own positions, and attention alone gathers the keys and values of all pieces. A query sees the keys up to
    its own position, so the pieces are dealt out from both ends, and each rank has as many pairs of queries and keys:

        2 ranks, 4 pieces      rank 0: pieces 0, 3      rank 1: pieces 1, 2

    A rank's loss is of its own targets, and its gradients are its tokens' part: for parameters, gradients and norms the
    ranks are as those of data parallelism. transformers builds no mask for an attention function that it has no mask
    function for, and the function here needs none.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import bias

from lamella_transformers._document_attention import refuse_changed_scores
from lamella_transformers._errors import ModelError

_NAME: Final = "lamella_context_parallel"
_TRIAL_TOLERANCE: Final = 0.02  # of the largest logit; a model that mixes tokens outside attention changes all logits
_NUM_TRIAL_TOKENS: Final = 8  # a piece

# torch 2.13 has new names, and the former ones warn.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class SequencePieces:
    """This rank's two pieces of every sequence; see Note [Sequences on several ranks].

    Args:
        group: The ranks with pieces of the same sequences.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def of(self, sequences: torch.Tensor, padding: int) -> torch.Tensor:
        """Return this rank's columns, as many on each rank, with padding behind the last column.

        Args:
            sequences: (num_sequences, length), equal on all ranks.
            padding: Fills columns behind the last.
        """
        length = self._piece_length(sequences.shape[1])
        padded = F.pad(sequences, (0, 2 * self.num_ranks * length - sequences.shape[1]), value=padding)
        return torch.cat([padded[:, piece * length :][:, :length] for piece in self._pieces], dim=1)

    def positions(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return the positions of this rank's columns of `sequences`, (num_sequences, columns) int64."""
        length = self._piece_length(sequences.shape[1])
        columns = torch.arange(length, device=sequences.device)
        positions = torch.cat([columns + piece * length for piece in self._pieces])
        return positions.expand(sequences.shape[0], -1)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the causal attention of this rank's queries to the keys of all ranks, differentiable.

        Args:
            query: (num_sequences, num_heads, columns, width).
            key: (num_sequences, num_key_heads, columns, width); each head serves as many heads of queries.
            value: (num_sequences, num_key_heads, columns, width of a value).
            options: Further arguments of `scaled_dot_product_attention`.

        Effects: an all-gather over the ranks; in backward a reduce-scatter.
        """
        pairs = cast(torch.Tensor, _SequenceGather.apply(torch.cat([key, value], -1), self))  # type: ignore[no-untyped-call]
        pairs = pairs.repeat_interleave(query.shape[1] // key.shape[1], 1)
        keys, values = pairs[..., : key.shape[-1]], pairs[..., key.shape[-1] :]
        outputs = []
        for piece, queries in zip(self._pieces, query.chunk(2, 2), strict=True):
            length = queries.shape[2]
            end = (piece + 1) * length
            mask = {"is_causal": True} if piece == 0 else {"attn_mask": bias.causal_lower_right(length, end)}
            outputs.append(
                F.scaled_dot_product_attention(queries, keys[:, :, :end], values[:, :, :end], **mask, **options)
            )
        return torch.cat(outputs, 2)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the columns (dim 2) of all ranks in order. Effects: an all-gather over the ranks."""
        parts = part.new_empty((self.num_ranks, *part.shape))
        _all_gather(parts.flatten(0, 1), part.contiguous(), group=self._group)
        halves = [half.chunk(2, 2) for half in parts]
        return torch.cat([*(front for front, _ in halves), *(back for _, back in reversed(halves))], 2)

    def scattered_sum(self, columns: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of the sum over the ranks. Effects: a reduce-scatter over the ranks."""
        pieces = columns.chunk(2 * self.num_ranks, 2)
        parts = [torch.cat([pieces[rank], pieces[-1 - rank]], 2) for rank in range(self.num_ranks)]
        total = torch.empty_like(parts[0])
        _reduce_scatter(total, torch.cat(parts), group=self._group)
        return total

    @property
    def _pieces(self) -> tuple[int, int]:
        return self.rank, 2 * self.num_ranks - 1 - self.rank

    def _piece_length(self, length: int) -> int:
        return -(-length // (2 * self.num_ranks))


class _SequenceGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: torch.Tensor, pieces: SequencePieces) -> torch.Tensor:
        context.pieces = pieces
        return pieces.gathered(part)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return context.pieces.scattered_sum(gradient), None


def cut_sequences(model: nn.Module, pieces: SequencePieces) -> None:
    """Let a model's attention see the pieces of all ranks, for forwards on `pieces.of(tokens)` at `pieces.positions`.

    Args:
        model: A causal language model of transformers, whose attention takes transformers' functions.
        pieces: This rank's pieces.

    Raises:
        ModelError: The model's attention takes no functions, or sees a window of each sequence.

    Effects: registers a function with transformers, for the whole process, under a name of its own.
    """
    from transformers import AttentionInterface

    check_sequences(model)
    AttentionInterface.register(_NAME, _attention_over(pieces))
    _set_attention(model, _NAME)


def check_sequences(model: nn.Module) -> None:
    """Refuse models whose sequences `cut_sequences` cannot cut, as far as a config tells.

    Raises:
        ModelError: The config names a model that `cut_sequences` refuses.
    """
    spec = _text_config(model)
    model_type = getattr(spec, "model_type", type(model).__name__)
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"Expected a model whose attention takes transformers' functions, got {model_type!r}, whose does not."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"Expected a model that takes positions of its tokens, got {model_type!r}, which does not.")
    layer_types = getattr(spec, "layer_types", None)
    kinds = {kind for kind in layer_types or () if kind not in ("full_attention", "attention")}
    if layer_types is None and getattr(spec, "sliding_window", None) is not None:
        kinds.add("sliding_attention")  # Mistral: all layers, and the trial's tokens are fewer than a window's
    if kinds:
        raise ModelError(f"Expected layers of full attention alone, got {min(kinds)!r} in {model_type!r}.")


def check_pieces(model: nn.Module, pieces: SequencePieces, vocab_size: int, device: torch.device) -> None:
    """Refuse a model whose logits on pieces of a sequence are not those on the sequence.

    Args:
        model: After `cut_sequences`, with its weights, sharded or not.
        pieces: This rank's pieces.
        vocab_size: A bound of the trial's tokens.
        device: The device of the model's inputs.

    Raises:
        ModelError: The model mixes tokens outside attention, or changes the scores of attention. On every rank.

    Effects: collective over all ranks: two forwards of a few tokens, and an all-reduce. The random state stays.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (1, 2 * pieces.num_ranks * _NUM_TRIAL_TOKENS), generator=generator).to(device)
    was_training = model.training
    model.eval()  # Dropout masks of pieces are not those of sequences.
    positions = pieces.positions(tokens)
    try:
        with torch.no_grad():
            # First: it refuses changed scores by name, some of which the kernel of the other forward drops.
            logits = model(input_ids=pieces.of(tokens, 0), position_ids=positions, use_cache=False).logits
            with _former_attention(model):
                sequence_logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        model.train(was_training)
    expected = sequence_logits[:, positions[0]]
    is_equal = ((logits - expected).abs().max() <= _TRIAL_TOLERANCE * expected.abs().max()).float()
    dist.all_reduce(is_equal, op=dist.ReduceOp.MIN)  # The same end on every rank.
    if not is_equal.item():
        raise ModelError(
            f"Expected a model whose tokens meet in causal attention alone, got {_text_config(model).model_type!r}, "
            "whose logits on pieces of a sequence are not those on the sequence."
        )


def _attention_over(pieces: SequencePieces) -> Any:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        refuse_changed_scores(options, "on pieces of sequences")
        output = pieces.attend(query, key, value, dropout_p=dropout, scale=scaling)
        return output.transpose(1, 2).contiguous(), None

    return attention


@contextmanager
def _former_attention(model: nn.Module) -> Iterator[None]:
    _set_attention(model, "sdpa")
    try:
        yield
    finally:
        _set_attention(model, _NAME)


def _set_attention(model: nn.Module, name: str) -> None:
    cast(Any, model).config._attn_implementation = name
    _text_config(model)._attn_implementation = name


def _text_config(model: nn.Module) -> Any:
    spec: Any = getattr(model, "config", None)
    return spec.get_text_config() if hasattr(spec, "get_text_config") else spec
