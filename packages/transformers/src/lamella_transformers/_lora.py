"""Low-rank adapters, LoRA and DoRA, in the linear layers of a model: peft's modules on a model without memory."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, cast

from torch import nn

from lamella_transformers._errors import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR: Final = "all-linear"
"""The target that stands for all linear layers."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The sizes and places of adapters.

    Attributes:
        rank: The inner size of the two matrices of an adapter.
        alpha: The product of the matrices is scaled by alpha / rank.
        targets: Names, or shell patterns of names, of linear layers; "all-linear" for all.
        dora: Train a magnitude of each output beside the two matrices.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dora: bool = False

    @property
    def scaling(self) -> float:
        """The factor of the product of the two matrices."""
        return self.alpha / self.rank


def has_peft() -> bool:
    """True where peft is installed."""
    return importlib.util.find_spec("peft") is not None


def lora_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the names of the linear layers that get adapters, in the model's order; never the output head.

    Args:
        model: A model of transformers without adapters; may be on the meta device.
        targets: Names, or shell patterns of names; "all-linear" for all. A pattern matches a full name, or its last
            parts.

    Raises:
        ModelError: A target matches no linear layer; names the target.
    """
    head = cast(Any, model).get_output_embeddings()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    for target in targets:
        if not any(_matches(name, target) for name in names):
            first = f"The first is {names[0]!r}." if names else "The model has none."
            raise ModelError(f"Expected adapters in layers of torch.nn.Linear, got {target!r}. {first}")
    return [name for name in names if any(_matches(name, target) for target in targets)]


def _matches(name: str, target: str) -> bool:
    return target == ALL_LINEAR or fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def lora_config(settings: LoraSettings, layers: Sequence[str], base: str | None = None) -> "LoraConfig":
    """Return peft's configuration of adapters.

    Args:
        settings: The sizes of the adapters.
        layers: The names of the layers that get adapters.
        base: The name or path of the model without adapters.

    Effects: imports peft.
    """
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha),
        target_modules=list(layers),
        use_dora=settings.dora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def add_lora(model: nn.Module, settings: LoraSettings) -> list[str]:
    """Put adapters into a model without memory. Parameters of the adapters are on the meta device, all others frozen.

    Args:
        model: A model of transformers with parameters on the meta device, not sharded yet. Changed in place: the
            parameters of a layer `q_proj` become those of `q_proj.base_layer`.
        settings: The sizes and places of the adapters.

    Returns:
        The names of the layers with adapters.

    Raises:
        ModelError: The conditions of `lora_layers`.

    Effects: imports peft.
    """
    from peft import inject_adapter_in_model

    layers = lora_layers(model, settings.targets)
    inject_adapter_in_model(lora_config(settings, layers), model, low_cpu_mem_usage=True)
    return layers
