"""What an option that cuts work over groups of ranks cannot go with."""

from collections.abc import Iterator, Mapping


def problems(option: str, num_ranks: int, ranks: int | None, excluded: Mapping[str, bool]) -> Iterator[str]:
    """Yield a line for each conflict of the option with the number of ranks and with other options.

    Args:
        option: As on the command line, `--tensor-parallel`.
        num_ranks: The ranks of a group.
        ranks: The ranks of the run; None for as many as the machine has.
        excluded: Other options, each with the reason where the reason is not plain, and whether each is set.
    """
    if ranks is not None and ranks % num_ranks:
        yield (
            f"Expected {option} to divide the {ranks} ranks, got {num_ranks}. Pass a divisor, or --ranks that it "
            "divides."
        )
    for other, is_set in excluded.items():
        if is_set:
            yield f"Expected {option} without {other}, got both. Leave one of them out."
