"""Two roundings and torch's chunking rule, on which the whole package is built."""

from lamella_layout._range import Range


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`."""
    return ceil_div(value, multiple) * multiple


def torch_chunk(dim_size: int, num_chunks: int, index: int) -> Range:
    """Return the indices of chunk `index` of a dim, by the rule of `torch.chunk` and `Shard(dim)`.

    Chunks hold `ceil(dim_size / num_chunks)` indices, the last non-empty chunk possibly fewer. Empty chunks start at
    `dim_size`, the offset torch reports for them.
    """
    chunk_size = ceil_div(dim_size, num_chunks)
    return Range(min(dim_size, index * chunk_size), min(dim_size, (index + 1) * chunk_size))
