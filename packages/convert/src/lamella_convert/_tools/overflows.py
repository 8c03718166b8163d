"""Finite values that a cast makes infinite: a `Source` over a `Source` that counts them."""

from collections import Counter
from collections.abc import Sequence

import torch

from lamella_convert._translation.translation_plan import short_dtype
from lamella_files import Over, Source, Wanted


class CountedOverflows(Over):
    """A `Source` that counts, in its reads, the finite values that the reader's dtype cannot hold."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._counts: Counter[tuple[str, torch.dtype]] = Counter()

    @property
    def reasons(self) -> dict[str, str]:
        """A line of each tensor read so far that has such values, by name."""
        return {
            name: f"{count} finite values are infinite in {short_dtype(dtype)}"
            for (name, dtype), count in self._counts.items()
        }

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`; pieces with infinite values are read once more."""
        self.source.read(requests)
        for name, chunk, into in requests:
            dtype = self.tensors[name].dtype
            if not (_is_narrower(into.dtype, dtype) and bool(into.isinf().any())):
                continue
            values = torch.empty(into.shape, dtype=dtype)
            self.source.read([Wanted(name, chunk, values)])
            if num_overflows := int((values.isfinite() & into.isinf()).sum()):
                self._counts[name, into.dtype] += num_overflows


def _is_narrower(dtype: torch.dtype, stored: torch.dtype) -> bool:
    both_are_floats = dtype.is_floating_point and stored.is_floating_point
    return both_are_floats and torch.finfo(dtype).max < torch.finfo(stored).max
