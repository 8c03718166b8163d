"""Padding of the vocabulary: rows behind the tokens' own, of which other tensor-parallel ranks have more or fewer.

megatron-core makes the number of rows divisible by `make_vocab_size_divisible_by` times the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lamella_convert import Padded, Rule, Rules, parameter_shapes, translate
from lamella_files import Source

_ENDINGS: Final = ("word_embeddings.weight", "output_layer.weight")
"""The endings of the names of tensors with a row for each token."""


def with_padding(source: Source, shapes: Mapping[str, tuple[int, ...]], vocabulary_size: int) -> Source:
    """A checkpoint with as many rows of padding as a model has, in weights and optimizer state alike.

    Rows of padding that both have are the checkpoint's, further ones zeros, as megatron-core fills them from
    `torch_dist`. Tensors of other differences stay, for `load` to report.

    Args:
        source: Under native names.
        shapes: The model's, global, by the checkpoint's names.
        vocabulary_size: The number of tokens, and so of rows that are no padding.

    Effects: reads nothing.
    """
    correspondences = []
    for name, stored in parameter_shapes(source).items():
        live = shapes.get(name, stored)
        num_rows = min(stored[0], live[0]) if name.endswith(_ENDINGS) else 0
        if stored != live and stored[1:] == live[1:] and num_rows >= vocabulary_size:
            rule = Rule(Padded(name, "both", "stored"), Padded(name, "both", "live"))
            correspondences += Rules((rule,), {"both": num_rows, "live": live[0]}).match({name: stored})
    return translate(source, correspondences, to="right") if correspondences else source
