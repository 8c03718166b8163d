"""Low-rank adapters, LoRA and DoRA, in the linear layers of a model: peft's modules on a model without memory."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, cast

from torch import nn

from lamella_transformers._errors import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR: Final = "all-linear"
"""The target that stands for all linear layers."""

_READ_IN_MAMBA: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), ("dt_proj", "out_proj")),
    **dict.fromkeys(("bamba", "granitemoehybrid", "zamba2"), ("out_proj",)),
    "jamba": ("dt_proj",),
}
"""By type of model, the layers of Mamba whose weights the forward reads past an adapter, on some devices at least.

peft refuses `out_proj` of the first.
"""


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
    """Return the names of the linear layers that get adapters, in the model's order.

    The output head gets none, nor do layers of Mamba whose weights are read past an adapter.

    Args:
        model: A model of transformers without adapters; may be on the meta device.
        targets: Names, or shell patterns of names; "all-linear" for all. A pattern matches a full name, or its last
            parts.

    Raises:
        ModelError: A target matches no linear layer; names the target.
    """
    untyped = cast(Any, model)
    head, model_type = untyped.get_output_embeddings(), untyped.config.model_type
    excluded = _READ_IN_MAMBA.get(model_type, ())
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name.rpartition(".")[2] not in excluded
    ]
    for target in targets:
        if not any(_matches(name, target) for name in names):
            first = f"The first is {names[0]!r}." if names else "The model has none."
            note = f" {model_type!r} gets none in {' and '.join(excluded)}." if excluded else ""
            raise ModelError(f"Expected adapters in layers of torch.nn.Linear, got {target!r}. {first}{note}")
    return [name for name in names if any(_matches(name, target) for target in targets)]


def _matches(name: str, target: str) -> bool:
    return target == ALL_LINEAR or fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def lora_config(model: nn.Module, settings: LoraSettings, base: str | None = None) -> "LoraConfig":
    """Return the configuration by which peft opens adapters, in the layers of `lora_layers`.

    In models with stacked experts, peft takes the names of dense and shared layers (`gate_proj`, `up_proj`,
    `down_proj`) for those of the experts. The weights of such layers are `target_parameters`, which peft keeps.

    Args:
        model: The model without adapters; may be on the meta device.
        settings: The sizes and places of the adapters.
        base: The name or path of the model without adapters.

    Raises:
        ModelError: The conditions of `lora_layers`; or DoRA in a layer whose weight would be a target parameter.

    Effects: imports peft.
    """
    layers = lora_layers(model, settings.targets)
    as_parameters = [name for name in layers if _is_taken_for_experts(name, model)]
    if settings.dora and as_parameters:
        raise ModelError(
            f"Expected LoRA in {as_parameters[0]!r}, whose weight peft adapts as a parameter beside stacked experts, "
            "got DoRA. Merge the adapters into their layers (--merge)."
        )
    modules = [name for name in layers if name not in as_parameters]
    return _config(settings, modules, [f"{name}.weight" for name in as_parameters], base)


def _is_taken_for_experts(layer: str, model: nn.Module) -> bool:
    """True for a name that peft would rewrite into a parameter of stacked experts."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[layer])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # peft wants gate_proj and up_proj together, and was passed one of them.
        return True
    return not config.target_modules


def _config(
    settings: LoraSettings, modules: Sequence[str], parameters: Sequence[str] = (), base: str | None = None
) -> "LoraConfig":
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha),
        target_modules=list(modules),
        target_parameters=list(parameters) or None,
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
    # In a model with a config, peft would rewrite targets into parameters of stacked experts; the holder has none.
    holder = nn.ModuleDict({"model": model})
    inject_adapter_in_model(_config(settings, layers), holder, low_cpu_mem_usage=True)
    return layers
