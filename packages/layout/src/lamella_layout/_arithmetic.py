"""Two roundings and torch's chunking rule; everything else in the package is built from them."""

from lamella_layout._range import Range


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def torch_chunk(dim_size: int, num_chunks: int, index: int) -> Range:
    """Return the indices of chunk `index` when a dim is cut as `torch.chunk` and `Shard(dim)` cut it.

    All chunks hold `ceil(dim_size / num_chunks)` but the last non-empty one; chunks after that are empty and lie
    at the end of the dim, where torch reports them too.
    """
    chunk_size = ceil_div(dim_size, num_chunks)
    return Range(min(dim_size, index * chunk_size), min(dim_size, (index + 1) * chunk_size))
