"""The family of Qwen3.5, chosen by a config's `model_type`: rules, and differences between files and modules."""

from collections.abc import Iterable, Mapping
from typing import Final

from lamella_convert import Family, Join, Rule, Rules, Stack
from lamella_qwen._megatron import EXPERTS, experts_of, megatron_rules, megatron_sizes
from lamella_qwen._sizes import QwenSizes

_WITH_VISION: Final = "model.language_model."
_ALONE: Final = "model."


def module_rules(config: Mapping[str, object]) -> Rules:
    """Return the rules between names in files (left) and names of transformers' modules (right).

    Modules stack the experts; files of `save_pretrained` store experts separately. The layer that predicts
    further tokens has no modules: the rules leave the layer's experts separate, also for Qwen3.6's files with
    stacked experts. A text model opens the files of a model with vision, and leaves the vision tower's tensors unread.

    Raises:
        ValueError: The config is not a whole Qwen3.5's.
    """
    sizes = QwenSizes.of(config)
    stacked = experts_of(sizes)
    if sizes.num_vision_heads is not None:
        return Rules((*_stacks(_WITH_VISION, _WITH_VISION), *_unstacked_mtp()), stacked=stacked)
    text_names = Rule(f"{_WITH_VISION}{{name*}}", f"{_ALONE}{{name*}}")
    return Rules(
        (*_stacks(_ALONE, _ALONE), *_stacks(_WITH_VISION, _ALONE), *_unstacked_mtp(), text_names), stacked=stacked
    )


def _stacks(separate: str, stacked: str) -> Iterable[Rule]:
    packed = f"{stacked}layers.{{layer}}.mlp.experts."
    gate_up, down = _one_by_one(separate)
    return [Rule(gate_up, f"{packed}gate_up_proj"), Rule(down, f"{packed}down_proj")]


def _unstacked_mtp() -> Iterable[Rule]:
    packed = "mtp.layers.{layer}.mlp.experts."
    gate_up, down = _one_by_one("mtp.")
    return [Rule(f"{packed}gate_up_proj", gate_up), Rule(f"{packed}down_proj", down)]


def _one_by_one(before: str) -> tuple[Join, Stack]:
    """Stacked experts, gate and up together, and down, out of the stored tensors of the experts."""
    single = f"{before}layers.{{layer}}.mlp.experts.{{expert}}."
    gate, up, down = (
        Stack(f"{single}{part}_proj.weight", index="expert", count=EXPERTS) for part in ("gate", "up", "down")
    )
    return Join((gate, up), sizes=(1, 1), dim=1), down


FAMILY: Final = Family(megatron=megatron_rules, megatron_sizes=megatron_sizes, modules=module_rules)
"""What the entry points of this package give."""
