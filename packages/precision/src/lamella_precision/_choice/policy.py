"""The number formats of a unit, decided once and frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

import torch
import torch.nn as nn

from lamella_precision._protocol import Recipe
from lamella_precision._recipes.plain import PlainRecipe

# With `reduce_dtype` None, FSDP2 reduces in the main dtype since 2.15, and in the compute dtype before.
_REDUCES_IN_MAIN_DTYPE = torch.__version__ >= "2.15"


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit stores, computes, reduces and returns.

    All fields but `main_dtype`, `main_grads_dtype` and `recipe` are FSDP2's, in FSDP2's order and meaning.

    Args:
        param_dtype: Dtype of the unsharded parameters, for gathers and compute. None keeps each parameter's own dtype.
        reduce_dtype: Dtype of gradient sums. None follows FSDP2 of the installed torch: the main weights' dtype since
            2.15; before, the gradients' dtype in backward (`param_dtype`, if given), also the communication dtype. A
            wider dtype here widens the wire only between hosts, and for gradients already accumulated (microbatches
            without reduction, layers with `main_grad`). Where sums in the main weights' dtype are faster, as with
            copy-engine exchanges, a narrower dtype here sets the communication dtype only.
        output_dtype: Dtype of the unit's floating-point outputs. None leaves outputs unchanged.
        cast_forward_inputs: Cast floating-point inputs of the unit's forward to `param_dtype`.
        param_dtype_override_fn: Called once for each parameter at sharding; every rank must return the same. The
            parameter's own dtype exempts it from `param_dtype`; None or `param_dtype` does not. Inputs are cast to
            `param_dtype` regardless.
        recipe: The communication and compute format of floating-point parameters: a `Recipe`, or a function called once
            for each parameter, with a `Recipe` or None as the result, the same on every rank
            (`lambda p: recipe if p.ndim == 2 else None`). None casts to `param_dtype`.
        main_dtype: Dtype of the sharded parameters, updated by the optimizer. None keeps each parameter's own;
            torch.float32 gives fp32 main weights to a model built in bf16, as training should have.
        main_grads_dtype: Dtype of the sharded parameters' `.grad`. None is the main weights' dtype. torch.bfloat16
            halves the gradients at rest: a reduction is summed in `reduce_dtype` and rounded once, and each later
            microbatch's is added in this dtype. Of torch's optimizers SGD takes gradients of another dtype than the
            weight's; for Adam use Transformer Engine's FusedAdam.

    Raises:
        TypeError: A field is not a `torch.dtype`; `recipe` is neither a recipe nor a function.
        ValueError: A dtype cannot hold a gradient (integers, complex, 1-byte floats).

    Source: torch.distributed.fsdp.MixedPrecisionPolicy for all fields but `main_dtype`, `main_grads_dtype` and
        `recipe`; `main_grads_dtype` of Megatron-FSDP's MixedPrecisionPolicy.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    _: KW_ONLY
    main_dtype: torch.dtype | None = None
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None
    recipe: Recipe | Callable[[nn.Parameter], Recipe | None] | None = None
    main_grads_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "main_dtype", "main_grads_dtype"):
            _check_dtype(name, getattr(self, name))
        is_served = isinstance(self.recipe, Recipe) or callable(self.recipe)
        if self.recipe is not None and (isinstance(self.recipe, type) or not is_served):  # a class has all members too
            raise TypeError(
                f"Expected `recipe` to be a Recipe, a function of a parameter or None, got {self.recipe!r}. A recipe "
                "has compute_dtype, block_rows, payloads, columns, encode and decode; of a class, pass an instance."
            )

    def resolved_for(self, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        """The policy of one parameter: the answers of `param_dtype_override_fn` and of a function as `recipe`.

        Raises:
            TypeError: The function returned neither a recipe nor None.
            ValueError: The function returned none of the parameter's dtype, `param_dtype` and None; or the recipe
                computes in another dtype than the policy.
        """
        policy = self
        if self.param_dtype_override_fn is not None:
            dtype = self.param_dtype_override_fn(parameter)
            if dtype not in (None, self.param_dtype, parameter.dtype):
                raise ValueError(
                    f"Expected None, {self.param_dtype} or {parameter.dtype} for a parameter of shape "
                    f"{tuple(parameter.shape)}, got {dtype!r}: param_dtype_override_fn must return None, param_dtype, "
                    "or the parameter's original dtype. Give parameters of a third dtype a unit of their own."
                )
            policy = replace(policy, param_dtype=dtype or self.param_dtype, param_dtype_override_fn=None)
        if self.recipe is not None:
            recipe = self._recipe_for(parameter)
            policy = replace(policy, recipe=recipe)
            compute_dtype = policy.compute_dtype_of(parameter.dtype)
            if recipe is not None and recipe.compute_dtype not in (None, compute_dtype):
                raise ValueError(
                    f"Expected `param_dtype` {recipe.compute_dtype} for a parameter of shape {tuple(parameter.shape)}, "
                    f"as {recipe!r} computes in it, got {compute_dtype}. Give both the same dtype."
                )
        return policy

    def _recipe_for(self, parameter: nn.Parameter) -> Recipe | None:
        recipe = self.recipe
        if recipe is None or not parameter.dtype.is_floating_point:
            return None
        if isinstance(recipe, Recipe):
            return recipe
        chosen = recipe(parameter)
        if chosen is not None and (isinstance(chosen, type) or not isinstance(chosen, Recipe)):
            raise TypeError(
                f"Expected `recipe` to return a Recipe or None for a parameter of shape {tuple(parameter.shape)}, got "
                f"{chosen!r}. A recipe has compute_dtype, block_rows, payloads, columns, encode and decode."
            )
        return chosen

    def recipe_of(self, main_dtype: torch.dtype) -> Recipe:
        """The recipe of a parameter with a main weight in `main_dtype`; the policy must be resolved beforehand."""
        if isinstance(self.recipe, Recipe):
            return self.recipe
        return PlainRecipe(self.param_dtype if main_dtype.is_floating_point else None)

    def main_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The sharded dtype of a parameter built in `dtype`."""
        return self.main_dtype or dtype

    def main_grads_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the sharded gradient of a parameter built in `dtype`."""
        return self.main_grads_dtype or self.main_dtype_of(dtype)

    def compute_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The gather and compute dtype of a parameter built in `dtype`."""
        return self.param_dtype or self.main_dtype_of(dtype)

    def reduce_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The reduce dtype of the gradient of a parameter built in `dtype`."""
        if self.reduce_dtype is None and _REDUCES_IN_MAIN_DTYPE:
            return self.main_dtype_of(dtype)
        return self.reduce_dtype or self.compute_dtype_of(dtype)


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"Expected `{name}` to be a torch.dtype or None, got {dtype!r}.")
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"Expected `{name}` to be a floating-point dtype of at least 16 bits, got {dtype}. "
            "Narrower formats carry scales and are a recipe, not a dtype."
        )
