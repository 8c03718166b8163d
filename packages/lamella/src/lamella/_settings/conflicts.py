"""Lines on options that exclude each other."""

from collections.abc import Iterator, Mapping


def exclusions(option: str, excluded: Mapping[str, bool]) -> Iterator[str]:
    """Yield a line for each excluded option in use.

    Args:
        option: The option as on the command line, such as `--capture`.
        excluded: Whether an option is set, by its text: the option, and a reason unless the reason is plain.
    """
    for other, is_set in excluded.items():
        if is_set:
            yield f"Expected {option} without {other}, got both. Leave one of them out."


def problems(option: str, num_ranks: int, ranks: int | None, excluded: Mapping[str, bool]) -> Iterator[str]:
    """Yield a line for each conflict of an option for groups of ranks.

    Args:
        option: The option as on the command line, such as `--tensor-parallel`.
        num_ranks: The ranks of a group.
        ranks: The ranks of the run; None for as many as the machine has.
        excluded: Whether an option is set, by its text, as `exclusions` takes the options.
    """
    if ranks is not None and ranks % num_ranks:
        yield (
            f"Expected {option} to divide the {ranks} ranks, got {num_ranks}. Pass a divisor, or --ranks that it "
            "divides."
        )
    yield from exclusions(option, excluded)
