"""Refusals of a conversion: an unknown size or model type."""

from collections.abc import Mapping

_WAY_OUT = "Give it to the rules, as `sizes`."


class SizeUnknown(ValueError):
    """A missing size that rules need to cut a tensor.

    `size` is the missing name ("tp" is the number of tensor-parallel ranks), `known` the given sizes, `needed_for` the
    tensor, and `way_out` who takes the size.
    """

    def __init__(
        self, size: str, known: Mapping[str, int], needed_for: str | None = None, way_out: str = _WAY_OUT
    ) -> None:
        super().__init__(size, known, needed_for, way_out)
        self.size = size
        self.known = known
        self.needed_for = needed_for
        self.way_out = way_out

    def __str__(self) -> str:
        text = f"Expected the size {self.size!r}, got {dict(self.known)!r}. {self.way_out}"
        return text if self.needed_for is None else f"{text} Needed for {self.needed_for!r}."


class ModelUnknown(ValueError):
    """A `model_type` without rules in any installed package; `known` are the types with rules."""

    def __init__(self, model_type: str, known: tuple[str, ...]) -> None:
        super().__init__(model_type, known)
        self.model_type = model_type
        self.known = known

    def __str__(self) -> str:
        return (
            f"Expected a package with the rules of model type {self.model_type!r}, to go between Hugging Face's names "
            f"and Megatron's, got those of {self.known}. Pass `translate`."
        )
