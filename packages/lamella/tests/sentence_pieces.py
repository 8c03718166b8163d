"""A tokenizer as SentencePiece makes them: a space begins a piece, and the decoder strips the first one of a text."""

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

NUM_PIECES = 300
"""The vocabulary of the tests' model."""


def write_sentence_pieces(folder: Path, nbytes: Iterable[int] = b"\n") -> None:
    """Write a tokenizer of 300 pieces, with pieces of some bytes for other characters than letters."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in nbytes), "\u2581", *ascii_lowercase, "\u2581in", "-den"]
    words = (f"\u2581{first}{second}" for first, second in product(ascii_lowercase, repeat=2))
    pieces += [word for word, _ in zip(words, range(NUM_PIECES - len(pieces)), strict=False)]
    # With equal scores a text becomes as few pieces as can be.
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
