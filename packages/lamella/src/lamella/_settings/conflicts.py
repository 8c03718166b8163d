"""Lines on options that do not go together."""

from collections.abc import Iterator, Mapping


def exclusions(option: str, excluded: Mapping[str, bool]) -> Iterator[str]:
    """Yield a line for each other option that is set.

    Args:
        option: The option as on the command line, such as `--capture`.
        excluded: Other options, each with the reason where the reason is not plain, and whether each is set.
    """
    for other, is_set in excluded.items():
        if is_set:
            yield f"Expected {option} without {other}, got both. Leave one of them out."


def problems(option: str, num_ranks: int, ranks: int | None, excluded: Mapping[str, bool]) -> Iterator[str]:
    """Yield a line for each conflict of an option that cuts work over groups of ranks.

    Args:
        option: The option as on the command line, such as `--tensor-parallel`.
        num_ranks: The ranks of a group.
        ranks: The ranks of the run; None for as many as the machine has.
        excluded: Other options, as for `exclusions`.
    """
    if ranks is not None and ranks % num_ranks:
        yield (
            f"Expected {option} to divide the {ranks} ranks, got {num_ranks}. Pass a divisor, or --ranks that it "
            "divides."
        )
    yield from exclusions(option, excluded)
